"""Low-rank additions to a product: their definition, their kernels, and dropout by position."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kernels.conftest import CUDA
from tests.kernels.expert_cases import PARTS
from tests.kernels.test_rebuilt import kept
from tests.support.numbers import assert_as_near, relative_error
from tests.support.recompute import recompute_above
from tests.train.test_rounding import WORD, splitmix64
from tigon.kernels import fp8_linear, gated_act, lora_linear, lora_linear_ref, rms_norm
from tigon.kernels.linear import fp8_casts
from tigon.kernels.linear.dropout import Dropout, apply_dropout, apply_dropout_ref, keep_mask_ref
from tigon.kernels.linear.lora import PLAIN_BASE, LoRATerm, make_fp8_base
from tigon.kernels.linear.low_rank import (
    WIDEST_GRADIENTS,
    WIDEST_PRODUCT,
    low_rank_gradients,
    low_rank_product,
    supports_rank,
)
from tigon.kernels.recompute import find_recompute

C, K = 48, 70  # columns of x and of y


class Case:
    """Inputs of a product with additions."""

    def __init__(self, parts: str, dtype: torch.dtype, own: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        own, specs = own or dtype, PARTS[parts]
        self.x = torch.randn(2, 3, C).to(dtype).requires_grad_()
        self.weight = nn.Parameter(torch.randn(K, C).to(dtype) / 7, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(K).to(dtype), requires_grad=False)
        self.a = nn.Parameter(torch.randn(sum(r for *_, r, _ in specs), C).to(own) / 7)
        bs = [nn.Parameter(torch.randn(rows, r).to(own)) for _, rows, r, _ in specs]
        self.additions = [LoRATerm(f, b, s) for (f, _, _, s), b in zip(specs, bs, strict=True)]
        self.upstream = torch.randn(2, 3, K).to(dtype)

    def at(self, dtype: torch.dtype) -> "Case":
        """The same numbers in another dtype."""
        other = Case.__new__(Case)
        for name in ("x", "weight", "bias", "a", "upstream"):
            t = getattr(self, name)
            new = t.detach().to(dtype)
            if isinstance(t, nn.Parameter):
                new = nn.Parameter(new, t.requires_grad)
            setattr(other, name, new.requires_grad_(t.requires_grad))
        other.additions = [
            add._replace(b=add.b.detach().to(dtype).requires_grad_()) for add in self.additions
        ]
        return other

    def run(
        self, function: Callable[..., Tensor], make: Callable[[Tensor], Tensor] = lambda x: x
    ) -> dict[str, Tensor]:
        """y and all gradients."""
        y = function(make(self.x), self.weight, self.bias, self.a, self.additions)
        wanted = [self.x, self.a, *(add.b for add in self.additions)]
        found = torch.autograd.grad(y, wanted, self.upstream)
        names = ["x", "a", *(f"b{i}" for i in range(len(self.additions)))]
        return {"y": y.detach()} | dict(zip(names, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("plain", [True, False])
def test_dropout(dtype: torch.dtype, plain: bool) -> None:
    """PEFT's formula of the same mask, forward and back; the product of the base has all of x."""
    case, base = Case("ends", dtype), PLAIN_BASE._replace(plain=plain)
    dropout = Dropout(torch.randint(-(2**63), 2**63 - 1, (2, 3)), 77, 0.4)
    mask = keep_mask_ref(dropout, C)
    assert 0.2 < mask.float().mean() < 0.9

    def peft(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, additions: Any) -> Tensor:
        y = F.linear(x, weight, bias)
        ranks = [add.b.shape[1] for add in additions]
        u = F.linear(x * mask / (1 - dropout.share), a).split(ranks, -1)
        for own, (first, b, scale) in zip(u, additions, strict=True):
            before, after = first, K - first - b.shape[0]
            y = y + F.pad(F.linear(own, b) * scale, (before, after))
        return y

    ours = case.run(partial(lora_linear, base=base, dropout=dropout))
    assert_as_near(ours, case.run(peft), case.at(torch.float64).run(peft))
    definition = case.run(partial(lora_linear_ref, dropout=dropout))
    assert_as_near(definition, case.run(peft), case.at(torch.float64).run(peft))
    with torch.no_grad():
        given = case.weight, case.bias, case.a, case.additions
        assert torch.equal(lora_linear(case.x, *given, base=base, dropout=dropout), ours["y"])


@pytest.mark.parametrize("p", [0.5, 0.99, 0.9999999])
def test_dropout_keeps_the_mean(p: float) -> None:
    """Of what is added by ones, also where p is nearer to 1 than what can be drawn."""
    generator = torch.Generator("cpu").manual_seed(3)
    keys = torch.randint(-(2**63), 2**63 - 1, (512,), generator=generator, device="cpu")
    keys = keys.to(torch.get_default_device())
    x, a = torch.ones(512, 64), torch.full((1, 64), 1 / 64)
    additions = [LoRATerm(0, torch.ones(1, 1), 1.0)]
    dropout = Dropout(keys, 7, p)
    y = lora_linear(x, torch.zeros(1, 64), None, a, additions, dropout=dropout)
    kept = 1 - dropout.share
    assert abs(y.mean() - 1) < 5 * math.sqrt(dropout.share / kept / x.numel())


def test_parameters_in_fp32_beside_a_base_in_bf16() -> None:
    case = Case("ends", torch.bfloat16, torch.float32)
    found = case.run(lora_linear)
    assert {name: t.dtype for name, t in found.items() if name not in "xy"} == dict.fromkeys(
        ("a", "b0", "b1"), torch.float32
    )
    rounded = case.at(torch.bfloat16).run(lora_linear)
    assert all(torch.equal(t, rounded[name].to(t.dtype)) for name, t in found.items())


def dropped(p: float = 0.4) -> Dropout:
    return Dropout(torch.arange(6).view(2, 3) * 2**55, -5, p)


def normed(x: Tensor) -> Tensor:
    return rms_norm(x, torch.ones(C, dtype=x.dtype), 1e-6)


def activated(x: Tensor) -> Tensor:
    return gated_act(torch.cat((x, x.flip(-1)), -1) * 1.0, "silu")


@pytest.mark.parametrize("dropout", [None, dropped()])
def test_a_gated_activation_that_nobody_else_reads(path: str, dropout: Dropout | None) -> None:
    case = Case("ends", torch.float32)
    if dropout is not None:
        dropout = dropout._replace(keys=dropout.keys.to(case.x.device))
    function = partial(lora_linear, dropout=dropout)
    expected = case.run(function, activated)

    def alone(x: Tensor) -> Tensor:
        y = activated(x)
        if (recompute := find_recompute(y)) is not None:
            recompute.single_reader = True
        return y

    with recompute_above(0):
        found = case.run(function, alone)
    for name, t in found.items():
        torch.testing.assert_close(t, expected[name], msg=name)


def test_what_is_kept(kernels_only: None) -> None:
    case = Case("ends", torch.float32)
    w = nn.Parameter(torch.ones(C), requires_grad=False)
    bs = [add.b for add in case.additions]
    own = case.weight, case.a, *bs

    def run(dropout: Dropout | None = None) -> Tensor:
        y = rms_norm(case.x, w, 1e-6)
        return lora_linear(y, case.weight, case.bias, case.a, case.additions, dropout=dropout)

    with recompute_above(0):
        assert kept(run, *own) == [C]  # the stream; u is narrower
        assert kept(partial(run, dropped()), *own) == [C]  # no mask, and nothing that has one
    with recompute_above(math.inf):
        assert kept(run, *own) == [C, C]
    for p in (case.a, *bs):  # a frozen adapter keeps no input
        p.requires_grad_(False)
    with recompute_above(math.inf):
        assert kept(run, *own) == [C]


def test_fp8(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's products are those of fp8_linear, and the additions as ever. Of the weight, which
    has no gradient, the maxima are found once."""
    torch.manual_seed(0)
    made, maxima_of = [], fp8_casts._maxima
    monkeypatch.setattr(fp8_casts, "_maxima", lambda *given: made.append(1) or maxima_of(*given))
    x = torch.randn(2, 3, 64).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(32, 64).bfloat16(), requires_grad=False)
    bias = nn.Parameter(torch.randn(32).bfloat16(), requires_grad=False)
    a = nn.Parameter(torch.randn(4, 64).bfloat16())
    b = nn.Parameter(torch.zeros(16, 4).bfloat16())
    upstream = torch.randn(2, 3, 32).bfloat16()
    y = lora_linear(x, weight, bias, a, [LoRATerm(16, b, 2.0)], base=make_fp8_base())
    other = nn.Parameter(weight * torch.logspace(-3, 3, 64).bfloat16(), requires_grad=False)
    lora_linear(x, other, bias, a, [LoRATerm(16, b, 2.0)], base=make_fp8_base())
    base = fp8_linear(x, weight, bias)
    assert torch.equal(y, base)
    (dx, db), (expected,) = (
        torch.autograd.grad(y, [x, b], upstream),
        torch.autograd.grad(base, [x], upstream),
    )
    assert torch.equal(dx, expected) and not made
    u = (x.detach().float() @ a.float().t()).view(-1, 4)
    torch.testing.assert_close(
        db.float(), 2 * upstream.view(-1, 32)[:, 16:].float().t() @ u, rtol=0.05, atol=0.5
    )


@pytest.mark.parametrize("drops", [False, True])
def test_autocast(drops: bool) -> None:
    case, dropout = Case("all", torch.float32), dropped() if drops else None
    with torch.autocast(case.x.device.type, torch.bfloat16):
        found, expected = (
            case.run(partial(f, dropout=dropout)) for f in (lora_linear, lora_linear_ref)
        )
    for name, t in found.items():
        torch.testing.assert_close(t, expected[name])


def test_gradients_of_b_are_rounded_once() -> None:
    """Of whole numbers, whose sums fp32 has exactly, and a scale that is no power of two."""
    torch.manual_seed(0)
    u, d = (torch.randint(-9, 10, (512, n)).bfloat16() for n in (8, K))
    x = u.repeat(1, 2)  # A takes its first half
    weight = nn.Parameter(torch.zeros(K, 16, dtype=torch.bfloat16), requires_grad=False)
    b = nn.Parameter(torch.zeros(K, 8))
    lora_linear(x, weight, None, torch.eye(8, 16), [LoRATerm(0, b, 0.3)]).backward(d)
    expected = (d.float().t() @ u.float() * 0.3).bfloat16()
    assert b.grad is not None
    assert (b.grad != expected.float()).float().mean() < 0.05  # the product with 0.3 has fp32's


# Products with factors of few columns; on a GPU in a Llama's shapes, too

# Columns of the wide matrix, and first column, columns, rank and scale of each part
FACTORS: dict[str, tuple[int, list[tuple[int, int, int, float]]]] = {
    "one": (64, [(0, 64, 4, 1.0)]),
    "gaps": (70, [(3, 27, 3, 0.5), (40, 20, 20, -1.5)]),
    "strips of several parts": (107, [(0, 65, 16, 2.0), (65, 1, 1, 1.0), (66, 41, 8, 3.0)]),
}
# The interpreter has no products of bf16
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32, torch.float16]


class Given:
    """Factors, and the sums of their products in fp64."""

    def __init__(
        self, N: int, K: int, parts: Sequence[tuple[int, int, int, float]], dtype: torch.dtype
    ) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape).to(dtype)

        self.u, self.dy = drawn(N, sum(r for *_, r, _ in parts)), drawn(N, K)
        self.bs = [drawn(size, r) for _, size, r, _ in parts]
        self.bias = drawn(K)
        self.firsts, self.scales = [p[0] for p in parts], [p[3] for p in parts]
        self.y = torch.zeros(N, K, dtype=torch.float64)
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
@pytest.mark.parametrize("case", FACTORS)
def test_products_and_gradients_of_factors(
    case: str, dtype: torch.dtype, kernels_only: None
) -> None:
    Given(20, *FACTORS[case], dtype).check()


def test_several_runs_of_rows(monkeypatch: pytest.MonkeyPatch, kernels_only: None) -> None:
    monkeypatch.setattr("tigon.kernels.linear.low_rank.PROGRAMS", 8)
    monkeypatch.setattr("tigon.kernels.linear.low_rank.LEAST", 32)
    Given(100, *FACTORS["gaps"], torch.float32).check()


def test_a_transposed_factor(kernels_only: None) -> None:
    given = Given(33, *FACTORS["one"], torch.float32)
    (b,) = given.bs
    found = low_rank_product(given.u, [b.t().contiguous()], [0], [1.0], 64, None, True)
    assert torch.equal(found, given.product())


def test_any_strides_of_the_gradient(kernels_only: None) -> None:
    given = Given(17, *FACTORS["gaps"], torch.float32)
    wide = torch.randn(17, 80)
    wide[:, 5:75] = given.dy
    for dy in (wide[:, 5:75], given.dy.t().contiguous().t()):
        for found, expected in zip(given.gradients(dy), given.gradients(), strict=True):
            assert torch.equal(found, expected)
    row = given.dy[:1]
    for found, expected in zip(
        given.gradients(row.expand(17, -1)), given.gradients(row.repeat(17, 1)), strict=True
    ):
        assert torch.equal(found, expected)


def test_gradients_of_u_alone_and_of_no_rows(kernels_only: None) -> None:
    given = Given(17, *FACTORS["gaps"], torch.float32)
    (du,) = given.gradients(of_bs=False)
    assert torch.equal(du, given.gradients()[0])
    empty = given.u[:0], given.bs, given.firsts, given.scales
    assert low_rank_product(*empty, 70, None, False).shape == (0, 70)
    du, *dbs = low_rank_gradients(given.dy[:0], *empty, True)
    assert du.shape == (0, 23) and not any(db.any() for db in dbs)


def test_gradients_of_parameters_in_another_dtype(kernels_only: None) -> None:
    """They are rounded to the dtype of what is multiplied."""
    given = Given(33, *FACTORS["gaps"], DTYPES[1])
    expected = given.gradients()
    given.bs = [b.float() for b in given.bs]
    for found, other in zip(given.gradients()[1:], expected[1:], strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, other.float())


def test_for_what_the_kernels_are(monkeypatch: pytest.MonkeyPatch, kernels_only: None) -> None:
    monkeypatch.setattr("tigon.kernels.linear.low_rank.runs_triton", lambda x: True)
    x = torch.empty(1, dtype=torch.bfloat16, device="meta")
    on_cpu = torch.empty(1, dtype=torch.bfloat16, device="cpu")
    for widest, most in (WIDEST_PRODUCT, 128), (WIDEST_GRADIENTS, 32):
        assert [r for r in (1, 16, 17, 32, 33, 128, 129) if supports_rank(x, r, widest)][-1] == most
    assert not supports_rank(on_cpu, 16, WIDEST_PRODUCT)


@pytest.mark.traced
def test_operators_of_factors(kernels_only: None) -> None:
    given = Given(17, *FACTORS["gaps"], torch.float32)
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
def test_layers_of_a_llama(sizes: tuple[int, ...], rank: int, kernels_only: None) -> None:
    """Of several runs of rows, and the same bits again."""
    parts = [(sum(sizes[:i]), size, rank, 2.0) for i, size in enumerate(sizes)]
    given = Given(4099, sum(sizes), parts, torch.bfloat16)
    given.check()
    for found, expected in zip(given.gradients(), given.gradients(), strict=True):
        assert torch.equal(found, expected)


# Dropout by position: how much it drops, and that nothing repeats

ROWS, COLUMNS = 256, 512


def keys(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 31, 70])
def test_dropout_is_the_definition(columns: int, dtype: torch.dtype) -> None:
    """Also of a matrix with other columns beside it, and back."""
    dropout = Dropout(keys(3, 5), -(2**62) - 1, 0.3)
    wide = torch.randn(3, 5, columns + 2).to(dtype)
    for x in (wide[..., 1:-1], wide[..., 1:-1].clone().requires_grad_()):
        y, expected = apply_dropout(x, dropout), apply_dropout_ref(x, dropout)
        assert torch.equal(y, expected)
        assert (y == 0).any() or columns == 1
    dy = torch.randn(3, 5, columns).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, apply_dropout_ref(dy, dropout))


def test_dropout_bits_are_splitmix64s() -> None:
    key, place = int(keys(1)), 2**40 + 3
    words = splitmix64((key + place) & WORD, 3)
    sixteens = [word >> 16 * i & 0xFFFF for word in words for i in range(4)]
    for p in (0.2, 0.5, 0.7):
        dropout = Dropout(torch.tensor([key]), place, p)
        assert apply_dropout(torch.ones(1, 11), dropout)[0].tolist() == [
            s >= round(p * 2**16) for s in sixteens[:11]
        ]


def test_dropout_of_a_low_rank_product(kernels_only: None) -> None:
    dropout = Dropout(keys(37), 9, 0.4)
    u, a = torch.randn(37, 4), torch.randn(4, 70)
    given = u, [a], [0], [1.0], 70, None, True
    y = low_rank_product(*given, dropout.keys, dropout.seed, dropout.threshold)
    assert torch.equal(y, apply_dropout_ref(low_rank_product(*given), dropout))


@pytest.mark.parametrize("p", [0.01, 0.05, 0.5, 0.9])
def test_dropout_rate(p: float) -> None:
    """Within five deviations of what independent draws give: of all, of rows, and of columns."""
    found = keep_mask_ref(Dropout(keys(ROWS), 1, p), COLUMNS).double()
    for dims, count in (((0, 1), ROWS * COLUMNS), (1, COLUMNS), (0, ROWS)):
        far = (1 - found.mean(dims) - p).abs().max()
        assert far < 5 * math.sqrt(p * (1 - p) / count) + 2**-16, dims


@pytest.mark.parametrize("p", [0.0, 1e-7])
def test_nothing_is_dropped(p: float) -> None:
    assert apply_dropout(torch.ones(8, 70), Dropout(keys(8), 1, p)).all()


def test_masks_agree_by_chance_alone() -> None:
    """Of other layers, neighboring keys, other rows, and other columns of a row."""
    base = Dropout(keys(ROWS), 1, 0.5)
    first = keep_mask_ref(base, COLUMNS)
    others = {
        "place": keep_mask_ref(base._replace(seed=2), COLUMNS),
        "key": keep_mask_ref(base._replace(keys=base.keys + 2), COLUMNS),
        "row": first.roll(1, 0),
        "column": first.roll(1, 1),
        "word": first.roll(4, 1),
    }
    for name, other in others.items():
        agree = (first == other).double().mean()
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(ROWS * COLUMNS), name
