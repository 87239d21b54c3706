"""Activations in host memory on a GPU: the same bits, and less memory."""

from typing import Any

import pytest
import torch

import tigon
from bench.compare_side import LLAMA_1B

pytestmark = pytest.mark.gpu
T = 4096
WAYS = [(0, False), (0, True), (2, False), (2, True), (True, False), (True, True)]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    values = LLAMA_1B | {"num_hidden_layers": 8, "vocab_size": 8192}
    made = tigon.Llama.from_config(values, dtype=torch.bfloat16, device="cuda").train()
    yield made
    del made
    torch.cuda.empty_cache()


def step(model: Any, recompute: int, away: bool) -> tuple[Any, list[Any], int]:
    """Loss, gradients, and bytes at the peak beyond what was there."""
    model.activation_checkpointing, model.activation_offload = recompute, away
    torch.manual_seed(1)
    ids = torch.randint(0, 8192, (2, T), device="cuda")
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = model(ids, labels=ids).loss
    loss.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients, peak


def test_no_bit_changes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic kernels, which FlashAttention-2 has only where others are an error."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        expected = step(model, *WAYS[0])
        for way in WAYS:
            for _ in range(2):  # a race would not show each time
                loss, gradients, _ = step(model, *way)
                assert torch.equal(loss, expected[0]), way
                assert all(map(torch.equal, gradients, expected[1])), way
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_it_saves(model: Any) -> None:
    """Of eight blocks at most three are on the GPU: the last, and two that come or go."""
    step(model, 0, False)  # workspaces
    peaks = {way: step(model, *way)[2] for way in WAYS}
    assert peaks[0, True] < 0.65 * peaks[0, False]
    assert peaks[0, True] < peaks[2, False]
    assert peaks[True, True] <= peaks[True, False]


def test_a_forward_alone_and_a_backward_again(model: Any) -> None:
    """Copies that nobody waits for, and a graph that is kept."""
    model.activation_checkpointing, model.activation_offload = False, True
    torch.manual_seed(1)
    ids = torch.randint(0, 8192, (2, T), device="cuda")
    _ = model(ids, labels=ids).loss
    del _
    expected = step(model, 0, True)[1]
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        error = (parameter.grad - gradient).float().norm() / gradient.float().norm()
        assert error < 1e-2
