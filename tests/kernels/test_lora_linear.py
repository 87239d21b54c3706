"""Low-rank additions to a product against their definition, and what their one node keeps."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.kernels.test_rebuilt import kept
from tests.numbers import assert_as_near
from tigon.kernels import fp8_linear, gated_act, lora_linear, lora_linear_ref, rms_norm
from tigon.kernels.linear.dropout import Dropout, keep_mask_ref
from tigon.kernels.linear.lora import FP8_BASE, PLAIN_BASE, LoRATerm
from tigon.kernels.recompute import find_recompute, recompute_above

C, K = 48, 70  # columns of x and of y
# By the first column, how many, rank and scale of each part
PARTS: dict[str, list[tuple[int, int, int, float]]] = {
    "one": [(0, K, 4, 2.0)],
    "all": [(0, 30, 4, 2.0), (30, 20, 4, 2.0), (50, 20, 4, 2.0)],
    "ends": [(0, 30, 3, 0.5), (50, 20, 5, 1.5)],
    "inside": [(30, 20, 1, -2.0)],
}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", PARTS)
def test_definition(parts: str, dtype: torch.dtype) -> None:
    case = Case(parts, dtype)
    ours, peer = case.run(lora_linear), case.run(lora_linear_ref)
    assert_as_near(ours, peer, case.at(torch.float64).run(lora_linear_ref))
    with torch.no_grad():
        given = case.weight, case.bias, case.a, case.additions
        assert torch.equal(lora_linear(case.x, *given), ours["y"])
        row = case.x[:1, :1]
        found = lora_linear(row, *given)
        assert_as_near(found, lora_linear_ref(row, *given), exact(case, row))


def test_rows_that_are_not_next_to_each_other() -> None:
    case = Case("all", torch.float32)
    function = partial(lora_linear, dropout=dropped())
    expected = case.run(function)
    found = case.run(function, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


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


def exact(case: Case, x: Tensor) -> Tensor:
    other = case.at(torch.float64)
    return lora_linear_ref(x.double(), other.weight, other.bias, other.a, other.additions).detach()


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


@pytest.mark.parametrize("make", [normed, activated])
def test_the_input_is_computed_again(make: Any, path: str) -> None:
    case = Case("ends", torch.float32)
    for function in (lora_linear, partial(lora_linear, dropout=dropped())):
        with recompute_above(0):
            found = case.run(function, make)
        with recompute_above(math.inf):
            expected = case.run(function, make)
        assert all(torch.equal(t, expected[name]) for name, t in found.items())


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


@pytest.mark.parametrize("make", [normed, activated])
@pytest.mark.parametrize("least", [0, math.inf])
def test_checkpointing(make: Any, least: float) -> None:
    """Bits of a block that is computed again, whose last product is not."""
    case = Case("ends", torch.float32)

    drops = partial(lora_linear, dropout=dropped())

    def again(x: Tensor, *rest: Any) -> Tensor:
        y: Tensor = checkpoint(lambda x: drops(make(x), *rest), x, use_reentrant=False)
        return y

    with recompute_above(least):
        found, expected = case.run(again), case.run(drops, make)
    assert all(torch.equal(t, expected[name]) for name, t in found.items())


def test_fp8(path: str) -> None:
    """The base's products are those of fp8_linear, and the additions as ever."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(32, 64).bfloat16(), requires_grad=False)
    bias = nn.Parameter(torch.randn(32).bfloat16(), requires_grad=False)
    a = nn.Parameter(torch.randn(4, 64).bfloat16())
    b = nn.Parameter(torch.zeros(16, 4).bfloat16())
    upstream = torch.randn(2, 3, 32).bfloat16()
    y = lora_linear(x, weight, bias, a, [LoRATerm(16, b, 2.0)], base=FP8_BASE)
    base = fp8_linear(x, weight, bias)
    assert torch.equal(y, base)
    (dx, db), (expected,) = (
        torch.autograd.grad(y, [x, b], upstream),
        torch.autograd.grad(base, [x], upstream),
    )
    assert torch.equal(dx, expected)
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
