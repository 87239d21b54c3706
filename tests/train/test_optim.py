import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.small import LLAMA
from tigon.models import MODELS
from tigon.settings.load import load
from tigon.train.checkpoint.format import optimizer_states
from tigon.train.distributed import shard
from tigon.train.optim import (
    build_optimizer,
    clip_gradients,
    hidden_matrices,
    learning_rate,
    state_bytes,
)
from tigon.train.optim.clip import BucketedNorm


def config(*overrides: str):
    return load(None, ["run_dir=a", "model=m", "data=d", "lr=1.0", *overrides])


WARM, FLAT = [0.25, 0.5, 0.75, 1.0], [1.0] * 16
RATES = {  # of all steps, from 0; None: any
    "schedule=constant warmup_steps=4": WARM + FLAT,
    "schedule=constant warmup_steps=0.2": WARM + FLAT,
    "schedule=linear warmup_steps=4 min_lr_ratio=0.1": WARM + [1 - 0.9 * i / 16 for i in range(16)],
    # A fifth of 24 steps is 5
    "schedule=wsd warmup_steps=4 min_lr_ratio=0.1": (
        WARM + [1.0] * 15 + [1 - 0.18 * i for i in range(5)]
    ),
    **{
        f"schedule=wsd decay_steps={steps} decay_type={shape} min_lr_ratio=0": FLAT + last
        for steps in ("4", "0.2")
        for shape, last in (
            ("linear", [1, 0.75, 0.5, 0.25]),
            ("cosine", [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
            ("sqrt", [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
        )
    },
    # The decay begins after the warm-up, however long both are
    "schedule=wsd warmup_steps=8 decay_steps=8 min_lr_ratio=0": (
        [i / 8 for i in range(1, 9)] + [1, 0.75, 0.5, 0.25]
    ),
}


@pytest.mark.parametrize("given", RATES)
def test_schedules(given):
    expected, settings = RATES[given], config(*given.split())
    rates = [learning_rate(settings, step, len(expected)) for step in range(len(expected))]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["warmup_steps=2.5"], "warmup_steps=2.5 is neither a number of steps nor a share"),
        (["schedule=wsd", "decay_steps=0"], "decay_steps=0.* no step to fall in"),
        (["schedule=wsd", "decay_steps=1"], "decay_steps=1.* give 2 or more, or schedule=constan"),
        (
            ["lr=0", "parameter_groups={match: '*', lr: 1}"],
            r"lr=0 leaves parameter_groups\[0\].lr=1",
        ),
        (
            ["parameter_groups={match: '*', lr: 1, freeze: true}"],
            "with freeze, lr and weight_decay",
        ),
        (["parameter_groups={match: '*', lr: .inf}"], "must be finite"),
    ],
)
def test_settings_that_do_not_fit_together(settings, message):
    with pytest.raises(ValueError, match=message):
        config(*settings)


def trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters after three steps with fixed gradients, then the states."""
    for step in range(3):
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{kind}.{name}": state for kind, state in optimizer.state[p].items()}
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "sgd momentum=0.9"])
def test_sharding_on_one_rank_changes_no_bit(optimizer, world):
    settings = config("weight_decay=0.1", *f"optimizer={optimizer}".split())
    runs = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = MODELS["llama"].from_config(LLAMA)
        if sharded:
            shard(model, world, torch.float32)
        optimizer_of = build_optimizer(model, settings)
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                torch.manual_seed(100 * step + i)
                given = torch.randn(p.shape)
                whole = (given, p.device_mesh, p.placements) if sharded else None
                p.grad = DTensor.from_local(*whole) if whole else given
            optimizer_of.step()
        if optimizer != "muon":  # and it is this rank's tensors that are updated
            kept = [s for state in optimizer_of.state.values() for s in state.values()]
            assert not any(isinstance(s, DTensor) for s in kept)
        runs.append([p.full_tensor() if sharded else p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "adamw_bf16", "muon stochastic_rounding=false", "sgd", "sgd momentum=0.9"],
)
def test_state_bytes_are_those_that_the_optimizer_keeps(optimizer, dtype):
    settings = config(*f"optimizer={optimizer}".split(), f"param_dtype={dtype}")
    model = MODELS["llama"].from_config(LLAMA, dtype=getattr(torch, dtype))
    states = build_optimizer(model, settings)
    trained(states, model)
    hidden = hidden_matrices(model)
    for name, p in model.named_parameters():
        kept = [s for s in states.state[p].values() if s is not None and s.dim()]
        size = sum(s.numel() * s.element_size() for s in kept)
        assert size == p.numel() * state_bytes(settings, hidden=name in hidden), name


def test_a_cosine_is_that_of_torch():
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([p], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.2)
    settings = config("min_lr_ratio=0.2")
    for step in range(10):
        assert learning_rate(settings, step, 10) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()


def test_clipping_scales_to_the_exact_global_norm():
    model = nn.Linear(512, 8192)
    gradients = [torch.randn_like(p) * 5 for p in model.parameters()]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    for limit, scale in ((0.0, 1.0), (0.5, 0.5 / norm), (2 * norm, 1.0)):
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g.clone()
        assert clip_gradients(model, limit).item() == pytest.approx(norm, rel=1e-6)
        for p, g in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, g * scale, rtol=1e-5, atol=1e-6)
    split = BucketedNorm(model)
    split.begin()
    split.add(0, dict(model.named_parameters()), by_kernel=False)
    assert split.total().item() == pytest.approx(norm, rel=1e-6)


def test_the_norm_of_bfloat16_gradients_is_in_float32():
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    given = model.weight.grad.double()
    assert clip_gradients(model, 1.0).item() == pytest.approx(exact, rel=1e-6)
    # Rounded once, and not by a factor that was rounded itself
    assert torch.equal(model.weight.grad, (given / (exact + 1e-6)).bfloat16())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16", "muon", "sgd"])
def test_states_saved_before_the_first_update(optimizer):
    """As where the first steps are skipped: the update after them is the first."""
    models = [MODELS["llama"].from_config(LLAMA) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [build_optimizer(model, config(f"optimizer={optimizer}")) for model in models]
    saved = optimizer_states(models[0], optimizers[0])
    assert all(shard.memory.count_nonzero() == 0 for shard, _ in saved.values())
    both = [trained(*pair) for pair in zip(optimizers, models, strict=True)]
    assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())
