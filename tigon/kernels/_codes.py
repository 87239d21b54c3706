"""Numbers of 8 bits inside of kernels: a code for each, and a scale for each block.

The definition is in tigon/train/optim/eight_bit.py; of the same values, codes are the same.
"""

from tigon.kernels._triton import tl, triton


@triton.jit
def dequantize(codes, scale, table):
    """float32 [K, B], from codes [K, B], scales [K, 1] and the value of each code."""
    return tl.load(table + codes.to(tl.int32)) * scale


@triton.jit
def quantize(x, bounds, SIGNED: tl.constexpr):
    """Codes uint8 [K, B] and scales float32 [K, 1], from [K, B] and the bounds between codes."""
    # Bits of what is not negative are in the order of the numbers, and NaN is the largest
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    scale = largest.to(tl.float32, bitcast=True)
    positive = scale > 0
    share = tl.where(positive, tl.div_rn(x, tl.where(positive, scale, 1.0)), 0.0)
    code = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(8):  # how many bounds are not above it
        half = 128 >> k
        above = tl.load(bounds + code + (half - 1)) > share
        code += tl.where(above, 0, half)
    if not SIGNED:
        code = tl.where(share > 0, tl.maximum(code, 1), code)
    return code.to(tl.uint8), scale
