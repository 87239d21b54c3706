"""The command line and documents of all benchmarks; experts and padding at tiny size."""

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

import tigon
from bench import (
    adapters,
    attention,
    checkpoint,
    compare,
    cpu,
    distillation,
    estimates,
    generate,
    generate_multi,
    harness,
    kernels,
    layouts,
    long_sums,
    measure,
    moe,
    one_shot_sum,
    optimizers,
    padding,
    parallel,
    preference,
    recipes,
    timing,
    train_curves,
    train_multi,
    train_step,
    trainer,
)
from bench.compare_side import LLAMA_1B, QWEN3_MOE
from bench.harness import RESULTS, ROOT
from tests.test_bench import clock

__all__ = ["clock"]

BENCHES = (kernels, moe, attention, padding, generate, cpu, compare)
BENCHES += (train_step, train_multi, train_curves, preference, distillation, recipes, checkpoint)
BENCHES += (parallel, adapters, generate_multi, one_shot_sum, long_sums, estimates, trainer)
BENCHES += (optimizers, layouts)


def test_errors_in_records_name_files_from_the_root(tmp_path: Path) -> None:
    side = tmp_path / "side.py"
    side.write_text(f"raise OSError('{ROOT}/tigon/cli.py')")
    found = estimates.run_ranks(side, 1, tmp_path, [], 60)
    assert found["error"] == "OSError: tigon/cli.py"
    for path in RESULTS.glob("*.json"):
        assert not re.search(r'File \\"/\S*/(tigon|bench|tests)/', path.read_text()), path


@pytest.mark.parametrize("bench", [b.BENCH for b in BENCHES], ids=lambda bench: bench.kind)
def test_the_docs_show_the_newest_runs(bench: harness.Bench) -> None:
    if not list(RESULTS.glob(f"{bench.kind}*.json")):
        pytest.skip(f"bench/{bench.kind}.py has not run yet")
    found = harness.records(bench.kind)
    for name, block in bench.documented(found).items():
        text = (ROOT / name).read_text(encoding="utf-8")
        command = f"run bench/{bench.kind}.py --write-docs"
        assert text == harness.between(text, block, name, bench.kind), command
    assert all(record["commit"] in bench.show(record) for record in found)


def test_each_script_has_a_command_line() -> None:
    """It starts where the package is not installed, from any folder."""
    for bench in BENCHES:
        assert bench.__file__ is not None
        text = Path(bench.__file__).read_text(encoding="utf-8")
        assert text.endswith('if __name__ == "__main__":\n    harness.main(BENCH)\n')
        assert "--only" in harness.parser_of(bench.BENCH).format_help()


def test_bad_cases_and_missing_gpus_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in {
        ("--only", "rms_norm,rmsnorm"): "no case rmsnorm; there are rms_norm, rms_norm_residual",
        ("--only", "rms_norm"): "measuring needs a CUDA GPU; --table and --write-docs need none",
    }.items():
        with pytest.raises(SystemExit):
            harness.main(kernels.BENCH, arguments)
        assert message in capsys.readouterr().err


def test_a_document_shows_the_newest_record_of_every_machine() -> None:
    bench = harness.Bench("k", "", lambda _: "", lambda r: f"{r['machine']} {r['date']}", ())
    rows = [("A", "1", True), ("B", "9", False), ("A", "2", True), ("A", "3", False)]
    records = [{"machine": m, "date": d, "complete": c} for m, d, c in rows]
    one = replace(bench, document="d.md")
    assert one.documented(records) == {"d.md": "A 2"}
    assert replace(one, each_machine=True).documented(records) == {"d.md": "A 2\n\nB 9"}
    assert replace(bench, each_machine=True).documented(records) == {}


def test_a_verdict_has_digits_enough_to_be_followed() -> None:
    for reached, aim, most, said in (
        (0.886, 0.87, True, "MISSED: x: 0.886, target ≤ 0.87"),
        (1.35008, 1.35, False, "met: x: 1.350, target ≥ 1.35"),
        (1.0004, 1.0, True, "MISSED: x: 1.0004, target ≤ 1.00"),
        (1.1199, 1.12, False, "MISSED: x: 1.1199, target ≥ 1.12"),
        (0.168, 1 / 6, True, "MISSED: x: 0.1680, target ≤ 0.167"),
        (1.0, 1.0, True, "met: x: 1.000, target ≤ 1.00"),
    ):
        assert harness.verdict("x", reached, aim, most=most) == said
    assert harness.judge(1.00004, 1.0, True, 2) == (False, "1.00004", "1.00")


def test_records_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    for name in ("checkpoint_export-cpu", "checkpoint-cpu", "checkpoint", "checkpoints"):
        (tmp_path / f"{name}.json").write_text(json.dumps(name))
    assert harness.records("checkpoint") == ["checkpoint", "checkpoint-cpu"]
    assert harness.records("checkpoint_export") == ["checkpoint_export-cpu"]


def test_a_saved_checkpoint_is_shown_and_judged() -> None:
    saved = {"tigon": (2.0, 4e9), "transformers": (8.0, 4e9), "raw": (1.0, 4e9)}
    rows = {name: {"seconds": s, "bytes": b} for name, (s, b) in saved.items()}
    _, table, judged = checkpoint.exports_of(rows)
    assert "| tigon | 2.00 | 2.00 |" in table and "| raw writes | 1.00 | 4.00 |" in table
    assert judged == "met: time of saving over transformers': 0.250, target ≤ 0.33"
    rows["tigon"]["seconds"] = 4.0
    assert checkpoint.exports_of(rows)[2].startswith("MISSED: ")
    assert checkpoint.exports_of({}) == []


def test_cases_are_chosen_by_name_or_by_a_part_of_it() -> None:
    names = ("rope", "qk_norm_rope", "rms_norm", "host")
    assert harness.chosen(["rope"], names) == ["rope"]
    assert harness.chosen(["host", "norm"], names) == ["qk_norm_rope", "rms_norm", "host"]
    assert (
        harness.split("host,norm", names) == ["host", "norm"] and harness.split(None, names) == []
    )
    assert harness.split("8B, fp8", ["8B", "8B, fp8"]) == ["8B, fp8"]


def test_experts_agree_with_the_definition(clock: None) -> None:
    """A tiny layer by ours and by transformers, and the dense products beside them."""
    path = moe.EXPERTS["Qwen3-30B-A3B"]
    what = moe.problem(24, 16, 8, 4, 2, path, True)
    what.providers = [p for p in what.providers if p.name != "transformers grouped_mm"]
    found = measure.measure("tiny", what, measure.ONCE)
    ours, theirs, liger = found["providers"]
    assert liger["error"].startswith("ModuleNotFoundError")
    for row in (ours, theirs):
        assert set(row["errors"]) == {"y", "dx", "dgate_up", "ddown", "dweights"}
        assert 0 < max(row["errors"].values()) < 0.02
    assert found["references"] == {"forward_ms": [1.0, 2.0, 3.0], "both_ms": [1.0, 2.0, 3.0]}


def test_a_layer_of_experts_is_shown(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward takes 1, 3, 5, 7 ms by one provider after the other, forward and backward 2, 4..."""
    name, ticks = "Qwen3-30B-A3B", count(1)
    monkeypatch.setattr(moe, "SHAPES", {name: (24, 16, 8, 4, 2)})
    monkeypatch.setattr(timing, "milliseconds", lambda *_, **__: [float(next(ticks))])
    layer = json.loads(json.dumps(moe.layer(name, True, "cpu")))
    flops = layer["flops_forward"]
    assert flops == 6 * 24 * 2 * 16 * 8
    ours = layer["providers"]["tigon"]
    assert ours["forward_tflops"] == flops / 1e9 and ours["backward_tflops"] == 2 * flops / 1e9
    shown = moe.layer_table({name: layer})
    assert f"| {name} | tigon | 1 | 0 | 7.00 | 1 | 0 | 1.00 | " in shown
    assert f"| {name} | dense GEMMs | 7 | 0 | 1.00 | 1 | 0 | 1.00 |  |  |" in shown
    assert f"| {name} | Liger | ModuleNotFoundError: No module" in shown


TINY_MODEL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TINY_MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_padded_rows_are_measured_and_shown(clock: None) -> None:
    """Ours with and without padding, and transformers: the same loss, the same gradient."""
    inputs = padding.batch(97, 3, 7)
    record = padding.measured(LLAMA_1B | TINY_MODEL, inputs, measure.ONCE)
    rows = record["providers"]
    assert list(rows) == [padding.WITH, padding.WITHOUT, padding.THEIRS]
    assert record["real"] == int((inputs["labels"] != -100).sum()) < inputs["labels"].numel()
    for row in rows.values():
        assert row["ms"] == [1.0, 2.0, 3.0] and row["gradient_off"] < 0.01
        assert row["loss"] == pytest.approx(rows[padding.WITH]["loss"], rel=1e-3)
    stamp = {"gpu": "G", "torch": "2", "transformers": "5", "commit": "c", "date": "2026-11-21"}
    shown = padding.show(record | stamp | {"uncommitted_changes": False})
    rate = f"{record['real'] / 2e-3:,.0f}"
    assert f"| tigon | 2 | {rate} | 1.00 | 0.0 | {rows['tigon']['loss']:.4f} |" in shown


def test_a_stack_of_experts_is_measured(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an optimizer, so that the loss is that of the second step."""
    monkeypatch.setattr(moe, "STACK_TOKENS", (1, 12))
    more = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    stack = moe.stack(QWEN3_MOE | TINY_MODEL | more, True, "cpu")
    ours, theirs, liger = stack["providers"].values()
    assert ours["tokens_per_second"] == 12e3 / 2.0 == theirs["tokens_per_second"]
    assert 3.0 < ours["loss"] < 6.0 and liger["error"].startswith("ModuleNotFoundError")
    assert "| tigon | 2 | 6000 | 0.0 |" in moe.stack_table(stack)
    assert "| transformers + Liger | ModuleNotFoundError: No module" in moe.stack_table(stack)


def test_the_cpu_beside_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tigon.Llama.from_config(LLAMA_1B | TINY_MODEL | {"vocab_size": 64})
    model.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(cpu, "DECODE", [(2, 5)])
    monkeypatch.setattr(cpu, "NEW_TOKENS", 3)
    monkeypatch.setattr(cpu, "NEVER", None)
    threads, out = torch.get_num_threads(), tmp_path / "out.json"
    rest = ["--quick", "--threads", "1", "2", "--out", str(out)]
    harness.main(cpu.BENCH, [str(tmp_path / "tiny"), "--only", "float32", *rest])
    torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    decoded, trained, *others = record["results"]
    assert decoded["what"] == "decoded token" and trained["what"] == "training step"
    assert decoded["ours_ms"] > 0 and trained["transformers_ms"] > 0 < trained["ratio"]
    assert record["model"] == "tiny" and decoded["threads"] == 1
    assert [row["threads"] for row in others] == [2, 2]
    assert "| training step | float32 | 2 | 1 | 512 | " in cpu.show(record)
