"""Both passes of flash-attn-4 as custom operators, since torch.compile cannot trace its functions.

Names and shapes are those of flash_attn.cute 4.0.0b36.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.attention import backends
from tigon.kernels.runtime import operator

SHARED_ARGUMENTS = (  # of the forward and the backward pass
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"),
    *("window_size_left", "window_size_right", "softcap"),
)


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates the attention output and the log-sum-exp."""
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32)
    return q.new_empty(q.shape), lse


@operator("flash_attn_4", _outputs)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    scale: float | None,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float,
    deterministic: bool,  # in the backward pass
) -> tuple[Tensor, Tensor]:
    """Calls flash-attn-4's forward kernel, on rows or, with bounds, on sequences.

    Returns the output, and the log-sum-exp of the scores, which has no gradient.
    """
    run = backends.flash_attn_4().interface._flash_attn_fwd
    arguments = cu_q, cu_k, longest_q, longest_k, scale, causal, left, right, softcap
    options: dict[str, Any] = dict(zip(SHARED_ARGUMENTS, arguments, strict=True))
    out, lse, *_ = run(q, k, v, **options, return_lse=True)
    return out, lse


def _empty_like(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the gradients of q, k and v."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@operator("flash_attn_4_backward", _empty_like)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    scale: float | None,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls flash-attn-4's backward kernel; returns the gradients of q, k and v."""
    run = backends.flash_attn_4().interface._flash_attn_bwd
    arguments = cu_q, cu_k, longest_q, longest_k, scale, causal, left, right, softcap
    options: dict[str, Any] = dict(zip(SHARED_ARGUMENTS, arguments, strict=True))
    # Allocated here, since it would choose other strides than the compiler expects
    options |= zip(("dq", "dk", "dv"), _empty_like(q, k, v), strict=True)
    return run(q, k, v, out, dout, lse, **options, deterministic=deterministic)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves the inputs and outputs of the forward pass for backward."""
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.rest = inputs[5:]


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the arguments of `_forward`."""
    q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
    # Not `_backward`, which autograd would treat as a constant in second derivatives
    gradients = _backward.op(q, k, v, out, dout, lse, cu_q, cu_k, *ctx.rest)
    return *gradients, *[None] * 10


_forward.op.register_autograd(_gradients, setup_context=_save)
LAUNCHERS = _forward.__wrapped__, _backward.__wrapped__
# Functions of flash-attn-4 that compile the kernels of a backward pass: the first one's takes as
# long as the others together
BACKWARD_PARTS = ("_flash_attn_bwd",), ("_bwd_preprocess", "_bwd_postprocess_convert")


class _FullCache:
    """Stands for a cache of flash-attn-4 in which nothing is missing."""

    def __contains__(self, key: object) -> bool:
        return True


def compile_jobs(
    launcher: Callable[..., object], arguments: Sequence[Any]
) -> list[Callable[[], object]]:
    """Returns what compiles the kernels of a call of one of LAUNCHERS with fake tensors: jobs that
    may run side by side."""
    functions = [name for part in BACKWARD_PARTS for name in part]
    interface = backends.flash_attn_4().interface
    has_caches = all(hasattr(getattr(interface, n, None), "compile_cache") for n in functions)
    if launcher is not _backward.__wrapped__ or not has_caches:  # of another version
        return [partial(launcher, *arguments)]
    others = [[name for name in functions if name not in part] for part in BACKWARD_PARTS]
    return [partial(_compile_backward, names, arguments) for names in others]


def _compile_backward(skip: Sequence[str], arguments: Sequence[Any]) -> None:
    """Compiles the kernels of a backward pass, but not those of the functions to skip."""
    interface = backends.flash_attn_4().interface
    with ExitStack() as stack:
        for function in (getattr(interface, name) for name in skip):
            stack.callback(setattr, function, "compile_cache", function.compile_cache)
            function.compile_cache = _FullCache()
        _backward.__wrapped__(*arguments)


def environment() -> dict[str, str]:
    """Returns the variables that tell flash-attn-4 the GPU in a process that cannot use it.

    Its compiler reads a variable of its own at import alone: it finds out the GPU here, once.
    """
    if not torch.cuda.is_available():
        return {}
    with suppress(KeyError, AttributeError):  # not imported, or of another version
        sys.modules["cutlass"].base_dsl.BaseDSL._get_dsl().get_arch_enum()
    gpu = torch.cuda.get_device_properties()
    arch, count = f"sm_{gpu.major}{gpu.minor}", gpu.multi_processor_count
    return {"FLASH_ATTENTION_ARCH": arch, "FLASH_ATTENTION_NUM_SMS": str(count)}
