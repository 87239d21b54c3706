"""Scaling and capping of logits, options and checks that all losses share.

# N rows (tokens), C model dim, V vocab
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.runtime import (
    check_devices,
    check_values,
    is_eager,
    may_sync,
    num_sms,
    operator,
    runs_triton,
    tl,
    triton,
)

IGNORE_INDEX = -100
METRICS = ("accuracy", "predicted_tokens", "entropy", "max_logit", "nll", "z")
Reduction = Literal["sum", "none"]


@dataclass(frozen=True)
class Options:
    """Scale and softcap of raw logits, and regularizers of the loss.

    `z_loss` adds `z_loss * logsumexp(logits)^2` (PaLM, arXiv 2204.02311).
    """

    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap} is not positive; None means no softcap")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} is not in [0, 1]")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss} is not a finite number of at least 0")

    def without_regularizers(self) -> "Options":
        """Returns softcap and scale alone."""
        return Options(self.softcap, self.logit_scale)

    def at_temperature(self, t: float) -> "Options":
        cap = None if self.softcap is None else self.softcap / t
        return Options(cap, self.logit_scale / t)


DEFAULT_OPTIONS = Options()


def check_logit_options(options: Options) -> None:
    """Raises ValueError for label smoothing or z-loss, which are options of cross-entropy alone."""
    if options.label_smoothing or options.z_loss:
        raise ValueError(f"{options}: label_smoothing and z_loss are for cross-entropy alone")


class LogitGradient(NamedTuple):
    """Tensors for the gradient of a chunk's logits, which a loss term writes.

    Where `row_scale` is 0, so is the gradient, whatever the logits are.
    """

    row_scale: Tensor  # [N], the gradient of each row's loss
    out: Tensor  # [N, V], may be the logits
    before: Tensor | None = None  # [N, V], what it is added to; may be `out`


def scale_and_cap(logits: Tensor, options: Options) -> Tensor:
    """Returns `softcap * tanh(scale * logits / softcap)` in the dtype of `logits`."""
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits


def logits_ref(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns raw logits of a head in fp32."""
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


# Numbers that a narrowing in place begins with, through a copy; it doubles what it takes each time
IN_PLACE_START = 2**20
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(y):
    """Returns tanh(y), as a series near 0, where 1 - 2 / (1 + exp(2 y)) cancels."""
    s = y * y
    near = y * (1 + s * (-0.33333333 + s * (0.13333333 + s * (-0.05396825 + s * 0.02186949))))
    far = 1 - 2 / (1 + tl.exp2(tl.abs(y) * (2 * LOG2E)))
    return tl.where(s < 0.0625, near, tl.where(y < 0, -far, far))


@triton.jit
def transform(x, head):
    """Returns scaled and capped logits in fp32."""
    z = x.to(tl.float32)
    if head[0] is not None:
        z = z * head[0]
    if head[1] is not None:
        z = head[1] * tanh(z * (1 / head[1]))
    return z


@triton.jit
def uncap(d, z, head):
    """Returns the gradient of a scaled logit from the gradient d of the capped one z."""
    if head[1] is not None:
        d *= 1 - (z / head[1]) * (z / head[1])
    return d


def head_constants(options: Options) -> tuple[float | None, float | None]:
    """Returns the `head` of `transform`: None, unlike other numbers, compiles kernels again."""
    scale = None if options.logit_scale == 1 else float(options.logit_scale)
    return scale, None if options.softcap is None else float(options.softcap)


@triton.jit
def _rescale_kernel(x, out, factor, n, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes x * factor to out; in place, a factor of 1 writes nothing."""
    f = tl.load(factor).to(tl.float32)
    if (not IN_PLACE) or f != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
            at = start + tl.arange(0, BLOCK)
            y = tl.load(x + at, mask=at < n).to(tl.float32) * f
            tl.store(out + at, y.to(out.dtype.element_ty), mask=at < n)


def _launch_rescale(x: Tensor, out: Tensor, factor: Tensor) -> None:
    """Launches `_rescale_kernel`, in place if out is x; both are contiguous."""
    # Few programs that walk: half a million that find nothing to do would take longer than a pass
    programs = min(triton.cdiv(x.numel(), 2048), 16 * num_sms(x))
    if programs:
        _rescale_kernel[(programs,)](
            x, out, factor, x.numel(), IN_PLACE=out is x, BLOCK=2048, num_warps=8
        )


def _rescale_outputs(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates the rescaled tensor, in `dtype`."""
    return x.new_empty(x.shape, dtype=dtype)


@operator("rescale", _rescale_outputs)
def _rescale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x * factor` in `dtype`."""
    x = x.contiguous()
    out = _rescale_outputs(x, factor, dtype)
    _launch_rescale(x, out, factor)
    return out


def rescale(x: Tensor, factor: Tensor, dtype: torch.dtype, *, overwrite: bool = False) -> Tensor:
    """Returns `x * factor` in `dtype`, rounded once; a bf16 product would round the factor, too.

    With `overwrite` it is in the memory of x, if that has the dtype and nothing else sees it; a
    factor of 1 then writes nothing.
    """
    if overwrite and x.dtype == dtype and _may_overwrite(x):
        _overwrite(x, x, factor)
        return x
    return _rescale(x, factor, dtype) if runs_triton(x) else (x.float() * factor).to(dtype)


def _join_outputs(first: Tensor, rest: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates the joined gradient."""
    return first.new_empty(len(first) + len(rest), *first.shape[1:], dtype=dtype)


@operator("rescale_and_join", _join_outputs)
def _rescale_and_join(first: Tensor, rest: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rescales two tensors and joins them along the rows."""
    out = _join_outputs(first, rest, factor, dtype)
    _launch_rescale(first, out[: len(first)], factor)
    _launch_rescale(rest, out[len(first) :], factor)
    return out


def rescale_and_join(
    first: Tensor, rest: Tensor, factor: Tensor, dtype: torch.dtype, *, overwrite: bool = False
) -> Tensor:
    """Returns `rescale` of the rows of `first`, then those of `rest`, both fp32 and contiguous.

    With `overwrite` it is in the memory of `first`, which has at least as many rows, if nothing
    else sees that; `dtype` then has 16 bits. No other memory is needed, and `rest` can be freed.
    """
    if not (overwrite and _may_overwrite(first)):
        if not runs_triton(first):
            return torch.cat([rescale(x, factor, dtype) for x in (first, rest)])
        return _rescale_and_join(first, rest, factor, dtype)
    x, y = first.view(-1), rest.view(-1)
    out = x.view(dtype)[: len(x) + len(y)]  # number i lies over number i / 2 of x
    done = min(len(x), IN_PLACE_START)
    out[:done].copy_(rescale(x[:done], factor, dtype))
    while done < len(x):  # what is written over has been read, and nothing is both in one step
        end = min(2 * done, len(x))
        _overwrite(x[done:end], out[done:end], factor)
        done = end
    _overwrite(y, out[len(x) :], factor)
    return out.view(-1, *first.shape[1:])


def _may_overwrite(x: Tensor) -> bool:
    """Whether a kernel may write into `x` unseen by torch: nothing traces it."""
    if torch.compiler.is_compiling() or not x.is_contiguous() or not runs_triton(x):
        return False
    # On meta there is nothing to write, but memory counts as on a GPU
    return x.is_meta or is_eager(x)


def _overwrite(x: Tensor, out: Tensor, factor: Tensor) -> None:
    """Writes x * factor to out; on meta it does nothing."""
    if not x.is_meta:
        with torch.cuda.device_of(x):
            _launch_rescale(x, out, factor)


def check_rows(rows: Tensor, **per_row: Tensor | None) -> None:
    """Raises unless each tensor has a value for every row [..., C], on the same device."""
    lead = rows.shape[:-1]
    letters = "[N]" if len(lead) == 1 else "[B, n]"
    for name, value in per_row.items():
        if value is not None and value.shape not in (lead, (lead.numel(),)):
            raise ValueError(f"{name} {tuple(value.shape)} is not {letters} = {list(lead)}")
    check_devices(rows=rows, **per_row)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Raises ValueError unless hidden states, weight and bias fit each other."""
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{prefix}hidden {tuple(hidden.shape)} and {prefix}weight {tuple(weight.shape)} "
            "are not [..., C] and [V, C]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{prefix}bias {tuple(bias.shape)} is not [V] = [{weight.shape[0]}]")


def check_reduction(reduction: str) -> None:
    if reduction not in ("sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not 'sum' or 'none'")


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Raises unless every target is -100 or in [0, V); names it where the host may read it."""
    bad = (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= vocab_size))
    if may_sync(bad) and bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"label {targets[tuple(where)].item()} at {where} is neither {IGNORE_INDEX} nor in "
            f"[0, {vocab_size}), the vocabulary of the head"
        )
    if not may_sync(bad):
        check_values(~bad.any(), f"a label is neither {IGNORE_INDEX} nor in [0, {vocab_size})")
