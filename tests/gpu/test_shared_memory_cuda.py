"""Launches for GPUs with less shared memory, run on this one: they give what its own give."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_append_attention import Rows, assert_same, copied
from tests.kernels.test_gated_delta import draw, narrowed, results
from tigon.kernels import gated_delta_rule, runtime
from tigon.kernels.attention.decode import append_attention
from tigon.kernels.mlp.grouped_product import grouped_product

pytestmark = pytest.mark.gpu
KIB = pytest.mark.parametrize("kib", [99, 163])
Less = Callable[[int], None]


@pytest.fixture
def less(monkeypatch: pytest.MonkeyPatch) -> Iterator[Less]:
    def settle(kib: int) -> None:
        monkeypatch.setattr(runtime, "_shared_memory", lambda device: kib << 10)

    torch.set_default_device("cuda")
    yield settle
    torch.set_default_device(None)


def test_what_a_program_may_have() -> None:
    known = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    assert runtime.shared_memory(torch.zeros(1, device="cuda")) == known


@KIB
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("dim", "heads"), [(256, 8), (320, 32), (512, 8), (576, 32)])
def test_decoding(
    dim: int, heads: int, dtype: torch.dtype, int8: bool, kib: int, less: Less
) -> None:
    options: dict[str, Any] = {
        "heads": heads,
        "kv_heads": 1,
        "dim": dim,
        "int8": int8,
        "dtype": dtype,
    }
    rows = Rows([0, 300, 77], 512, **options)
    q, k, v = rows.new(2)
    truth, buffers = rows.exact(q), copied(rows.buffers)
    own = (append_attention(q, k, v, buffers, rows.lengths).double() - truth).norm()
    less(kib)
    y = append_attention(q, k, v, rows.buffers, rows.lengths)
    assert (y.double() - truth).norm() <= 1.5 * own + 1e-6 * truth.norm()
    assert_same(rows.buffers, buffers)


@KIB
def test_the_delta_rule_of_few_heads(kib: int, less: Less) -> None:
    inputs = narrowed(draw(200, D=128), torch.bfloat16)
    ups = [torch.randn(1, 200, 2, 128), torch.randn(1, 2, 128, 128)]
    own = results(gated_delta_rule, inputs, ups)
    less(kib)
    for name, x in results(gated_delta_rule, inputs, ups).items():
        assert torch.equal(x, own[name]), name


@KIB
def test_products_of_experts(kib: int, less: Less) -> None:
    x = torch.randn(700, 512, dtype=torch.bfloat16)
    weight = torch.randn(8, 384, 512, dtype=torch.bfloat16)
    ends = torch.tensor([100, 100, 130, 400, 401, 600, 690, 700], dtype=torch.int32)

    def product() -> Tensor:
        return grouped_product(x, weight, ends)

    own = product()
    less(kib)
    assert torch.equal(product(), own)
