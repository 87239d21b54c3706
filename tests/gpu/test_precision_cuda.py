"""Few bits and states in host memory on the GPU: the same bits, and the memory that they save."""

import time

import pytest
import torch

import tigon.kernels
from tests.train.conftest import workspace
from tests.train.ranks import Ranks, train_on_gpus
from tests.train.test_precision import SHAPES, Model, settings, states
from tests.train.test_precision_runs import BF16, step, tensors
from tigon.train import main
from tigon.train.optim import adamw, build_optimizer, low_precision
from tigon.utils import random

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture
def definition():
    """No kernel: states in host memory are updated without AdamW's."""
    with tigon.kernels.use("reference"):
        yield


def by_definition(arguments: list[str]) -> None:
    with tigon.kernels.use("reference"):
        main(arguments)


STATES = {"adamw": "float32", "adamw_bf16": "bfloat16", "adamw_8bit": "8bit"}


def on_gpu(steps: int, **changes):
    """After so many steps, with the same weights and gradients."""
    if changes["optimizer"] == "sgd":
        changes["momentum"] = 0.9
    config = settings(**changes)
    model = Model(getattr(torch, config.param_dtype), SHAPES).cuda()
    optimizer = build_optimizer(model, config)
    for number in range(steps):
        model.learn(number)
        optimizer.step()
    return model, optimizer


def test_rounding_has_the_cpus_bits():
    torch.manual_seed(0)
    x = torch.randn(300, 576) * torch.logspace(-38, 30, 300).view(-1, 1)
    for first in (0, 1 << 40):
        at = torch.arange(first, first + x.numel())
        bits = random.random_bits(low_precision.stream_seed(3, 7), at.to(CUDA))
        assert torch.equal(bits.cpu(), random.random_bits(low_precision.stream_seed(3, 7), at))
        for index in range(4):
            own = random.take_16_bits(bits.view_as(x), index)
            found = low_precision.round_stochastically(x.cuda(), own).cpu()
            assert torch.equal(found, low_precision.round_stochastically(x, own.cpu()))
    for signed in (True, False):
        y = x if signed else x.abs()
        for found, expected in zip(
            low_precision.quantize(y.cuda(), signed), low_precision.quantize(y, signed), strict=True
        ):
            assert torch.equal(found.cpu(), expected)
        codes, scale = low_precision.quantize(y, signed)
        back = low_precision.dequantize(codes.cuda(), scale.cuda(), signed)
        assert torch.equal(back.cpu(), low_precision.dequantize(codes, scale, signed))


@pytest.mark.parametrize("optimizer", [*STATES, "sgd"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_states_in_host_memory_change_no_bit(optimizer, param_dtype, definition, monkeypatch):
    """Copied in and out in many pieces, against torch's own or one that stays on the device."""
    changes = {"optimizer": optimizer, "param_dtype": param_dtype}
    here, its = on_gpu(20, **changes)
    monkeypatch.setattr(adamw, "SIZE", 2000)
    there, own = on_gpu(20, optimizer_offload="true", **changes)
    for (name, p), q in zip(here.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(p, q), name
    found, expected = states(there, own), states(here, its)
    assert found.keys() >= expected.keys()
    for name, state in expected.items():
        assert torch.equal(found[name].cpu(), state.cpu()), name
    assert all(s.is_pinned() for name, s in found.items() if not name.startswith("step."))


@pytest.mark.parametrize("optimizer", STATES)
def test_memory_and_time_of_an_update(optimizer):
    """256 Mi parameters: what stays on the device, and what an update takes besides and how long.

    Measured values are printed; the bounds are those of docs/optimizers.md's table.
    """
    shapes = {f"w{i}": (4096, 4096) for i in range(16)}
    count = 16 * 4096**2
    for offload in ("false", "true"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        config = settings(optimizer=optimizer, optimizer_offload=offload, param_dtype="bfloat16")
        with torch.device("cuda"):
            model = Model(torch.bfloat16, shapes)
        learner = build_optimizer(model, config)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        learner.step()
        held = (torch.cuda.memory_allocated() - before) / count
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            learner.step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / 3
        peak = (torch.cuda.max_memory_allocated() - before) / count
        print(
            f"{optimizer} offload={offload}: {held:.3f} bytes a parameter stay, {peak:.3f} at "
            f"most, {1e3 * seconds:.1f} ms an update of {count / 1e6:.0f}M parameters"
        )
        sizes = {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 * (1 + 4 / low_precision.BLOCK)}
        kept = 0.0 if offload == "true" else sizes[STATES[optimizer]]
        assert held == pytest.approx(2 + 2 + kept, abs=0.02)
        assert (peak - held) * count < 600 * 2**20
        del model, learner, p


@pytest.mark.parametrize("optimizer", STATES)
def test_runs_with_states_in_host_memory(workspace, optimizer, definition):
    """FSDP2 over bfloat16 computation, with an average, interrupted: the same checkpoint."""
    same = {"steps": 4, "save_every": 2, "keep_last": 0, "ema_decay": 0.9, "device": "cuda"}
    same |= {"optimizer": optimizer, "deterministic": "true", "export": "true"}
    main(workspace.settings(f"{optimizer}-here", **same))
    main(workspace.settings(f"{optimizer}-there", optimizer_offload="true", **same))
    source = step(workspace.root / f"{optimizer}-there", 2)
    settings = workspace.settings(f"{optimizer}-again", optimizer_offload="true", **same)
    main([*settings, f"resume={source}"])
    expected = tensors(step(workspace.root / f"{optimizer}-here", 4))
    for run in ("there", "again"):
        found = tensors(step(workspace.root / f"{optimizer}-{run}", 4))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (run, name)
        exported = tensors(workspace.root / f"{optimizer}-{run}/hf-ema")
        assert all(torch.equal(t, expected[f"ema.{name}"]) for name, t in exported.items())
    train_on_gpus(workspace.settings(f"{optimizer}-two", optimizer_offload="true", **same))
    loss = workspace.metrics(f"{optimizer}-here", "loss")
    assert workspace.metrics(f"{optimizer}-two", "loss") == pytest.approx(loss, rel=5e-3)


def test_bfloat16_weights_learn_as_float32_ones_do(workspace):
    """Stochastic rounding follows float32 weights where rounding to nearest falls behind."""
    same = {"steps": 40, "lr": 1e-4, "schedule": "constant", "device": "cuda", "dtype": "bfloat16"}
    main(workspace.settings("learn-exact", **same))
    losses = {"exact": workspace.metrics("learn-exact", "loss")[-8:]}
    for name, stochastic in (("stochastic", "true"), ("nearest", "false")):
        changes = {"param_dtype": "bfloat16", "optimizer": "adamw_bf16", "accumulate_fp32": "true"}
        settings = workspace.settings(name, **same, **changes, stochastic_rounding=stochastic)
        main(settings)
        losses[name] = workspace.metrics(name, "loss")[-8:]
    means = {name: sum(values) / len(values) for name, values in losses.items()}
    print(means)
    start = workspace.metrics("learn-exact", "loss")[0]
    assert abs(means["stochastic"] - means["exact"]) < 0.1 * (start - means["exact"])
    assert means["nearest"] - means["exact"] > 0.3 * (start - means["exact"])


def test_states_in_host_memory_on_two_gpus(workspace):
    same = {"steps": 3, "save_every": 3, "device": "cuda", "deterministic": "true", **BF16}
    for run, offload in (("two-here", "false"), ("two-there", "true")):
        settings = workspace.settings(run, optimizer_offload=offload, **same)
        Ranks(2, by_definition, settings, on_gpus=True).finish()
    found = [tensors(step(workspace.root / run, 3)) for run in ("two-here", "two-there")]
    assert all(torch.equal(found[1][name], t) for name, t in found[0].items())
