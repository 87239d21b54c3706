"""Truths that results are compared with, and the wrong results that this shows; parts of a time."""

import itertools
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench import adapters, end_to_end_side, gated_delta, generate_cases, kernels, measure
from bench.attention_cases import problem
from bench.generate_cases import OURS
from tests.bench.small import RAGGED_ATTENTION, SMALL_KERNELS, SMALL_LLAMA, Patch
from tigon.kernels import AttentionMask, attention_ref


def test_truth_does_not_depend_on_the_chunk() -> None:
    x, w, dy = torch.randn(7, 5), torch.randn(5), torch.randn(7, 5)
    expected = {"y": x.sin() * w, "dx": dy * w * x.cos(), "dw": (dy * x.sin()).sum(0)}
    names = {"x": x, "row": torch.arange(7)}, {"w": w}, ("y",), (dy,)
    for step in (3, 7, 100):
        found = measure.truth(
            lambda x, row, w: x.sin() * w * (row[:, None] >= 0), *names, step=step
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_truth_is_the_definition(softcap: float | None) -> None:
    what, _ = problem(replace(RAGGED_ATTENTION, softcap=softcap))
    exact = what.truth()
    wide = [x.detach().double().requires_grad_() for x in what.leaves.values()]
    ids = torch.tensor([[0] * 5 + [1] * 3, [2] + [3] * 7])
    out = attention_ref(*wide, mask=AttentionMask(8, segment_ids=ids), window=3, softcap=softcap)
    grads = torch.autograd.grad(out, wide, what.upstream[0].double())
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(exact[name].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("clock")
def test_provider_that_raises_is_recorded_and_restored() -> None:
    made = kernels.build(SMALL_KERNELS[0], "cpu", {})
    (dy,) = made.upstream

    def broken() -> None:
        dy.zero_()
        raise RuntimeError("no kernel for this")

    made.providers[0] = measure.Provider("Liger", lambda: broken, overwrites=(dy,))
    del made.providers[2:]
    fresh = dy.clone()
    failed, eager = measure.measure("", made, measure.ONCE)["providers"]
    assert failed == {"name": "Liger", "error": "RuntimeError: no kernel for this"}
    assert eager["both_ms"] == [1.0, 2.0, 3.0] and torch.equal(dy, fresh)
    names = [p.name for p in kernels.build(SMALL_KERNELS[0], "cpu", {"Liger": None}).providers]
    assert "Liger" not in names and "QuACK" in names


@pytest.mark.usefixtures("clock")
def test_wrong_numbers_of_nf4_are_noticed(monkeypatch: Patch) -> None:
    right = adapters.quantized.dequantize_nf4
    monkeypatch.setattr(adapters.quantized, "dequantize_nf4", lambda *given: right(*given) * 1.01)
    (row,) = adapters.dequantising((8, 64), 1e9, measure.ONCE)["providers"]
    assert "differ from the definition" in row["error"]


def test_each_second_belongs_to_the_innermost_phase(monkeypatch: Patch) -> None:
    now = itertools.count(1.0)
    monkeypatch.setattr(end_to_end_side.time, "monotonic", lambda: next(now))

    class Trainer:
        def load(self) -> str:
            return "loaded"

        def train(self) -> str:
            return self.load()

    module = ModuleType("a_library")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_library", module)
    clock = end_to_end_side.Clock(0.0)
    clock.watch("a_library:Trainer.load", end_to_end_side.MODEL)
    clock.watch("a_library:Trainer.train", end_to_end_side.STEPS)
    assert Trainer().train() == "loaded"  # enters at 1, loads from 2 to 3, leaves at 4
    clock.turn()
    assert clock.seconds == {"start": 1.0, "model": 1.0, "steps": 2.0, "other": 1.0}


def test_kernels_that_hold_up_a_step_are_named(monkeypatch: Patch) -> None:
    module = ModuleType("a_compiler")
    module.compile = lambda source: source  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_compiler", module)
    clock = end_to_end_side.Clock(0.0)
    clock.watch("a_compiler:compile", end_to_end_side.COMPILE)
    triton, cute = SimpleNamespace(name="rope_kernel"), itertools.repeat
    assert module.compile(triton) is triton
    assert not clock.compiled  # the first step waits for its kernels anyway
    clock.step()
    module.compile(triton)
    clock.step()
    module.compile(cute)
    module.compile(cute(0))
    assert clock.compiled == [(1, "rope_kernel"), (2, "repeat"), (2, "repeat")]


def test_wrong_token_is_noticed() -> None:
    model = generate_cases.ours(SMALL_LLAMA, "cpu")
    tokens = generate_cases.generating(model, OURS, torch.randint(1000, 1201, (2, 5)))(7)
    assert generate_cases.choice_gaps(model, tokens, 7).max() < 0.1
    tokens[1, 8] = (tokens[1, 8] + 1) % 1201
    assert generate_cases.choice_gaps(model, tokens, 7).max() > generate_cases.DOUBT


def test_gated_delta_is_beside_the_truth() -> None:
    found = gated_delta.check([5, 0, 66], (1, 2), 8, torch.float32)
    for errors in found.values():
        assert errors.keys() == {"o", "state", *(f"d{n}" for n in gated_delta.NAMES)}
        assert max(errors.values()) < 1e-5
