"""Low-rank additions on the GPU: numbers, what a step holds, and passes from graphs."""

from typing import Any

import pytest
import torch
from torch import nn

import tigon
from bench.compare_side import LLAMA_1B
from tests.numbers import assert_as_near
from tigon import LoraConfig
from tigon.kernels import lora_linear, lora_linear_ref
from tigon.kernels.linear.lora import LoRATerm
from tigon.train.cuda_graphs import Graphs

pytestmark = pytest.mark.gpu
T, C = 4096, 2048
PARTS = ((0, 2048), (2048, 512), (2560, 512))  # first column and size of q, k and v


def operands(dtype: torch.dtype, rank: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        x = torch.randn(T, C).to(dtype).requires_grad_()
        weight = nn.Parameter((torch.randn(3072, C) / 45).to(dtype), requires_grad=False)
        a = nn.Parameter((torch.randn(3 * rank, C) / 45).to(dtype))
        bs = [nn.Parameter((torch.randn(size, rank) / 4).to(dtype)) for _, size in PARTS]
    return x, weight, a, bs


def results(run: Any, x: Any, weight: Any, a: Any, bs: Any) -> dict[str, torch.Tensor]:
    added = [LoRATerm(first, b, 2.0) for (first, _), b in zip(PARTS, bs, strict=True)]
    y = run(x, weight, None, a, added)
    upstream = torch.linspace(-1, 1, y.numel(), device="cuda").to(y.dtype).view(y.shape)
    dx, da, *dbs = torch.autograd.grad(y, (x, a, *bs), upstream)
    return {"y": y.detach(), "dx": dx, "da": da} | {f"db{i}": d for i, d in enumerate(dbs)}


@pytest.mark.parametrize("rank", [16, 5])
def test_numbers(rank: int) -> None:
    given = operands(torch.bfloat16, rank)
    x, weight, a, bs = given
    exact = [t.detach().double().requires_grad_() for t in (x, a, *bs)]
    truth = results(lora_linear_ref, exact[0], weight.double(), exact[1], exact[2:])
    assert_as_near(results(lora_linear, *given), results(lora_linear_ref, *given), truth)


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    values = LLAMA_1B | {"num_hidden_layers": 4, "vocab_size": 8192}
    made = tigon.Llama.from_config(values, dtype=torch.bfloat16, device="cuda").train()
    made.add_adapter(LoraConfig(rank=16), **options)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.normal_(std=0.02)
    return made


def step(model: Any, ids: torch.Tensor) -> int:
    """Bytes at the peak beyond what was there."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(ids, labels=ids).loss.backward()
    return torch.cuda.max_memory_allocated() - before


def test_nothing_is_kept_for_the_base() -> None:
    """Of a block: q, k and v once rotated, what attention returns, gate and up, and the stream
    before both norms, in rows of the model's width; beside these the narrow products with A."""
    made, ids = model(), torch.randint(8192, (1, 8192), device="cuda")
    step(made, ids)
    made.zero_grad()
    peak = step(made, ids)
    c, wide = made.config.hidden_size, made.config.intermediate_size
    kept = 4 * 8192 * 2 * (1.5 * c + c + 2 * wide + 2 * c)
    # A block's own gradients, and the head's
    assert peak < kept + 8192 * 2 * (2 * wide + 6 * c) + 2**30


def test_passes_from_graphs() -> None:
    ids = torch.randint(8192, (1, 512), device="cuda")
    found = []
    for graphs in (False, True):
        made = model()
        if graphs:
            Graphs(made)
        for _ in range(4):
            made.zero_grad()
            made(ids, labels=ids).loss.backward()
        found.append({n: p.grad.clone() for n, p in made.named_parameters() if p.requires_grad})
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_decoding_from_graphs() -> None:
    """Another adapter, or none, is another text: no graph of the one before is replayed."""
    made = model().eval()
    ids = torch.randint(8192, (1, 40), device="cuda")

    def text() -> torch.Tensor:
        return made.generate(ids, max_new_tokens=40, do_sample=False, cache_implementation="static")

    first = text()
    with made.adapters_disabled():
        assert not torch.equal(text(), first)
    assert torch.equal(text(), first)
