"""The page of a run: what it says, that it loads nothing, and that hostile text stays text."""

import fcntl
import html
import html.parser
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import tigon.report
from tigon.cli import main
from tigon.report.charts import charts
from tigon.report.page import describe_state
from tigon.report.read import read
from tigon.settings.load import dump, load

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>\"'&"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
LOADS = {"src", "href", "srcset", "action", "background", "data", "poster", "ping", "formaction"}


class Elements(html.parser.HTMLParser):
    """Every start tag with its attributes, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.open.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    row = {"step": step, "epoch": step / 10, "lr": 1e-3, "grad_norm": 1.0, "loss": 3.0 / step}
    row |= {"accuracy": 0.5, "tokens": 100, "step_seconds": 2.0, "data_seconds": 0.1, "mfu": None}
    row |= {"data_share": 0.05, "tokens_per_second": 50.0, "memory_gib": 1.5}
    return row | changes


def write_run(path: Path, rows: list[dict[str, Any]], *settings: str) -> Path:
    path.mkdir(parents=True)
    config = load(None, ["model=some/model", "data=a.jsonl", f"run_dir={path}", *settings])
    (path / "config.yaml").write_text("# 1 rank on cpu, commit abc\n" + dump(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [{"step": 0, "eval_loss": 4.0, "eval_accuracy": 0.25, "eval_loss/math": 3.5}]
    rows += [step_row(step) for step in range(1, 11)]
    rows[4] |= {"loss": None, "grad_norm": None, "skipped": "nonfinite"}
    rows[8] |= {"rollbacks": 1}
    rows += [{"step": 10, "eval_loss": 2.0, "eval_accuracy": 0.75, "eval_loss/math": 1.5}]
    rows[0]["eval/arc_easy/acc_norm"], rows[-1]["eval/arc_easy/acc_norm"] = 0.25, 0.625
    path = write_run(tmp_path / "first", rows, "steps=10", "lr=1e-3", "eval_data=b.jsonl")
    samples = [{"step": s, "prompt": "Why?", "text": f"Because {s}."} for s in (0, 10)]
    (path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return path


def page_of(*runs: Path) -> str:
    return tigon.report.write(runs).read_text()


def assert_harmless(page: str) -> Elements:
    """Nothing loads or acts, and the policy would forbid it."""
    elements = Elements(page)
    for tag, attributes in elements.tags:
        assert not LOADS & attributes.keys(), (tag, attributes)
        assert (attributes.get("xlink:href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form")
    assert "url(http" not in page and "@import" not in page
    policy = next(a["content"] for t, a in elements.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'; ")
    return elements


def text_of(page: str) -> str:
    assert_harmless(page)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_page_of_a_run(run: Path) -> None:
    page = page_of(run)
    text = text_of(page)
    for expected in (
        "first finished · 10 steps", "some/model", "1 rank on cpu, commit abc",
        "Eval loss, first 4", "Eval loss, last 2", "Eval perplexity, last 7.389",
        "Eval accuracy, last 75.00%", "Tokens seen 1,000", "Time of training steps 20.0 s",
        "Throughput, median, tokens/s 50", "Peak memory 1.50 GiB", "Skipped steps 1",
        "Rollbacks 1", "training: 3 at first, 0.3 at last", "evaluation: 25 % at first, 75 %",
        "training is not finite in 1 rows: step 4", "skipped: step 4 (nonfinite)",
        "rollbacks before step 8", "Loss by data set", "math: 3.5 at first, 1.5 at last", "Why?",
        "arc easy/acc norm", "evaluation: 0.25 at first, 0.625 at last",
        "before training Because 0.", "step 10 Because 10.",
    ):  # fmt: skip
        assert expected in text, expected
    titles = [title.strip() for title in re.findall(r"<h3>([^<]*)", page)]
    assert "MFU" not in titles  # all null: there is nothing to draw
    assert {"Loss", "Accuracy", "Learning rate", "Gradient norm", "Throughput"} <= {*titles}
    changed, _, same = page[page.index("<h2>Settings that") :].partition("<details>")
    assert "<td>lr</td><td>0.001</td><td>1.0e-05</td>" in changed and "<td>steps</td>" in changed
    assert "<td>beta1</td>" in same and "<td>beta1</td>" not in changed


def test_line_has_gaps_where_values_are_not_finite(run: Path) -> None:
    loss = next(chart for chart in charts([read(run)]) if chart["title"] == "Loss")
    pattern = r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #0a58ad'
    (line,) = re.findall(pattern, loss["svg"])  # drawn in a color and not filled
    assert line.count("M") == 2 and line.count("L") == 7  # ten steps without the fourth


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rows = [
        step_row(1, **{HOSTILE: 1.0, "skipped": HOSTILE + "\x1b[2J\u202e", "_$x^$": 1.0}),
        step_row(2, **{HOSTILE: 2.0, "_$x^$": 2.0}),
    ]
    rows += [{"step": 2, "eval_loss": 1.0, f"eval_loss/{HOSTILE}": 1.0, "eval_loss/_$\\frac": 1.0}]
    path = write_run(tmp_path / HOSTILE.replace("/", "∕"), rows, "steps=2")
    config = yaml.safe_load((path / "config.yaml").read_text())
    config |= {"model": HOSTILE, "task": HOSTILE, HOSTILE: HOSTILE, "data": [{"path": HOSTILE}]}
    (path / "config.yaml").write_text(f"# {HOSTILE}\n" + yaml.safe_dump(config))
    sample = {"step": 2, "prompt": HOSTILE, "text": HOSTILE}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    other = shutil.copytree(path, tmp_path / "other")
    for page in (page_of(path), page_of(path, other)):
        assert HOSTILE in assert_harmless(page).text
        assert HOSTILE not in page and "alert(1)</script>" not in page
        assert not {c for c in page if not c.isprintable()} - set("\t\n")


def test_two_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    rows = [step_row(step, loss=1.0) for step in range(1, 6)]
    other = write_run(tmp_path / "second", rows, "steps=8", "lr=2e-3")
    path = tigon.report.write([run, other])
    assert path == run / "comparison.html"
    text = text_of(path.read_text())
    assert "2 runs compared" in text and "stopped · step 5 of 8" in text
    assert re.search(r"Training loss, last step ?0.3 ?1 ", text)
    differ = text[text.index("Settings that differ") : text.index("Charts")]
    assert re.search(r"lr ?0.001 ?0.002", differ)
    assert "run_dir" not in differ and "beta1" not in differ
    assert "1: first is not finite in 1 rows: step 4" in text
    assert "2: second: 1 at first, 1 at last" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", None, "No training step has been recorded in metrics.jsonl."),
        ("metrics.jsonl", b"", "No training step has been recorded in metrics.jsonl."),
        ("config.yaml", None, "There is no config.yaml, so the settings are not known."),
        ("config.yaml", b"a: [\xff\n", "config.yaml cannot be read: "),
        ("config.yaml", BOMB.encode(), "config.yaml cannot be read: "),
        ("config.yaml", b"lr: &a [*a]\n", "config.yaml cannot be read: "),
        ("config.yaml", b"[1]\n", "config.yaml cannot be read: it holds no settings"),
        ("config.yaml", b"#" * (1 << 19), "config.yaml cannot be read: "),
        ("config.yaml", b"epochs: two\n", "stopped"),
    ],
)
def test_damaged_files_are_reported(run, name, content, message):
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    found = read(run)
    assert message in " ".join([*found.problems, describe_state(found)]) and not found.is_finished


def test_damaged_lines_are_left_out(run: Path) -> None:
    more = b'{"step": 11, "lo\0\0\0\n[1]\n{"step": "x"}\n{"step": 1e9}\n{"step": true}\n'
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(more + b"[" * 99999)
    assert "Left out of metrics.jsonl: 6 lines" in text_of(page_of(run))
    assert read(run).is_finished


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "metrics.jsonl", "samples.jsonl", ".exported", ".lock", "hf/config.json"],
)
def test_pipe_in_place_of_a_file(run: Path, name: str) -> None:
    (run / "hf").mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)  # which nobody ever writes
    assert read(run).name == "first"


def test_states(tmp_path: Path, run: Path) -> None:
    (run / "config.yaml").write_text("epochs: 1\n")
    assert read(run).is_finished  # the last row has epoch 1.0
    (run / "config.yaml").write_text("epochs: 2\n")
    assert not read(run).is_finished and not read(run).running
    (run / ".exported").write_text("10\n")
    assert read(run).is_finished
    (run / ".exported").unlink()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert describe_state(read(run)) == "running · step 10"
    assert not read(run).running
    rows = [{"step": s, "eval_loss": loss} for s, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0))]
    early = write_run(tmp_path / "early", [*rows, step_row(4)], "steps=9")
    for patience, name in ((2, "ended early"), (3, "stopped")):
        (early / "config.yaml").write_text(f"patience: {patience}\nsteps: 9\n")
        assert describe_state(read(early)) == f"{name} · step 4 of 9"


def test_thousands_of_steps(tmp_path: Path) -> None:
    path = write_run(tmp_path / "long", [step_row(i, loss=i % 3) for i in range(1, 20_001)])
    began = time.process_time()
    page = page_of(path)
    assert time.process_time() - began < 5  # about 1 s on a quiet core
    assert len(page) < 1_500_000 and "a point is the mean of 84 steps" in page


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    out = tmp_path / "page.html"
    assert main(["report", str(run), str(run), "--out", str(out)]) == 0
    assert "2 runs compared" in out.read_text()
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, message in (
        ([str(tmp_path / "none")], "no run directory"),
        ([str(empty)], "holds no run: it has neither config.yaml nor metrics.jsonl"),
        ([str(run.parent)], f"metrics.jsonl; name those in it, such as {run}\n"),
        ([str(run), "--out", str(tmp_path / "none/page.html")], "no directory"),
        ([str(run), "--out", str(tmp_path)], "is a directory: name a file"),
    ):
        assert main(["report", *words]) == 1
        err = capsys.readouterr().err
        assert err.startswith("tigon report: ") and message in err and err.count("\n") == 1
    assert list(empty.iterdir()) == []


def test_missing_matplotlib_names_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'tigon[report]'" in tigon.report.write_or_explain(run)
    assert not (run / "report.html").exists()


def test_a_link_in_place_of_the_page(run: Path, tmp_path: Path) -> None:
    """It is neither followed nor removed, unless it is named."""
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    (run / "report.html").unlink(missing_ok=True)
    (run / "report.html").symlink_to(mine)
    with pytest.raises(FileExistsError, match=f"report.html is a link to {mine}, which is not"):
        tigon.report.write([run])
    assert mine.read_text() == "mine"
    assert tigon.report.write([run], run / "report.html") == mine
    assert (run / "report.html").is_symlink() and "<html" in mine.read_text()
    (run / "report.html").unlink()


def test_whole_or_not_at_all(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = page_of(run)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "full")))
    assert tigon.report.write_or_explain(run) == "no report: OSError: [Errno 28] full"
    assert (run / "report.html").read_text() == before
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


def test_a_folder_that_is_only_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the page, not its temporary name."""
    refused = PermissionError(13, "Permission denied", str(run / ".report.html.0123"))
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(refused))
    page = run / "none.html"
    with pytest.raises(PermissionError) as caught:
        tigon.report.write([run], page)
    text = f"{page.resolve()} cannot be written: Permission denied; name another file (--out)"
    assert str(caught.value) == text
