"""What adapters cost, without a GPU: problems compute what they say, and records are shown."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import adapters, harness, measure, timing
from bench.adapters import FORMULA, MODELS, OURS, STEPS
from bench.harness import Record
from tests.small import LLAMA


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's clock and memory are played: everything takes 2 ms and 2 MiB."""

    def times(run: timing.Run, *_: Any, **__: Any) -> list[float]:
        run()
        return [2.0]

    monkeypatch.setattr(gc, "collect", int)  # 0.2 s in a process this large
    monkeypatch.setattr(timing, "milliseconds", times)
    monkeypatch.setattr(timing, "peak_mib", lambda run, *_: times(run)[0])


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("parts", [(16, 8, 8), (24,)])
def test_both_compute_the_truth(parts: tuple[int, ...], dropout: bool) -> None:
    torch.manual_seed(0)
    problem = adapters.linear(64, parts, rows=40, dropout=dropout)
    found = measure.measure("", problem, measure.ONCE)
    names = {f"{kind}{i}" for kind in ("y", "da", "db") for i in range(len(parts))} | {"dx"}
    assert [row["name"] for row in found["providers"]] == [OURS, FORMULA][: 2 - dropout]
    for row in found["providers"]:
        assert set(row["errors"]) == names and 0 < max(row["errors"].values()) < 0.02, row
    # The truth itself: of the definition, in fp64
    exact = problem.truth()
    assert exact["y0"].shape == (40, parts[0]) and exact["db0"].abs().sum() > 0
    assert dict(found["references"]).keys() == {"forward_ms", "both_ms"}


def test_four_bits_are_held_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    found = adapters.dequantising((8, 64), 1e9, measure.ONCE)
    assert found["bytes"] == 8 * 64 // 2 + 8 + 4 + 4 + 8 * 64 * 2
    (row,) = found["providers"]
    assert row["other_share"] == 0 and row["ms"] == [2.0] * 3
    right = adapters.nf4.nf4_dequantise
    monkeypatch.setattr(adapters.nf4, "nf4_dequantise", lambda *given: right(*given) * 1.01)
    (row,) = adapters.dequantising((8, 64), 1e9, measure.ONCE)["providers"]
    assert "differ from the definition" in row["error"]


@pytest.mark.parametrize("name", MODELS)
def test_models_train_the_adapter_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {k: v for k, v in LLAMA.items() if k in adapters.LLAMA_8B}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kind, values, config, few = MODELS[name]
    values = values | {k: v for k, v in small.items() if k in values and k != "model_type"}
    monkeypatch.setitem(MODELS, name, (kind, values, config, few))
    made = adapters.model(name, 2, device="cpu")
    ids = torch.randint(0, 100, (1, 9))
    made.train()(ids, labels=ids).loss.backward()
    learned = {n: p for n, p in made.named_parameters() if p.requires_grad}
    assert learned and all(".lora" in n and p.grad.abs().sum() > 0 for n, p in learned.items())
    assert ("experts.lora" in str(list(learned))) == name.endswith("experts too")
    (optimizer,) = adapters.adamw(made.parameters()).param_groups
    assert len(optimizer["params"]) == len(learned)


def test_a_run_writes_what_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(adapters, "LINEARS", {"o": (64, (24,))})
    monkeypatch.setattr(adapters, "ROWS", 40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch, "set_default_device", lambda _: None)
    monkeypatch.setattr(timing, "wait", timing.nothing)
    monkeypatch.setattr(measure.Effort, "copy", lambda *_: [1.0, 2.0, 3.0])
    steps: Record = {name: {"ms": [1.0, 4.0, 5.0], "peak_mib": 2.0, "loss": 3.0} for name in MODELS}
    steps["DoRA"]["ms"], steps["QLoRA"] = [1.0, 5.0, 6.0], {"error": "E: no"}
    monkeypatch.setattr(adapters, "training_steps", lambda *_: steps)
    out = tmp_path / "adapters.json"
    arguments = ["--only", "o,o with dropout,nf4,steps", "--out", str(out), "--commit", "abc1234"]
    harness.main(adapters.BENCH, arguments)
    shown = adapters.show(json.loads(out.read_text()))
    assert "| o | 2.00 | 2.00 | 2.00 | 1.00 | 2.00 | 1.00 | 2.00 | 2.00 | 0.00" in shown
    assert "| o with dropout | 2.00 | 2.00 |" in shown and "| 24 x 64 | tigon | 2.000 |" in shown
    assert "| DoRA | 5.000 | 1.25 | 2.00 | 3.0000 |" in shown and "| QLoRA | E: no |" in shown
    assert list(steps) == list(json.loads(out.read_text())[STEPS])
