"""Criteria of a head where only a GPU can tell: streams, devices, recompilation, assertions."""

import os
import subprocess
import sys

import pytest
import torch

from tigon.kernels import KL, CrossEntropy, Head, LogProbs, linear_cross_entropy, run_loss_terms
from tigon.kernels.loss.cross_entropy_rows import _rows_kernel
from tigon.kernels.loss.logits import Options
from tigon.kernels.loss.terms import find_valid_rows
from tigon.layers import LMHead

pytestmark = pytest.mark.gpu


def test_annealing_compiles_nothing_anew() -> None:
    logits = torch.randn(64, 5003, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5003, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 5003, (64,), device="cuda")

    def step(x: float) -> None:
        options = Options(softcap=30 * x, logit_scale=x / 3, label_smoothing=x / 10, z_loss=x / 100)
        linear_cross_entropy(hidden, weight, targets, options=options)[0].backward()

    def compiled() -> int:
        return sum(len(cache[0]) for cache in _rows_kernel.device_caches.values())

    step(0.9)
    before = compiled()
    for x in (0.8, 0.7, 0.6):
        step(x)
    assert compiled() == before and logits.isfinite().all()


def test_checks_that_wait_leave_the_gpu_usable() -> None:
    code = """
import torch, tigon.kernels as k
h, w = torch.randn(4, 8, device="cuda"), torch.randn(16, 8, device="cuda")
t = torch.tensor([1, 2, 99, 3], device="cuda")
try:
    k.linear_cross_entropy(h, w, t)
except ValueError as error:
    print(error)
t[2] = 4
print(k.linear_cross_entropy(h, w, t)[0].isfinite().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TIGON_CHECKS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "label 99 at [2] is neither -100 nor in [0, 16)" in done.stdout
    assert done.stdout.endswith("True\n")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_are_counted_on_the_copying_stream() -> None:
    """The tensors' device is not the current one, and its stream is busy."""
    targets = torch.zeros(4096, dtype=torch.long, device="cuda:1")
    for n in (1, 100, 4096):
        torch.cuda._sleep(50_000_000)
        with torch.cuda.device(1):
            torch.cuda._sleep(200_000_000)
        targets.fill_(-100)
        targets[:n] = 0
        active = find_valid_rows(targets)
        assert active is not None
        index = active.index()
        assert (4096 if index is None else len(index)) == n


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_several_criteria_at_real_sizes(dtype: torch.dtype, reduction: str) -> None:
    """Each alone and then together: the same gradients, up to the sum's rounding."""
    n, c, v = 1500, 256, 32003
    hidden = torch.randn(n, c, device="cuda").to(dtype).requires_grad_()
    weight = (c**-0.5 * torch.randn(v, c, device="cuda")).to(dtype).requires_grad_()
    teacher = Head((c**-0.5 * torch.randn(v, c, device="cuda")).to(dtype))
    states = torch.randn(n, c, device="cuda").to(dtype)
    targets = torch.randint(0, v, (n,), device="cuda")
    targets[::3] = -100
    logprobs, tokens = (states @ teacher.weight.T).float().log_softmax(-1).topk(32)
    mine = {"targets": targets, "reduction": reduction}
    if reduction == "sum":
        mine["denominator"] = 1000.0
    criteria = [
        CrossEntropy(**mine, label_smoothing=0.1, z_loss=1e-4),
        KL(**mine, teacher_hidden=states, teacher=teacher, beta=0.3),
        KL(**mine, teacher_tokens=tokens, teacher_logprobs=logprobs),
        *([LogProbs(targets=targets)] if reduction == "none" else []),
    ]

    def gradients(some: list[object], **more: int) -> list[torch.Tensor]:
        total = sum(x.value.sum() for x in run_loss_terms(hidden, weight, None, some, **more))
        return [g.float() for g in torch.autograd.grad(total, (hidden, weight))]

    apart = [gradients([criterion]) for criterion in criteria]
    most = 1e-5 if dtype == torch.float32 else 1e-2
    for logits_bytes in (2**30, 2**26):
        together = gradients(criteria, logits_bytes=logits_bytes)
        for found, *parts in zip(together, *apart, strict=True):
            # Cross-entropy and log-probabilities nearly cancel: rounding is that of the parts
            scale = sum(part.norm() for part in parts)
            assert (found - sum(parts)).norm() <= most * scale


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_watching_changes_no_bit(reduction: str) -> None:
    """Predictions for the accuracy, and logits of a few positions beside the loss."""
    torch.manual_seed(0)
    head = LMHead(256, 5003).to("cuda", torch.bfloat16)
    torch.nn.init.normal_(head.weight, std=0.05)
    hidden = torch.randn(2, 700, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 5003, (2, 700), device="cuda")
    at = hidden.detach().flatten(0, 1)[::100]
    found = []
    for metrics, beside in ((), None), (("predicted_tokens",), at):
        criterion = CrossEntropy(targets=targets, reduction=reduction, metrics=metrics)
        out = head(hidden, [criterion], at=beside, logits_bytes=2 * 5056 * 512)
        value = out.values[0].value
        found.append([value, *torch.autograd.grad(value.sum(), [hidden, head.weight])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    expected = torch.nn.functional.linear(at.float(), head.weight.float())
    torch.testing.assert_close(out.logits_at.float(), expected, rtol=2e-2, atol=2e-2)
    assert not out.logits_at.requires_grad


@pytest.mark.parametrize("n", [16384, 2048])
def test_the_gradient_takes_the_memory_of_its_sum(n: int) -> None:
    """At the peak there is a chunk of logits beside it, and it has the bits of a copy."""
    c, v = 2048, 128256
    options = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(n, c, **options).requires_grad_()
    weight = (0.02 * torch.randn(v, c, **options)).requires_grad_()
    targets = torch.randint(0, v, (n,), device="cuda")

    def loss() -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, targets, denominator=n)[0] * 0.7

    value = loss()
    copies = torch.autograd.grad(value, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(value, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(copies, again, strict=True))
    truth = torch.autograd.grad(
        torch.nn.functional.cross_entropy(hidden[:2048].float() @ weight.float().T, targets[:2048])
        * (0.7 * 2048 / n),
        hidden,
    )[0]
    difference = (again[0][:2048].float() - truth[:2048].float()).norm()
    assert difference <= 0.02 * truth[:2048].float().norm()
    del value, copies, again, truth, difference
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss().backward()
    peak = torch.cuda.max_memory_allocated() - before
    sums = 4 if n > 4096 + c else 2
    assert peak <= 1.02 * (2 * 4096 * (v + c) + sums * v * c + 2 * n * c) + 2**26
    assert torch.cuda.memory_allocated() - before <= 1.01 * (2 * v * c + 2 * n * c)
    assert weight.grad is not None
    assert weight.grad.untyped_storage().nbytes() == 2 * v * c
