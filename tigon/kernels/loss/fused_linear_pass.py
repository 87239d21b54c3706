"""A pass over the logits of a head, chunk by chunk: losses and gradients of every loss term.

# N rows (tokens), m rows that are computed, n rows of a chunk, C model dim, V vocab, k terms,
# r rank of what an adapter adds to the logits
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.linear import add_matmul, chunked_matmul, matmul_into
from tigon.kernels.loss.cross_entropy_rows import loss_rows
from tigon.kernels.loss.divergence_rows import divergence_rows, topk_rows
from tigon.kernels.loss.logits import DEFAULT_OPTIONS, IGNORE_INDEX, LogitGradient, Options
from tigon.kernels.loss.vocab_parallel import (
    VocabularyShard,
    shard_divergence_rows,
    shard_loss_rows,
    shard_topk_rows,
)
from tigon.kernels.runtime import operator, runs_triton

# Upper bound of the logits, and on the CPU their fp32 copies, that exist at one time
LOGITS_BYTES = 2**30
# A chunk that nobody bounds has this many rows, or as many as these bytes hold if they are more,
# and at most LOGITS_BYTES. For each chunk the weight's gradient in fp32 is read and written: on an
# H200 with 1B's head, 16384 rows take 50 ms in chunks of 1024, 44.5 of 2048, 42.7 of 4096, and 41.8
# at once.
CHUNK_ROWS, CHUNK_BYTES = 4096, 2**29
# What is held beside a chunk's logits, a teacher's logits for one, is of so many of its rows at a
# time, shared by one more than there are such tensors: enough for a fast product
PIECE_ROWS = 1024


class ChunkSizes(NamedTuple):
    """The rows of a pass that exist at one time."""

    rows: int  # of a chunk: logits
    piece: int  # of them, for what is held beside the logits
    extra: int  # tensors of a piece beside the logits


def chunk_sizes(
    hidden: Tensor,
    weight: Tensor | None,
    vocab: int,  # V, of one rank if several share it
    extra: int,
    logits_bytes: int,  # 0: as many as the shapes suggest
    needs: Sequence[bool],  # gradients of hidden, weight, bias, low and up
    count: int,  # m
) -> ChunkSizes:
    """Returns sizes for which everything that exists of a chunk fits the budget."""
    budget = logits_bytes or LOGITS_BYTES
    if weight is None:
        rows = chunk_rows(vocab, hidden, budget // extra) if extra else max(1, hidden.shape[0])
        return ChunkSizes(rows, rows, extra)
    free = runs_triton(hidden) and not logits_bytes
    if extra:
        row = _row_bytes(vocab, hidden)
        if free:  # half of all logits
            budget = min(budget, max(CHUNK_BYTES, count * row // 2))
        piece = chunk_rows(vocab, hidden, min(budget, PIECE_ROWS * row) // (1 + extra))
        rows = chunk_rows(vocab, hidden, budget - extra * piece * row)
    else:
        rows = chunk_rows(vocab, hidden, budget)
        if free and any(needs):
            rows = min(rows, max(CHUNK_ROWS, chunk_rows(vocab, hidden, CHUNK_BYTES)))
        piece = rows
    # All rows at once need 2 V (m + C) bytes, chunks of n 2 V (n + 2 C)
    sums = free and needs[1] and hidden.dtype == torch.bfloat16
    if sums and count - rows <= hidden.shape[1]:
        rows = max(1, count)
        piece = piece if extra else rows
    return ChunkSizes(rows, piece, extra)


def chunk_rows(vocab: int, hidden: Tensor, logits_bytes: int) -> int:
    """Returns how many rows of logits fit the budget; on the CPU with their fp32 copies.

    A multiple of 1024, or else of 128: other sizes, and smaller ones, make matrix products slower.
    """
    rows = max(1, logits_bytes // _row_bytes(vocab, hidden))
    if not runs_triton(hidden):
        return rows
    step = next(step for step in (1024, 128, 1) if rows >= step)
    return rows // step * step


def _row_bytes(vocab: int, hidden: Tensor) -> int:
    """Returns the bytes that one row of a chunk needs."""
    return hidden.element_size() * pad_vocab(vocab) if runs_triton(hidden) else 16 * vocab


def pad_vocab(vocab: int) -> int:
    """Rounds up to a multiple of 64."""
    return -(-vocab // 64) * 64


GRADIENTS = 6  # that a pass returns
SLOTS = 6  # tensors of a term: two of rows, two of a head, then peak and log_mass if known
Slots = list[Tensor | None]


STATISTICS = ("peak", "log_mass")  # of cross-entropy; their sum is the logsumexp


class LossPlan(NamedTuple):
    """The settings of a loss term in one pass; the operator takes them as a string and numbers."""

    kind: str  # cross_entropy: targets. divergence: teacher's states, head. topk: tokens, logprobs
    options: Options
    beta: float = 0.0
    teacher_options: Options | None = None  # None: plain. Dynamo traces no default of our own class
    normalized: bool = False
    metrics: tuple[str, ...] = ()
    statistics: bool = False  # return these too

    def encode(self) -> str:
        """Writes kind and `names` as text, since an operator takes no objects; see `numbers`."""
        return f"{self.kind}:{','.join(self.names)}"

    def numbers(self) -> list[float]:
        """Lists the rest of the plan as eight floats, which `_plans` reads back."""
        o, t = self.options, self.teacher_options or DEFAULT_OPTIONS
        heads = [o.softcap or 0.0, o.logit_scale, t.softcap or 0.0, t.logit_scale]
        return [*heads, o.label_smoothing, o.z_loss, self.beta, float(self.normalized)]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values that a pass returns for each row, in order."""
        return ("loss", *(STATISTICS if self.statistics else ()), *self.metrics)


class LossArgs(NamedTuple):
    """The tensors of a pass that its loss terms share."""

    hidden: Tensor  # [N, C]; or raw logits [N, V], where there is no weight
    weight: Tensor | None  # [V, C]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r]: low up^T is added to the logits
    up: Tensor | None  # [V, r]
    chosen: Tensor | None  # [m]: the rows to compute; None: all
    live: Tensor | None  # [N]: rows that have a gradient; None: all that are computed


class LossPass(NamedTuple):
    """The settings of a pass."""

    name: str  # in messages
    plans: tuple[LossPlan, ...]
    per_token: tuple[bool, ...]  # whether a term's value is one for each row, not their sum
    learned: tuple[bool, ...]  # whether the weights of its rows get a gradient
    teachers: tuple[Callable[..., Any] | None, ...]  # modules that lend their heads' tensors
    needs: tuple[bool, ...]  # gradients of hidden, weight, bias, low and up
    late: bool  # fp16: row scales are divided by their maximum, gradients multiplied by it
    ahead: bool  # gradients are computed in the forward pass, for the sum of the values
    overwrite: bool  # the logits by their gradient, which is then not returned
    logits_bytes: int  # 0: as many as the head's shape suggests
    shard: str = ""  # of the vocabulary, as a word; empty: all of it

    @property
    def instead(self) -> str:
        """What a message recommends to those who need a second derivative."""
        if not self.name.startswith("linear_"):
            return 'compute it inside `with tigon.kernels.use("reference")`'
        return (
            "the plain definitions, such as linear_cross_entropy_ref, have one, and so has a model "
            'with return_logits=True and attention="reference" inside '
            '`with tigon.kernels.use("reference")`'
        )


def _plans(words: str, numbers: list[float]) -> list[LossPlan]:
    """Reads plans back from their text and numbers."""
    plans = []
    for i, word in enumerate(words.split()):
        kind, names = word.split(":")
        cap, scale, t_cap, t_scale, smoothing, z_loss, beta, normalized = numbers[8 * i : 8 * i + 8]
        options = Options(cap or None, scale, smoothing, z_loss)
        teacher = Options(t_cap or None, t_scale)
        metrics = tuple(n for n in names.split(",") if n not in ("loss", *STATISTICS))
        statistics = STATISTICS[0] in names
        plans.append(LossPlan(kind, options, beta, teacher, bool(normalized), metrics, statistics))
    return plans


def run_pass(
    p: LossPass,
    inputs: LossArgs,
    slots: Slots,
    row_scales: list[Tensor],  # k of [N]: the gradient of row t's loss
    needs: tuple[bool, ...],  # gradients of hidden, weight, bias, low and up
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Returns six gradients (empty unless needed), and for each loss term values [N] by name.

    Gradients are those of hidden, of the first rows of the weight, of its other rows, if any, of
    the bias, of low and of up. On the CPU torch.compile sees through it, elsewhere it is one op.
    """
    plain = inputs.hidden.device.type == "cpu" and not runs_triton(inputs.hidden)
    run = _head_pass.__wrapped__ if plain else _head_pass
    words = " ".join(plan.encode() for plan in p.plans)
    numbers = [x for plan in p.plans for x in plan.numbers()]
    flags = words, numbers, list(needs), p.logits_bytes, p.overwrite, p.shard
    out = run(*inputs, slots, row_scales, *flags)
    rest = iter(out[GRADIENTS:])
    return out[:GRADIENTS], [{name: next(rest) for name in plan.names} for plan in p.plans]


def _outputs(hidden: Tensor, *args: Any) -> list[Tensor]:
    """Allocates what the pass returns: losses, metrics and gradients."""
    weight, bias, low, up, index, _, _, _, *settings = args
    words, numbers, needs, logits_bytes, overwrite, *shard = settings
    plans = _plans(words, numbers)
    n, m = hidden.shape[0], hidden.shape[0] if index is None else index.shape[0]
    late = hidden.dtype == torch.float16 and weight is not None
    only = m <= _pass_sizes(hidden, weight, plans, logits_bytes, needs, m, *shard).rows and not late
    full = torch.float32
    outputs: list[tuple[Sequence[int], torch.dtype] | None] = [None] * GRADIENTS  # their shapes
    if needs[0] and not overwrite:
        outputs[0] = hidden.shape, full if late else hidden.dtype
    if needs[1] and weight is not None:
        vocab, dim = weight.shape
        first = _first_rows(weight, only=only)
        outputs[1] = (first, dim), weight.dtype if only else full
        outputs[2] = ((vocab - first, dim), full) if first < vocab else None
    if needs[2] and bias is not None:
        outputs[3] = bias.shape, full
    if needs[3] and low is not None:
        outputs[4] = low.shape, full if late else low.dtype
    if needs[4] and up is not None:
        outputs[5] = up.shape, up.dtype if only else full
    names = [name for plan in plans for name in plan.names]
    outputs += [((n,), torch.int64 if r == "predicted_tokens" else full) for r in names]
    return [
        hidden.new_empty(0) if x is None else hidden.new_empty(x[0], dtype=x[1]) for x in outputs
    ]


@operator("head_pass", _outputs)
def _head_pass(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    index: Tensor | None,
    live: Tensor | None,
    slots: list[Tensor | None],
    row_scales: list[Tensor],
    words: str,
    numbers: list[float],
    needs: list[bool],
    logits_bytes: int,
    overwrite: bool,
    shard: str = "",
) -> list[Tensor]:
    """Returns the gradients, then the rows of each loss term in the order of `LossPlan.names`.

    Gradients of weights are fp32 if chunks add up to them, the bias's always; in fp16 all are.
    """
    plans, n = _plans(words, numbers), hidden.shape[0]
    count = n if index is None else len(index)
    rows, piece, _ = _pass_sizes(hidden, weight, plans, logits_bytes, needs, count, shard)
    cut = VocabularyShard.decode(shard) if shard else None
    if index is not None:
        hidden, row_scales = hidden[index], [r[index] for r in row_scales]
        slots = _take_rows(slots, index)
        live, low = (None if x is None else x[index] for x in (live, low))
    chunks = range(0, max(1, len(hidden)), rows)  # one at least, so that all results exist
    outputs: list[list[Tensor]] = [[] for plan in plans for _ in plan.names]
    d_hidden = hidden if overwrite or not needs[0] else hidden.new_empty(hidden.shape)
    d_bias: Tensor | None = None
    d_low = None if low is None or not needs[3] else low.new_empty(low.shape)
    d_up: Tensor | None = None
    late = hidden.dtype == torch.float16 and weight is not None
    only = len(chunks) == 1 and not late
    first = 0 if weight is None else _first_rows(weight, only=only)
    d_weights: list[Tensor | None] = [None] * (1 + (weight is not None and first < len(weight)))
    for start in chunks:
        part = slice(start, start + rows)
        h = hidden[part]
        out_logits = None if low is None else low[part]
        logits = h if weight is None else _product(h, weight, bias, out_logits, up)
        out = None
        if weight is None and needs[0]:
            out = logits if overwrite else d_hidden[part]
        elif any(needs):
            out = logits
        tensors, scales = _take_rows(slots, part), [r[part] for r in row_scales]
        for at in range(0, max(1, len(logits)), piece):
            values = _run_piece(plans, logits, out, tensors, scales, at, piece, cut)
            for parts, value in zip(outputs, values, strict=True):
                parts.append(value)
        if out is not None and weight is not None:
            if needs[0]:
                matmul_into(out, weight, d_hidden[part])
            if needs[1]:
                masked = _mask_rows(live, part, h)
                columns = out.split([first, out.shape[1] - first], 1)
                d_weights = [
                    add_product(total, x.T, masked, only=only)
                    for total, x in zip(d_weights, columns, strict=False)
                ]
            if needs[2]:
                total = out.sum(0, dtype=torch.float32)
                d_bias = total if d_bias is None else d_bias + total
            if d_low is not None and up is not None:
                matmul_into(out, up, d_low[part])
            if needs[4] and out_logits is not None:
                d_up = add_product(d_up, out.T, _mask_rows(live, part, out_logits), only=only)
        del logits, out  # or the next chunk would be computed beside this one
    fills = (IGNORE_INDEX if n == "predicted_tokens" else 0 for plan in plans for n in plan.names)
    rows_of = (
        None if d is None else _scatter_rows(d.float() if late else d, index, n)
        for d in (d_hidden if needs[0] and not overwrite else None, d_low)
    )
    gradients = next(rows_of), *(*d_weights, None)[:2], d_bias, next(rows_of), d_up
    return [
        *(hidden.new_empty(0) if d is None else d for d in gradients),
        *(_scatter_rows(torch.cat(x), index, n, f) for x, f in zip(outputs, fills, strict=True)),
    ]


def _mask_rows(live: Tensor | None, part: slice, x: Tensor) -> Tensor:
    """Returns a chunk's rows, 0 where the gradient is 0: NaN in an ignored row must not count."""
    return x if live is None else x.where(live[part, None], 0)


def workspace(hidden: Tensor, *args: Any) -> int:
    """Returns the bytes of a chunk's logits and of what is held beside them, for arguments of the
    operator on a GPU; 0 without a head."""
    weight, _, _, _, index, live, _, _, *settings = args
    words, numbers, needs, logits_bytes, _, *shard = settings
    if weight is None:
        return 0
    plans, count = _plans(words, numbers), hidden.shape[0] if index is None else index.shape[0]
    rows, piece, extra = _pass_sizes(hidden, weight, plans, logits_bytes, needs, count, *shard)
    rows = min(count, rows)
    chunk = (rows + extra * min(rows, piece)) * pad_vocab(weight.shape[0])
    chunk += 0 if live is None else rows * hidden.shape[1]
    return chunk * hidden.element_size()


def _take_rows(slots: Slots, rows: Any) -> Slots:
    """Returns rows of the terms' tensors, but all of the teachers' heads."""
    return [x if x is None or i % SLOTS in (2, 3) else x[rows] for i, x in enumerate(slots)]


def _scatter_rows(rows: Tensor, index: Tensor | None, n: int, fill: int = 0) -> Tensor:
    """Scatters the computed rows to their positions among all N; the rest are `fill`."""
    if index is None:
        return rows
    return rows.new_full((n, *rows.shape[1:]), fill).index_copy_(0, index, rows)


def _run_piece(
    plans: Sequence[LossPlan],
    logits: Tensor,  # [n, V] of a chunk
    out: Tensor | None,  # [n, V] for their gradient; may be the logits
    slots: Slots,
    row_scales: Sequence[Tensor],
    start: int,
    rows: int,
    cut: VocabularyShard | None,
) -> list[Tensor]:
    """Returns the values of `rows` rows from `start` on; the last term writes the gradient to
    `out`."""
    part = slice(start, start + rows)
    z, out_logits = logits[part], None if out is None else out[part]
    out_logits = z if out is logits else out_logits
    several = out_logits is z and len(plans) > 1
    # Only the last term may overwrite what all of them read
    room = _allocate_logits(z, z.shape[1]) if several else out_logits
    values: list[Tensor] = []
    before = None
    for i, plan in enumerate(plans):
        tensors = _take_rows(slots[SLOTS * i : SLOTS * (i + 1)], part)
        to = out_logits if i == len(plans) - 1 else room
        grad = None if to is None else LogitGradient(row_scales[i][part], to, before)
        values += _run_term(plan, z, tensors, grad, cut)
        before = to
    return values


def _run_term(
    plan: LossPlan,
    logits: Tensor,  # [n, V]
    slots: Slots,
    grad: LogitGradient | None,
    cut: VocabularyShard | None,
) -> list[Tensor]:
    """Returns a loss term's values for a chunk, as `plan.names` has them; writes its gradient."""
    first, second, weight, bias, peak, log_mass = slots
    assert first is not None
    if cut is not None:
        logits, grad = cut.without_padding(logits, grad)
    if plan.kind == "topk":
        assert second is not None
        stored = topk_rows if cut is None else partial(shard_topk_rows, cut)
        return [stored(logits, first, second, plan.options, plan.beta, grad)]
    if plan.kind == "divergence":
        teacher = first if weight is None else _product(first, weight, bias)
        numbers = plan.options, plan.teacher_options or DEFAULT_OPTIONS, plan.beta
        if cut is not None:
            teacher, _ = cut.without_padding(teacher, None)
            return [shard_divergence_rows(cut, logits, teacher, *numbers, grad)]
        return [divergence_rows(logits, teacher, *numbers, grad, normalized=plan.normalized)]
    lse_parts = None if peak is None or log_mass is None else (peak, log_mass)
    run = loss_rows if cut is None else partial(shard_loss_rows, cut)
    rows = run(logits, first, plan.options, plan.metrics, grad, lse_parts)
    outputs = {"loss": rows.loss, "peak": rows.peak, "log_mass": rows.log_mass} | rows.metrics
    return [outputs[name] for name in plan.names]


def _first_rows(weight: Tensor, *, only: bool) -> int:
    """Returns how many rows of the weight's gradient are in its first tensor: all, or over half.

    The fp32 sum of 16-bit gradients is split in two: backward writes the result to the memory of
    the first tensor and frees the second for what follows.
    """
    vocab = weight.shape[0]
    if only or weight.dtype == torch.float32 or not runs_triton(weight):
        return vocab
    return min(vocab, pad_vocab(-(-vocab // 2)))


def _pass_sizes(
    hidden: Tensor,
    weight: Tensor | None,
    plans: Sequence[LossPlan],
    logits_bytes: int,
    needs: Sequence[bool],
    count: int,  # of rows that are computed
    shard: str = "",
) -> ChunkSizes:
    """Returns the chunk sizes with room for a sum of gradients, a teacher's logits and a copy."""
    several = len(plans) > 1 and any(needs)
    extra = int(weight is not None and several)
    extra += any(plan.kind == "divergence" and not plan.normalized for plan in plans)
    extra += any(plan.kind == "topk" for plan in plans) and (several or weight is None)
    vocab = hidden.shape[1] if weight is None else weight.shape[0]
    if shard:
        vocab = VocabularyShard.decode(shard).share  # so that all ranks have the same chunks
    return chunk_sizes(hidden, weight, vocab, extra, logits_bytes, needs, count)


def _allocate_logits(x: Tensor, vocab: int) -> Tensor:
    """Allocates logits for the rows of x; rows start at multiples of 128 bytes for the GPU."""
    return x.new_empty(x.shape[0], pad_vocab(vocab))[:, :vocab]


def _product(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """Returns the logits of a chunk in new memory."""
    if not h.is_cuda:
        logits = F.linear(h, weight, bias)
    else:
        logits = _allocate_logits(h, weight.shape[0])
        if bias is None:
            torch.mm(h, weight.T, out=logits)
        else:
            torch.addmm(bias, h, weight.T, out=logits)
    return logits if low is None or up is None else logits.addmm_(low, up.T)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, *, only: bool) -> Tensor:
    """Returns `total + a @ b` in fp32 in the memory of `total`; without one in the dtype of a."""
    if only:
        return chunked_matmul(a, b)
    if a.device.type == "cuda" and a.dtype != torch.float32 and len(b):
        return add_matmul(total, a, b)
    if total is None:
        total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    return total.addmm_(a.float(), b.float())  # in place, so autocast does not narrow it
