"""Optimizers whose weights and states have few bits, against fp32."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.numbers import neighbours
from tigon.train import load
from tigon.train.optim import adamw, build_optimizer, low_precision, parameter_groups, state_bytes
from tigon.weights import Layout, ShardSpec, TensorSlice

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    """Parameters as a model has them, by which the elements are numbered."""

    def __init__(self, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        self.shard_specs: dict[str, ShardSpec] = {}
        torch.manual_seed(0)
        for name, shape in shapes.items():
            weight = torch.randn(shape) * 0.05
            self.register_parameter(name, torch.nn.Parameter(weight.to(dtype)))

    def layout(self, stacked_experts: bool = False) -> Layout:
        return {n: (TensorSlice.whole(n, tuple(p.shape)),) for n, p in self.named_parameters()}

    def learn(self, step: int) -> None:
        draw = torch.Generator().manual_seed(step)
        for p in self.parameters():
            p.grad = (torch.randn(p.shape, generator=draw) * 1e-3).to(p)


SHAPES = {"a": (130, 64), "b": (137,), "c": (3, 8, 32), "d": (70, 33)}


def settings(**changes):
    values = {"run_dir": "x", "data": "x", "model": "x", "lr": 1e-2, "weight_decay": 0.1} | changes
    return load(None, [f"{key}={value}" for key, value in values.items()])


def trained(steps: int, shapes=SHAPES, **changes):
    config = settings(**changes)
    model = Model(getattr(torch, config.param_dtype), shapes)
    optimizer = build_optimizer(model, config)
    for step in range(steps):
        model.learn(step)
        optimizer.step()
    return model, optimizer


def states(model, optimizer) -> dict[str, Tensor]:
    return {
        f"{kind}.{name}": state
        for name, p in model.named_parameters()
        for kind, state in optimizer.state[p].items()
    }


@pytest.mark.parametrize("size", [None, 100, 1 << 22])
def test_float32_is_torchs_adamw_bit_for_bit(size, monkeypatch):
    """Updated in place, or in pieces of so many elements, as offloaded states are."""
    config = settings()
    plain, stored = (Model(torch.float32, SHAPES) for _ in range(2))
    options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    its = torch.optim.AdamW(parameter_groups(plain, config), **options, fused=True)
    own = build_optimizer(stored, config)
    if size is not None:
        monkeypatch.setattr(adamw, "SIZE", size)
        monkeypatch.setattr(own, "is_copied", lambda _: True)
    for step in range(5):
        for model, optimizer in ((plain, its), (stored, own)):
            model.learn(step)
            if step == 1:  # a is then corrected for fewer steps
                model.a.grad = None
            optimizer.step()
    for name, p in plain.named_parameters():
        assert torch.equal(stored.get_parameter(name), p), name
    expected = states(plain, its)
    found = states(stored, own)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], state) for name, state in expected.items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_bit_for_bit(momentum):
    changes = {"momentum": momentum, "nesterov": momentum > 0, "weight_decay": 0.1}
    found, own = trained(5, optimizer="sgd", **changes)
    expected = Model(torch.float32, SHAPES)
    groups = [[p for p in expected.parameters() if (p.dim() > 1) == matrix] for matrix in (0, 1)]
    torchs = torch.optim.SGD(
        [{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}],
        1e-2,
        fused=True,
        **changes,
    )
    for step in range(5):
        expected.learn(step)
        torchs.step()
    for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name
        if momentum:
            buffer = torchs.state[q]["momentum_buffer"]
            assert torch.equal(own.state[p]["momentum_buffer"], buffer), name


def test_to_nearest_loses_what_stochastic_rounding_keeps():
    """Weights of 1 move by 1e-4 a step, a fortieth of bfloat16's spacing there."""
    changes = {"param_dtype": "bfloat16", "optimizer": "adamw_bf16", "lr": 1e-4, "weight_decay": 0}
    moved = {}
    for stochastic in ("true", "false"):
        config = settings(**changes, stochastic_rounding=stochastic)
        model = Model(torch.bfloat16, {"w": (64, 64)})
        model.w.data.fill_(1.0)
        optimizer = build_optimizer(model, config)
        for _ in range(50):
            model.w.grad = torch.ones_like(model.w)  # each of Adam's updates is then lr
            optimizer.step()
        moved[stochastic] = 1 - model.w.double().mean().item()
    assert moved["false"] == 0
    # The spacing below 1 is 2**-8; an element's variance of 50 roundings is at most 50 * 1/4 * that
    error = 2**-8 * math.sqrt(50 * 0.0256 * (1 - 0.0256) / 64**2)
    assert moved["true"] == pytest.approx(50 * 1e-4, abs=4 * error + 2e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16", "adamw_8bit"])
def test_bfloat16_weights_are_updated_in_float32(optimizer):
    """One step: every weight is a neighbour of what fp32 AdamW makes of it."""
    exact = Model(torch.float32, SHAPES)
    for p in exact.parameters():
        p.data = p.data.bfloat16().float()
    reference = build_optimizer(exact, settings())
    exact.learn(0)
    for p in exact.parameters():
        p.grad = p.grad.bfloat16().float()
    reference.step()
    found, _ = trained(1, optimizer=optimizer, param_dtype="bfloat16")
    for (name, p), q in zip(found.named_parameters(), exact.parameters(), strict=True):
        low, high = neighbours(q.detach())
        near = (p.double() == low) | (p.double() == high) | (p.double() == q.double())
        assert near.all(), name


def test_the_documented_bytes_are_those_that_are_kept():
    text = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
    table = text.partition("<!-- precision:begin -->\n")[2].partition("<!-- precision:end -->")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert len(rows) == 8
    for dtype, name, *sizes in rows:
        optimizer, _, momentum = name.partition(", with ")
        changes = {momentum: 0.9} if momentum else {}
        model, own = trained(1, {"w": (8, 512)}, optimizer=optimizer, param_dtype=dtype, **changes)
        kept = [s for s in own.state[model.w].values() if s.dim()]
        found = [model.w.nbytes, model.w.grad.nbytes, sum(s.nbytes for s in kept)]
        assert [f"{round(x / 4096, 2):g}" for x in [*found, sum(found)]] == sizes, (dtype, name)
        config = settings(optimizer=optimizer, param_dtype=dtype, **changes)
        assert state_bytes(config) * 4096 == found[2]


def test_eight_bits_are_torchaos(monkeypatch):
    """Its codes and scales, where rows are whole blocks of 256; run without its compiler."""
    torchao = pytest.importorskip("torchao.optim")
    from torchao.optim import quant_utils, subclass_8bit

    for signed in (True, False):
        table = torch.tensor(quant_utils.create_dynamic_map(signed))
        assert torch.equal(low_precision.tables(signed, CPU)[0], table)
    shapes = {"w": (24, 512)}
    mine, own = trained(5, shapes, optimizer="adamw_8bit")
    theirs = Model(torch.float32, shapes)
    optimizer = torchao.AdamW8bit(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            theirs.learn(step)
            optimizer.step()
    # But for the few elements whose second moment became 0 there
    assert (~torch.isclose(mine.w, theirs.w, rtol=1e-5, atol=1e-6)).float().mean() < 1e-3
    for kind in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[theirs.w][kind]
        assert isinstance(state, subclass_8bit.OptimState8bit)
        codes = own.state[mine.w][f"{kind}_codes"]
        # A value within float32's error of the middle between two codes may take either
        assert (codes.int() - state.codes.int()).abs().max() <= 1
        assert (codes != state.codes).float().mean() < 1e-3
        scale = own.state[mine.w][f"{kind}_scale"].flatten()
        torch.testing.assert_close(scale, state.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_the_nearest_code(signed):
    torch.manual_seed(0)
    x = torch.randn(6, 576) * torch.logspace(-16, 3, 6).view(-1, 1)
    x = x if signed else x * x
    x[2, :64] = 0
    codes, scale = low_precision.quantize(x, signed)
    assert codes.dtype == torch.uint8 and scale.shape == (6, 9)  # 576 is 9 blocks of 64
    found = low_precision.dequantize(codes, scale, signed)
    table = low_precision.tables(signed, CPU)[0].double()
    share = (x.double().view(6, 9, 64) / scale.double().clamp(min=1e-300).unsqueeze(-1)).view(-1)
    nearest = (share.unsqueeze(-1) - table).abs().amin(-1).view(6, 576)
    off = (found.double() - x.double()).abs() / scale.double().repeat_interleave(64, 1).clamp(
        1e-300
    )
    assert (off - nearest).max() < 1e-6
    # The widest spacing of the table is 0.9 / 64 (signed) and 0.9 / 128 of a block's largest
    assert off.max() <= 0.9 / (128 if signed else 256) * 1.01
    assert (found[2, :64] == 0).all()
    again = low_precision.quantize(found, signed)
    assert torch.equal(again[0].int().sign(), codes.int().sign())


def test_eight_bit_updates_of_small_gradients_are_bounded():
    """Squares of the small ones are below the least code of their block, the momentum is not."""
    sizes = {}
    for optimizer in ("adamw", "adamw_8bit"):
        model = Model(torch.float32, {"w": (4, 256)})
        learner = build_optimizer(model, settings(optimizer=optimizer, lr=1e-3, weight_decay=0))
        sizes[optimizer] = 0.0
        for step in range(8):
            before = model.w.detach().clone()
            model.w.grad = torch.zeros(4, 256)
            if step % 4 == 0:
                model.w.grad += torch.tensor([1e-2] + [3e-6] * 255)
            learner.step()
            sizes[optimizer] = max(sizes[optimizer], (model.w - before).abs().max().item() / 1e-3)
    assert sizes["adamw"] == pytest.approx(1, rel=1e-3)
    assert sizes["adamw_8bit"] < 1.1  # 127 where the second moment becomes 0
