"""Products that sum over a dimension of any length: tokens, or the vocabulary.

# K and C rows and columns of the result, L summands

cuBLAS 13.1 on an H200 leaves summands out of some products in 16 bits, without an error: with
[L, K]^T [L, C] of K = 16 and C = 4,096 the last of L = 2,561, 2,689 and most other 128 j + 1, the
last two of 6,338 with K = 64 and C = 2,048, and more of long rows. All products that were wrong
had results of at most 2^21 numbers, and few summands behind a multiple of 64, at most one in 1,500;
bench/long_sums.py looks for more. Weight gradients of routers, of low-rank factors and of small
models are such products.
"""

import torch
from torch import Tensor

SMALL = 2**22  # numbers of a result; all that were wrong had at most half as many
RARE = 1024  # one in so many summands and fewer may be lost; all that were lost were rarer


def drops(summands: int, k: int, c: int) -> bool:
    """Whether cuBLAS may leave summands out of a [k, c] product in 16 bits."""
    behind = summands % 32 or summands % 64 or summands % 128  # a multiple of the products' blocks
    return k * c <= SMALL and 0 < behind <= summands // RARE


def at_risk(x: Tensor, summands: int, k: int, c: int) -> bool:
    """As `drops`, of factors like x."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and drops(summands, k, c)


def runs_of(a: Tensor, b: Tensor) -> list[slice]:
    """Of the summands of a [K, L] @ b [L, C]: those to multiply at once, without a loss."""
    length = len(b)
    if not at_risk(a, length, len(a), b.shape[1]):
        return [slice(0, length)]
    end = length // 128 * 128
    return [slice(0, end), slice(end, length)]


def add_sum(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total` + a [K, L] @ b [L, C] in fp32, of factors in 16 bits on a GPU; adds to the memory of
    `total`."""
    for run in runs_of(a, b):
        own = a[:, run], b[run]
        if total is None:
            total = torch.mm(*own, out_dtype=torch.float32)
        else:
            total = torch.addmm(total, *own, out_dtype=torch.float32, out=total)
    assert total is not None
    return total


def long_sum(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` a [K, L] @ b [L, C], rounded once."""
    if at_risk(a, len(b), len(a), b.shape[1]):
        return add_sum(None, a, b).mul_(scale).to(a.dtype)
    if scale == 1:
        return a @ b
    return a.new_empty(len(a), b.shape[1]).addmm_(a, b, beta=0, alpha=scale)


def write_sum(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a [K, L] @ b [L, C] into `out`."""
    if a.is_cuda and not at_risk(a, len(b), len(a), b.shape[1]):
        torch.mm(a, b, out=out)
    else:
        out.copy_(long_sum(a, b))
