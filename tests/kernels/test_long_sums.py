"""Products whose last summands cuBLAS may leave out: in two runs, with all of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench import long_sums
from tigon.kernels.linear import linear as implementation
from tigon.kernels.linear.linear import (
    chunked_matmul,
    linear,
    matmul_into,
    may_drop_summands,
    reduction_chunks,
)
from tigon.kernels.linear.lora import LoRATerm, lora_linear
from tigon.kernels.loss import fused_linear_pass
from tigon.kernels.mlp import grouped_product
from tigon.kernels.mlp.grouped_product import grouped_weight_gradient
from tigon.layers import LoRAPart
from tigon.layers.embedding import LowRankEmbedding
from tigon.layers.lm_head import _merge_adapter
from tigon.layers.lora import LowRank


def test_lengths_that_gpus_drop_are_in_danger() -> None:
    for summands, k, c in [(2561, 16, 4096), (16513, 16, 4096), (2561, 32, 576)]:
        assert may_drop_summands(summands, k, c) and may_drop_summands(summands, c, k)
    for summands in (6337, 6338):
        assert may_drop_summands(summands, 64, 2048)
    assert may_drop_summands(8961, 1152, 1024)
    for summands in (2**15 + 32, 2**16 + 64):
        assert may_drop_summands(summands, 16, 4096)
    for summands in (64, 96, 1025 - 32, 2560, 8192, 16384, 2**15 - 32):  # nothing behind, or much
        assert not may_drop_summands(summands, 16, 4096)
    assert not may_drop_summands(2561, 4096, 4096)  # a large result is not divided by summands


class Faulty(TorchDispatchMode):
    """Products in bfloat16 without the last summand of 128 j + 1, as some are on a GPU, and with
    float32 results, which a CPU has not."""

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            *before, a, b = (x for x in given if isinstance(x, Tensor))
            if a.dtype == torch.bfloat16 and len(b) > 2048 and len(b) % 128 == 1:
                a, b = a[:, :-1], b[:-1]
            if "dtype" in function._overloadname:
                total = a.float() @ b.float() + sum(before)
                return named["out"].copy_(total) if "out" in named else total
            given = (*before, a, b, *(x for x in given if not isinstance(x, Tensor)))
        return function(*given, **named)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every product in bfloat16 is in danger."""

    def at_risk(x: Tensor, summands: int, k: int, c: int) -> bool:
        return x.dtype == torch.bfloat16 and may_drop_summands(summands, k, c)

    monkeypatch.setattr(implementation, "is_at_risk", at_risk)
    with Faulty():
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Of few bits: sums of them in float32 are exact in any order."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=draw).bfloat16()


@pytest.mark.parametrize("length", [2561, 6338, 2560, 100])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_sum_is_the_definition_s(gpu: None, length: int, scale: float) -> None:
    a, b = numbers(16, length), numbers(length, 24, seed=1)
    expected = (scale * (a.float() @ b.float())).bfloat16()
    assert torch.equal(chunked_matmul(a, b, scale), expected)
    runs = reduction_chunks(a, b)
    assert [i for run in runs for i in range(length)[run]] == list(range(length))
    assert (len(runs) == 2) == (length in (2561, 6338))


def test_a_layer_learns_from_all_rows(gpu: None) -> None:
    weight, bias = (nn.Parameter(x) for x in (numbers(8, 16), numbers(8, seed=3)))
    x = numbers(3, 1067, 16, seed=1).requires_grad_()  # 3,201 rows
    dy = numbers(3, 1067, 8, seed=2)
    y = linear(x, weight, bias)
    assert type(y.grad_fn).__name__ == "_LinearBackward"
    assert torch.equal(y, torch.nn.functional.linear(x, weight, bias))
    found = torch.autograd.grad(y, (x, weight, bias), dy)
    rows = dy.flatten(0, 1).float()
    expected = [rows @ weight.float(), rows.t() @ x.flatten(0, 1).float(), rows.sum(0)]
    for own, definition in zip(found, expected, strict=True):
        assert torch.equal(own, definition.bfloat16().view_as(own))
    weight.requires_grad_(False)
    assert "Summed" not in str(linear(x, weight, bias).grad_fn)


def test_without_it_a_row_is_left_out(gpu: None) -> None:
    """What the other tests are worth."""
    weight, x = nn.Parameter(numbers(8, 16)), numbers(3201, 16, seed=1)
    dy = numbers(3201, 8, seed=2)
    (found,) = torch.autograd.grad(torch.nn.functional.linear(x, weight), weight, dy)
    rows = dy.float().t()
    assert torch.equal(found, (rows[:, :-1] @ x[:-1].float()).bfloat16())
    assert not torch.equal(found, (rows @ x.float()).bfloat16())


@pytest.mark.parametrize("learns", [False, True], ids=["frozen base", "base learns"])
def test_an_adapter_learns_from_all_rows(gpu: None, learns: bool) -> None:
    """In one node, or by operators of autograd's beside a base that learns."""
    weight, a, b = (nn.Parameter(numbers(*s, seed=4)) for s in ((8, 16), (2, 16), (8, 2)))
    x, dy = numbers(2561, 16, seed=1), numbers(2561, 8, seed=2)
    y = lora_linear(x, weight.requires_grad_(learns), None, a, [LoRATerm(0, b, 0.5)])
    found = torch.autograd.grad(y, (a, b, *([weight] if learns else [])), dy)
    u = (x.float() @ a.float().t()).bfloat16()
    du = (0.5 * (dy.float() @ b.float())).bfloat16()
    rows = dy.float().t()
    expected = du.float().t() @ x.float(), 0.5 * (rows @ u.float()), rows @ x.float()
    for own, definition in zip(found, expected, strict=False):
        assert torch.equal(own, definition.bfloat16())


def test_a_gradient_of_rows_has_the_whole_vocabulary(gpu: None) -> None:
    weight = nn.Parameter(numbers(2561, 16))
    x, dy = numbers(5, 16, seed=1).requires_grad_(), numbers(5, 2561, seed=2)
    (found,) = torch.autograd.grad(linear(x, weight), x, dy)
    assert torch.equal(found, (dy.float() @ weight.float()).bfloat16())


def test_experts_learn_from_all_their_rows(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host multiplies one by one."""
    monkeypatch.setattr(grouped_product, "_torch_supports", lambda *_: False)
    dy, x = numbers(2700, 8), numbers(2700, 16, seed=1)
    found = grouped_weight_gradient(dy, x, torch.tensor([2561, 2561, 2700]))
    ends = ((0, 2561), (2561, 2561), (2561, 2700))
    for own, (start, end) in zip(found, ends, strict=True):
        assert torch.equal(own, (dy[start:end].float().t() @ x[start:end].float()).bfloat16())


VOCABULARY = 2561
PLACE = LoRAPart("0", 0, VOCABULARY, 2, 0.5)


def filled(adapter: Any) -> Any:
    for i, p in enumerate(adapter.parameters()):
        p.data = numbers(*p.shape, seed=5 + i)
    return adapter


def of_tokens(seed: int = 0) -> Tensor:
    """[V, C], of which the last token has most."""
    return torch.cat([numbers(VOCABULARY - 1, 16, seed=seed), 64 * numbers(1, 16, seed=9)])


def test_column_lengths_are_over_all_tokens(gpu: None) -> None:
    low = filled(LowRankEmbedding(16, PLACE, dora=True, dtype=torch.bfloat16, device="cpu"))
    low.lora_embedding_A.data[:, -1] = 64
    weight = of_tokens()
    added = 0.5 * (low.lora_embedding_B.float() @ low.lora_embedding_A.float())
    lengths = (weight.float() + added.t()).norm(dim=0)
    expected = low.lora_magnitude_vector.float() / lengths
    torch.testing.assert_close(low.dora_scale(weight), expected, rtol=5e-3, atol=0)


def test_dora_learns_from_the_whole_head(gpu: None) -> None:
    low = filled(LowRank(16, [PLACE], dora=True, dtype=torch.bfloat16, device="cpu"))
    low.dora = False  # what it is multiplied by afterwards is no sum
    dy = of_tokens(seed=8)
    (found,) = torch.autograd.grad(_merge_adapter(numbers(VOCABULARY, 16), low), low.lora_A, dy)
    (addition,) = low.additions()
    expected = 0.5 * (addition.b.float().t() @ dy.float())
    # It is a sum of two that were rounded
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=0.5)


def test_a_head_s_gradients_have_all_summands(gpu: None) -> None:
    d_logits, weight = numbers(5, 2561), numbers(2561, 16, seed=1)
    out = torch.empty(5, 16, dtype=torch.bfloat16)
    matmul_into(d_logits, weight, out)
    assert torch.equal(out, (d_logits.float() @ weight.float()).bfloat16())
    found = fused_linear_pass.add_product(None, d_logits, weight, only=True)
    assert torch.equal(found, out)


def test_the_benchmark_finds_them(gpu: None) -> None:
    sides = long_sums.wrong(long_sums.SIDES, 16, 24, [2560, 2561, 2562, 2689], "cpu")
    assert sides == {long_sums.TORCH: [2561, 2689], long_sums.OURS: []}
    assert {n % 128 for n in long_sums.long_lengths()} == {*range(128)}
