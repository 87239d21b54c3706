import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import experts as experts_and_tokens
from tests.kernels.definitions import grouped_mlp as exact
from tigon.kernels import grouped_mlp
from tigon.kernels.mlp import grouped_mlp as implementation
from tigon.kernels.mlp.grouped_mlp import (
    UNKNOWN_SLOTS,
    LoRAFactors,
    _backward,
    _forward,
    pad_rank,
    unchecked_grouped_mlp,
)

# C and I are multiples of 8, which the kernel needs in 16 bits
N, C, I, E, K = 13, 24, 40, 7, 3  # noqa: E741
CUDA = torch.cuda.is_available()
# The interpreter has no bf16 products; fp16 is right everywhere
HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]


def inputs(
    n: int = N,
    c: int = C,
    i: int = I,
    e: int = E,
    k: int = K,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """x, gate_up, down, experts, weights; no token chooses the last expert but one."""
    made = experts_and_tokens(n, c, i, e, k)
    weights = made.pop("weights").to(weights_dtype or dtype)
    return [x.to(dtype) if x.is_floating_point() else x for x in made.values()] + [weights]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]


def gradients(y: Tensor, tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    wanted = [t for t in tensors if t.requires_grad]
    upstream = upstream.to(y.dtype)
    return list(torch.autograd.grad(y, wanted, upstream, materialize_grads=True))


def assert_exact(
    tensors: list[Tensor], slots: int | None = None, low: LoRAFactors | None = None
) -> list[Tensor]:
    """Value and gradients in fp32 are those of the loop; returns the gradients."""
    tensors = leaves(tensors)
    x, gate_up, down, experts, weights = tensors
    y = unchecked_grouped_mlp(*tensors, "silu", slots, low)
    learned = [*tensors, *(low or ())]
    if low is not None:
        low = LoRAFactors(*(t.double() for t in low))
        gate_up, down = gate_up + low.b_up @ low.a_up, down + low.b_down @ low.a_down
    expected = exact(x, gate_up, down, experts, weights, "silu")
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-5)
    upstream = torch.randn_like(y)
    found = gradients(y, learned, upstream)
    for grad, wanted in zip(found, gradients(expected, learned, upstream), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=2e-5 * (1 + float(wanted.max())))
    return found


def low_rank(r: int, q: int) -> LoRAFactors:
    shapes = (E, r, C), (E, 2 * I, r), (E, q, I), (E, C, q)
    return LoRAFactors(*((0.3 * torch.randn(s)).requires_grad_() for s in shapes))


@pytest.mark.parametrize("sizes", [{"c": 8, "i": 6}, {"c": 7, "i": 8}], ids=str)
def test_rows_that_grouped_mm_pads(sizes: dict[str, int]) -> None:
    """bf16 products of which the interpreter computes none: rows of 24 and of 14 bytes."""
    tensors = leaves(inputs(**sizes, dtype=torch.bfloat16))
    y, expected = grouped_mlp(*tensors, "silu"), exact(*tensors, "silu")
    upstream = torch.randn(N, sizes["c"])
    found = [y, *gradients(y, tensors, upstream)]
    for a, b in zip(found, [expected, *gradients(expected, tensors, upstream)], strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


def asked(*_: Any) -> None:
    raise AssertionError("the host asks the device")


@pytest.mark.parametrize(
    "sizes", [{}, {"n": 1, "c": 7}, {"n": 1, "e": 90, "c": 7, "i": 5}, {"n": 0}], ids=str
)
def test_host_asks_nothing_where_it_must_not_wait(
    sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with few rows on a GPU; copies of matrices where rows are few beside the experts."""
    tensors = inputs(**sizes)
    expected = exact(*tensors, "silu") if len(tensors[0]) else tensors[0].double()
    with monkeypatch.context() as patch, torch.no_grad():
        for name in ("tolist", "item"):
            patch.setattr(Tensor, name, asked)
        patch.setattr(implementation, "must_not_sync", lambda *_: True)
        y = unchecked_grouped_mlp(*tensors, "silu")
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_expert_weights_at_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product for GPUs takes multiples of 16 bytes alone, so it must not be asked."""
    grouped_mm = F.grouped_mm

    def strict(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        assert a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0
        return grouped_mm(a, b, **options)

    monkeypatch.setattr(F, "grouped_mm", strict)
    tensors = inputs()
    for i in (1, 2):
        memory = torch.zeros(tensors[i].numel() + 1)
        tensors[i] = memory[1:].view_as(tensors[i]).copy_(tensors[i])
        assert tensors[i].data_ptr() % 16
    assert_exact(tensors)


@pytest.mark.gpu
def test_expert_weights_at_any_address_in_bf16() -> None:
    tensors = leaves(inputs(n=200, dtype=torch.bfloat16))
    expected = grouped_mlp(*tensors, "silu")
    upstream = torch.randn_like(expected)
    wanted = gradients(expected, tensors, upstream)
    for i in (1, 2):
        memory = torch.zeros(tensors[i].numel() + 1, dtype=torch.bfloat16)
        memory[1:] = tensors[i].detach().flatten()
        tensors[i] = memory[1:].view_as(tensors[i]).requires_grad_()
    y = grouped_mlp(*tensors, "silu")
    for a, e in zip((y, *gradients(y, tensors, upstream)), (expected, *wanted), strict=True):
        torch.testing.assert_close(a, e, rtol=2**-6, atol=2**-6 * float(e.abs().max()))


def test_experts_that_come_more_than_once() -> None:
    x, gate_up, down, experts, weights = inputs()
    experts[:, 1] = experts[:, 0]
    assert_exact([x, gate_up, down, experts, weights])
    _, dgate_up, ddown, _ = assert_exact([x, gate_up, down, torch.full((N, K), 4), weights])
    for grad in (dgate_up, ddown):
        assert {e for e in range(E) if grad[e].any()} == {4}


@pytest.mark.parametrize("low", [False, True], ids=["", "low-rank"])
@pytest.mark.parametrize("share", [0.4, 1.0], ids=["some", "all"])
def test_absent_experts(share: float, low: bool) -> None:
    """As of tokens some of whose experts are on other ranks."""
    x, gate_up, down, experts, weights = inputs()
    absent = torch.rand(N, K) < share
    absent[0] = True
    experts[absent] = E
    slots = int((~absent).sum())
    tensors = [x, gate_up, down, experts, weights]
    found = assert_exact(tensors, slots, low_rank(3, 4) if low else None)
    assert not found[3][absent].any() and (slots > 0) == bool(found[3].any())


def test_ranks_are_filled_up_with_zeros() -> None:
    low = low_rank(5, 8)
    a, b = pad_rank(low[:2])
    assert a.shape == (E, 8, C) and b.shape == (E, 2 * I, 8)
    torch.testing.assert_close(b @ a, low.b_up @ low.a_up)
    assert all(map(operator.is_, pad_rank(low[2:]), low[2:]))


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize("sizes", [{}, {"c": 7, "i": 5}, {"n": 1, "e": 90}], ids=str)
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_absent_experts_that_nobody_counts(
    share: float, sizes: dict[str, int], few: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a captured step of generation; places of absent ones hold NaN until the end."""
    x, gate_up, down, experts, weights = inputs(**sizes)
    experts[torch.rand(experts.shape) < share] = len(gate_up)
    tensors = x, gate_up, down, experts, weights
    expected = exact(*tensors, "silu")
    with monkeypatch.context() as patch, torch.no_grad():
        if few and path == "triton":
            for name in ("tolist", "item", "__int__", "__bool__"):
                patch.setattr(Tensor, name, asked)
            patch.setattr(implementation, "must_not_sync", lambda *_: True)
        y = unchecked_grouped_mlp(*tensors, "silu", UNKNOWN_SLOTS)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact_weights", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounded_where_the_definition_says(dtype: torch.dtype, exact_weights: bool) -> None:
    """Products in the input's dtype; the sum over a token's experts in fp32, rounded once."""
    weights_dtype = torch.float32 if exact_weights else dtype
    tensors = leaves(inputs(n=24, dtype=dtype, weights_dtype=weights_dtype))
    x, gate_up, down, experts, weights = tensors
    rows = []
    for n in range(24):
        row = torch.zeros(C)
        for j, e in enumerate(experts[n].tolist()):
            gate, up = (gate_up[e].float() @ x[n].float()).to(dtype).chunk(2)
            hidden = F.silu(gate) * up
            row += weights[n, j].float() * (down[e].float() @ hidden.float()).to(dtype).float()
        rows.append(row.to(dtype))
    y, expected = grouped_mlp(*tensors, "silu"), torch.stack(rows)
    assert y.dtype == dtype
    assert (y != expected).float().mean() < 0.05  # products may be a rounding apart
    if exact_weights:
        rounded = [*tensors[:4], weights.to(dtype)]
        assert (grouped_mlp(*rounded, "silu") != expected).float().mean() > 0.1
    upstream = torch.randn(24, C)
    found = gradients(y, tensors, upstream)
    wanted = gradients(exact(*tensors, "silu"), tensors, upstream)
    for grad, w, t in zip(found, wanted, [x, gate_up, down, weights], strict=True):
        assert grad.dtype == t.dtype
        assert (grad - w).norm() < 4 * torch.finfo(dtype).eps * w.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tiles_of_the_kernel(dtype: torch.dtype, path: str) -> None:
    """Several per expert in rows, outputs and what is summed over, the last of each not full."""
    if path == "reference" or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernel does not run")
    tensors = leaves(inputs(n=700, c=328, i=200, e=7, k=3, dtype=dtype))
    assert all(implementation._triton_supports(tensors[0], w) for w in tensors[1:3])
    rows = tensors[3].flatten().bincount(minlength=7)
    assert rows.max() > 256 and rows[-2] == 0
    y, expected = grouped_mlp(*tensors, "silu"), exact(*tensors, "silu")
    upstream = torch.randn(700, 328)
    found = [y, *gradients(y, tensors, upstream)]
    for a, b in zip(found, [expected, *gradients(expected, tensors, upstream)], strict=True):
        assert (a - b).norm() < 4 * torch.finfo(dtype).eps * b.norm()
    assert not found[2][-2].any() and not found[3][-2].any()


@pytest.mark.traced
def test_operators_of_absent_experts_and_padded_rows() -> None:
    for c, i, dtype, wanted, slots in (
        (7, 8, torch.float32, [False, True, False, True], 5),
        (8, 5, torch.bfloat16, [True] * 4, None),  # grouped_mm pads its rows
    ):
        x, gate_up, down, experts, weights = inputs(n=3, c=c, i=i, e=3, k=2, dtype=dtype)
        if slots is not None:
            experts[1, 0] = 3  # absent
        arguments = (x, gate_up, down, [], experts, weights, "silu", slots)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(_forward.op, arguments, test_utils=tests)
        y, *saved = _forward(*arguments)
        assert all(t.is_contiguous() for t in saved)
        given = (x, gate_up, down, [], weights, wanted, saved[0], [], *saved[1:], y, "silu")
        torch.library.opcheck(_backward.op, given, test_utils=tests)


BAD: dict[str, tuple[dict[int, Any], str]] = {
    "an activation": ({5: "relu"}, "act='relu' is not one of"),
    "x": ({0: torch.randn(N, C + 1)}, r"x \(13, 25\), gate_up \(7, 80, 24\), .* are not \[N, C\]"),
    "x with batch": ({0: torch.randn(2, N, C)}, r"x \(2, 13, 24\)"),
    "gate_up": ({1: torch.randn(E, 2 * I - 1, C)}, r"gate_up \(7, 79, 24\)"),
    "experts of gate_up": ({1: torch.randn(E + 1, 2 * I, C)}, r"gate_up \(8, 80, 24\)"),
    "down": ({2: torch.randn(E, I, C)}, r"down \(7, 40, 24\)"),
    "tokens": ({3: torch.zeros(N - 1, K).long()}, r"experts \(12, 3\), weights \(13, 3\)"),
    "none": ({3: torch.zeros(N, 0).long(), 4: torch.zeros(N, 0)}, r"experts \(13, 0\)"),
    "experts are int32": ({3: torch.zeros(N, K).int()}, "experts is torch.int32, .* must be int64"),
    "weights are int": (
        {4: torch.zeros(N, K).long()},
        "weights torch.int64: they must be int64 an",
    ),
    "dtypes": ({1: torch.randn(E, 2 * I, C).half()}, "x is torch.float32, gate_up torch.float16"),
    "an expert too far": ({3: torch.full((N, K), E)}, r"expert 7 at \[0, 0\] is not in \[0, 7\)"),
    "a negative expert": ({3: torch.full((N, K), -1)}, r"expert -1 at \[0, 0\] is not in \[0, 7\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    if CUDA and "expert" in case.split() and "of" not in case:
        pytest.skip("an assertion on the device ends the process's use of it")
    changes, message = BAD[case]
    tensors = [changes.get(i, t).to(t.device) for i, t in enumerate(inputs())]
    with pytest.raises(ValueError, match=message):
        grouped_mlp(*tensors, changes.get(5, "silu"))
