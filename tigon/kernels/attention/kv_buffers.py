"""The preallocated cache of a layer, plain or in int8, and how tokens are written to it and read.

# B rows, T new tokens of each, N of all, R cache slots, S slots in use, K kv heads, D head dim
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import check_devices, tl, triton


class KVBuffers(NamedTuple):
    """The cache of one layer: the token at position p is in slot p % R.

    With scales, keys and values are int8: symmetric, absmax / 127 per token and head.
    """

    keys: Tensor  # [B, K, R, D]
    values: Tensor  # [B, K, R, D]
    key_scales: Tensor | None = None  # [B, K, R] fp32
    value_scales: Tensor | None = None  # [B, K, R] fp32


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [..., D] rounded to int8, and fp32 scales [...]: the largest magnitude / 127."""
    x = x.float()
    largest = x.abs().amax(-1)
    scales = largest / largest.new_full((), 127.0)  # by a plain 127 torch does not divide on GPUs
    return (x / scales.clamp_min(1e-30)[..., None]).round().to(torch.int8), scales


def write_tokens(k: Tensor, v: Tensor, buffers: KVBuffers, rows: Tensor, slots: Tensor) -> None:
    """Writes k and v [..., K, D] to the slots [...] of the rows [...], int8 if there are scales."""
    new = ((k, buffers.keys, buffers.key_scales), (v, buffers.values, buffers.value_scales))
    for x, stored, kept_scales in new:
        x = x.detach()
        if kept_scales is not None:
            x, scales = _quantize(x)
            kept_scales[rows, :, slots] = scales
        stored[rows, :, slots] = x.to(stored.dtype)


def dequantize_slots(x: Tensor, scales: Tensor | None, slots: int) -> Tensor:
    """Returns the first `slots` slots of x [B, K, R, D] in fp32, times their scales if given."""
    x = x[:, :, :slots].float()
    return x if scales is None else x * scales[:, :, :slots, None]


def check_buffers(k: Tensor, buffers: KVBuffers) -> torch.Size:
    """Returns the shape [B, K, R, D] of the buffers; raises ValueError unless they fit each other
    and, without scales, have the dtype of k."""
    keys, values, *scales = buffers
    if keys.dim() != 4 or values.shape != keys.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not [B, K, R, D]"
        )
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("the numbers of a head must be adjacent in keys and in values")
    if (scales[0] is None) != (scales[1] is None):
        raise ValueError("give scales of keys and of values, or of neither")
    if any(x is not None and x.shape != keys.shape[:3] for x in scales):
        raise ValueError(f"scales are not {tuple(keys.shape[:3])}, one for each token and head")
    stored = k.dtype if scales[0] is None else torch.int8
    if keys.dtype != stored or values.dtype != stored:
        raise ValueError(f"keys are {keys.dtype}, values {values.dtype}: they must be {stored}")
    return keys.shape


def append_tokens(
    k: Tensor,  # [N, K, D]
    v: Tensor,  # [N, K, D]
    buffers: KVBuffers,
    rows: Tensor,  # [N]
    positions: Tensor,  # [N]
    ends: Tensor,  # [N]
) -> None:
    """Writes tokens of several rows, token n at position positions[n] of row rows[n].

    The tokens of a row are in order of position; ends[n] is the row's length afterwards. If a ring
    is too small for them, the last R stay. The host does not wait for the device.
    """
    _, kv_heads, slots, d = check_buffers(k, buffers)
    new = len(rows), kv_heads, d
    if k.shape != new or v.shape != new:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} are not {new}, as rows and the cache say"
        )
    check_devices(k=k, v=v, rows=rows, positions=positions, ends=ends, **buffers._asdict())
    # Several writes to one slot would come in any order: all of them write the token that stays
    later = (ends - 1 - positions) // slots * slots
    last = torch.arange(len(k), device=k.device) + later
    write_tokens(k[last], v[last], buffers, rows, positions % slots)


@triton.jit
def unpack_int8(x, dtype: tl.constexpr):
    """Splits each int16 into two int8, the low ones and the high ones, as numbers in `dtype`."""
    if dtype == tl.bfloat16:
        # Two at a time, exactly: the bits of 128 + a byte's lower seven, less 128 or, with its
        # sign bit, 256. Triton would convert one by one, which takes longer than loading them
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, x, minus_one;
            mov.b32 minus_one, 0xBF80BF80;
            lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, $2, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, b, minus_one, a;
            shr.b32 x, $2, 8;
            lop3.b32 a, x, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, x, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, b, minus_one, a;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = ((x << 8) >> 8).to(dtype), (x >> 8).to(dtype)
    return low, high


@triton.jit
def load_packed(at, in_range):
    """Loads new keys or values [TOKENS, D] as `_quantize` packs them, in pairs, and the scales."""
    low = tl.load(at, mask=in_range, other=0.0).to(tl.float32)
    high = tl.load(at + 1, mask=in_range, other=0.0).to(tl.float32)
    scales = tl.div_rn(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 127.0)
    divisor = tl.broadcast_to(tl.maximum(scales, 1e-30)[:, None], low.shape)
    # From 1.5 * 2^23 on numbers have no fraction
    low = (tl.div_rn(low, divisor) + 12582912.0 - 12582912.0).to(tl.int16)
    high = (tl.div_rn(high, divisor) + 12582912.0 - 12582912.0).to(tl.int16)
    return (high << 8) | (low & 0xFF), scales
