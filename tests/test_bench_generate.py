"""The generation benchmark without a GPU: its bytes, its bounds, its checks, its verdicts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from bench import generate as bench
from bench import generate_cases as cases
from bench import harness, timing
from bench.generate_cases import (
    CASES,
    DYNAMIC,
    EAGER,
    INT8,
    LLAMA_8B,
    OURS,
    THEIRS,
    Decode,
    Prefill,
    Size,
)
from bench.measure import Effort
from tigon.generation import steps

TINY = LLAMA_8B | {
    "vocab_size": 1201,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
ONE, MANY, PREFILL = CASES


@pytest.mark.parametrize("config", [LLAMA_8B, TINY, TINY | {"tie_word_embeddings": True}])
def test_parameters_are_those_of_the_model(config: dict[str, Any]) -> None:
    model = tigon.Llama.from_config(config | {"model_type": "llama"}, device="meta")
    assert Size(config).parameters == sum(p.numel() for p in model.parameters())
    products = [p.shape for n, p in model.named_parameters() if "layers.0" in n and p.dim() == 2]
    assert sorted(Size(config).products) == sorted(map(tuple, products))


def test_bytes_counted_by_hand() -> None:
    size = Size(LLAMA_8B)
    assert size.parameters == 8_030_261_248
    # 32 layers x 8 heads x (key, value) of 128 elements; quantised, each with an fp32 scale
    assert (size.cached(), size.cached(True)) == (131_072, 67_584)
    assert isinstance(ONE, Decode) and isinstance(MANY, Decode) and isinstance(PREFILL, Prefill)
    # the 33rd to 224th token see 1024 + 32 to 1024 + 223 tokens
    assert ONE.held(OURS) == sum(range(1056, 1248)) / 192
    assert ONE.held(THEIRS) == ONE.held(EAGER) == ONE.held(DYNAMIC) == sum(range(1028, 1048)) / 20
    step = size.step(MANY, OURS)
    assert step["parameters"] - step["read"] == 2 * 128256 * 4096
    assert step["cache"] == 64 * 1151.5 * 131_072
    assert size.step(MANY, INT8)["cache"] == 64 * 1151.5 * 67_584
    tied = Size(LLAMA_8B | {"tie_word_embeddings": True}).step(MANY, OURS)
    assert tied["read"] == tied["parameters"] == step["read"]
    # 8192 tokens: 32768 for the stream, 10240 queries and keys, 43008 for the gate; embedding, head
    layers = 32 * 8192 * (32768 + 10240 + 43008)
    assert size.passes(8192) == 2 * (layers + 8192 * 8192 + 128256 * 4096)


def test_a_wrong_token_is_noticed() -> None:
    model = cases.ours(TINY, "cpu")
    ids = torch.randint(1000, 1201, (2, 5))
    tokens = cases.generating(model, OURS, ids)(7)
    assert cases.worst_choice(model, tokens, 7) < 0.1
    tokens[1, 8] = (tokens[1, 8] + 1) % 1201
    assert cases.worst_choice(model, tokens, 7) > cases.DOUBT
    with pytest.raises(RuntimeError, match=r"9 tokens asked of \(2, 5\), not \(2, 12\)"):
        model.generate = lambda *_, **__: tokens
        cases.generating(model, OURS, ids)(9)


def test_without_graphs_every_step_is_a_first_one() -> None:
    kept = steps.WARM_UP
    model = cases.ours(TINY, "cpu")
    seen: list[int] = []

    def generate(ids: Any, max_new_tokens: int, **_: Any) -> Any:
        seen.append(steps.WARM_UP)
        return torch.cat((ids, ids[:, :max_new_tokens]), 1)

    model.generate = generate
    for provider in (EAGER, OURS):
        cases.generating(model, provider, torch.ones(1, 3, dtype=torch.long))(2)
    assert seen == [sys.maxsize, kept] and steps.WARM_UP == kept < 9


def test_a_run_writes_what_the_table_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run of tiny models, with the GPU's clock and memory played."""
    now = [0.0]

    def takes(model: Any, ms: float, generate: Any) -> None:
        def played(ids: Any, *, max_new_tokens: int, **options: Any) -> Any:
            now[0] += 1e-3 * (7 + ms * max_new_tokens)
            return generate(ids, max_new_tokens=max_new_tokens, **options)

        model.generate = played

    def model(make: Any, ms: float) -> Any:
        def made(config: dict[str, Any]) -> Any:
            found = make(config, "cpu")
            takes(found, ms, found.generate)
            return found

        return made

    def peak(run: timing.Run) -> float:
        run()
        return 3.0

    def times(run: timing.Run, *_: Any, **__: Any) -> list[float]:
        run()
        return [2.0]

    tiny = (Decode(ONE.name, 1, 5, (2, 4), (2, 4), 2), Decode(MANY.name, 3, 5, (2, 4), (2, 4), 1))
    monkeypatch.setattr(bench, "LLAMA_8B", TINY)
    monkeypatch.setattr(bench, "CASES", (*tiny, Prefill(PREFILL.name, 16)))
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(cases, "ours", model(cases.ours, 1.0))
    monkeypatch.setattr(cases, "theirs", model(cases.theirs, 3.0))
    monkeypatch.setattr(cases, "CACHES", {OURS: None})
    monkeypatch.setattr(cases, "products", lambda *_: [("a", timing.nothing)] * 1)
    monkeypatch.setattr(cases, "attentions", lambda *_: [("x", lambda: 1 / 0), ("y", int)])
    monkeypatch.setattr(Effort, "copy", lambda *_: [1.0, 2.0, 3.0])
    monkeypatch.setattr(timing, "wait", timing.nothing)
    monkeypatch.setattr(timing, "peak_mib", peak)
    monkeypatch.setattr(timing, "milliseconds", times)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    harness.main(bench.BENCH, ["--commit", "abc1234"])
    printed = capsys.readouterr().out
    path = tmp_path / "generate-nvidia-h200.json"
    record = json.loads(path.read_text())
    assert record["complete"] and record["copy"]["bytes_per_second"] == 2**31 / 2e-3
    one, many, prefill = record["cases"]
    assert "error" not in json.dumps(record).replace("ZeroDivisionError", "")
    assert [r["name"] for r in one["providers"]] == [OURS, THEIRS]
    # the 7 ms of a call fall out
    assert [r["ms"] for r in one["providers"]] == [pytest.approx([n] * 3) for n in (1.0, 3.0)]
    assert bench.times(one, one["providers"][0]) == pytest.approx(3.0)
    moved = 2 * Size(TINY).parameters + 3 * 7.5 * Size(TINY).cached()
    share = bench.share(record, many, many["providers"][0])
    assert share == pytest.approx(1e3 * moved / (2**31 / 2e-3) / 1.0)
    assert prefill["parts_ms"]["products"] == prefill["parts_ms"]["attention"] == 2 * 2.0
    assert prefill["attention_ms"]["x"].startswith("ZeroDivisionError")
    assert prefill["limit_ms"] == sum(prefill["parts_ms"].values())
    assert prefill["providers"][0]["first_token_ms"][1] == pytest.approx(8.0)
    assert "MISSED: decode 1 x 1024, speed over transformers: 3.000, target ≥ 11.00" in printed
    assert "met: prefill 8192, share of the bound: " in printed
    harness.main(bench.BENCH, ["--table"])
    shown = capsys.readouterr().out
    assert "commit abc1234, " in shown and "| transformers | 3.00 | 1,000 | " in shown
    for name in ("README.md", "docs/generation.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a\n<!-- generate:begin -->old<!-- generate:end -->\nb\n")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    harness.main(bench.BENCH, ["--write-docs"])
    assert "| decode 1 x 1024 | 1,000 | " in (tmp_path / "README.md").read_text()
    assert shown.strip() in (tmp_path / "docs/generation.md").read_text()


def test_who_raises_ends_his_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure, and a generation that is fast because it is wrong."""

    def peak(run: timing.Run) -> float:
        run()
        return 0.0

    monkeypatch.setattr(timing, "peak_mib", peak)
    monkeypatch.setattr(torch.cuda, "empty_cache", timing.nothing)
    monkeypatch.setattr(bench, "LLAMA_8B", TINY)
    ours, theirs = cases.ours(TINY, "cpu"), cases.theirs(TINY, "cpu")
    ours.generate = lambda ids, max_new_tokens, **_: torch.cat((ids, ids[:, :max_new_tokens]), 1)
    theirs.generate = lambda *_, **__: 1 / 0
    monkeypatch.setattr(cases, "CACHES", {OURS: None})
    case = Decode(ONE.name, 1, 5, (2, 4), (2, 4), 1)
    found = bench.decode(case, {OURS: ours, THEIRS: theirs}, quick=True)
    wrong, broken = found["providers"]
    assert wrong["error"].startswith("RuntimeError: chose a token ") and "ms" not in wrong
    assert broken["error"].startswith("ZeroDivisionError")
    record = {"copy": {"bytes_per_second": 1e9}, "cases": [found]}
    assert "| transformers | ZeroDivisionError: " in bench.table(record, found)
    assert next(bench.verdicts(record)) == "not measured: decode 1 x 1024, share of the bound"


def test_bad_arguments_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    for arguments, message in {
        ("--table",): f"no generate*.json in {tmp_path}",
        ("--only", "nothing"): "no case nothing; there are decode 1 x 1024, decode 64",
        ("--only", "prefill"): "measuring needs a CUDA GPU; --table",
    }.items():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            harness.main(bench.BENCH, arguments)
        assert message in capsys.readouterr().err
