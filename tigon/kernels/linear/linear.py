"""Linear layers: long sums and recomputed inputs in training, few rows in decoding.

# K and C rows and columns of a product, L summands; N rows of x, I intermediate size; of one row,
# C its columns and N rows of the weight

cuBLAS 13.1 on an H200 leaves summands out of some 16-bit products without an error: with [L, K]^T
[L, C] of K = 16 and C = 4,096 the last of L = 2,561, 2,689 and most other 128 j + 1, the last two
of 6,338 with K = 64 and C = 2,048, and more of long rows. All wrong products had at most 2^21
results and few summands after a multiple of 64, at most one in 1,500; bench/long_sums.py looks for
more. Weight gradients of routers, of low-rank factors and of small models are such products.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.mlp.gated_act import (
    Activation,
    act_and_slope,
    check_act,
    gated_act_ref,
    gradient_and_product,
)
from tigon.kernels.recompute import (
    find_recompute,
    has_function_mode,
    note_recompute,
    run_recompute,
    save_input,
    start_fetch,
)
from tigon.kernels.runtime import (
    autocast_dtype,
    is_plain,
    is_plain_parameter,
    launches_on_fakes,
    next_power_of_2,
    num_sms,
    operator,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

SMALL = 2**22  # numbers of a result; all that were wrong had at most half as many
# Summands of a product that takes no longer than to write its result, and may be computed again
CHEAP_SUMMANDS = 256
RARE = 1024  # one in so many summands and fewer may be lost; all that were lost were rarer


def may_drop_summands(summands: int, k: int, c: int) -> bool:
    """Whether cuBLAS may leave summands out of a 16-bit product [k, c]."""
    behind = summands % 32 or summands % 64 or summands % 128  # a multiple of the products' blocks
    return k * c <= SMALL and 0 < behind <= summands // RARE


def is_at_risk(x: Tensor, summands: int, k: int, c: int) -> bool:
    """Whether `may_drop_summands` holds for a product of factors with the dtype and device of x."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and half and may_drop_summands(summands, k, c)


def reduction_chunks(a: Tensor, b: Tensor) -> list[slice]:
    """Returns ranges of the L summands of a [K, L] @ b [L, C], each for a product of its own.

    It is one range, or two where cuBLAS may leave out the last summands.
    """
    length = len(b)
    if not is_at_risk(a, length, len(a), b.shape[1]):
        return [slice(0, length)]
    end = length // 128 * 128
    return [slice(0, end), slice(end, length)]


def add_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Adds a [K, L] @ b [L, C] to `total` in fp32, in place, for 16-bit factors on a GPU.

    Returns it; without a total, returns the product.
    """
    for run in reduction_chunks(a, b):
        values = a[:, run], b[run]
        if total is None:
            total = torch.mm(*values, out_dtype=torch.float32)
        elif not launches_on_fakes():  # torch 2.11 has no fake of it
            torch.addmm(total, *values, out_dtype=torch.float32, out=total)
    assert total is not None
    return total


def chunked_matmul(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Returns `scale` a [K, L] @ b [L, C] with all summands, rounded once."""
    if is_at_risk(a, len(b), len(a), b.shape[1]):
        return add_matmul(None, a, b).mul_(scale).to(a.dtype)
    if scale == 1:
        return a @ b
    return a.new_empty(len(a), b.shape[1]).addmm_(a, b, beta=0, alpha=scale)


def matmul_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a [K, L] @ b [L, C] with all summands to `out`."""
    if a.is_cuda and not is_at_risk(a, len(b), len(a), b.shape[1]):
        torch.mm(a, b, out=out)
    else:
        out.copy_(chunked_matmul(a, b))


# Linear layers in training that recompute their input instead of saving it.
#
# A pre-norm block of a Llama in bf16 saves 2 N C bytes less for each of two normed inputs and 2 N I
# for the input of down_proj. It moves 4 N C bytes more for each of the two (the stream is read, the
# normed rows are written), and 2 N I, which the gated activation's backward writes.
#
# Backward recomputes a checkpointed block until it has saved all that the first pass did
# (torch.utils.checkpoint's early stop), and nothing reads its output. But a Function saves its
# tensors after its forward, so its last product, a tenth of a block's operations or more, would be
# computed in vain. There a product is two nodes: one that saves and returns a `placeholder`, and
# one that computes (`finish_product`).


def _parameter_gradients(dy: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of weight and, if asked to, `bias`, from dy [N, K] and x [..., C]."""
    return chunked_matmul(dy.t(), x.reshape(-1, x.shape[-1])), dy.sum(0) if bias else None


def defers_product() -> bool:
    """Whether this forward pass runs inside a backward pass, as that of a checkpointed block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def placeholder(x: Tensor, columns: int) -> Tensor:
    """Returns [..., columns] without memory: the output of a node that only saves."""
    return x.new_empty(()).expand(*x.shape[:-1], columns)


class _DeferredProduct(torch.autograd.Function):
    """Returns `compute()` and passes the gradient on to `output`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def finish_product(output: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Returns `output`, or if its node has deferred the product, what `compute` returns."""
    return _DeferredProduct.apply(output, compute) if defers_product() else output


class _Linear(torch.autograd.Function):
    """`F.linear` whose gradients have all summands; see the head of this file.

    With a `Recompute` its input is computed again in backward instead of being saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        weight, bias, recompute = args
        (ctx.recompute_fn, saved_x), ctx.shape = save_input(x, recompute), x.shape
        ctx.save_for_backward(weight, *saved_x)
        return placeholder(x, weight.shape[0]) if defers_product() else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear")
        weight, *saved_x = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if (remote := start_fetch(ctx.recompute_fn, saved_x)) is not None and needs_x:
            # Beside the fetch; what follows, beside a sum
            dx = chunked_matmul(rows, weight).view(ctx.shape)
            remote.reduce(dx)
        # Else the weight's gradient first: x is gone when its gradient comes
        x = run_recompute(ctx.recompute_fn, saved_x).view(ctx.shape)
        dweight, dbias = _parameter_gradients(rows, x, needs_bias)
        del x
        if needs_x and dx is None:
            dx = chunked_matmul(rows, weight).view(ctx.shape)
        return dx, dweight, dbias, None


class _GatedLinear(torch.autograd.Function):
    """`F.linear(product, weight, bias)`, differentiated by the gate_up of `product`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, product: Tensor, *args: Any) -> Tensor:
        weight, bias, ctx.act, ctx.overwrite = args
        ctx.shape = product.shape
        ctx.save_for_backward(gate_up, weight)
        if defers_product():
            return placeholder(product, weight.shape[0])
        return F.linear(product, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with a gated activation")
        gate_up, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        d = rows.mm(weight).view(ctx.shape)
        gradient, product = gradient_and_product(d, gate_up, ctx.act, ctx.overwrite)
        del d
        dweight, dbias = _parameter_gradients(rows, product, ctx.needs_input_grad[3])
        return gradient, None, dweight, dbias, None, None


def _has_gradient_at_risk(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS may leave summands out of the gradient of x or weight of `F.linear`."""
    rows, columns = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    return is_at_risk(x, rows, *weight.shape) or is_at_risk(x, len(weight), rows, columns)


def has_plain_operands(x: Tensor, weight: Tensor) -> bool:
    """Whether no subclass of x, other dtype, autocast or mode changes the product with `weight`."""
    plain = is_plain(x) and x.dtype == weight.dtype
    return plain and autocast_dtype(x.device) is None and not has_function_mode()


def chunked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose gradients have all summands if the weight requires a gradient."""
    if (
        weight.requires_grad
        and not torch.compiler.is_compiling()
        and _has_gradient_at_risk(x, weight)
        and is_plain(weight)
        and has_plain_operands(x, weight)
    ):
        y = _Linear.apply(x, weight, bias, None)
        return finish_product(y, lambda: F.linear(x, weight, bias))
    return F.linear(x, weight, bias)


def training_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with the same bits, which saves less: an `x` that can be recomputed is not saved.

    Only for plain parameters that require a gradient: without one nothing is saved, and
    parametrized or quantized weights have products of their own.
    """
    if not weight.requires_grad or (recompute := find_recompute(x)) is None:
        return chunked_linear(x, weight, bias)
    # The gradient of another weight would be another product
    plain = is_plain_parameter(weight) and weight.is_contiguous()
    if not (plain and has_plain_operands(x, weight)):
        return chunked_linear(x, weight, bias)
    if recompute.gated is not None and recompute.single_reader:
        gate_up, act, node = recompute.gated
        y = _GatedLinear.apply(gate_up, x.detach(), weight, bias, act, node.overwrite)
    else:
        y = _Linear.apply(x, weight, bias, recompute)
    return finish_product(y, lambda: F.linear(x, weight, bias))


# One row, as in decoding one sequence, with the gated activation after it.
#
# The time is that of reading the weight: 2 N C bytes in bf16, for as many operations. Each
# multiprocessor runs a few programs, which walk over the weight and prefetch the next tile. With
# programmatic dependent launch (`pdl_wait`) a program starts as soon as the previous kernel leaves
# room, and loads its first tile before it waits for that kernel's results. So the kernel before
# must not write weights: FSDP2, which gathers them, turns this off (`disable_pdl`).

BLOCK, TILE = 4096, 16384  # columns, and elements of a tile
PART = 2**18  # on a CPU: elements of a weight that each thread reads at a time


class GemvLaunch(NamedTuple):
    """The rows and columns of a tile, and the programs on each multiprocessor; tuned on an H200."""

    rows: int
    block: int
    warps: int
    per_sm: int


@functools.cache
def select_launch(C: int, factors: int) -> GemvLaunch:
    """Chooses the launch. `factors`: weights that are read together, 2 for gate and up."""
    block = next_power_of_2(C)
    if block <= BLOCK:
        return GemvLaunch(max(8192 // block // factors, 1), block, warps=4, per_sm=4)
    # A whole row with idle lanes behind it is faster than several steps that have none
    if block * factors > TILE:
        block = BLOCK
    return GemvLaunch(TILE // block // factors, block, warps=8, per_sm=2)


def gemv_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act: Activation | None = None
) -> Tensor:
    """Returns `F.linear(x, weight, bias)`, gated if there is an activation: the definition."""
    y = F.linear(x, weight, bias)
    return y if act is None else gated_act_ref(y, act)


@triton.jit
def _load_tile(weight, tile, columns, N, C: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Loads a tile of the weight."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    mask = (rows < N)[:, None]
    if not EVEN:
        mask = mask & (columns < C)[None, :]
    at = weight + rows.to(tl.int64)[:, None] * C + columns[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _round_sums(sums, bias, y, rows, N):
    """Adds the bias and rounds once, as the linear layer does."""
    if bias is not None:
        sums += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    return sums.to(y.dtype.element_ty)


@triton.jit
def _gemv_kernel(
    x, weight,
    up_weight,  # the second half of the weight's rows, with an activation
    bias, up_bias, y,
    N,  # of y
    C: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies a row by rows of the weight, and gates two halves where there is an activation."""
    STEPS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = C % BLOCK == 0
    columns = tl.arange(0, BLOCK)
    first, step = tl.program_id(0), tl.num_programs(0)
    w = _load_tile(weight, first, columns, N, C, ROWS, EVEN)
    if ACT is not None:
        u = _load_tile(up_weight, first, columns, N, C, ROWS, EVEN)
    pdl_wait(PDL)
    if STEPS == 1:
        row = tl.load(x + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    for tile in tl.range(first, tl.cdiv(N, ROWS), step):
        sums = tl.zeros([ROWS], tl.float32)
        up_sums = tl.zeros([ROWS], tl.float32)
        for i in tl.static_range(STEPS):
            # The tile of the next step is under way while this one is used
            later = tile + step if i == STEPS - 1 else tile
            ahead = columns if i == STEPS - 1 else columns + (i + 1) * BLOCK
            w_next = _load_tile(weight, later, ahead, N, C, ROWS, EVEN)
            if ACT is not None:
                u_next = _load_tile(up_weight, later, ahead, N, C, ROWS, EVEN)
            if STEPS > 1:
                at = i * BLOCK + columns
                row = tl.load(x + at, mask=at < C, other=0.0).to(tl.float32)[None, :]
            sums += tl.sum(w.to(tl.float32) * row, 1)
            w = w_next
            if ACT is not None:
                up_sums += tl.sum(u.to(tl.float32) * row, 1)
                u = u_next
        rows = tile * ROWS + tl.arange(0, ROWS)
        out = _round_sums(sums, bias, y, rows, N)
        if ACT is not None:
            up = _round_sums(up_sums, up_bias, y, rows, N)
            a, _ = act_and_slope(out.to(tl.float32), ACT)
            out = (a.to(out.dtype).to(tl.float32) * up.to(tl.float32)).to(out.dtype)
        tl.store(y + rows, out, mask=rows < N)


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    """Allocates the output [..., N]."""
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (1 if act is None else 2))


@operator("gemv", _output)
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    """Returns `gemv` by the kernel: the product of one row, gated with an activation."""
    y = _output(x, weight, bias, act)
    N, C = y.shape[-1], x.shape[-1]
    launch = select_launch(C, 1 if act is None else 2)
    programs = min(triton.cdiv(N, launch.rows), launch.per_sm * num_sms(x))
    _gemv_kernel[(programs,)](
        x, weight, None if act is None else weight[N:], bias,
        None if act is None or bias is None else bias[N:], y, N,
        C=C, ACT=act, ROWS=launch.rows, BLOCK=launch.block, num_warps=launch.warps,
        **pdl_options(x),
    )  # fmt: skip
    return y


def _is_plain_product(x: Tensor, weight: Tensor) -> bool:
    """Whether neither gradients, autocast, another dtype nor a subclass change `F.linear`, and the
    weight is a contiguous parameter."""
    return (
        not torch.is_grad_enabled()
        and not x.is_meta  # which autocast does not know
        and not torch.is_autocast_enabled(x.device.type)
        and x.dtype == weight.dtype
        and is_plain_parameter(weight)  # subclasses, such as quantized ones, have their own
        and weight.is_contiguous()
    )


def uses_gemv(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemv` serves this call: one row on a GPU, without gradients."""
    return x.numel() == x.shape[-1] and runs_triton(x) and _is_plain_product(x, weight)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act: Activation | None = None
) -> Tensor:
    """Returns `F.linear(x, weight, bias)` of one row x [..., C], without gradients.

    With an activation, the weight [2 N, C] has the rows of gate and up, as in `gated_act`, and the
    result is [..., N]. Sums are fp32, and every step is rounded as by separate operators. Check
    `uses_gemv` first.
    """
    if x.numel() != x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} is not one row")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit the weight {tuple(weight.shape)}")
    if act is not None:
        check_act(act)
        if weight.shape[0] % 2:
            raise ValueError(f"weight {tuple(weight.shape)} has no two halves: give an even N")
    # The kernel reads rows one after another; a copy of the weight would cost more than it saves
    plain = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if not (plain and runs_triton(x)):
        return gemv_ref(x, weight, bias, act)
    return _forward(x.contiguous(), weight, bias, act)


def _num_parts(x: Tensor, weight: Tensor) -> int:
    """Returns in how many parts to read the weight for a few fp32 rows on a CPU.

    MKL first copies the weight into another layout; the copy of a part stays in the caches.
    """
    few = (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and 4 <= x.numel() // x.shape[-1] <= 8
        and torch.backends.mkl.is_available()
        and _is_plain_product(x, weight)
    )
    parts = weight.numel() // (PART * torch.get_num_threads()) if few else 1
    return parts if parts >= 4 else 1


def _is_learned_product(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is that of a plain parameter that learns, so that a graph has x."""
    plain = is_plain_parameter(weight) and weight.requires_grad
    return plain and not torch.compiler.is_compiling() and has_plain_operands(x, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, faster for the few rows of decoding: one on a GPU, 4 to 8 in fp32 on a CPU.

    In training an `x` that backward can recompute is not saved: see `training_linear`.
    """
    if torch.is_grad_enabled():
        y = training_linear(x, weight, bias)
        if weight.shape[-1] <= CHEAP_SUMMANDS and _is_learned_product(x, weight):
            note_recompute(y, F.linear, (x, weight, bias), chained=True)
        return y
    if uses_gemv(x, weight):
        return gemv(x, weight, bias)
    if (parts := _num_parts(x, weight)) > 1:
        biases = [None] * parts if bias is None else bias.chunk(parts)
        weights = weight.chunk(parts)
        return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=False)], -1)
    return F.linear(x, weight, bias)
