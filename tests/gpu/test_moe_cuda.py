"""Decoding steps of mixtures of experts in CUDA graphs, in dtypes with and without a kernel."""

from typing import Any

import pytest
import torch

import tigon
from tests.gpu.support import no_waiting
from tigon.kernels.mlp import grouped_product

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 97,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, Any] = {
    "qwen3_moe": (
        tigon.Qwen3Moe,
        {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 72},
    ),
    "no multiples of 8": (
        tigon.Qwen3Moe,
        {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 70},
    ),
    "mixtral": (tigon.Mixtral, {"num_local_experts": 8}),
    "gpt_oss": (tigon.GptOss, {"num_local_experts": 16, "num_experts_per_tok": 3}),
}


CASES = [
    (family, dtype, rows)
    for family in FAMILIES
    for dtype in (torch.bfloat16, torch.float32)
    for rows in (1, 3, 40)  # the last: more slots than are few
]
everything = pytest.mark.parametrize(("family", "dtype", "rows"), CASES, ids=str)


def build(family: str, dtype: torch.dtype) -> tigon.CausalLM:
    cls, overrides = FAMILIES[family]
    return cls.from_config({**SIZES, **overrides}, dtype=dtype, device="cuda").eval()


@everything
@torch.no_grad()
def test_a_step_in_a_graph(
    family: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = build(family, dtype), torch.randint(0, 97, (rows, 20), device="cuda")
    eager, graphed = (model.static_cache(rows, 32) for _ in range(2))
    given, graph = ids[:, 5:6].clone(), torch.cuda.CUDAGraph()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for cache in (eager, graphed):
        model(ids[:, :5], past_key_values=cache)
        model(given, past_key_values=cache)  # compiles
    with no_waiting():
        with torch.cuda.graph(graph):
            out = model(given, past_key_values=graphed).logits
        # Outside of a graph, so many rows would wait, and other products round otherwise
        monkeypatch.setattr(grouped_product, "must_not_sync", lambda *_: True)
        for i in range(6, 18):
            given.copy_(ids[:, i : i + 1])
            graph.replay()
            pairs.append((out.clone(), model(given, past_key_values=eager).logits))
    for replayed, expected in pairs:
        torch.testing.assert_close(replayed, expected, rtol=0, atol=0)


@everything
@torch.no_grad()
def test_the_plain_definition_in_a_graph(family: str, dtype: torch.dtype, rows: int) -> None:
    moe, graph = build(family, dtype).model.layers[0].mlp, torch.cuda.CUDAGraph()
    x = torch.randn(rows, 1, 128, device="cuda", dtype=dtype)
    with tigon.kernels.use("reference"):
        expected = moe(x).x
        with torch.cuda.graph(graph):
            found = moe(x).x
    graph.replay()
    assert (found - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("rows", [256, 4096])
@pytest.mark.parametrize("width", [2880, 5760])
def test_products_of_the_widths_of_gpt_oss(rows: int, width: int) -> None:
    """Matrices as it stores them, with biases: programs have several tiles, and columns end inside
    of one."""
    experts, inner = 32, 2880
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(experts, inner, width, dtype=torch.bfloat16, device="cuda") * inner**-0.5
    bias = torch.randn(experts, width, dtype=torch.bfloat16, device="cuda")
    ends = torch.randint(rows + 1, (experts,), dtype=torch.int32, device="cuda").sort()[0]
    ends[-1] = rows
    found = grouped_product.grouped_product(x, weight, ends, transposed=True, bias=bias)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        expected = x[start:end].float() @ weight[expert].float() + bias[expert].float()
        torch.testing.assert_close(found[start:end].float(), expected, rtol=1e-2, atol=2e-2)
        start = end
