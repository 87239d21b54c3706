"""What saves memory on a GPU has the same bits: activations in host memory, recomputed inputs."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from bench.compare_side import LLAMA_1B
from tests.support.recompute import recompute_above
from tigon.kernels import gated_act, rms_norm, rms_norm_add, sandwich_norm
from tigon.kernels.mlp.gated_act import gradient_and_product
from tigon.kernels.recompute import MIN_BYTES, find_recompute

pytestmark = pytest.mark.gpu
T = 4096
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Recomputed blocks, activations in host memory, and from how many bytes on inputs are recomputed
Way = tuple[int, bool, float]
PLAIN: Way = (0, False, math.inf)
WAYS: list[Way] = [(n, away, MIN_BYTES) for n in (0, 2, True) for away in (False, True)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    values = LLAMA_1B | {"num_hidden_layers": 8, "vocab_size": 8192}
    made = tigon.Llama.from_config(values, dtype=torch.bfloat16, device="cuda").train()
    yield made
    del made
    torch.cuda.empty_cache()


def step(model: Any, way: Way) -> tuple[Tensor, list[Tensor], int]:
    """Loss, gradients, and bytes at the peak beyond what was there."""
    model.activation_checkpointing, model.activation_offload, least = way
    torch.manual_seed(1)
    ids = torch.randint(0, 8192, (2, T), device="cuda")
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with recompute_above(least):
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
        expected = step(model, PLAIN)
        for way in (*WAYS, *WAYS):  # a race would not show each time
            loss, gradients, _ = step(model, way)
            assert torch.equal(loss, expected[0]), way
            assert all(map(torch.equal, gradients, expected[1])), way
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_host_memory_saves(model: Any) -> None:
    """Of eight blocks at most three are on the GPU: the last, and two that come or go."""
    step(model, WAYS[0])  # workspaces
    peaks = {way[:2]: step(model, way)[2] for way in WAYS}
    assert peaks[0, True] < 0.65 * peaks[0, False]
    assert peaks[0, True] < peaks[2, False]
    assert peaks[True, True] <= peaks[True, False]


def test_memory_that_recomputed_inputs_save(model: Any) -> None:
    """Of each layer two normed inputs and the gated product; a tenth for what else is at the peak,
    which may lie elsewhere."""
    step(model, PLAIN)  # workspaces
    without, found = step(model, PLAIN)[2], step(model, (0, False, MIN_BYTES))[2]
    c = model.config
    layer = 2 * 2 * T * (2 * c.hidden_size + c.intermediate_size)
    assert without - found >= 0.9 * c.num_hidden_layers * layer


def test_a_forward_alone_and_a_backward_again(model: Any) -> None:
    """Copies that nobody waits for, and a graph that is kept."""
    model.activation_checkpointing, model.activation_offload = False, True
    torch.manual_seed(1)
    ids = torch.randint(0, 8192, (2, T), device="cuda")
    _ = model(ids, labels=ids).loss
    del _
    expected = step(model, (0, True, MIN_BYTES))[1]
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        error = (parameter.grad - gradient).float().norm() / gradient.float().norm()
        assert error < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [96, 640, 1152, 2048, 2560, 3072, 4096, 5120, 8192])
def test_norms_have_the_same_bits(columns: int, dtype: torch.dtype) -> None:
    """Of compiled kernels, which may fuse what the interpreter rounds."""
    x, z, gate = (torch.randn(2, 333, columns, device="cuda").to(dtype) for _ in range(3))
    w, v = (torch.randn(columns, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    options: dict[str, Any]
    with recompute_above(0):
        for options in ({}, {"offset": 1.0, "cast": "after_weight"}):
            made = [
                rms_norm(x, w, 1e-6, **options),
                rms_norm(x, w, 1e-6, residual=z, **options)[0],
                rms_norm(x, w, 1e-6, gate=gate, **options),
                *sandwich_norm(x, z, v, w, 1e-6, **options),
                rms_norm_add(x, z, w, 1e-6, **options),
            ]
            for y in made:
                recompute = find_recompute(y)
                assert recompute is not None
                assert torch.equal(
                    recompute.fn.compute(*recompute.saved, *recompute.fn.constants), y
                )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [96, 1152, 6912, 14336])
def test_the_activation_has_the_same_bits(size: int, act: Any, dtype: torch.dtype) -> None:
    x = 4 * torch.randn(333, 2 * size, device="cuda").to(dtype).requires_grad_()
    y = gated_act(x, act)
    d = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, d)
    for overwrite in (False, True):
        own = x.detach().clone()
        found: list[Tensor] = []
        one = torch.ones(1, device="cuda", requires_grad=True)
        # Inside a backward pass, which says whether its graph is kept
        one.register_hook(
            lambda _, own=own, found=found, overwrite=overwrite: found.extend(
                gradient_and_product(d.clone(), own, act, overwrite)
            )
        )
        one.sum().backward()
        gradient, product = found
        assert torch.equal(product, y) and torch.equal(gradient, expected)
        assert (gradient.data_ptr() == own.data_ptr()) == overwrite
