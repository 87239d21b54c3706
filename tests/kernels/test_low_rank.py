"""Products with factors of few columns against sums in fp64; on a GPU in a Llama's shapes, too."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import CUDA
from tests.numbers import relative_error
from tigon.kernels.linear.lora import (
    low_rank_gradients,
    low_rank_product,
    supports_gradients,
    supports_product,
)

pytestmark = pytest.mark.kernel
# Columns of the wide matrix, and first column, columns, rank and scale of each part
CASES: dict[str, tuple[int, list[tuple[int, int, int, float]]]] = {
    "one": (64, [(0, 64, 4, 1.0)]),
    "gaps": (70, [(3, 27, 3, 0.5), (40, 20, 20, -1.5)]),
    "strips of several parts": (107, [(0, 65, 16, 2.0), (65, 1, 1, 1.0), (66, 41, 8, 3.0)]),
}
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter has no products of bf16
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def path() -> None:
    """One: these are kernels."""


class Given:
    """Factors, and the sums of their products in fp64."""

    def __init__(
        self, N: int, K: int, parts: Sequence[tuple[int, int, int, float]], dtype: torch.dtype
    ) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape).to(DEVICE, dtype)

        self.u, self.dy = drawn(N, sum(r for *_, r, _ in parts)), drawn(N, K)
        self.bs = [drawn(size, r) for _, size, r, _ in parts]
        self.bias = drawn(K)
        self.firsts, self.scales = [p[0] for p in parts], [p[3] for p in parts]
        self.y = torch.zeros(N, K, dtype=torch.float64, device=DEVICE)
        dus, self.dbs, rank = [], [], 0
        for (first, size, r, scale), b in zip(parts, self.bs, strict=True):
            own, d = self.u[:, rank : rank + r].double(), self.dy[:, first : first + size].double()
            self.y[:, first : first + size] = scale * own @ b.double().t()
            dus.append(scale * d @ b.double())
            self.dbs.append(scale * d.t() @ own)
            rank += r
        self.du = torch.cat(dus, 1)

    def product(self, bias: Tensor | None = None) -> Tensor:
        columns = self.dy.shape[1]
        found: Tensor = low_rank_product(
            self.u, self.bs, self.firsts, self.scales, columns, bias, False
        )
        return found

    def gradients(self, dy: Tensor | None = None, *, of_bs: bool = True) -> list[Tensor]:
        given = self.dy if dy is None else dy, self.u, self.bs, self.firsts, self.scales
        found: list[Tensor] = low_rank_gradients(*given, of_bs)
        return found

    def check(self) -> None:
        eps = torch.finfo(self.u.dtype).eps  # rounding once costs a quarter of it; fp32 adds up so
        limit = 4 * eps if self.u.dtype == torch.float32 else eps / 2
        assert relative_error(self.product(), self.y) < limit
        assert relative_error(self.product(self.bias), self.y + self.bias) < limit
        for found, exact in zip(self.gradients(), [self.du, *self.dbs], strict=True):
            assert found.dtype == self.u.dtype and relative_error(found, exact) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_definition(case: str, dtype: torch.dtype) -> None:
    Given(20, *CASES[case], dtype).check()


def test_several_runs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tigon.kernels.linear.lora.PROGRAMS", 8)
    monkeypatch.setattr("tigon.kernels.linear.lora.LEAST", 32)
    Given(100, *CASES["gaps"], torch.float32).check()


def test_a_transposed_factor() -> None:
    given = Given(33, *CASES["one"], torch.float32)
    (b,) = given.bs
    found = low_rank_product(given.u, [b.t().contiguous()], [0], [1.0], 64, None, True)
    assert torch.equal(found, given.product())


def test_any_strides_of_the_gradient() -> None:
    given = Given(17, *CASES["gaps"], torch.float32)
    wide = torch.randn(17, 80, device=DEVICE)
    wide[:, 5:75] = given.dy
    for dy in (wide[:, 5:75], given.dy.t().contiguous().t()):
        for found, expected in zip(given.gradients(dy), given.gradients(), strict=True):
            assert torch.equal(found, expected)
    row = given.dy[:1]
    for found, expected in zip(
        given.gradients(row.expand(17, -1)), given.gradients(row.repeat(17, 1)), strict=True
    ):
        assert torch.equal(found, expected)


def test_gradients_of_u_alone_and_of_no_rows() -> None:
    given = Given(17, *CASES["gaps"], torch.float32)
    (du,) = given.gradients(of_bs=False)
    assert torch.equal(du, given.gradients()[0])
    empty = given.u[:0], given.bs, given.firsts, given.scales
    assert low_rank_product(*empty, 70, None, False).shape == (0, 70)
    du, *dbs = low_rank_gradients(given.dy[:0], *empty, True)
    assert du.shape == (0, 23) and not any(db.any() for db in dbs)


def test_gradients_of_parameters_in_another_dtype() -> None:
    """They are rounded to the dtype of what is multiplied."""
    given = Given(33, *CASES["gaps"], DTYPES[1])
    expected = given.gradients()
    given.bs = [b.float() for b in given.bs]
    for found, other in zip(given.gradients()[1:], expected[1:], strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, other.float())


def test_for_what_the_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tigon.kernels.linear.lora.runs_triton", lambda x: True)
    x = torch.empty(1, dtype=torch.bfloat16, device="meta")
    on_cpu = torch.empty(1, dtype=torch.bfloat16, device="cpu")
    assert [r for r in (1, 16, 17, 32, 33, 128, 129) if supports_product(x, r)][-1] == 128
    assert [r for r in (1, 16, 17, 32, 33, 128, 129) if supports_gradients(x, r)][-1] == 32
    assert not supports_product(on_cpu, 16)


@pytest.mark.traced
def test_operators() -> None:
    given = Given(17, *CASES["gaps"], torch.float32)
    rest: tuple[Any, ...] = given.bs, given.firsts, given.scales
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        low_rank_product.op, (given.u, *rest, 70, given.bias, False), test_utils=tests
    )
    for of_bs in (True, False):
        torch.library.opcheck(
            low_rank_gradients.op, (given.dy, given.u, *rest, of_bs), test_utils=tests
        )


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 5, 32])
@pytest.mark.parametrize(
    "sizes", [(14336, 14336), (4096, 1024, 1024), (4096,), (1000, 24, 7)], ids=str
)
def test_layers_of_a_llama(sizes: tuple[int, ...], rank: int) -> None:
    """Of several runs of rows, and the same bits again."""
    parts = [(sum(sizes[:i]), size, rank, 2.0) for i, size in enumerate(sizes)]
    given = Given(4099, sum(sizes), parts, torch.bfloat16)
    given.check()
    for found, expected in zip(given.gradients(), given.gradients(), strict=True):
        assert torch.equal(found, expected)
