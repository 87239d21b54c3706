"""AdamW's kernel on the GPU: beside torch's fused one, on large tensors, on two GPUs."""

import itertools
import time

import pytest
import torch
from torch import Tensor

import tigon.kernels
from tests.train.conftest import workspace
from tests.train.ranks import train_on_gpus
from tests.train.test_optim_fused import assert_near
from tests.train.test_precision import Model, settings
from tests.train.test_precision_runs import step, tensors
from tigon.kernels.optim import adamw
from tigon.train import main
from tigon.train.optim import build_optimizer, clip, parameter_groups

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu
# Many programs, an end that fills no program, and tensors for accesses of 2 or 4 bytes
SHAPES = {"a": (1030, 4096), "b": (4097,), "c": (3, 500, 96), "d": (1001, 77)}
STATES = ("adamw", "adamw_bf16", "adamw_8bit")


def stepped(mode: str, steps: int, **changes):
    config = settings(**changes)
    model = Model(getattr(torch, config.param_dtype), SHAPES).cuda()
    optimizer = build_optimizer(model, config)
    with tigon.kernels.use(mode):
        for number in range(steps):
            model.learn(number)
            optimizer.step()
    return model, optimizer


def units(found: Tensor, expected: Tensor) -> Tensor:
    """Of the last place of `expected`."""
    spacing = expected.abs().nextafter(torch.full_like(expected, torch.inf)) - expected.abs()
    return (found.double() - expected.double()).abs() / spacing.double()


def test_float32_is_torchs_fused_adamw_within_rounding():
    """Its order of operations; some versions compute in float64 what others do in float32. A
    weight near 0 is a difference of larger numbers, of whose last places these are units."""
    config = settings()
    model, optimizer = stepped("triton", 3)
    plain = Model(torch.float32, SHAPES).cuda()
    options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    its = torch.optim.AdamW(parameter_groups(plain, config), **options, fused=True)
    for number in range(3):
        plain.learn(number)
        its.step()
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        for kind in ("exp_avg_sq", "exp_avg"):
            off = units(optimizer.state[p][kind], its.state[q[1]][kind])
            print(
                f"{kind} of {name}: {(off == 0).double().mean():.4f} equal, mean {off.mean():.3f}"
            )
            if kind == "exp_avg_sq":  # sums of what is not negative
                assert off.max() <= 16
        off = (p - q[1]).abs().max().item()
        equal = (p == q[1]).double().mean().item()
        print(f"{name}: {equal:.4f} equal, at most {off:.3g} off")
        # Three updates of 1e-2, each within 16 units of 2**-24 of itself, and of a weight below 0.5
        assert off <= 3 * (16 * 1e-2 * 2**-24 + 0.5 * 2**-24)


@pytest.mark.parametrize(
    ("param", "states", "stochastic"),
    [
        *itertools.product(("float32", "bfloat16"), STATES, ("true",)),
        ("bfloat16", "adamw_bf16", "false"),
    ],
)
@pytest.mark.parametrize("own", [None, 1 << 16])
def test_update_of_large_tensors_is_the_definition(param, states, stochastic, own, monkeypatch):
    monkeypatch.setattr(adamw, "OWN_LAUNCH", own)
    changes = {"param_dtype": param, "optimizer": states}
    if param == "bfloat16":
        changes["stochastic_rounding"] = stochastic
    found, optimizer = stepped("triton", 1, **changes)
    expected, its = stepped("reference", 1, **changes)
    for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert_near(p.detach(), q.detach(), name)
        for kind, state in its.state[q].items():
            assert_near(optimizer.state[p][kind], state, f"{kind} of {name}")


def test_a_step_does_not_wait_for_the_device():
    """The host is done while the device still spins."""
    model, optimizer = stepped("triton", 2, param_dtype="bfloat16", optimizer="adamw_bf16")
    model.learn(2)
    _, scale = clip(model, optimizer, 1.0)
    optimizer.step(scale=scale)
    torch.cuda.synchronize()
    for p in model.parameters():
        p.grad = p.grad.clone()  # at another address
    event = torch.cuda.Event()
    torch.cuda._sleep(1 << 31)
    began = time.perf_counter()
    _, scale = clip(model, optimizer, 1.0)
    optimizer.step(scale=scale)
    event.record()
    assert not event.query(), f"{time.perf_counter() - began:.3f} s"
    torch.cuda.synchronize()


@pytest.mark.parametrize("states", STATES)
def test_resumed_run_has_the_same_bits(workspace, states):
    same = {"steps": 4, "save_every": 2, "keep_last": 0, "device": "cuda", "export": "false"}
    same |= {"optimizer": states, "deterministic": "true", "param_dtype": "bfloat16"}
    main(workspace.settings(f"{states}-whole", **same))
    source = step(workspace.root / f"{states}-whole", 2)
    main([*workspace.settings(f"{states}-again", **same), f"resume={source}"])
    expected = tensors(step(workspace.root / f"{states}-whole", 4))
    found = tensors(step(workspace.root / f"{states}-again", 4))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    train_on_gpus(workspace.settings(f"{states}-two", **same))
    loss = workspace.metrics(f"{states}-whole", "loss")
    assert workspace.metrics(f"{states}-two", "loss") == pytest.approx(loss, rel=5e-3)
