"""Each benchmark has a command line, and docs/ shows its newest whole record."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import (
    adapters,
    attention,
    checkpoint,
    choices,
    compare,
    cost_curves,
    cpu,
    distillation,
    end_to_end,
    epilogues,
    estimates,
    evaluation,
    fp8,
    fp8_curves,
    fp8_recipes,
    gated_delta,
    generate,
    generate_families,
    generate_multi,
    harness,
    kernels,
    killed_run,
    long_sums,
    moe,
    neighbours,
    one_shot_sum,
    optimizers,
    padding,
    parallel,
    preference,
    recipes,
    scaling,
    serve,
    several_gpus,
    train_curves,
    train_step,
    trainer,
)
from bench.__main__ import titles
from bench.generate_cases import OURS, THEIRS
from bench.harness import RESULTS, ROOT, Record
from tests.bench.small import Patch

BENCHES = (kernels, moe, attention, padding, generate, cpu, compare, train_step)
BENCHES += (train_curves, preference, distillation, recipes, checkpoint, parallel, adapters)
BENCHES += (generate_multi, one_shot_sum, long_sums, estimates, trainer, optimizers, scaling)
BENCHES += (gated_delta, neighbours, serve, evaluation, generate_families, choices, epilogues)
BENCHES += (fp8, fp8_curves, fp8_recipes, cost_curves, end_to_end, killed_run)


def test_families_go_on_where_they_were_cut_off(tmp_path: Path, monkeypatch: Patch) -> None:
    found = tmp_path / "out.json"

    def measured(commit: str, cut: str) -> list[str]:
        made: list[str] = []

        def in_turn(case: str, *_: Any) -> list[Record]:
            made.append(case)
            if case == cut:
                raise KeyboardInterrupt
            return []

        monkeypatch.setattr(generate_families, "in_turn", in_turn)
        with suppress(KeyboardInterrupt):
            arguments = ["--tiny", "--only", "E4B,oss", "--out", str(found), "--commit", commit]
            harness.main(generate_families.BENCH, arguments)
        return made

    config = SimpleNamespace(num_hidden_layers=2, vocab_size=9)
    model = SimpleNamespace(config=config, device="cpu")
    monkeypatch.setattr(generate_families, "build", lambda *_: dict.fromkeys((OURS, THEIRS), model))
    monkeypatch.setattr(generate_families, "distance", lambda *_: 0.0)
    for name in ("moved", "Decoding"):
        monkeypatch.setattr(generate_families, name, lambda *_: None)
    for name in ("rows", "missing"):
        monkeypatch.setattr(generate_families, name, lambda _: [])
    one, many = "1 x 5", "3 x 5"
    for commit, cut, made, kept in (
        ("a", f"Gemma4-E4B, {many}", [f"Gemma4-E4B, {one}", f"Gemma4-E4B, {many}"], "a"),
        ("a", "", [f"Gemma4-E4B, {many}", f"gpt-oss-20b, {one}", f"gpt-oss-20b, {many}"], "aa"),
        ("b", f"Gemma4-E4B, {one}", [f"Gemma4-E4B, {one}"], "aa"),
        ("b", f"gpt-oss-20b, {one}", [f"Gemma4-E4B, {x}" for x in (one, many)], "ba"),
    ):
        assert measured(commit, cut)[: len(made)] == made
        models = json.loads(found.read_text())["models"].values()
        assert "".join(model["commit"] for model in models) == kept


@pytest.mark.parametrize("bench", [b.BENCH for b in BENCHES], ids=lambda bench: bench.kind)
def test_docs_show_the_newest_runs(bench: harness.Bench) -> None:
    if not list(RESULTS.glob(f"{bench.kind}*.json")):
        pytest.skip(f"bench/{bench.kind}.py has not run yet")
    found = harness.records(bench.kind)
    for name, block in bench.documented(found).items():
        text = (ROOT / name).read_text(encoding="utf-8")
        command = f"run python -m bench {bench.kind} --write-docs"
        assert text == harness.between(text, block, name, bench.kind), command
    assert all(record["commit"] in bench.show(record) for record in found)


def test_records_name_files_from_the_root() -> None:
    for path in RESULTS.glob("*.json"):
        assert not re.search(r'File \\"/\S*/(tigon|bench|tests)/', path.read_text()), path


def test_each_script_has_a_command_line() -> None:
    """`python -m bench NAME`."""
    known = titles()
    for bench in BENCHES:
        assert bench.__file__ is not None
        assert bench.BENCH.kind == Path(bench.__file__).stem and bench.BENCH.kind in known
        assert "--only" in harness.parser_of(bench.BENCH).format_help()


@pytest.mark.parametrize(
    ("bench", "arguments", "message"),
    [
        (kernels, ["--only", "rmsnorm"], "no case rmsnorm; there are rms_norm"),
        (kernels, ["--only", "rms_norm"], "measuring needs a CUDA GPU"),
        (compare, ["--base", "/nowhere"], "/nowhere holds no tigon/"),
        (compare, ["--base", str(ROOT)], "measuring needs a CUDA GPU, or --tiny"),
    ],
)
def test_bad_arguments_are_named(bench, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        harness.main(bench.BENCH, arguments)
    assert message in capsys.readouterr().err


def test_cases_come_in_the_order_asked() -> None:
    cases = ["8B 1 x 8192", "8B 1 x 8192, fp8", "oss, 8 layers, 1 x 4096", "1B"]
    for only, expected in (
        ("1B,8B", (3, 0, 1)),
        ("8B 1 x 8192, fp8,8B 1 x 8192", (1, 0)),
        ("oss, 8 layers, 1 x 4096,fp8,oss", (2, 1)),
    ):
        found = harness.chosen(harness.split(only, cases), cases)
        assert found == [cases[i] for i in expected], only


def test_a_part_leaves_a_whole_record_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    options = SimpleNamespace(out=tmp_path / "k.json", only=[], quick=False, commit="abc")

    for whole, kept in ((False, False), (True, True), (False, True)):
        job = harness.Job("k", "CPU", options, whole)
        job.add(machine="CPU")
        job.finish("")
        assert json.loads(options.out.read_text())["complete"] is kept
    assert json.loads((tmp_path / "bench/out/k.json").read_text())["complete"] is False
    job = harness.Job("k", "CPU", options, True)
    job.record["machine"] = "CPU"
    assert job.place != job.out
    assert job.resume()["complete"] and job.place == job.out  # goes on with what it has read


def test_newest_whole_record_is_shown() -> None:
    bench = harness.Bench(lambda _: "", lambda r: f"{r['machine']} {r['date']}", ())
    rows = [("A", "1", True), ("B", "9", False), ("A", "2", True), ("A", "3", False)]
    records = [{"machine": m, "date": d, "complete": c} for m, d, c in rows]
    one = replace(bench, document="d.md")
    assert one.documented(records) == {"d.md": "A 2"}
    assert replace(one, each_machine=True).documented(records) == {"d.md": "A 2\n\nB 9"}


def test_docs_are_written_between_markers_or_not(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    readme, other = tmp_path / "README.md", tmp_path / "other.md"
    readme.write_text("before\n<!-- k:begin -->\nstale\n<!-- k:end -->\nafter\n")
    other.write_text("no markers\n")
    with pytest.raises(ValueError, match=r"other\.md does not hold"):
        harness.write_docs({"README.md": "new", "other.md": "more"}, "k")
    assert "stale" in readme.read_text()
    harness.write_docs({"README.md": "new"}, "k")
    text = "before\n<!-- k:begin -->\nnew\n<!-- k:end -->\nafter\n"
    assert readme.read_text() == text


def test_gain_of_flash_attn_4_is_the_newest_record() -> None:
    """What a run without the package is told."""
    found = attention.gains(harness.newest(harness.records("attention")))
    assert json.loads(attention.GAINS.read_text()) == found
    least, most = found["packed"]
    assert 1 < least <= most


@pytest.mark.parametrize("gpus", [2, 4])
def test_steps_for_several_gpus_are_commands(gpus: int) -> None:
    steps = dict(several_gpus.steps(gpus, "abc1234", {"sides": {}}, tiny=True))
    assert ("scaling" in steps) == (gpus == 4) and ("generate_multi" in steps) == (gpus == 2)
    modules = {Path(bench.__file__).stem: bench for bench in BENCHES}
    for command in steps.values():
        if command[1] == "pytest":
            continue
        flag, package, name, *given = command
        assert (flag, package) == ("-m", "bench")
        options = harness.parser_of(modules[name].BENCH).parse_args(given)
        assert options.tiny and options.commit == "abc1234"
