"""Whole training steps beside transformers: sides, records and verdicts, at tiny size."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import harness, train_limit, train_report, train_side, train_step
from bench.harness import Record
from bench.train_cases import CASES, OURS, PEER, Batch, Case, offered, ours, parts_of, settings

FIRST, RAGGED = "Llama-3.1-8B 1 x 8192", "ragged chats, Llama-3.1-8B"
LORA = "Llama-3.1-8B 1 x 512 LoRA"
MOE, SHORT = "Qwen3-30B-A3B, 8 layers, 1 x 8192", "Llama-3.2-1B 1 x 512"


def test_the_target_table_is_that_of_the_cases() -> None:
    aims = {name: (case.speed, case.memory, case.share) for name, case in CASES.items()}
    assert aims == {
        "Llama-3.2-1B 2 x 8192": (1.18, 0.85, 0.95),
        "Llama-3.1-8B 1 x 8192": (1.12, 0.87, 0.96),
        "Llama-3.1-8B 2 x 8192, checkpointing": (1.15, 0.90, None),
        "Qwen3-4B 2 x 8192": (1.14, 0.85, 0.98),
        "Gemma3-1B 2 x 8192": (2.4, 0.75, 0.98),
        MOE: (1.5, 0.9, None),
        RAGGED: (1.35, 0.80, None),
        SHORT: (2.5, None, None),
        "Llama-3.1-8B 2 x 4096 LoRA": (1.55, 0.70, None),
        LORA: (3.5, None, None),
        "Llama-3.1-8B 2 x 4096 QLoRA": (1.5, None, None),
        "Llama-3.1-8B 1 x 8192, fp8": (1.35, 1.0, None),
        "Llama-3.1-8B 2 x 4096 LoRA, fp8": (1.35, 1.0, None),
    }
    assert set(CASES) - set(offered()) <= {"Llama-3.1-8B 1 x 8192, fp8"}


def test_ragged_chats_are_learned_at_their_ends() -> None:
    case = CASES[RAGGED]
    batch = Batch.of(case, 512, "cpu", tiny=False)
    assert batch.lengths is not None and sum(batch.lengths) == 8192 == batch.ids.numel()
    assert 0.35 < batch.supervised / 8192 < 0.45
    assert batch.bounds[-1] == 8192 and batch.bounds.dtype == torch.int32
    starts = batch.bounds[:-1].long()
    assert (batch.positions[0, starts] == 0).all() and (batch.labels[0, starts] == -100).all()
    assert batch.theirs().keys() == {"input_ids", "labels", "position_ids"}  # bounds on a GPU


def test_weights_are_drawn_by_the_names_of_checkpoints() -> None:
    model, optimizer = ours(CASES[MOE], OURS, "cpu", True, "torch")
    parts = dict(parts_of(model))
    again = dict(parts_of(ours(CASES[MOE], OURS, "cpu", True, "torch")[0]))
    assert all(torch.equal(parts[name], again[name]) for name in parts)
    q, k = (parts[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qk")
    assert not torch.equal(q[: len(k)], k) and 0.018 < q.std() < 0.022
    assert parts["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    assert isinstance(optimizer, torch.optim.AdamW)


def test_settings_are_those_of_the_trainer() -> None:
    chosen = settings(CASES["Llama-3.1-8B 2 x 8192, checkpointing"], OURS, "adamw_bf16")
    assert chosen.activation_checkpointing is True and chosen.param_dtype == "bfloat16"
    assert (chosen.lr, chosen.beta2, chosen.weight_decay) == (1e-5, 0.999, 0.0)
    assert chosen.optimizer_in_backward and not chosen.max_grad_norm
    assert not settings(CASES[FIRST], OURS, "adamw_bf16").optimizer_in_backward


def test_the_limit_counts_every_product_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes 1 ms, a copy moves 1 GB in it."""
    monkeypatch.setattr(train_limit, "took", lambda run: 1.0)
    monkeypatch.setattr(train_limit, "copy_bandwidth", lambda *_: 1e12)
    once, twice = (
        train_limit.composed(case, Batch.of(case, 512, "cpu", True), True)
        for case in (
            Case("Llama-3.2-1B", 1, 48, 1.0),
            Case("Llama-3.2-1B", 1, 48, 1.0, checkpointing=True),
        )
    )
    # Two blocks of qkv, o, gate and up, down, and the head: three products each
    assert once["milliseconds"]["matrix products"] == 3 * (2 * 4 + 1)
    assert twice["milliseconds"]["matrix products"] == 3 * (2 * 4 + 1) + 2 * 4
    assert once["milliseconds"]["attention"] == 2 and twice["milliseconds"]["attention"] == 4
    tokens, c = 48, 64
    moved = {
        "norms": 2 * 2 * 2 * 8 * tokens * c,  # bytes, blocks, norms, tensors
        "RoPE": 2 * 2 * 4 * tokens * (4 + 1) * 16,
        "activation": 2 * 2 * 8 * tokens * 96,
        "embedding": 2 * 4 * tokens * c,
        "head": 2 * 2 * tokens * 512,
    }
    assert once["bytes"] == moved
    assert twice["bytes"]["norms"] == moved["norms"] * 12 // 8
    assert once["milliseconds"]["optimizer"] == 14 * once["parameters"] / 1e9
    sparse = train_limit.composed(CASES[RAGGED], Batch.of(CASES[RAGGED], 512, "cpu", True), True)
    head = next(row for row in sparse["products"] if row["n"] == 512)
    assert head["m"] == Batch.of(CASES[RAGGED], 512, "cpu", True).supervised < 24


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", int)  # 0.2 s in a process this large


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """Processes are calls; what is asked of each is kept."""
    asked: list[Any] = []

    def spawn(request: Any, seconds: float) -> Any:
        asked.append(request)
        lines: list[Record] = []
        with monkeypatch.context() as patch:
            patch.setattr(train_side, "say", lambda kind, **f: lines.append({"kind": kind, **f}))
            patch.setattr(train_side.Training, "profiled", lambda self: {"attention": 1.0})
            train_side.main(json.dumps(train_step.asdict(request)))
        yield from json.loads(json.dumps(lines))

    monkeypatch.setattr(train_step, "spawn", spawn)
    return asked


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")
def test_cases_are_measured_once_and_agree(
    in_process: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ours and by transformers with the same weights, for rows, ragged chats and experts."""
    pytest.importorskip("transformers")
    out = tmp_path / "train_step.json"
    common = ["--tiny", "--out", str(out), "--commit", "abc1234", "--rounds"]
    harness.main(
        train_step.BENCH,
        [*common, "1", "--only", f"{SHORT.replace(', ', ',')},ragged,Qwen3-30B,512 LoRA"],
    )
    record = json.loads(out.read_text())
    assert [case["name"] for case in record["cases"]] == [SHORT, RAGGED, MOE, LORA]
    assert record["complete"] is False and record["machine"] == "CPU"
    for case in record["cases"]:
        (theirs,), (mine,) = (case["rounds"][side] for side in (PEER, OURS))
        assert "error" not in theirs and "error" not in mine, case
        assert mine["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-3)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-2)
        assert theirs["ms"] > 0 < mine["ms"] and mine["left_mib"] == 0.0
        assert case["profile"].keys() == {PEER, OURS}
        assert case["name"] == LORA or case["limit"]["total"] > 0
        assert train_report.disagreement(case) == ""
    assert f"{SHORT}: tokens/s over {PEER}: " in capsys.readouterr().out
    assert len(in_process) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")
def test_what_the_record_has_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def spawn(request: Any, seconds: float) -> Any:
        asked.append(request)
        yield {"kind": "options", "attention": "sdpa", "experts": ""}
        for _ in range(request.rounds):
            yield from ({"kind": "round", "side": s, **round_of(2.0, 1.0)} for s in (PEER, OURS))
        for side in request.profile:
            yield {"kind": "profile", "side": side, "milliseconds": {"attention": 1.0}}
        if request.limit:
            yield {"kind": "limit", **a_case()["limit"]}

    monkeypatch.setattr(train_step, "spawn", spawn)
    out = tmp_path / "train_step.json"

    def measure(rounds: int, *only: str, commit: str = "abc1234") -> Record:
        options = ["--tiny", "--out", str(out), "--commit", commit, "--rounds", str(rounds)]
        harness.main(train_step.BENCH, [*options, *only])
        return json.loads(out.read_text())

    record = measure(1, "1B 1 x 512", "ragged")
    assert len(asked) == 2 and asked[0].limit and asked[0].profile == (PEER, OURS)
    # One round is missing, and nothing else; then nothing is
    record["cases"][0]["rounds"][OURS].append({"error": "OutOfMemoryError"})
    out.write_text(json.dumps(record))
    again = measure(2, "1B 1 x 512")
    assert (asked[-1].rounds, asked[-1].profile, asked[-1].limit) == (1, (), False)
    assert asked[-1].options == {"attention": "sdpa", "experts": ""}
    assert measure(2, "1B 1 x 512")["cases"] == again["cases"] and len(asked) == 3
    assert [len(rows) for rows in again["cases"][0]["rounds"].values()] == [2, 2]
    assert again["cases"][1] == record["cases"][1]
    # Another commit measures it anew, and keeps what it does not measure
    newest = measure(1, "1B 1 x 512", commit="def5678")["cases"]
    assert asked[-1].limit and [case["commit"] for case in newest] == ["def5678", "abc1234"]
    measure(1, "1B 1 x 512", "--again", commit="def5678")
    assert len(asked) == 5


def round_of(ms: float, gib: float, loss: float = 11.8, norm: float = 2.0) -> Record:
    sizes = {
        "allocated_gib": gib,
        "reserved_gib": gib + 1,
        "gib": dict.fromkeys(train_report.MEMORY, 1.0),
    }
    row = {"ms": ms, "losses": [loss, loss - 0.1], "gradient_norm": norm, "attention": ["fa4"]}
    row |= {"left_mib": 8.0}
    return row | sizes


def a_case() -> Record:
    limit = {"matrix products": 500.0, "attention": 100.0, "fused kernels": 30.0, "optimizer": 26.0}
    return {
        "name": FIRST,
        "commit": "abc1234",
        "date": "2026-11-23T00:00:00Z",
        "tokens": 8192,
        "tried": {"flash_attention_4": {"ms": 800.0}, "sdpa": {"error": "RuntimeError: no"}},
        "rounds": {
            PEER: [round_of(800.0, 80.0), round_of(820.0, 80.0), round_of(780.0, 81.0)],
            OURS: [round_of(700.0, 60.0), round_of(710.0, 60.0), round_of(690.0, 60.75)],
        },
        "profile": {
            OURS: {"matrix products": 520.0, "attention": 105.0, "waiting": 3.0},
            PEER: {"matrix products": 530.0, "attention": 140.0, "copies": 20.0},
        },
        "limit": {
            "milliseconds": limit, "total": 656.0, "bytes_per_second": 4e12, "flops": 3.5e14,
            "attention": [{"backend": "fa4"}], "bytes": {"norms": 4 * 10**9}, "parameters": 2**33,
        },
    }  # fmt: skip


@pytest.fixture
def record() -> Record:
    stamp = {"date": "2026-11-23T00:00:00Z", "commit": "abc1234", "uncommitted_changes": False}
    more = {"machine": "NVIDIA H200", "torch": "2.11", "libraries": {"Liger": "0.8.5"}}
    return stamp | more | {"cases": [a_case()]}


def test_a_summary_says_how_often_it_measured_and_what_not(record: Record) -> None:
    text = train_report.summary(record)
    assert "Rounds: 3. In brackets: targets." in text
    measured = {case["name"] for case in record["cases"]}
    missing = [name for name in train_report.CASES if name not in measured]
    assert missing and f"Not measured: {'; '.join(missing)}." in text
    record["cases"][0]["rounds"][OURS].pop()
    assert "Rounds: 2 or 3." in train_report.summary(record)


def test_verdicts_are_of_the_rounds_medians(record: Record) -> None:
    (case,) = record["cases"]
    assert list(train_report.verdicts(case)) == [
        f"met: {FIRST}: tokens/s over {PEER}: 1.143, target ≥ 1.12",
        f"met: {FIRST}: peak memory over {PEER}: 0.750, target ≤ 0.87",
        f"MISSED: {FIRST}: share of the composed limit: 0.937, target ≥ 0.96",
    ]
    case["rounds"][PEER][1]["left_mib"] = 900.0
    said = f"WRONG: {FIRST}: 900 MiB were allocated before a model was built"
    assert list(train_report.verdicts(case))[-1] == said
    case["rounds"][OURS][0] |= {"losses": [11.85, 11.7], "gradient_norm": 2.1}
    *_, wrong = train_report.verdicts(case)
    assert wrong == (
        f"WRONG: {FIRST}: the sides disagree: first loss 11.8000 and 11.8500; "
        "norm of the first gradients 2 and 2.1"
    )
    case["rounds"][OURS] = [{"error": "OutOfMemoryError: no room"}] * 3
    assert next(train_report.verdicts(case)) == f"not measured: {FIRST}: tokens/s over {PEER}"
    assert train_report.failures(case) == [f"{OURS}: OutOfMemoryError: no room"]
    assert "≥ 1.12" in train_report.summary(record)


def test_where_time_and_memory_go_is_shown(record: Record, tmp_path: Path) -> None:
    text = train_report.show(record)
    assert "| GEMMs | 500 | 520 | 530 |" in text
    assert "| copies |  |  | 20.0 |" in text and "| GPU idle |  | 75.0 | 110 |" in text
    assert "| **step** | **656.0** | **700.0** | **800.0** |" in text
    assert "| optimizer states | 32.0 | 1.00 | 1.00 |" in text
    assert "| **peak, allocated** |  | 60.8 | 81.0 |" in text
    assert "sdpa RuntimeError: no" in text and "norms 1.00" in text and "700 TFLOP/s" in text
    assert f"| {FIRST} | 10,240, 81.0 | 11,703, 60.8 | 1.14 (≥ 1.12) | 0.75 (≤ 0.87) | " in text
    blocks = train_report.blocks(record)
    assert set(blocks) == {"README.md", "docs/performance.md"}
    train_report.plot(record, tmp_path / "a.svg")
    assert ">1.14<" in (tmp_path / "a.svg").read_text()


def test_a_gpu_needs_the_peer_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "installed", lambda _: None)
    with pytest.raises(SystemExit, match="pip install transformers liger-kernel"):
        train_step.libraries(tiny=False)
    assert train_step.libraries(tiny=True)["Liger"] is None


@pytest.mark.parametrize(
    "script, seconds, why",
    [
        ("import sys; sys.exit(3)", 60.0, "it ended with status 3"),
        ("import time; time.sleep(60)", 0.2, "not done after 0 s"),
    ],
)
def test_a_process_that_ends_badly_is_said(
    script: str, seconds: float, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    side = tmp_path / "side.py"
    side.write_text(f'print(\'{{"kind": "x"}}\', flush=True)\n{script}\n')
    monkeypatch.setattr(train_step, "SIDE", side)
    *_, last = train_step.spawn(train_step.Request(FIRST, 1, False, tiny=True), seconds)
    assert last == {"kind": "ended", "error": why}
