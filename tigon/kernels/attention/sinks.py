"""Attention sinks: of each head one more logit in the softmax, whose value is zero (gpt-oss).

# B batch, T query tokens, N of all sequences, H query heads, D head dim; ... is B or nothing

A query's output is `out = r * o` with r = sigmoid(lse - sink), where o is attention without sinks
and lse the log-sum-exp of its scores. Fused kernels know no sinks, but their backward passes
compute probabilities from the lse that they are given, and read the output only for the row sums
of dout * out. So they return the gradients of attention with sinks, exactly, from its output and
from logaddexp(lse, sink). A sink's gradient is the sum of -(1 - r) (dout . out) over its queries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import refuse_second_derivative


class FusedPasses(NamedTuple):
    """Both passes of a fused kernel, on q, k and v [..., T, heads, D] or [N, heads, D]."""

    # (q, k, v) -> the output, the lse [..., H, T] or [H, N] in fp32, and what else backward needs
    forward: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]]
    # (dout, q, k, v, out, lse, *these) -> the gradients of q, k and v
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class AttentionWithSinks(torch.autograd.Function):
    """Computes attention with a sink [H] for each head by kernels that have no sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, passes: FusedPasses
    ) -> Tensor:
        out, lse, rest = passes.forward(q, k, v)
        total = torch.logaddexp(lse, sinks.float()[:, None])
        out = out.mul_((lse - total).exp_().transpose(-1, -2)[..., None])
        ctx.save_for_backward(q, k, v, sinks, out, total, *rest)
        ctx.passes = passes
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention with sinks")
        q, k, v, sinks, out, lse, *rest = ctx.saved_tensors
        dsinks = None
        if ctx.needs_input_grad[3]:
            row_sums = (dout * out).sum(-1, dtype=torch.float32)  # [..., H]
            shares = (sinks.float()[:, None] - lse).exp_().transpose(-1, -2)
            dsinks = -(shares * row_sums).flatten(0, -2).sum(0).to(sinks.dtype)
        gradients = ctx.passes.backward(dout, q, k, v, out, lse, *rest)
        return *gradients, dsinks, None


def scale_by_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns attention [B, H, T, D] with sinks, from that without them and its lse [B, H, T]."""
    return (out * torch.sigmoid(lse - sinks.float()[:, None])[..., None]).to(out.dtype)
