"""Low-rank additions on the GPU: numbers, what a step holds, and passes from graphs."""

from typing import Any

import pytest
import torch

import tigon
from bench.compare_side import LLAMA_1B
from tigon import LoraConfig
from tigon.train.cuda_graphs import Graphs

pytestmark = pytest.mark.gpu
T, C = 4096, 2048


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
