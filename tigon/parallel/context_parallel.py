"""Context parallelism: the ranks of a group share rows, and each computes a shard of the tokens.

A hook before the model's forward shifts labels on whole rows and then keeps this rank's tokens, so
that the model and its losses see these alone.

# B batch, T tokens, S tokens of this rank's shard, V vocab
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tigon.distributed.collectives import Ranks
from tigon.kernels.loss.logits import IGNORE_INDEX, METRICS, check_targets
from tigon.kernels.loss.terms import LossTerm
from tigon.kernels.runtime import check_values
from tigon.layers import ContextShard, ShortConv, SoftmaxAttention
from tigon.models import Batch, CausalLM, CausalLMOutput, Targets
from tigon.models.loss import POSITION_FIELDS, resolve_arguments
from tigon.models.targets import resolve_logits_at
from tigon.parallel.mesh import as_ranks


def share_context(model: CausalLM, mesh: DeviceMesh | Ranks) -> None:
    """Shards the tokens of every later pass without a cache over the mesh, of one dimension.

    All its ranks make the same passes over the same rows. A rank's loss is its part of the sum over
    the ranks, and its logits, log-probabilities and metrics are those of its tokens. Gradients are
    partial and must be summed over the ranks. Raises ValueError for a model without support.
    """
    ranks = as_ranks(mesh)
    check_context(model, ranks.size)
    model.context_ranks = ranks
    model.register_forward_pre_hook(_shard_arguments, with_kwargs=True)


def check_context(model: CausalLM, ranks: int) -> None:
    """Raises ValueError for several ranks and a mixer other than attention or short convolution."""
    if ranks == 1:
        return
    for i, block in enumerate(model.model.layers):
        mixer = block.mixer
        if not isinstance(mixer, SoftmaxAttention | ShortConv):
            raise ValueError(
                f"parallel.context={ranks}: layer {i} of {type(model).__name__} is a "
                f"{type(mixer).__name__}, which needs the tokens before on the same rank; only "
                "attention and short convolutions exchange them: give parallel.context=1"
            )


def _shard_arguments(
    model: CausalLM, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """The arguments of a pass, with those of this rank's tokens in place of whole rows.

    With a cache, and if the batch is a shard already, they stay those of the call.
    """
    batch, targets, options = resolve_arguments(model, *args, **kwargs)
    if batch.cache is None and batch.shard is None and model.context_ranks is not None:
        if targets.labels is not None:  # on all ranks, or the others would wait for one
            check_targets(targets.labels, model.config.vocab_size)
        whole, batch = batch, shard_batch(batch, model.context_ranks)
        targets = shard_targets(targets, batch)
        if terms := options.get("criteria"):
            options["criteria"] = tuple(_shard_term(c, whole, batch) for c in terms)
        if (at := options.get("logits_at")) is not None:
            index = resolve_logits_at(at, *whole.shape, whole.device)
            options["logits_at"] = _shard(batch).local_index(index)[1]
    return (), {**options, "batch": batch, "targets": targets}


def shard_batch(batch: Batch, ranks: Ranks) -> Batch:
    """Returns the batch of this rank's tokens, with the mask of whole rows."""
    real, shard = batch.real, ContextShard(ranks, batch.shape[1], batch.position_ids)
    if shard.padding and real is None:
        real = torch.ones(batch.shape, dtype=torch.bool, device=batch.device)
    shard = replace(shard, real=None if real is None else shard.part(real))
    tensors = batch.input_ids, batch.inputs_embeds, batch.dropout_keys
    ids, embeds, keys = (None if x is None else shard.part(x) for x in tensors)
    positions = shard.part(batch.position_ids)
    return Batch(ids, embeds, positions, None, batch.mask, None, batch.defaults, False, keys, shard)


def _shard(batch: Batch) -> ContextShard:
    """Returns `batch.shard`, which must not be None."""
    assert batch.shard is not None
    return batch.shard


def shard_targets(targets: Targets, batch: Batch) -> Targets:
    """The targets of the tokens of `batch`, a shard; the denominator stays that of whole rows.

    Positions that `targets` does not keep are ignored. Without labels, the last k positions of
    whole rows become the last k of the shard.
    """
    shard = _shard(batch)
    labels, weights, tokens, kept = targets.labels, targets.weights, batch.shape[1], targets.kept
    first = 0
    if isinstance(kept, Tensor):
        ordered = kept.expand(batch.shape[0], -1).sort().values
        check_values(
            (ordered.diff() > 0).all(),
            "logits_to_keep has a position twice, which context parallelism does not support: "
            "give each position once",
        )
    elif labels is None:
        first = max(tokens - (kept.stop - kept.start), 0)
    if labels is not None:
        labels = targets.scatter_to_positions(labels, IGNORE_INDEX)
        labels = shard.part(labels, IGNORE_INDEX)
    if weights is not None:
        weights = shard.part(targets.scatter_to_positions(weights, 0))
    kept = slice(first, tokens)
    return targets.replace(batch=batch, kept=kept, labels=labels, weights=weights)


def _shard_term(term: LossTerm, whole: Batch, batch: Batch) -> LossTerm:
    """The loss term with its tensors [B, T, ...] as shards [B, S, ...], if they are whole."""
    values = {name: getattr(term, name, None) for name in POSITION_FIELDS}
    local = {
        name: _shard(batch).part(x)
        for name, x in values.items()
        if x is not None and x.shape[:2] == whole.shape
    }
    return replace(term, **local)


def gather_output(
    model: CausalLM, output: CausalLMOutput, targets: Targets, logits_at: Tensor | None = None
) -> CausalLMOutput:
    """The output for whole rows, the same on every rank, from that of this rank's tokens.

    `targets` and `logits_at`, an index, are those of the call. Losses are summed over the ranks;
    logits, log-probabilities and metrics of tokens are gathered; "accuracy" and hidden states stay
    as they are. Every rank must use the output alike, as backward reaches its own tokens alone.
    Returns `output` without context parallelism, or with a cache. Raises ValueError for
    `logits_to_keep=k` without labels, which kept the last k of each rank's tokens.
    """
    if model.context_ranks is None or targets.batch.cache is not None:
        return output
    kept = targets.kept
    if targets.labels is None and isinstance(kept, slice) and kept.start:
        raise ValueError("logits_to_keep=k without labels keeps the last k of each rank: omit it")
    shard = ContextShard(model.context_ranks, targets.batch.shape[1], targets.batch.position_ids)

    def gather(x: Tensor | None) -> Any:
        if x is None or not x.dim():
            return None if x is None else shard.sum(x)
        return targets.take(shard.gather(x))

    if logits_at is not None and output.logits_at is not None:
        is_local, _ = shard.local_index(logits_at)
        logits = output.logits_at.new_zeros(len(logits_at), output.logits_at.shape[1])
        output.logits_at = shard.sum(logits.masked_scatter(is_local[:, None], output.logits_at))
    names = [name for name in output.metrics if name in METRICS and name != "accuracy"]
    return replace(
        output,
        loss=gather(output.loss),
        logits=gather(output.logits),
        logprobs=gather(output.logprobs),
        aux_loss=gather(output.aux_loss),
        criteria=tuple(map(gather, output.criteria)),
        metrics=output.metrics | {name: gather(output.metrics[name]) for name in names},
    )
