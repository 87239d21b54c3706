"""One row through a linear layer: beside the definition in double precision, on both paths."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tigon.kernels.linear.linear import PART, TILE, gemv, linear, select_launch, uses_gemv
from tigon.kernels.mlp.gated_act import Activation, gated_act_ref
from tigon.kernels.runtime import is_hopper, pdl_options

# N, C: less than a tile, several of them, one row, columns that fill no block, several steps
SHAPES = [
    (48, 64),
    (37, 96),
    (1, 64),
    (29, 2560),
    (13, 4096),
    (21, 6144),
    (9, 9216),
    (5, 14336),
    (3, 18944),
]
KINDS: list[tuple[Activation | None, bool]] = [
    (None, False),
    (None, True),
    ("silu", False),
    ("gelu", True),
    ("gelu_tanh", True),
]


def problem(
    n: int, c: int, act: Activation | None, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, nn.Parameter, nn.Parameter | None]:
    torch.manual_seed(n)
    rows = n if act is None else 2 * n
    weight = nn.Parameter((torch.randn(rows, c) * c**-0.5).to(dtype))
    return (
        torch.randn(1, 1, c).to(dtype),
        weight,
        nn.Parameter(torch.randn(rows).to(dtype)) if bias else None,
    )


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation | None) -> Tensor:
    y = x.double() @ weight.double().T
    y = y if bias is None else y + bias.double()
    return y if act is None else gated_act_ref(y, act)


@pytest.mark.parametrize(("act", "bias"), KINDS)
@pytest.mark.parametrize(("n", "c"), SHAPES)
@torch.no_grad()
def test_values(n: int, c: int, bias: bool, act: Activation | None) -> None:
    x, weight, b = problem(n, c, act, bias, torch.float32)
    y = gemv(x, weight, b, act)
    assert y.shape == (1, 1, n)
    torch.testing.assert_close(y.double(), exact(x, weight, b, act), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize(
    ("n", "c"), [(6144, 4096), (4096, 14336), (4096, 7168), (1152, 6912), (100, 640)]
)
@torch.no_grad()
def test_half_precision_is_as_exact_as_torch(
    n: int, c: int, act: Activation | None, dtype: torch.dtype
) -> None:
    x, weight, b = problem(n, c, act, True, dtype)
    want = exact(x, weight, b, act)
    eager = nn.functional.linear(x, weight, b)
    eager = eager if act is None else gated_act_ref(eager, act)
    error = (gemv(x, weight, b, act).double() - want).norm()
    assert error <= 1.1 * (eager.double() - want).norm()


@pytest.mark.gpu
@torch.no_grad()
def test_chain_in_graph_waits_for_each_result() -> None:
    """Kernels start before the one before has ended; they must not read what is not there yet."""
    gc.collect()  # models of other tests, whose weights were gathered
    weights = [nn.Parameter(torch.randn(2048, 2048) * 2048**-0.5) for _ in range(24)]
    x = torch.randn(1, 2048)
    if is_hopper(x.device.index):
        assert pdl_options(x)["PDL"]

    def chain() -> Tensor:
        y = x
        for w in weights:
            y = gemv(y, w)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        x.normal_()
        graph.replay()
        want = x.double()
        for w in weights:
            want = want @ w.double().T
        torch.testing.assert_close(y.double(), want, rtol=1e-3, atol=1e-3)


class Other(torch.Tensor):
    """Stands for quantized or sharded weights, which know their own products."""


class Calls(TorchFunctionMode):
    """Names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="a way of MKL's")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 1), (4, 1), (2, 3), (8,), (9, 1), (0, 1)])
def test_few_rows_on_a_cpu(shape: tuple[int, ...], bias: bool) -> None:
    n, c = 2050, 1024
    weight = nn.Parameter(torch.randn(n, c, device="cpu") * c**-0.5)
    b = nn.Parameter(torch.randn(n, device="cpu")) if bias else None
    x = torch.randn(*shape, c, device="cpu")
    with torch.no_grad(), Calls() as calls:
        y = linear(x, weight, b)
    torch.testing.assert_close(y.double(), exact(x, weight, b, None), rtol=1e-5, atol=1e-5)
    parts = n * c // (PART * torch.get_num_threads())
    assert calls.names.count("linear") == (parts if parts >= 4 and 4 <= y.numel() / n <= 8 else 1)
    with Calls() as calls:  # with gradients, and where another dtype or way to compute is asked for
        linear(x, weight, b).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight, b).dtype == torch.bfloat16
        with torch.no_grad():
            linear(x, nn.Parameter(Other(weight.detach())), b)
    assert calls.names.count("linear") == 3


def test_whom_it_serves(path: str) -> None:
    x, weight, _ = problem(8, 64, None, False, torch.float32)
    with torch.no_grad():
        assert uses_gemv(x, weight) == (path == "triton")
        assert not uses_gemv(torch.cat((x, x)), weight)
        assert not uses_gemv(x, nn.Parameter(weight.half()))
        assert not uses_gemv(x, weight.T[:64].T)
        assert not uses_gemv(x, weight.detach())
        assert not uses_gemv(x, nn.Parameter(Other(weight.detach())))
        with torch.autocast(x.device.type, torch.bfloat16):
            assert not uses_gemv(x, weight)
    assert not uses_gemv(x, weight)


@pytest.mark.parametrize("act", [None, "silu"])
@torch.no_grad()
def test_strided_weights_and_biases(act: Activation | None) -> None:
    x, weight, bias = problem(8, 64, act, True, torch.float32)
    assert bias is not None
    transposed = nn.Parameter(weight.T.contiguous().T)
    strided = nn.Parameter(torch.stack((bias, bias + 1), 1)[:, 0])
    assert not transposed.is_contiguous() and not strided.is_contiguous()
    want = exact(x, weight, bias, act)
    for w, b in ((transposed, bias), (weight, strided), (transposed, strided)):
        torch.testing.assert_close(gemv(x, w, b, act).double(), want, rtol=1e-5, atol=1e-5)
    y = linear(x, weight, strided)
    torch.testing.assert_close(y.double(), exact(x, weight, bias, None), rtol=1e-5, atol=1e-5)


def test_a_tile_covers_whole_rows() -> None:
    for c in (8, 64, 2560, 4096, 5120, 6912, 8192, 14336, 28672):
        for factors in (1, 2):
            launch = select_launch(c, factors)
            assert launch.rows >= 1
            assert launch.block & (launch.block - 1) == 0
            assert launch.rows * launch.block * factors <= TILE
            assert launch.block >= c or c * factors > 8192  # a row in one step
