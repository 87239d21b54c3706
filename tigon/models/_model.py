"""The forward contract that every family shares.

# B batch, T tokens, n kept tokens, C model dim, V vocab
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn

from tigon.kernels._attention_backends import HALF, PLAIN
from tigon.kernels._triton import runs_triton
from tigon.kernels.attention import Backend, check_backend
from tigon.kernels.linear_cross_entropy import active_rows
from tigon.layers import Cache, KVCache, LMHead, RotaryEmbedding, StaticCache, autocast_dtype
from tigon.models._blocks import Block
from tigon.models._config import Config
from tigon.models._decoder import Decoder
from tigon.models._given import check_cache, check_ids, check_positions, same_bounds
from tigon.models._inputs import Inputs, resolve_inputs
from tigon.models._layout import Names
from tigon.models._loss import Keep, Reduction, denominator, divisor, resolve_keep, shift, take
from tigon.models._moe import ROUTING_METRICS, aux_loss_coef, balance_of


@dataclass
class CausalLMOutput:
    """What a forward pass returns; `metrics` holds what the call asked for."""

    loss: Tensor | None = None  # fp32 scalar, or [B, n] with loss_reduction="none"
    logits: Tensor | None = None  # [B, n, V] in the model's dtype
    past_key_values: Cache | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    aux_loss: Tensor | None = None  # of experts; differentiable, and in the loss where it belongs


@dataclass
class Defaults:
    """Forward arguments to use when a call does not give them; set on `model.defaults`."""

    logits_to_keep: Keep = 0
    return_logits: bool | None = None
    metrics: Sequence[str] = ()
    loss_reduction: Reduction = "token"


class LanguageModel(nn.Module):
    """A decoder with a language-model head, and the forward contract; see `CausalLM`."""

    config_class: ClassVar[type[Config]]
    block_class: ClassVar[type[Block]]
    checkpoint_names: ClassVar[Names] = Names()

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.generation_config: dict[str, Any] = {}
        self.defaults = Defaults()
        self.activation_checkpointing = False  # recompute each block in the backward pass
        self.attention: Backend = "auto"
        self.model = self.make_decoder(config)
        self.lm_head = self.make_head(config)
        if config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)

    def make_decoder(self, c: Any, **options: Any) -> Decoder:
        return Decoder(c, self.block_class, **options)

    def make_head(self, c: Any, **options: Any) -> LMHead:
        return LMHead(c.hidden_size, c.vocab_size, **options)

    @property
    def causal(self) -> bool:
        """Whether tokens see only those before them, so that the model can generate."""
        return True

    @property
    def turning_rope(self) -> RotaryEmbedding | None:
        """Whose table turns with the shortest text; None: no cache ever holds stale keys."""
        return self.model.turning_rope

    @property
    def cache_restart(self) -> int | None:
        """Tokens at which `generate` reads a text anew, for a RoPE that has turned."""
        return None

    def use_attention(self, backend: Backend) -> Self:
        """Choose what computes attention: a name that docs/attention.md explains, or "auto".

        Raises for a name that is none, and for a package that is not there; a call that the
        backend cannot serve raises when it is made.
        """
        check_backend(backend)
        self.attention = backend
        return self

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def static_cache(
        self, rows: int, capacity: int, *, chunk: int = 16, quantize: Literal["int8"] | None = None
    ) -> StaticCache:
        """An empty cache for `past_key_values`, with room for `capacity` tokens in each row.

        Inside `torch.autocast` it keeps what autocast computes.
        """
        return StaticCache(
            self.model.make_states,
            rows,
            capacity,
            dtype=autocast_dtype(self.device) or self.dtype,
            device=self.device,
            chunk=chunk,
            quantize=quantize,
        )

    def num_items(
        self,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
        loss_reduction: Reduction | None = None,
        logits_to_keep: Keep | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """This batch's part of the global denominator: an int64 scalar to add up.

        Takes the same keywords as `forward`; the total of all micro-batches and ranks is the
        `num_items_in_batch` of each.
        """
        given = labels if shift_labels is None else shift_labels
        if given is None:
            raise ValueError("num_items needs labels or shift_labels")
        b, t = given.shape
        inputs = resolve_inputs(
            b,
            t,
            given.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seq_lens=same_bounds(given.device, cu_seq_lens, cu_seq_lens_q, cu_seq_lens_k),
        )
        keep = self.defaults.logits_to_keep if logits_to_keep is None else logits_to_keep
        kept = resolve_keep(keep, b, t, given.device)
        targets, __ = shift(labels, shift_labels, None, inputs.segment_ids, (b, t))
        segments = None if inputs.segment_ids is None else take(inputs.segment_ids, kept)
        reduction = loss_reduction or self.defaults.loss_reduction
        return denominator(take(targets, kept), segments, reduction, t).items

    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        *,
        attention_mask: Tensor | None = None,  # [B, cached + T], 0 on padding
        position_ids: Tensor | None = None,  # [B, T]; a restart begins a packed sequence
        inputs_embeds: Tensor | None = None,  # [B, T, C]
        cu_seq_lens: Tensor | None = None,  # [sequences + 1], over the flattened batch
        labels: Tensor | None = None,  # [B, T], unshifted, -100 ignored
        shift_labels: Tensor | None = None,  # [B, T], already shifted
        loss_weights: Tensor | None = None,  # [B, T], shifted with the labels
        loss_reduction: Reduction | None = None,
        num_items_in_batch: int | Tensor | None = None,
        logits_to_keep: Keep | None = None,
        return_logits: bool | None = None,
        metrics: Sequence[str] | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,  # transformers' names for the same boundaries
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> CausalLMOutput:
        """Labels: a loss and no logits, in training and evaluation alike. No labels: logits.

        `logits_to_keep` picks positions before the head (int k the last k, 0 all; an index or
        bool tensor; an index per row), of logits, labels and metrics together.
        `loss_reduction`: "token" (mean over targets), "sequence" (each sequence weighs the
        same), "sum", "none"; `num_items_in_batch` replaces the mean's denominator.
        `return_logits=True` with labels gives both. `metrics`: "accuracy", "predicted_tokens",
        "entropy", "max_logit", "nll", "z", without a [B, T, V] tensor.

        Mixtures of experts also know, with and without labels, "expert_load" [layers, experts],
        the share of a layer's assignments that each expert got, and "aux_loss", which is least
        when all get the same. Where their config says output_router_logits, "token" and
        "sequence" losses include router_aux_loss_coef times it, as transformers' does, and "sum"
        and "none" ones do not, but `aux_loss` of the output may be added. With
        num_items_in_batch a batch contributes by its share of the items: over micro-batches and
        ranks the losses add up to the cross-entropy and the coefficient times the weighted mean
        of their aux_loss, however many they are.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        if input_ids is not None:
            check_ids(input_ids, self.config.vocab_size)
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if x.dim() != 3:
            raise ValueError(f"input_ids {tuple(x.shape[:-1])} is not [batch, tokens]")
        b, t, _ = x.shape
        if not b or not t:
            raise ValueError(f"input_ids {(b, t)} has no tokens: give at least one")
        cache = past_key_values
        if cache is None and use_cache:
            cache = KVCache()
        if cache is not None and not self.causal:
            raise ValueError(
                f"{type(self).__name__} with attention to both sides can neither use a cache nor "
                "generate: each new token would change the ones before it"
            )
        if cache is not None:
            check_cache(cache, type(self).__name__, self.model.holds)
        cu_seq_lens = same_bounds(x.device, cu_seq_lens, cu_seq_lens_q, cu_seq_lens_k)
        inputs = resolve_inputs(
            b,
            t,
            x.device,
            cache=cache,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seq_lens=cu_seq_lens,
            longest=max_length_k if max_length_q is None else max_length_q,
            causal=self.causal,
            attention=self.attention,
        )
        if cu_seq_lens is not None and position_ids is not None:
            check_positions(inputs.position_ids, inputs.segment_ids, inputs.mask.key_mask)

        reduction = loss_reduction or self.defaults.loss_reduction
        keep = self.defaults.logits_to_keep if logits_to_keep is None else logits_to_keep
        kept = resolve_keep(keep, b, t, x.device)
        targets, share = self._loss_inputs(
            labels, shift_labels, loss_weights, reduction, num_items_in_batch, kept, inputs, (b, t)
        )
        if metrics is None:
            metrics = self.defaults.metrics if targets else ()
        of_routing = [m for m in metrics if m in ROUTING_METRICS]
        metrics = [m for m in metrics if m not in ROUTING_METRICS]
        if metrics and not targets:
            raise ValueError(f"metrics={tuple(metrics)} without labels: they come with the loss")
        if targets:
            weights = None if metrics else targets["token_weights"]
            # Before the blocks are launched, so that nobody waits for it
            active = active_rows(targets["targets"], weights)
            targets |= {"metrics": metrics, "active": active}
        # Where kernels go by the bounds of sequences, blocks need not compute padding: its hidden
        # states are 0 then, and its logits, which mean nothing anyway, those of 0
        real = inputs.mask.unpadded() if cache is None and self._may_unpad(x) else None
        rows, position_ids, mask = x, inputs.position_ids, inputs.mask
        if real is not None:
            places, mask = real
            rows = x.flatten(0, 1)[places][None]
            position_ids = position_ids.expand(b, t).flatten()[places][None]
        hidden, tallies = self.model(
            rows,
            position_ids,
            mask,
            cache,
            self.activation_checkpointing,
            bool(of_routing or (targets and aux_loss_coef(self.config) is not None)),
        )
        if real is not None:
            hidden = hidden.new_zeros(b * t, x.shape[-1]).index_copy(0, places, hidden[0])
            hidden = hidden.view(x.shape)
        want = self.defaults.return_logits if return_logits is None else return_logits
        out = self.lm_head(take(hidden, kept), **targets, return_logits=bool(want))
        result = CausalLMOutput(out.loss, out.logits, cache, out.metrics)
        return self._add_routing(result, tallies, share, of_routing)

    def _may_unpad(self, x: Tensor) -> bool:
        """Whether attention goes by bounds, not by a mask over what would be one long row; the
        host may look for padding; and RoPE does not turn with the longest row."""
        if x.device.type != "cuda" or x.dtype not in HALF or torch.compiler.is_compiling():
            return False
        if self.attention in PLAIN or not runs_triton(x):
            return False
        return self.turning_rope is None and not torch.cuda.is_current_stream_capturing()

    def _add_routing(
        self,
        out: CausalLMOutput,
        tallies: Sequence[Tensor],
        share: Tensor | None,
        metrics: Sequence[str],
    ) -> CausalLMOutput:
        """What routers did, where asked for, and its part of the loss."""
        found, coef = balance_of(self.config, tallies), aux_loss_coef(self.config)
        if found is None:
            if metrics:
                name = type(self).__name__
                raise ValueError(f"metrics={tuple(metrics)}: no layer of this {name} has experts")
            return out
        load, aux_loss = found
        values = {"aux_loss": aux_loss.detach(), "expert_load": load}
        out.metrics |= {name: values[name] for name in metrics}
        if coef is not None:
            out.aux_loss = aux_loss
            if out.loss is not None and share is not None:
                out.loss = out.loss + coef * share * aux_loss
        return out

    def _loss_inputs(
        self,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        loss_weights: Tensor | None,
        reduction: Reduction,
        num_items: int | Tensor | None,
        kept: slice | Tensor,
        inputs: Inputs,
        shape: tuple[int, int],
    ) -> tuple[dict[str, Any], Tensor | None]:
        """The head's loss arguments for the kept positions, empty without labels.

        And which share of the loss's items they are, if it is a mean.
        """
        if labels is None and shift_labels is None:
            if loss_weights is not None:
                raise ValueError("loss_weights without labels")
            return {}, None
        segments = inputs.segment_ids
        targets, weights = shift(labels, shift_labels, loss_weights, segments, shape)
        targets = take(targets, kept)
        segments = None if segments is None else take(segments, kept)
        d = denominator(targets, segments, reduction, shape[1])
        if weights is not None:
            weights = take(weights, kept)
        if d.weights is not None:
            weights = d.weights if weights is None else weights * d.weights
        total = divisor(d.items, num_items, reduction)
        share = None if reduction in ("sum", "none") else d.items / total
        return {
            "targets": targets,
            "token_weights": weights,
            "denominator": total,
            "reduction": "none" if reduction == "none" else "sum",
        }, share
