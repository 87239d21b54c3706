"""The gated delta rule: linear attention whose state forgets, and corrects what it predicts.

# B batch, T tokens, K key heads, H value heads (a multiple of K), Dk and Dv head dims,
# S packed sequences, C tokens of a chunk

Per value head and token, with a state of [Dk, Dv]:

    state = exp(g) * state
    error = v - state^T k                   # what the state does not predict
    state = state + k (beta * error)^T
    o = state^T q

Source: Yang et al. 2024 (arXiv 2412.06464); l2-normed keys and scaled queries are the caller's.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.delta.gated_delta_backward import gated_delta_backward, gradients_compile
from tigon.kernels.delta.gated_delta_forward import gated_delta_forward
from tigon.kernels.delta.gated_delta_step import gated_delta_tokens
from tigon.kernels.delta.gated_delta_tiles import CHUNK, MAX_DIM, fits
from tigon.kernels.runtime import (
    DTYPES,
    check_devices,
    on_host,
    refuse_second_derivative,
    runs_triton,
    without_autocast,
)
from tigon.kernels.saved_sources import save_sources

MAX_STEP_TOKENS = 16


def gated_delta_rule_ref(
    q: Tensor,  # [B, T, K, Dk]
    k: Tensor,  # [B, T, K, Dk]
    v: Tensor,  # [B, T, H, Dv]
    g: Tensor,  # [B, T, H], at most 0: the logarithm of the decay
    beta: Tensor,  # [B, T, H]
    *,
    cu_seqlens: Tensor | None = None,  # int32 [S + 1], with B = 1
    state: Tensor | None = None,  # [B or S, H, Dk, Dv]
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [B, T, H, Dv] and the states after the last tokens, fp32 inside.

    Works in chunks, whose tokens are solved for together; they start anew with each sequence.
    """
    if state is None:
        rows = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        shape = rows, v.shape[2], q.shape[3], v.shape[3]
        state = q.new_zeros(shape, dtype=torch.float32)
    if cu_seqlens is None:
        return _chunked(state, q, k, v, g, beta)
    if cu_seqlens.is_meta:  # shapes are all
        return torch.empty_like(v), state
    outputs, states = [v[:, :0]], [state[:0]]
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        part = (x[:, start:end] for x in (q, k, v, g, beta))
        o, final = _chunked(state[n : n + 1], *part)
        outputs.append(o)
        states.append(final)
    return torch.cat(outputs, 1), torch.cat(states)


def _chunked(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes rows of one sequence each, of which `state` is [B, H, Dk, Dv]."""
    inside = torch.float64 if q.dtype == torch.float64 else torch.float32
    T, groups = q.shape[1], v.shape[2] // q.shape[2]
    state, outputs = state.to(inside), []
    with without_autocast(q.device):
        for first in range(0, max(T, 1), CHUNK):
            part = (x[:, first : first + CHUNK].to(inside) for x in (q, k, v, g, beta))
            qc, kc, vc, gc, bc = (x.transpose(1, 2) for x in part)  # [B, heads, C, ...]
            qc, kc = (x.repeat_interleave(groups, 1) for x in (qc, kc))
            G = gc.cumsum(-1)
            # Never the product of two exponentials: G may fall to -1000 within a chunk
            decay = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
            reach = G.exp()[..., None]  # of the state before the chunk
            predicted = reach * (kc @ state)
            mixed = (decay * bc[..., None, :] * (kc @ kc.mT)).tril(-1)
            error = torch.linalg.solve_triangular(
                mixed, vc - predicted, upper=False, unitriangular=True
            )
            change = bc[..., None] * error
            o = reach * (qc @ state) + (decay * (qc @ kc.mT)) @ change
            outputs.append(o.transpose(1, 2).to(v.dtype))
            last = gc.sum(-1)[..., None, None]
            state = last.exp() * state + (kc * (last - G[..., None]).exp()).mT @ change
    return torch.cat(outputs, 1), state


def gated_delta_step_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Returns the outputs of tokens one after another and changes the state, fp32 inside."""
    groups = v.shape[2] // q.shape[2]
    outputs = []
    for t in range(q.shape[1]):
        qt, kt = (x[:, t].repeat_interleave(groups, 1).to(state.dtype) for x in (q, k))
        state *= g[:, t, :, None, None].to(state.dtype).exp()
        error = v[:, t].to(state.dtype) - (state * kt[..., None]).sum(-2)
        change = beta[:, t, :, None].to(state.dtype) * error
        state += kt[..., None] * change[..., None, :]
        outputs.append((state * qt[..., None]).sum(-2).to(v.dtype))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raises ValueError unless the shapes of what both operators take fit."""
    if q.dim() != 4 or k.shape != q.shape:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} are not both [B, T, K, Dk]")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v {tuple(v.shape)} is not [B, T, H, Dv] with {tuple(q.shape[:2])} tokens"
        )
    if v.shape[2] % max(q.shape[2], 1):
        raise ValueError(f"{v.shape[2]} value heads cannot share {q.shape[2]} key heads")
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            raise ValueError(f"{name} {tuple(x.shape)} is not [B, T, H] = {tuple(v.shape[:3])}")
    if g.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"g is {g.dtype}: sums of log decays need torch.float32")


def _check_state(state: Tensor, rows: int, q: Tensor, v: Tensor) -> None:
    """Raises ValueError unless the state is one of `rows` sequences."""
    shape = (rows, v.shape[2], q.shape[3], v.shape[3])
    if state.shape != shape:
        raise ValueError(f"state {tuple(state.shape)} is not [rows, H, Dk, Dv] = {shape}")
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"state is {state.dtype}: heads that remember need torch.float32")
    if state.requires_grad:
        raise ValueError("state requires a gradient, which is not computed: detach it")


class _GatedDeltaRule(torch.autograd.Function):
    """Saves its inputs, or what they are recomputed from: backward computes the rest again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:  # what `gated_delta_forward` takes
        if not torch.compiler.is_compiling():  # Dynamo need not know it; it passes zeros
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return tuple(gated_delta_forward(*inputs))

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> Any:
        refuse_second_derivative("gated_delta_rule")
        saved = ctx.saved_tensors  # each access recomputes
        do = torch.zeros_like(saved[2]) if do is None else do
        return *gated_delta_backward(*saved, do, dfinal), None, None


def _served(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> bool:
    """Whether the kernels take them."""
    same = q.dtype == k.dtype == v.dtype and g.dtype == torch.float32 and beta.dtype in DTYPES
    narrow = max(q.shape[3], v.shape[3]) <= MAX_DIM
    return same and narrow and runs_triton(q) and fits(q)


def gated_delta_rule(
    q: Tensor,  # [B, T, K, Dk]
    k: Tensor,  # [B, T, K, Dk]
    v: Tensor,  # [B, T, H, Dv]
    g: Tensor,  # [B, T, H], at most 0: the logarithm of the decay, fp32
    beta: Tensor,  # [B, T, H]
    *,
    cu_seqlens: Tensor | None = None,  # int32 [S + 1] from 0 to T, with B = 1
    state: Tensor | None = None,  # [B or S, H, Dk, Dv], fp32; None: zeros
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [B, T, H, Dv] and the fp32 states after the last tokens.

    Value head h reads key head `h // (H // K)`. A token whose g, beta and k are 0 leaves the state
    as it is. Differentiable in all but the state.
    """
    _check(q, k, v, g, beta)
    check_devices(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, state=state)
    rows = q.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or rows != 1:
            raise ValueError(
                f"cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} with {rows} rows: give "
                "integers [S + 1] with one row"
            )
        rows = len(cu_seqlens) - 1
    if state is not None:
        _check_state(state, rows, q, v)
    if cu_seqlens is not None and on_host(cu_seqlens):
        bounds, tokens = cu_seqlens.tolist(), q.shape[1]
        if not bounds or bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens {bounds} do not rise from 0 to {tokens} tokens")
    inputs = q, k, v, g, beta, cu_seqlens, state
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:5])
    if not _served(q, k, v, g, beta) or (learns and not gradients_compile(q)):
        return gated_delta_rule_ref(q, k, v, g, beta, cu_seqlens=cu_seqlens, state=state)
    if learns:
        with save_sources(q, k, v):
            return _GatedDeltaRule.apply(*inputs)
    o, final = gated_delta_forward(*inputs)
    return o, final


@torch.no_grad()
def gated_delta_step(
    q: Tensor,  # [B, T, K, Dk], T at most MAX_STEP_TOKENS
    k: Tensor,  # [B, T, K, Dk]
    v: Tensor,  # [B, T, H, Dv]
    g: Tensor,  # [B, T, H], at most 0: the logarithm of the decay, fp32
    beta: Tensor,  # [B, T, H]
    state: Tensor,  # [B, H, Dk, Dv], fp32: changed in place
) -> Tensor:
    """Returns the outputs [B, T, H, Dv] of a few new tokens and moves the state on: decoding.

    One pass over the state, without host syncs, for CUDA graphs. It has no gradients.
    """
    _check(q, k, v, g, beta)
    check_devices(q=q, k=k, v=v, g=g, beta=beta, state=state)
    if q.shape[1] > MAX_STEP_TOKENS:
        raise ValueError(
            f"{q.shape[1]} tokens are more than {MAX_STEP_TOKENS}: call gated_delta_rule"
        )
    _check_state(state, q.shape[0], q, v)
    if not (_served(q, k, v, g, beta) and state.is_contiguous()):
        return gated_delta_step_ref(q, k, v, g, beta, state)
    return gated_delta_tokens(q, k, v, g, beta, state)
