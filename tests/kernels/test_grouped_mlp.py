"""Experts that are absent, repeated or at any address, and rows of tokens at their places."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import CASES
from tests.kernels.definitions import grouped_mlp as exact
from tests.kernels.op_case import Inputs, OpCase
from tests.kernels.operators import assert_exact, gradients
from tests.support.saved import saved_storages
from tigon.kernels import grouped_mlp
from tigon.kernels.mlp import grouped_product as implementation
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.kernels.mlp.grouped_mlp import unchecked_grouped_mlp
from tigon.kernels.mlp.grouped_mlp_passes import (
    UNKNOWN_SLOTS,
    ExpertBiases,
    LoRAFactors,
    grouped_mlp_backward,
    grouped_mlp_forward,
)
from tigon.kernels.mlp.permute import combine_rows, spread_rows
from tigon.kernels.mlp.slot_order import sort_slots, sort_slots_ref

# C and I are multiples of 8, which the kernel needs in 16 bits
N, C, I, E, K = SIZE = 13, 24, 40, 7, 3  # noqa: E741
PLAIN, LOW = CASES["grouped_mlp, silu"], CASES["lora_grouped_mlp"]
NAMES = ("x", "gate_up", "down", "experts", "weights")


def case_of(operator: Callable[..., Any], *given: Any) -> OpCase:
    """With these arguments behind the tensors and the activation."""

    def call(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, act: str):
        return operator(x, gate_up, down, experts, weights, act, *given)

    return replace(PLAIN, operator=call)


def low_rank(r: int, q: int, inner: int = I) -> LoRAFactors:
    shapes = (E, r, C), (E, 2 * inner, r), (E, q, inner), (E, C, q)
    return LoRAFactors(*((0.3 * torch.randn(s)).requires_grad_() for s in shapes))


def tensors(inputs: Inputs) -> list[Tensor]:
    return [inputs[name] for name in NAMES]


@pytest.mark.parametrize("size", [(N, 8, 6, E, K), (N, 7, 8, E, K)], ids=str)
def test_rows_that_grouped_mm_pads(size: tuple[int, ...]) -> None:
    """bf16 products of which the interpreter computes none: rows of 24 and of 14 bytes."""
    inputs = PLAIN.make(size, torch.bfloat16)
    found, expected = PLAIN.run(inputs), PLAIN.run(inputs, exact)
    ups = [torch.randn(N, size[1])]
    pairs = [found + gradients(found, inputs, ups), expected + gradients(expected, inputs, ups)]
    for a, b in zip(*pairs, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


def asked(*_: Any) -> None:
    raise AssertionError("the host asks the device")


@pytest.mark.parametrize(
    "size", [SIZE, (1, 7, I, E, K), (1, 7, 5, 90, K), (0, C, I, E, K)], ids=str
)
def test_host_asks_nothing_where_it_must_not_wait(
    size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with few rows on a GPU; copies of matrices where rows are few beside the experts."""
    given = tensors(PLAIN.make(size))
    expected = exact(*given, "silu")
    with monkeypatch.context() as patch, torch.no_grad():
        for name in ("tolist", "item"):
            patch.setattr(Tensor, name, asked)
        patch.setattr(implementation, "must_not_sync", lambda *_: True)
        y = unchecked_grouped_mlp(*given, "silu")
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def misplaced(x: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)
    moved = memory[1:].view_as(x).copy_(x.detach())
    assert moved.data_ptr() % 16
    return moved.requires_grad_()


def test_expert_weights_at_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product for GPUs takes multiples of 16 bytes alone, so it must not be asked."""
    grouped_mm = F.grouped_mm

    def strict(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        assert a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0
        return grouped_mm(a, b, **options)

    monkeypatch.setattr(F, "grouped_mm", strict)
    inputs = PLAIN.make(SIZE)
    assert_exact(PLAIN, inputs | {n: misplaced(inputs[n]) for n in ("gate_up", "down")})


@pytest.mark.gpu
def test_expert_weights_at_any_address_in_bf16() -> None:
    inputs = PLAIN.make((200, C, I, E, K), torch.bfloat16)
    ups = [torch.randn(200, C)]
    results = []
    for given in (inputs, inputs | {n: misplaced(inputs[n]) for n in ("gate_up", "down")}):
        found = PLAIN.run(given)
        results.append(found + gradients(found, given, ups))
    for e, a in zip(*results, strict=True):
        torch.testing.assert_close(a, e, rtol=2**-6, atol=2**-6 * float(e.abs().max()))


def test_experts_that_come_more_than_once() -> None:
    inputs = PLAIN.make(SIZE)
    inputs["experts"][:, 1] = inputs["experts"][:, 0]
    assert_exact(PLAIN, inputs)
    inputs["experts"] = torch.full((N, K), 4)
    assert_exact(PLAIN, inputs)


# Slots and experts: one program, several, no slot, one expert, more experts than slots, few slots
# of a program
ORDERS = [(39, 7), (800, 128), (0, 3), (700, 1), (40, 300), (200, 3000)]


@pytest.mark.parametrize("absent", [False, True], ids=["all", "absent"])
@pytest.mark.parametrize(("slots", "experts"), ORDERS)
def test_slots_are_sorted_by_expert(
    slots: int, experts: int, absent: bool, kernels_only: None
) -> None:
    """Equal ones stay in their order; some experts have no slot, and one has many."""
    chosen = torch.randint(0, experts + absent, (slots,))
    chosen[torch.rand(slots) < 0.3] = experts // 2
    found = sort_slots(chosen, experts, absent, fused=True)
    for y, expected in zip(found, sort_slots_ref(chosen, experts), strict=True):
        assert y.dtype == expected.dtype and torch.equal(y, expected)


@pytest.mark.parametrize("low", [False, True], ids=["", "low-rank"])
@pytest.mark.parametrize("share", [0.4, 1.0], ids=["some", "all"])
def test_absent_experts(share: float, low: bool) -> None:
    """As of tokens some of whose experts are on other ranks."""
    inputs = PLAIN.make(SIZE)
    absent = torch.rand(N, K) < share
    absent[0] = True
    inputs["experts"][absent] = E
    slots = int((~absent).sum())
    if low:
        factors = low_rank(3, 4)
        inputs |= factors._asdict()

        def call(x, gate_up, down, experts, weights, **low):
            given = x, gate_up, down, experts, weights
            return unchecked_grouped_mlp(*given, "silu", slots, LoRAFactors(**low))

        case = replace(LOW, operator=call)
    else:
        case = case_of(unchecked_grouped_mlp, slots)
    assert_exact(case, inputs)
    found = case.run(inputs)
    (grad,) = torch.autograd.grad(found, inputs["weights"], torch.randn(N, C))
    assert not grad[absent].any() and (slots > 0) == bool(grad.any())


@pytest.mark.parametrize("learns", [True, False], ids=["", "frozen"])
@pytest.mark.parametrize(
    ("ranks", "biased", "transposed", "absent"),
    [
        (None, False, False, False),
        (None, True, True, False),
        (None, False, False, True),
        ((3, 4), False, True, False),
        ((3, 0), True, False, True),
    ],
)
def test_gate_up_is_computed_again(
    ranks: Any, biased: bool, transposed: bool, absent: bool, learns: bool, kernels_only: None
) -> None:
    """With the same bits, also twice and where gradients are written over it, and nothing but it is
    kept less."""
    inner = 136 if learns else I
    x, gate_up, down, experts, weights = tensors(PLAIN.make((N, C, inner, E, K)))
    if transposed:
        gate_up, down = (t.detach().mT.contiguous().requires_grad_() for t in (gate_up, down))
    if absent:
        experts[torch.rand(N, K) < 0.4] = E
    slots = int((experts < E).sum())
    low = None if ranks is None else low_rank(*ranks, inner)
    shapes = (E, 2 * inner), (E, C)
    biases = ExpertBiases(*(torch.randn(s).requires_grad_() for s in shapes)) if biased else None
    if not learns:
        gate_up, down = gate_up.detach(), down.detach()
    given = x, gate_up, down, weights, *(low or ()), *(biases or ())
    leaves = [t for t in given if t.requires_grad and t.numel()]
    act: Any = ClampedSwiGLU(1.702, 0.6) if biased else "silu"
    up, found, kept = torch.randn(N, C), [], []
    for again in (False, True):
        with saved_storages() as saved:
            y = unchecked_grouped_mlp(
                x, gate_up, down, experts, weights, act, slots if absent else None, low,
                biases=biases, transposed=transposed, recompute_gate_up=again,
            )  # fmt: skip
        kept.append(sum(storage.nbytes() for storage in saved.values()))
        found.append([y, *torch.autograd.grad(y, leaves, up, retain_graph=True)])
        found.append([y, *torch.autograd.grad(y, leaves, up)])
    assert all(grad.any() for grad in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert kept[0] - kept[1] == slots * 2 * inner * 4


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize("size", [SIZE, (N, 7, 5, E, K), (1, C, I, 90, K)], ids=str)
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_absent_experts_that_nobody_counts(
    share: float, size: tuple[int, ...], few: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a captured step of generation; places of absent ones hold NaN until the end."""
    given = tensors(PLAIN.make(size))
    given[3][torch.rand(given[3].shape) < share] = len(given[1])
    expected = exact(*given, "silu")
    with monkeypatch.context() as patch, torch.no_grad():
        if few and path == "triton":
            for name in ("tolist", "item", "__int__", "__bool__"):
                patch.setattr(Tensor, name, asked)
            patch.setattr(implementation, "must_not_sync", lambda *_: True)
        y = unchecked_grouped_mlp(*given, "silu", UNKNOWN_SLOTS)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts_without_tokens_have_no_gradient(dtype: torch.dtype, kernels_only: None) -> None:
    """In the kernel, whose numbers at this size are compared with the table's."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernel does not run")
    inputs = PLAIN.make((700, 328, 200, 7, 3), dtype)
    assert all(implementation._triton_supports(inputs["x"], inputs[n]) for n in ("gate_up", "down"))
    rows = inputs["experts"].flatten().bincount(minlength=7)
    assert rows.max() > 256 and rows[-2] == 0
    y = grouped_mlp(*tensors(inputs), "silu")
    grads = torch.autograd.grad(y.sum(), (inputs["gate_up"], inputs["down"]))
    assert not any(grad[-2].any() for grad in grads)


@pytest.mark.traced
def test_operators_of_absent_experts_and_padded_rows() -> None:
    for c, i, dtype, wanted, slots in (
        (7, 8, torch.float32, [False, True, False, True], 5),
        (8, 5, torch.bfloat16, [True] * 4, None),  # grouped_mm pads its rows
    ):
        made = tensors(PLAIN.make((3, c, i, 3, 2), dtype))
        x, gate_up, down, experts, weights = (t.detach() for t in made)
        if slots is not None:
            experts[1, 0] = 3  # absent
        form = [], [], False
        arguments = (x, gate_up, down, [], experts, weights, "silu", slots, *form)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(grouped_mlp_forward.op, arguments, test_utils=tests)
        y, *saved = grouped_mlp_forward(*arguments)
        assert all(t.is_contiguous() for t in saved)
        for hidden in (saved[0], None):
            kept = hidden, [], *saved[1:]
            given = (x, gate_up, down, [], weights, wanted, *kept, y, "silu", *form)
            torch.library.opcheck(grouped_mlp_backward.op, given, test_utils=tests)


# Rows of tokens that are copied to their places and added up from there


def places(absent: float) -> tuple[Tensor, int]:
    """[N K], in any order, and how many there are."""
    there = torch.rand(N * K) >= absent
    found = torch.full((N * K,), N * K)
    count = int(there.sum())
    found[there] = torch.randperm(count)
    return found, count


@pytest.mark.parametrize("absent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("more", [0, 2], ids=["exact", "room"])
def test_rows_go_to_their_places_and_back(absent: float, more: int) -> None:
    at, count = places(absent)
    x, weights = torch.randn(N, 7), torch.rand(N, K)
    size = min(count + more, N * K)
    rows = spread_rows(x, at, K, size)
    assert rows.shape == (size, 7)
    there = at < count
    assert torch.equal(rows[at[there]], x.repeat_interleave(K, 0)[there])
    rows = torch.full((N * K + 1, 7), float("nan"))[:count].normal_()  # nothing is behind them
    for given in (weights, None):
        each = torch.ones(N * K) if given is None else given.flatten()
        values = torch.zeros(N * K, 7, dtype=torch.float64)
        values[there] = each[there, None].double() * rows[at[there]].double()
        y = combine_rows(rows, at, given, K)
        torch.testing.assert_close(y.double(), values.view(N, K, 7).sum(1), rtol=1e-6, atol=1e-6)


def test_no_tokens() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert spread_rows(torch.empty(0, 7), none, K, 0).shape == (0, 7)
    assert combine_rows(torch.empty(0, 7), none, None, K).shape == (0, 7)


@pytest.mark.parametrize("again", [False, True], ids=["", "gate_up again"])
def test_compiled_gradients_of_clamped_experts(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both paths: inside of an operator there is no autograd."""
    unchecked = partial(unchecked_grouped_mlp, recompute_gate_up=again)
    monkeypatch.setattr("tigon.kernels.mlp.grouped_mlp.unchecked_grouped_mlp", unchecked)
    case = CASES["grouped_mlp, gpt-oss"]
    inputs = case.make(None)
    eager = case.run(inputs)
    ups = [torch.randn_like(y) for y in eager]
    compiled = torch.compile(case.operator, backend="aot_eager")
    found = replace(case, operator=compiled).run(inputs)
    pairs = zip(gradients(found, inputs, ups), gradients(eager, inputs, ups), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
