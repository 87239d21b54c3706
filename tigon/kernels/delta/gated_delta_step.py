"""The gated delta rule for a few new tokens: the state is read once and written once.

# B batch, T tokens, K key heads, H value heads, Dk and Dv head dims

A state of [128, 128] is 64 KiB of the bytes that a step moves; the rest is less than 1 KiB a token.
"""

from torch import Tensor

from tigon.kernels.runtime import next_power_of_2, operator, pdl_options, pdl_wait, tl, triton

COLUMNS, WARPS = 16, 4  # of the state, so that programs fill the GPU with a single row


@triton.jit(do_not_specialize_on_alignment=["T"])
def _step_kernel(
    q, k,  # [B, T, K, Dk]
    v,  # [B, T, H, Dv]
    g, beta,  # [B, T, H]
    state,  # [B, H, Dk, Dv]
    o,  # [B, T, H, Dv]
    T, H, K,
    Dk: tl.constexpr, Dv: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Moves BV columns of the state of a value head on by T tokens."""
    pdl_wait(PDL)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    key_rows, value_columns = rows < Dk, columns < Dv
    at = state + (b * H + h) * Dk * Dv + rows[:, None] * Dv + columns[None, :]
    exists = key_rows[:, None] & value_columns[None, :]
    S = tl.load(at, mask=exists, other=0.0)
    for t in range(T):
        token = b * T + t
        key = (token * K + h // (H // K)) * Dk + rows
        kt = tl.load(k + key, mask=key_rows, other=0.0).to(tl.float32)[:, None]
        qt = tl.load(q + key, mask=key_rows, other=0.0).to(tl.float32)[:, None]
        value = (token * H + h) * Dv + columns
        vt = tl.load(v + value, mask=value_columns, other=0.0).to(tl.float32)
        S *= tl.exp(tl.load(g + token * H + h))
        change = tl.load(beta + token * H + h).to(tl.float32) * (vt - tl.sum(S * kt, 0))
        S += kt * change[None, :]
        out = tl.sum(S * qt, 0)
        tl.store(o + value, out.to(o.dtype.element_ty), mask=value_columns)
    tl.store(at, S, mask=exists)


def _output(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@operator("gated_delta_step", _output, mutates=("state",))
def gated_delta_tokens(
    q: Tensor,  # [B, T, K, Dk]
    k: Tensor,  # [B, T, K, Dk]
    v: Tensor,  # [B, T, H, Dv]
    g: Tensor,  # fp32 [B, T, H]
    beta: Tensor,  # [B, T, H]
    state: Tensor,  # fp32 [B, H, Dk, Dv], contiguous: changed in place
) -> Tensor:
    """Returns the outputs [B, T, H, Dv] and moves the state on."""
    o = _output(q, k, v)
    if o.numel() == 0:
        return o
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    (B, T, K, Dk), (H, Dv) = q.shape, v.shape[2:]
    block = min(COLUMNS, next_power_of_2(Dv))
    _step_kernel[(-(-Dv // block), H, B)](
        *(q, k, v, g, beta, state, o, T, H, K, Dk, Dv, next_power_of_2(Dk), block),
        num_warps=WARPS,
        **pdl_options(v),
    )
    return o
