"""The kernel benchmark without a GPU: its floors, its truths, its tables, and what the docs say."""

import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import harness, kernels, measure, peers, timing
from bench import kernels_report as report
from bench.harness import Record
from bench.kernels import CASES, Case, streamed
from bench.kernels_report import plot
from bench.measure import Problem, Provider, truth

BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"


def test_bytes_are_those_counted_by_hand() -> None:
    by_name = {case.name: case.bytes for case in CASES}
    expected = {
        # 67,108,864 elements: x, y; then x, dy, dx
        "rms_norm 16384x4096": (268_435_456, 671_088_640),
        "rms_norm 131072x128": (67_108_864, 167_772_160),
        "rms_norm_residual 16384x4096": (536_870_912, 1_073_741_824),
        "sandwich_norm 16384x4096": (536_870_912, 1_342_177_280),
        # 234,881,024 elements: gate, up, y; then gate, up, dy, dgate, dup
        "gated_act silu 16384x14336": (1_409_286_144, 3_758_096_384),
        "gated_act gelu_tanh 16384x6912": (679_477_248, 1_811_939_328),
        # 16384 tokens x 40 heads x 128
        "rope B2 T8192 32/8x128": (335_544_320, 671_088_640),
        # and 6 + 6 bytes there and back; dv in and out again is 4 bytes of 16,777,216
        "qk_norm_rope B2 T8192 32/8x128": (335_544_320, 905_969_664),
    }
    assert {name: tuple(by_name[name].values()) for name in expected} == expected
    assert by_name["cross_entropy 8192x128256"] == {"both": 4_202_692_608}
    assert by_name["linear_cross_entropy dense 8192, 4096, 128256"] == {}


def test_every_shape_of_the_target_table_is_measured() -> None:
    shapes = {name: [] for name in kernels.OPERATORS}
    for case in CASES:
        shapes[case.operator].append((case.variant, case.shape))
    assert {name: len(found) for name, found in shapes.items()} == {
        "rms_norm": 4,
        "rms_norm_residual": 1,
        "sandwich_norm": 2,
        "gated_act": 8,
        "rope": 1,
        "qk_norm_rope": 1,
        "cross_entropy": 3,
        "linear_cross_entropy": 15,
        "host": 0,
    }
    assert len({case.name for case in CASES}) == len(CASES)
    aims = {case.name: case.targets.get("both") for case in CASES}
    assert aims["linear_cross_entropy dense 16384, 2048, 151936"] == 1.05
    assert aims["linear_cross_entropy dense 8192, 2560, 262144"] == 1.10
    assert aims["linear_cross_entropy 30 % valid 8192, 1024, 151936"] == 0.40
    # 1 GiB of logits, dX of 64 MiB, dW of 1002 MiB, and that in fp32
    memory = {case.name: case.memory for case in CASES}
    assert memory["linear_cross_entropy dense 8192, 4096, 128256"] == 1024 + 64 + 3 * 1002


def test_quick_takes_the_first_shape_of_each_variant() -> None:
    assert [case.shape for case in kernels.chosen("rms_norm", True)] == ["16384x4096"]
    assert [case.name for case in kernels.chosen("gated_act", True)] == [
        "gated_act silu 16384x14336",
        "gated_act gelu_tanh 16384x14336",
    ]
    assert len(kernels.chosen("linear_cross_entropy", True)) == 3
    assert len(kernels.chosen("rms_norm", False)) == 4


SMALL = [
    streamed("rms_norm", 24, 64),
    streamed("rms_norm_residual", 24, 64),
    streamed("sandwich_norm", 24, 64),
    streamed("gated_act", 24, 32, variant="silu"),
    streamed("gated_act", 24, 32, variant="gelu_tanh"),
    streamed("rope", 2, 7, 4, 2, 16),
    streamed("qk_norm_rope", 2, 7, 4, 2, 16),
    kernels.cross_entropy(24, 97),
    *kernels.linear_cross_entropy(48, 32, 97, 1.05),
]


def built(case: Case) -> Problem:
    return kernels.build(case, "cpu", {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's clock and memory are played: everything takes 2 ms and 2 MiB."""

    def times(run: timing.Run, before: timing.Run = timing.nothing, **_: Any) -> list[float]:
        before(), run()
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(gc, "collect", int)  # 0.2 s in a process this large
    monkeypatch.setattr(timing, "milliseconds", times)
    monkeypatch.setattr(timing, "peak_mib", lambda *given: times(*given)[2])


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_ours_and_eager_agree_with_the_truth(
    case: Case, monkeypatch: pytest.MonkeyPatch, clock: None
) -> None:
    """Names, layouts and halves of every case are wired right; nothing is left overwritten."""
    made = built(case)
    before = [[t.detach().clone() for t in p.overwrites] for p in made.providers]
    made.providers = [p for p in made.providers if p.name in ("tigon", "tigon overwrite", "eager")]
    monkeypatch.setattr(kernels, "build", lambda *_: made)
    result = kernels.measured(case, {}, quick=True, device="cpu")
    names = [p["name"] for p in result["providers"]]
    assert names[0] == "tigon" and names[-1] == "eager"
    for provider, fresh in zip(made.providers, before, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(provider.overwrites, fresh, strict=True))
    for provider in result["providers"]:
        assert set(provider["errors"]) == set(result["providers"][-1]["errors"])
        assert {name for name in provider["errors"] if name.startswith("d")}
        assert max(provider["errors"].values()) < 0.02, provider
        assert all(e > 0 for name, e in provider["errors"].items() if name != "loss")
        assert provider["both_ms"] == [1.0, 2.0, 3.0]
        assert ("forward_ms" in provider) == ("forward" in case.modes)


def test_a_run_writes_what_the_report_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run, with the GPU's clock and memory played."""

    def on_cpu(case: Case, _: str, libraries: Any, build: Any = kernels.build) -> Problem:
        return build(case, "cpu", libraries)

    def times(run: timing.Run, *_: Any, **__: Any) -> list[float]:
        run()
        return [2.0]

    out = tmp_path / "part" / "kernels.json"
    monkeypatch.setattr(gc, "collect", int)
    monkeypatch.setattr(kernels, "build", on_cpu)
    monkeypatch.setattr(peers, "compiled", lambda f: f)
    monkeypatch.setattr(kernels, "CASES", [SMALL[0], *SMALL[-3:]])
    monkeypatch.setattr(kernels, "HOST_SHAPE", (4, 8))
    monkeypatch.setattr(kernels, "installed", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(timing, "wait", timing.nothing)
    monkeypatch.setattr(timing, "milliseconds", times)
    monkeypatch.setattr(timing, "peak_mib", lambda run, _: times(run)[0])
    monkeypatch.setattr(timing, "host_microseconds", times)
    monkeypatch.setattr(measure.Effort, "copy", lambda *_: [1.0, 2.0, 3.0])
    asked = "host,linear_cross_entropy,rms_norm"
    arguments = ["--only", asked, "--out", str(out), "--commit", "abc1234-dirty"]
    harness.main(kernels.BENCH, arguments)
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert (record["commit"], record["uncommitted_changes"]) == ("abc1234", True)
    assert record["complete"] is False and record["gpu"] == "NVIDIA H200"
    assert record["copy"]["bytes_per_second"] == 2**33 / 2e-3
    assert [case["operator"] for case in record["cases"]] == ["rms_norm"] + 3 * [
        "linear_cross_entropy"
    ]
    norm, dense, sparse, peaked = record["cases"]
    assert norm["floor_ms"]["forward"] == pytest.approx(2 * 2 * 24 * 64 / 2**33 * 2)
    assert dense["gemms_ms"] == [2.0] * 3 and len(dense["gemm_parts_ms"]) == 3
    assert "gemms_ms" not in sparse
    assert dense["notes"]["share_valid"] == 1.0 and 0.1 < sparse["notes"]["share_valid"] < 0.5
    assert dense["notes"]["share_over_half"] == 0.0 and peaked["notes"]["share_over_half"] > 0.3
    assert "error" not in json.dumps([case["providers"] for case in record["cases"]]).replace(
        '"errors"', ""
    )
    assert (
        "met: linear_cross_entropy dense 48, 32, 97: tigon, forward + backward: 1.000, target ≤"
        in (printed)
    )
    assert "| F.rms_norm | 2.00 | 2.00 |" in printed and "commit abc1234 with unc" in (
        report.details(record)
    )


def test_a_provider_that_raises_is_recorded_and_restored(
    monkeypatch: pytest.MonkeyPatch, clock: None
) -> None:
    made = built(SMALL[0])
    (dy,) = made.upstream

    def broken() -> None:
        dy.zero_()
        raise RuntimeError("no kernel for this")

    made.providers = [Provider("Liger", lambda: broken, overwrites=(dy,)), made.providers[1]]
    fresh = dy.clone()
    found = measure.measure("", made, measure.ONCE)
    broken_one, eager = found["providers"]
    assert broken_one == {"name": "Liger", "error": "RuntimeError: no kernel for this"}
    assert eager["both_ms"] == [1.0, 2.0, 3.0] and torch.equal(dy, fresh)
    # and one that is not installed is not tried
    names = [p.name for p in kernels.build(SMALL[0], "cpu", {"Liger": None}).providers]
    assert "Liger" not in names and "QuACK" in names


def test_the_truth_does_not_depend_on_the_chunk() -> None:
    x, w, dy = torch.randn(7, 5), torch.randn(5), torch.randn(7, 5)

    def whole(step: int) -> dict[str, torch.Tensor]:
        names = {"x": x, "row": torch.arange(7)}, {"w": w}, ("y",), (dy,)
        return truth(lambda x, row, w: torch.sin(x) * w * (row[:, None] >= 0), *names, step=step)

    expected = {"y": x.sin() * w, "dx": dy * w * x.cos(), "dw": (dy * x.sin()).sum(0)}
    for step in (3, 7, 100):
        torch.testing.assert_close(whole(step), expected)


def test_relative_error_and_quantiles() -> None:
    assert timing.relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1
    assert timing.relative_l2(torch.zeros(()), torch.full((), 2.0)) == 1.0
    assert timing.quantiles([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == [2.0, 3.5, 5.0]
    with pytest.raises(ValueError, match=r"shape \(1, 2\) is not \(2,\)"):
        timing.relative_l2(torch.zeros(1, 2), torch.zeros(2))


def test_a_deadline_interrupts() -> None:
    with pytest.raises(TimeoutError, match=r"0\.01 s"), timing.deadline(0.01):
        time.sleep(5)


def result(name: str, forward: float | None, both: float, **more: Any) -> Record:
    times = {"both_ms": [both - 0.01, both, both + 0.01]}
    times |= {} if forward is None else {"forward_ms": [forward] * 3}
    return {"name": name, **times, "peak_mib": 256.0, "errors": {"y": 0.5, "dx": 0.00234}} | more


@pytest.fixture
def record() -> Record:
    """A made run of three cases, at a bandwidth of 4 TB/s."""
    norm, (dense, sparse, _) = (
        streamed("rms_norm", 16384, 4096),
        kernels.linear_cross_entropy(8192, 4096, 128256, 1.05),
    )

    def measured(case: Case, providers: list[Record], **more: Any) -> Record:
        floor = {mode: moved / 4e9 for mode, moved in case.bytes.items()}
        copies = {mode: [1.02 * ms] * 3 for mode, ms in floor.items()}
        both = {"floor_ms": floor, "copy_ms": copies, "notes": {}, "providers": providers}
        return asdict(case) | both | more

    errors = {"dhidden": 0.002, "dweight": 0.003, report.NOT_TARGET: 1.0}
    lost = result("CCE", 20.0, 60.0, errors=errors)
    gemms = {"gemms_ms": [39.0, 40.0, 41.0], "gemm_parts_ms": {"x @ W.T": [13.0, 13.5, 14.0]}}
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-11-21T10:00:00Z",
        "commit": "abc1234",
        "uncommitted_changes": False,
        "torch": "2.11.0",
        "triton": "3.6.0",
        "peers": {"Liger": "0.8.5", "QuACK": None, "CCE": "25.1.1"},
        "copy": {"bytes": 2**33, "ms": [2.0, 2.147483648, 2.2], "bytes_per_second": 4e12},
        "complete": True,
        "cases": [
            measured(
                norm,
                [
                    result("tigon", 0.07, 0.18),
                    result("Liger", 0.08, 0.3, peak_mib=130.0),
                    {"name": "torch.compile", "error": "InductorError: a|b\nmore"},
                ],
            ),
            measured(dense, [result("tigon", 30.0, 41.0), lost], **gemms),
            measured(sparse, [result("tigon", None, 20.5), result("CCE", None, 15.0)]),
        ],
        "host": {
            "shape": "2048x4096",
            "providers": [{"name": "tigon", "forward_us": [9, 10, 11], "both_us": [50, 60, 70]}],
        },
    }


def test_the_summary_says_what_was_measured(record: Record) -> None:
    lines = report.summary(record).splitlines()
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, Liger 0.8.5, CCE 25.1.1; " in lines[1]
    assert lines[1].endswith("commit abc1234, 2026-11-21; a large copy in the same run: 4.00 TB/s.")
    assert lines[3] == (
        "| operator | shape | bound, ms | tigon | torch.compile | Liger 0.8.5 | CCE 25.1.1 "
        "| target |"
    )
    # 671,088,640 bytes at 4 TB/s are 0.168 ms, so 0.18 is 1.07 times that
    assert lines[5:] == [
        "| `rms_norm` | 16384x4096 | floor 0.168 | **0.180 (1.07)** | fails | 0.300 (1.79) "
        "|  | ≤ 1.15, met |",
        "| `linear_cross_entropy` | dense 8192, 4096, 128256 | three GEMMs 40.0 "
        "| **41.0 (1.02)** |  |  | 60.0 (1.50) | ≤ 1.05, met |",
        "| `linear_cross_entropy` | 30 % valid 8192, 4096, 128256 | own dense time 41.0 "
        "| 20.5 (0.500) |  |  | **15.0 (0.250)** | ≤ 0.40, missed |",
    ]


def test_the_details_show_memory_errors_and_every_target(record: Record) -> None:
    details = report.details(record)
    assert report.summary(record) in details
    assert (
        "| 16384x4096 | tigon | 0.0700 | 1.04 | 0.180 | 1.07 | 256 | 0.0023 | forward met (1.08), "
        "forward + backward met (1.15), MiB missed (130) |"
    ) in details
    assert "| 16384x4096 | torch.compile | InductorError: a\\|b |  |  |  |  |  |  |" in details
    assert "| dense 8192, 4096, 128256 | CCE | 20.0 |  | 60.0 | 1.50 | 256 | 0.0030 | 1.0 |  |" in (
        details
    )
    assert "| tigon | 10.0 | 60.0 |" in details
    console = report.console(record, "linear_cross_entropy")
    assert (
        "MISSED: linear_cross_entropy 30 % valid 8192, 4096, 128256: tigon, forward + backward: "
        "0.500, target ≤ 0.40"
    ) in console
    assert "three GEMMs 40, x @ W.T 13.5" in console
    bounds = "forward floor 0.06711, forward + backward floor 0.1678, forward copy 0.06845, "
    bounds += "forward + backward copy 0.1711"
    assert f"rms_norm 16384x4096: {bounds}" in report.console(record, "rms_norm")


def test_a_nan_is_worse_than_any_error() -> None:
    assert report.gradient_error({"errors": {"y": "nan", "dx": 0.1, "dw": "inf"}}) == "inf"
    assert report.gradient_error({"errors": {"y": 9.0, "dx": 0.1, "dw": 0.2}}) == 0.2
    assert report.figure(float("1344.4")) == "1344" and report.figure(0.31) == "0.310"


def test_docs_are_written_between_the_markers_or_not_at_all(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    readme, docs = tmp_path / "README.md", tmp_path / "docs/kernels.md"
    readme.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    docs.write_text("no markers\n")
    with pytest.raises(ValueError, match=r"docs/kernels\.md does not hold"):
        harness.write_docs(report.blocks(record), "kernels")
    assert "stale" in readme.read_text()
    docs.write_text(f"{BEGIN}\n{END}\n")
    for _ in range(2):
        harness.write_docs(report.blocks(record), "kernels")
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n![") and text.endswith(f"{END}\nafter\n")
    assert "stale" not in text and report.summary(record, short=True) in text
    assert report.details(record) in docs.read_text()


def test_the_newest_whole_run_is_shown(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no kernels\*\.json in .*: run bench/kernels\.py"):
        harness.records("kernels")
    later = {"date": "2026-11-22T00:00:00Z"}
    runs = [record, record | later | {"commit": "new"}, record | later | {"complete": False}]
    for number, run in enumerate(runs):
        (tmp_path / f"kernels-{number}.json").write_text(json.dumps(run))
    assert harness.newest(harness.records("kernels"))["commit"] == "new"


def test_the_plot_is_the_same_for_the_same_figures(record: Record, tmp_path: Path) -> None:
    plot(record, tmp_path / "a.svg"), plot(record, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "Liger 0.8.5" in text and ">1.07<" in text and "QuACK" not in text
