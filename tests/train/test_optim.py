import math

import pytest
import torch
from torch import nn

from tigon.train.config import load
from tigon.train.optim import build_optimizer, clip_gradients, learning_rate


def config(*overrides: str):
    return load(None, ["run_dir=a", "model=m", "data=d", "lr=1.0", *overrides])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.775, 0.55, 0.1 + 0.9 * 0.1]),
        ("cosine", [1, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, None]),
        ("wsd", [1, 1, 1, 0.1 + 0.9 * 0.5]),
    ],
)
def test_schedules_after_warmup(schedule, expected):
    settings = config(f"schedule={schedule}", "warmup_steps=4", "min_lr_ratio=0.1")
    rates = [learning_rate(settings, step, 24) for step in range(24)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    for step, rate in zip((4, 9, 14, 22), expected, strict=True):
        if rate is not None:
            assert rates[step] == pytest.approx(rate)
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)


def test_a_cosine_is_that_of_torch():
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([p], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.2)
    settings = config("min_lr_ratio=0.2")
    for step in range(10):
        assert learning_rate(settings, step, 10) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()


def test_weight_decay_is_for_matrices_only():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, config("weight_decay=0.5"))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name] * (0.5 if p.dim() > 1 else 1.0))


def test_clipping_scales_to_the_global_norm_and_reports_the_one_before():
    model = nn.Linear(3, 2)
    gradients = [torch.randn_like(p) * 5 for p in model.parameters()]
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    for limit, scale in ((0.0, 1.0), (0.5, 0.5 / norm), (2 * norm, 1.0)):
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g.clone()
        assert clip_gradients(model, limit).item() == pytest.approx(norm, rel=1e-6)
        for p, g in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, g * scale, rtol=1e-5, atol=1e-6)
