"""AdamW by one kernel, beside its definition: under Triton's interpreter, or on a GPU."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import tigon.kernels
from tests.train.test_precision import Model, settings
from tigon.kernels.norm import grad_norm
from tigon.kernels.optim import adamw
from tigon.kernels.optim.low_bits import CodeTables, draw_bits, extract_16_bits, quantize
from tigon.kernels.runtime import tl, triton
from tigon.train.optim import build_optimizer, clip, clip_gradients, low_precision
from tigon.train.optim.positions import runs_of
from tigon.utils import random

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Matrices with blocks of 64, 32 and none; vectors; more than a program's elements, and fewer
SHAPES = {"a": (18, 64), "b": (137,), "c": (3, 5, 32), "d": (7, 33), "e": (1, 1)}
CASES = [
    (param, states, stochastic)
    for param, states in itertools.product(
        ("float32", "bfloat16"), ("adamw", "adamw_bf16", "adamw_8bit")
    )
    for stochastic in (("true", "false") if param == "bfloat16" else ("false",))
]


@pytest.fixture(autouse=True)
def triton_path():
    with tigon.kernels.use("triton"):
        yield


@pytest.fixture
def kernel_calls(monkeypatch):
    """How many parameters each call of the kernel has updated."""
    calls = []
    call = adamw.FusedAdamW.__call__

    def counted(self, name, slots, *rest):
        calls.append(len(slots))
        call(self, name, slots, *rest)

    monkeypatch.setattr(adamw.FusedAdamW, "__call__", counted)
    return calls


def learner(shapes=SHAPES, **changes):
    config = settings(**changes)
    model = Model(getattr(torch, config.param_dtype), shapes).to(DEVICE)
    return model, build_optimizer(model, config)


def stepped(mode: str, steps: int, shapes=SHAPES, **changes):
    """The model and its optimizer after so many steps on a path."""
    model, optimizer = learner(shapes, **changes)
    with tigon.kernels.use(mode):
        for step in range(steps):
            model.learn(step)
            optimizer.step()
    return model, optimizer


@triton.jit
def _draw_kernel(out, first, stream, N: tl.constexpr):
    at = tl.arange(0, N)
    bits = draw_bits(first, at, stream)
    tl.store(out + at, bits.to(tl.int64, bitcast=True))
    for i in tl.static_range(3):
        tl.store(out + (i + 1) * N + at, extract_16_bits(bits, i).to(tl.int64))


@pytest.mark.parametrize("first", [0, 12345, (1 << 40) + 7])
def test_draws_are_those_of_the_definition(first):
    for seed, step in ((0, 1), (3, 7), (-1, 1 << 20)):
        out = torch.zeros(4, 256, dtype=torch.int64, device=DEVICE)
        _draw_kernel[(1,)](out, first, low_precision.stream_seed(seed, step), 256)
        at = torch.arange(first, first + 256, device=DEVICE)
        bits = random.random_bits(low_precision.stream_seed(seed, step), at)
        assert torch.equal(out[0], bits)
        assert all(torch.equal(out[i + 1], random.take_16_bits(bits, i)) for i in range(3))


@pytest.mark.parametrize(("param", "states", "stochastic"), CASES)
def test_an_update_is_that_of_the_definition(param, states, stochastic, kernel_calls):
    """float32 within its rounding, and what has fewer bits nearly always equal in every bit: an
    earlier rounding seldom changes what a draw decides, and then by one neighbour."""
    changes = {"param_dtype": param, "optimizer": states, "stochastic_rounding": stochastic}
    expected, its = stepped("reference", 1, **changes)
    assert not kernel_calls
    found, own = stepped("triton", 1, **changes)
    assert sum(kernel_calls) == len(SHAPES)
    start, _ = learner(**changes)
    pairs = zip(found.named_parameters(), expected.parameters(), start.parameters(), strict=True)
    for (name, p), q, before in pairs:
        assert not torch.equal(p, before), name
        assert_near(p.detach(), q.detach(), name)
        assert own.state[p].keys() == its.state[q].keys()
        for kind, state in its.state[q].items():
            assert own.state[p][kind].dtype == state.dtype
            assert_near(own.state[p][kind], state, f"{kind} of {name}")


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    if found.dtype == torch.float32:
        # Six operations that round differ by at most 2 units each; a weight's update is 1e-2
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, msg=what)
        return
    differs = found != expected
    assert differs.sum() <= 1 + found.numel() // 500, what
    if found.dtype == torch.uint8:
        assert (found.int() - expected.int()).abs().max() <= 1, what
    else:
        spacing = 2.0**-7 * expected.float().abs()
        assert ((found.float() - expected.float()).abs() <= spacing).all(), what


@pytest.mark.parametrize("states", ["adamw_bf16", "adamw_8bit"])
def test_states_of_exact_values_have_every_bit(states):
    """betas and gradients by which nothing is rounded before it is kept: all draws, all codes."""
    changes = {"optimizer": states, "beta1": 0.5, "beta2": 0.75, "param_dtype": "bfloat16"}
    kept = []
    for mode in ("reference", "triton"):
        model, optimizer = learner(**changes)
        draw_from = torch.Generator().manual_seed(0)
        with tigon.kernels.use(mode):
            for _ in range(2):  # states of zeros have exact sums in the first step, not later
                for p in model.parameters():
                    given = torch.randint(-40, 40, p.shape, generator=draw_from) * 2.0**-8
                    p.grad = given.to(p)
                optimizer.state.clear()
                optimizer.step()
        kept.append([s for state in optimizer.state.values() for s in state.values()])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_groups_counters_and_missing_gradients(kernel_calls):
    """Every parameter has its own settings and its own count; one without a gradient stays."""
    ends = []
    for mode in ("reference", "triton"):
        model, optimizer = learner()
        optimizer.param_groups[1] |= {"lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.3}
        with tigon.kernels.use(mode):
            for step in range(3):
                model.learn(step)
                if step == 1:
                    model.a.grad = None
                if step > 0:
                    model.d.grad = None
                before = model.d.detach().clone()
                optimizer.step()
        assert torch.equal(model.d, before)
        ends.append([p.detach() for p in model.parameters()])
    assert len(kernel_calls) == 2 + 2 + 3  # in the last step the matrices have two counts
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_layouts_that_tensors_may_have(kernel_calls):
    """Gradients with strides, storages that begin anywhere, ranks without rows; a weight with
    strides is left to the definition."""
    shapes = {"odd": (6, 64), "strided": (6, 64), "transposed": (6, 6), "none": (0, 64)}
    ends = []
    for mode in ("reference", "triton"):
        model, optimizer = learner(shapes)
        model.odd.data = torch.cat([torch.zeros(1, device=DEVICE), model.odd.data.flatten()])[
            1:
        ].view(6, 64)
        model.transposed.data = model.transposed.data.t()
        assert not model.transposed.is_contiguous()
        model.learn(0)
        model.strided.grad = model.strided.grad.t().contiguous().t()
        with tigon.kernels.use(mode):
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert kernel_calls == [2]
    assert optimizer.state[model.none]["step"] == 1
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("states", ["adamw", "adamw_bf16", "adamw_8bit"])
def test_launches_programs_and_ranks_change_no_bit(states, monkeypatch):
    """One launch for each tensor, smaller programs, 2-byte accesses; a rank with the last rows."""
    changes = {"param_dtype": "bfloat16", "optimizer": states}
    shapes = {"a": (9, 64), "b": (37,)}
    whole, _ = stepped("triton", 2, shapes, **changes)
    for name, value in (("OWN_LAUNCH", 0), ("BLOCK", 256), ("is_aligned", lambda *_: False)):
        with monkeypatch.context() as patch:
            patch.setattr(adamw, name, value)
            model, _ = stepped("triton", 2, shapes, **changes)
        assert all(map(torch.equal, model.parameters(), whole.parameters())), name
    part, optimizer = learner(shapes, **changes)
    row = nn.Parameter(part.a.detach()[7:].clone())
    optimizer.runs[row] = runs_of(None, 7 * 64, row.numel(), 0)
    group = next(group for group in optimizer.param_groups if group["weight_decay"])
    optimizer.param_groups.clear()
    optimizer.add_param_group({**group, "params": [row]})
    for step in range(2):
        part.learn(step)
        row.grad = part.a.grad[7:].clone()
        optimizer.step()
    assert torch.equal(row, whole.a[7:])


def test_scale_multiplies_gradients_and_nan_skips():
    for factor in (0.25, math.nan):
        ends = []
        for mode in ("reference", "triton"):
            model, optimizer = learner(param_dtype="bfloat16", optimizer="adamw_bf16")
            model.learn(0)
            optimizer.step()
            before = [p.detach().clone() for p in model.parameters()]
            model.learn(1)
            given = [p.grad.clone() for p in model.parameters()]
            with tigon.kernels.use(mode):
                optimizer.step(scale=torch.tensor(factor, device=DEVICE))
            ends.append([p.detach() for p in model.parameters()])
            if mode == "triton":  # gradients are only read
                assert all(
                    torch.equal(p.grad, g) for p, g in zip(model.parameters(), given, strict=True)
                )
        if math.isnan(factor):
            assert all(map(torch.equal, ends[1], before))
        else:  # by a power of two a gradient is not rounded
            assert all(map(torch.equal, ends[0], ends[1]))


@triton.jit
def _codes_kernel(
    x, codes, scale, bounds, cells, K: tl.constexpr, B: tl.constexpr, SIGNED: tl.constexpr
):
    at = tl.arange(0, K)[:, None] * B + tl.arange(0, B)[None, :]
    found, largest = quantize(tl.load(x + at), bounds, cells, SIGNED)
    tl.store(codes + at, found)
    tl.store(scale + tl.arange(0, K)[:, None], largest)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block", [32, 256])
def test_codes_are_those_of_the_definition(signed, block):
    """Of numbers of all sizes, of bounds and ends of cells and the numbers next to them, zeros, NaN
    and infinity."""
    tables = [low_precision.tables(sign, DEVICE) for sign in (True, False)]
    _, bounds = tables[not signed]
    own = CodeTables.build(*tables)[1:3] if signed else CodeTables.build(*tables)[4:]
    ends = torch.arange(0x33F00000, 0x3F800001, 1 << 16, dtype=torch.int32, device=DEVICE)
    edges = torch.cat([bounds, ends.view(torch.float32), -ends.view(torch.float32)])
    edges = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1)]).clamp(-1, 1)
    x = torch.randn(64, block, device=DEVICE)
    x *= torch.logspace(-9, 9, 64, device=DEVICE).view(-1, 1) ** 2
    x[24:26], x[26, 3], x[27, :5] = 0.0, math.nan, math.inf
    x[28] *= 1e-44
    x = torch.cat([x, _beside_ones(edges, block)])
    x = x if signed else x.abs()
    count = 1 << (len(x) - 1).bit_length()
    x = torch.cat([x, torch.zeros(count - len(x), block, device=DEVICE)])
    codes = torch.zeros_like(x, dtype=torch.uint8)
    scale = torch.zeros(count, 1, device=DEVICE)
    for first in range(0, count, 64):  # a program's tile
        rows = slice(first, first + 64)
        _codes_kernel[(1,)](x[rows], codes[rows], scale[rows], *own, 64, block, signed)
    expected_codes, expected_scale = low_precision.quantize(x, signed)
    assert low_precision.block_size(block) == block
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes, expected_codes)


def _beside_ones(values: Tensor, block: int) -> Tensor:
    """In blocks that each have a 1, so that a value is its share of the largest."""
    each = block - 1
    rows = -(-len(values) // each)
    padded = torch.zeros(rows * each, device=values.device)
    padded[: len(values)] = values
    return torch.cat([torch.ones(rows, 1, device=values.device), padded.view(rows, each)], 1)


def test_tables_change_only_with_an_address(monkeypatch):
    made = []
    sent = adamw._to_device
    monkeypatch.setattr(adamw, "_to_device", lambda *a: made.append(1) or sent(*a))
    model, optimizer = learner({"a": (3, 64), "b": (5, 64)})
    model.learn(0)
    optimizer.step()
    first = len(made)
    optimizer.step()
    assert len(made) == first
    kept = model.a.grad
    model.a.grad = kept.clone()
    optimizer.step()
    assert len(made) == first + 1  # the rows; which programs there are depends on sizes alone
    before = model.a.detach().clone()
    kept.fill_(math.nan)  # the old gradient is read no more
    optimizer.step()
    assert model.a.isfinite().all() and not torch.equal(model.a, before)


def test_exact_norm_leaves_factor_to_the_update(monkeypatch):
    monkeypatch.setattr(grad_norm, "CHUNK", 4096)
    for dtype in ("float32", "bfloat16"):
        model, optimizer = learner({"a": (90, 64), "b": (137,), "c": (0, 8)}, param_dtype=dtype)
        model.learn(0)
        gradients = [p.grad.clone() for p in model.parameters()]
        exact = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        for limit, factor in ((0.0, None), (2 * exact, 1.0), (exact / 4, 0.25)):
            found, scale = clip(model, optimizer, limit)
            assert found.item() == pytest.approx(exact, rel=2e-7)
            assert torch.equal(found, clip(model, optimizer, limit)[0])
            assert scale is None if factor is None else scale.item() == pytest.approx(factor, 1e-4)
        assert all(
            torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)
        )
        optimizer.step(scale=scale)
        other, its = learner({"a": (90, 64), "b": (137,), "c": (0, 8)}, param_dtype=dtype)
        other.learn(0)
        assert clip_gradients(other, exact / 4).item() == pytest.approx(exact, rel=1e-6)
        its.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            far = 0 if dtype == "float32" else 2.0**-7 * q.float().abs()
            assert ((p.float() - q.float()).abs() <= far + 1e-7).all()


def test_an_update_between_forward_and_backward_is_seen():
    """Autograd must not differentiate with weights that are not those of the forward pass."""
    for mode in ("reference", "triton"):
        with tigon.kernels.use(mode):
            model, optimizer = learner({"a": (4, 64), "b": (5,)})
            model.learn(0)
            x = torch.ones(64, requires_grad=True, device=DEVICE)
            y = model.a @ x
            optimizer.step(scale=torch.tensor(0.5, device=DEVICE))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("states", ["adamw", "adamw_bf16", "adamw_8bit"])
def test_states_are_loaded_as_they_are_kept(mode, states):
    """torch would give them the dtype of their parameters."""
    changes = {"param_dtype": "bfloat16", "optimizer": states}
    model, optimizer = stepped(mode, 1, **changes)
    other, its = learner(**changes)
    other.load_state_dict(model.state_dict())
    its.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name, state in optimizer.state[p].items():
            loaded = its.state[q][name]
            assert loaded.dtype == state.dtype and torch.equal(loaded, state)
            assert loaded is not state
    with tigon.kernels.use(mode):
        for one, of in ((model, optimizer), (other, its)):
            one.learn(1)
            of.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    with pytest.raises(ValueError, match="are not those of this optimizer"):
        kind = "adamw_bf16" if states == "adamw_8bit" else "adamw_8bit"
        learner(**changes | {"optimizer": kind})[1].load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(("param", "states"), [("float32", "adamw"), ("bfloat16", "adamw_8bit")])
@pytest.mark.parametrize("launch", [None, 0], ids=["table", "tensors"])
def test_squares_are_those_of_unscaled_gradients(param, states, launch, monkeypatch):
    monkeypatch.setattr(adamw, "OWN_LAUNCH", launch)
    for factor in (0.25, math.nan):
        model, optimizer = learner(param_dtype=param, optimizer=states)
        model.learn(0)
        parts = [(i, group["params"]) for i, group in enumerate(optimizer.param_groups)]
        sums = []
        optimizer.update(parts, scale=torch.tensor(factor, device=DEVICE), squares=sums)
        found = torch.stack(sums).sum()
        if factor != factor:
            assert found.isnan()
            continue
        expected = sum(p.grad.double().square().sum() for p in model.parameters())
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_codes_of_8_bits_are_needed():
    codes = torch.zeros(4, 32, dtype=torch.uint8, device=DEVICE)
    scale = torch.ones(4, 1, device=DEVICE)
    weight = torch.ones(4, 32, device=DEVICE)
    slot = adamw.AdamWSlot(weight, weight.clone(), codes, codes.clone(), scale, scale.clone())
    with pytest.raises(ValueError, match="pass `codes`"):
        adamw.FusedAdamW(False)(0, [slot], adamw.AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.0, 1, 0))
