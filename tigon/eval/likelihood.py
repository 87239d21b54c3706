"""Log-likelihoods of continuations, with the contexts that they share read once.

# G contexts, B rows of continuations, T tokens of the longest, N tokens of all, V vocab
"""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tigon.generation.steps import is_sharded
from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.models import CausalLM

MAX_CONTEXTS = 128  # contexts whose next token's logits exist at a time
Request = tuple[tuple[int, ...], tuple[int, ...]]  # context and continuation


@dataclass(frozen=True)
class Likelihood:
    """The log-likelihood of a continuation, and whether it is the greedy one."""

    logprob: float  # of the whole continuation, in nats
    greedy: bool  # whether greedy decoding gives exactly these tokens
    tokens: int  # of the continuation


@dataclass(frozen=True)
class SharedContext:
    """Groups the requests of one context."""

    context: tuple[int, ...]
    members: tuple[int, ...]  # their places in what was given
    longest: int  # tokens of a continuation that are read: all but its last


def log_likelihoods(
    model: CausalLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    tokens_per_batch: int = 8192,
) -> list[Likelihood]:
    """Returns how likely the model finds each continuation after its context, in order.

    A request is (context, continuation), both token ids and neither empty; where nothing comes
    before, the context is the token that begins a text. Equal contexts, as those of a question
    with several answers, are read once, and what follows them from copies of their keys and
    values; requests that share nothing are packed. The result is that of one forward pass per
    request, up to rounding. `tokens_per_batch` limits the tokens of a forward pass and the room of
    each of two caches, approximately; a longer request is a batch of its own. Raises TypeError for
    anything but such requests, and ValueError for one longer than max_position_embeddings.
    """
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch={tokens_per_batch} is not above 0")
    if not hasattr(model, "static_cache"):  # also torch.compile's wrapper has it
        raise TypeError(
            f"log_likelihoods of a {type(model).__name__}: give a model of Tigon, as "
            "tigon.from_pretrained reads it from the same checkpoint"
        )
    if not model.causal:
        raise ValueError(f"{type(model).__name__} attends to both sides: it predicts no next token")
    checked = [_check_request(model, i, request) for i, request in enumerate(requests)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(checked):
        groups.setdefault(context, []).append(i)
    rope = model.dynamic_rope

    def is_past_change(tokens: int) -> bool:
        """Returns whether a dynamic RoPE has changed: a pass has one table, for equal lengths."""
        return rope is not None and tokens > rope.original_length

    shared: list[SharedContext] = []
    packed: list[int] = []
    for context, members in groups.items():
        reads = [len(checked[i][1]) - 1 for i in members]
        separate = len(context) * len(members) + sum(reads)
        saves = len(context) + max(reads) * len(members) < separate
        if saves and is_past_change(len(context)) == is_past_change(len(context) + max(reads)):
            shared.append(SharedContext(context, tuple(members), max(reads)))
        else:
            packed += members

    results: dict[int, Likelihood] = {}
    with inference(model):
        totals = [sum(map(len, request)) - 1 for request in checked]
        packed.sort(key=lambda i: totals[i], reverse=True)
        sizes = [(totals[i], is_past_change(totals[i])) for i in packed]
        for batch in _batches(sizes, tokens_per_batch):
            results |= _score_packed(model, checked, packed[batch])
        shared.sort(key=lambda g: len(g.context) + g.longest, reverse=True)
        sizes = [(len(g.context) + g.longest, is_past_change(len(g.context))) for g in shared]
        for batch in _batches(sizes, tokens_per_batch, MAX_CONTEXTS):
            results |= _score_shared(model, checked, shared[batch], tokens_per_batch)
    return [results[i] for i in range(len(checked))]


def inference(model: CausalLM) -> AbstractContextManager[object]:
    """Returns a context for passes without gradients; raises ValueError for a model of which each
    rank returns a part of rows."""
    if model.context_ranks is not None:
        raise ValueError("a model after share_context returns parts of rows: load one without it")
    # FSDP reuses its buffers in training, which inference mode would not allow
    return torch.no_grad() if gathers_weights(model) else torch.inference_mode()


def gathers_weights(model: CausalLM) -> bool:
    """Returns whether passes of the model gather weights that ranks share: FSDP, or ZeRO-2."""
    return is_sharded(model) or model.zero2 is not None


def _check_request(
    model: CausalLM, number: int, pair: tuple[Sequence[int], Sequence[int]]
) -> Request:
    """Returns a context and its continuation as tuples of tokens; raises TypeError if they are
    none, and ValueError if one is empty, outside the vocabulary or too long."""
    try:
        context, continuation = pair
        request = tuple(map(index, context)), tuple(map(index, continuation))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"request {number} is {reprlib.repr(pair)} ({error}); give a pair of context and "
            "continuation, each a sequence of token ids, which a tokenizer's encode makes of text"
        ) from None
    for name, ids in zip(("context", "continuation"), request, strict=True):
        if not ids:
            hint = "; begin with the token that begins a text" if name == "context" else ""
            raise ValueError(f"request {number} has an empty {name}{hint}")
        vocab = model.config.vocab_size
        for wrong in (i for i in ids if not 0 <= i < vocab):
            raise ValueError(f"request {number} has token {wrong}, outside of [0, {vocab})")
    limit, total = model.config.max_position_embeddings, sum(map(len, request))
    if total - 1 > limit:
        raise ValueError(
            f"request {number} reads {total - 1} tokens, but the model takes "
            f"max_position_embeddings={limit}: cut {total - 1 - limit} tokens from the left"
        )
    return request


def _batches(
    sizes: Sequence[tuple[int, bool]], tokens: int, limit: int | None = None
) -> Iterator[slice]:
    """Yields slices of `sizes`, pairs (size, kind): runs of one kind, at most `limit` long, whose
    length times their largest size is within `tokens`, unless a run is one item."""
    start = largest = 0
    for end, (size, past_turn) in enumerate(sizes):
        largest = max(largest, size)
        count = end + 1 - start
        full = count * largest > tokens or (limit is not None and count > limit)
        if end > start and (full or past_turn != sizes[start][1]):
            yield slice(start, end)
            start, largest = end, size
    if sizes:
        yield slice(start, len(sizes))


def _score_packed(
    model: CausalLM, requests: Sequence[Request], members: Sequence[int]
) -> dict[int, Likelihood]:
    """Scores the requests of `members` in one packed row; returns the results by their indices."""
    rows, labels = [], []
    for context, continuation in (requests[i] for i in members):
        rows.append(torch.tensor(context + continuation[:-1], device="cpu"))
        labels.append(torch.full((len(rows[-1]),), IGNORE_INDEX, device="cpu"))
        labels[-1][len(context) - 1 :] = torch.tensor(continuation, device="cpu")
    targets, bounds = torch.cat(labels), _bounds(rows)
    nll, right = _score_labels(model, torch.cat(rows)[None], targets[None], cu_seq_lens=bounds)
    counts = [len(requests[i][1]) for i in members]
    scored = targets != IGNORE_INDEX
    parts = zip(nll[0][scored].split(counts), right[0][scored].split(counts), strict=True)
    return {
        i: Likelihood(-n.sum().item(), bool(r.all()), len(n))
        for i, (n, r) in zip(members, parts, strict=True)
    }


def _score_shared(
    model: CausalLM, requests: Sequence[Request], groups: Sequence[SharedContext], tokens: int
) -> dict[int, Likelihood]:
    """Scores the requests of the groups: reads their contexts into a cache, one a row, and then
    continuations, each after a copy of its row; returns the results by the requests' indices."""
    longest = max(g.longest for g in groups)
    room = max(len(g.context) for g in groups) + longest
    contexts = [torch.tensor(g.context, device="cpu") for g in groups]
    bounds = _bounds(contexts)
    cache = model.static_cache(len(groups), room, chunk=longest) if longest else None
    logits = model(
        torch.cat(contexts)[None].to(model.device),
        cu_seq_lens=bounds,
        past_key_values=cache,
        logits_to_keep=bounds[1:] - 1,
    ).logits[0]
    # The first token of each continuation, by the last one of its context: [members]
    members = [i for g in groups for i in g.members]
    counts = torch.tensor([len(g.members) for g in groups], device="cpu")
    row = torch.arange(len(groups), device="cpu").repeat_interleave(counts)
    first = torch.tensor([requests[i][1][0] for i in members], device="cpu")
    logprobs = logits.float().log_softmax(-1)
    sums = logprobs[row.to(model.device), first.to(model.device)].cpu().double()
    greedy = logprobs.argmax(-1).cpu()[row] == first

    # The others, in batches of rows; the longest first, so that there is little padding
    order = [m for m in range(len(members)) if len(requests[members[m]][1]) > 1]
    order.sort(key=lambda m: len(requests[members[m]][1]), reverse=True)
    for batch in _batches([(room, True)] * len(order), tokens):
        assert cache is not None
        rows = order[batch]
        continuations = [torch.tensor(requests[members[m]][1], device="cpu") for m in rows]
        ids = pad_sequence([s[:-1] for s in continuations], batch_first=True)
        targets = [s[1:] for s in continuations]
        labels = pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX)
        fork = cache.rows(0, len(groups))
        fork.select(row[rows])
        # Padding gets its row's last position: some RoPE types depend on the largest one
        last = torch.tensor([[len(s) - 2] for s in continuations], device="cpu")
        lengths = [[len(groups[g].context)] for g in row[rows].tolist()]
        start = torch.tensor(lengths, device="cpu")
        positions = start + torch.arange(ids.shape[1], device="cpu").clamp(max=last)
        nll, right = _score_labels(
            model, ids, labels, past_key_values=fork, position_ids=positions.to(model.device)
        )
        sums[rows] -= nll.sum(1)
        greedy[rows] &= right.all(1)
    return {
        i: Likelihood(sums[m].item(), bool(greedy[m]), len(requests[i][1]))
        for m, i in enumerate(members)
    }


def _score_labels(
    model: CausalLM, ids: Tensor, labels: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    """Returns the negative log-likelihood of each label in nats, fp64 [B, T], 0 where there is
    none, and whether greedy decoding gives it, bool [B, T], True where there is none."""
    out = model(
        ids.to(model.device),
        shift_labels=labels.to(model.device),
        loss_reduction="none",
        metrics=("predicted_tokens",),
        **options,
    )
    predicted = out.metrics["predicted_tokens"].cpu()
    return out.loss.cpu().double(), (predicted == labels) | (labels == IGNORE_INDEX)


def _bounds(rows: Sequence[Tensor]) -> Tensor:
    """Returns int64 [rows + 1], where each packed row begins and the last one ends."""
    return torch.tensor([0, *(len(row) for row in rows)], device="cpu").cumsum(0)
