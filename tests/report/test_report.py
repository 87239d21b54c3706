"""The page of a run: what it says, that it loads nothing, and that hostile text stays text."""

import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import tigon.report
from tigon.cli import main

from tigon.report.read import COLUMNS, read
from tigon.report.charts import buckets
from tigon.report.page import as_yaml, default_settings
from tigon.train.config import SECTIONS
from tigon.train.config_file import dump, load

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>\"'&"
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
    row = {
        "step": step,
        "epoch": step / 10,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "loss": 3.0 / step,
        "accuracy": 0.5,
        "tokens": 100,
        "step_seconds": 2.0,
        "data_seconds": 0.1,
        "data_share": 0.05,
        "tokens_per_second": 50.0,
        "mfu": None,
        "memory_gib": 1.5,
    }
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
    path = write_run(tmp_path / "first", rows, "steps=10", "lr=1e-3", "eval_data=b.jsonl")
    samples = [{"step": s, "prompt": "Why?", "text": f"Because {s}."} for s in (0, 10)]
    (path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return path


def page_of(*runs: Path) -> str:
    return tigon.report.write(runs).read_text()


def assert_harmless(page: str) -> Elements:
    """Nothing that loads, and no element or handler that the page does not itself have."""
    elements = Elements(page)
    for tag, attributes in elements.tags:
        assert not LOADS & attributes.keys(), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "video")
    assert [tag for tag, _ in elements.tags].count("script") == 1
    styles = re.findall(r"<style>(.*?)</style>", page, re.S)
    assert len(styles) == 1 and "url(" not in styles[0] and "@import" not in styles[0]
    policy = next(a["content"] for t, a in elements.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "http" not in policy
    return elements


def test_the_page_of_a_run(run: Path) -> None:
    elements = assert_harmless(page_of(run))
    text = re.sub(r"\s+", " ", elements.text)
    for said in (
        "first finished · 10 steps",
        "some/model",
        "1 rank on cpu, commit abc",
        "Eval loss, before training4Eval loss, last2Eval perplexity, last7.389",
        "Eval accuracy, last75 %",
        "Tokens seen1,000",
        "Time of training steps20.0 s",
        "Waiting for data5 % of it",
        "Throughput, median50 tokens/s",
        "Peak memory1.50 GiB",
        "Skipped steps1",
        "Rollbacks1",
        "Not finite in 1 steps: 4.",
        "step 4 skipped: nonfinite",
        "rollback before step 8",
        "Loss by data set",
        "Why?",
        "before trainingBecause 0.",
        "step 10Because 10.",
    ):
        assert said in text, said
    titles = [title.strip() for title in re.findall(r"<h3>([^<]*)", page_of(run))]
    assert "MFU" not in titles  # all null: there is nothing to draw
    for title in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "Throughput"):
        assert title in titles


def test_lines_carry_their_values(run: Path) -> None:
    lines = [a for t, a in Elements(page_of(run)).tags if t == "g" and "data-x" in a]
    loss = next(line for line in lines if line["data-name"] == "training")
    assert loss["data-x"] == "1 2 3 4 5 6 7 8 9 10"
    assert loss["data-y"] == "3 1.5 1 - 0.6 0.5 0.42857 0.375 0.33333 0.3"
    accuracy = [line["data-y"] for line in lines if line["data-unit"] == " %"]
    assert "25 75" in accuracy
    # A value that is not finite is a gap: the line begins again after it
    drawn = re.search(r'data-y="3 1.5 1 - .*?<path class="line" d="([^"]*)"', page_of(run))
    assert drawn is not None and drawn[1].count("M") == 2


def test_settings_that_differ_from_their_defaults(run: Path) -> None:
    page = page_of(run)
    _, _, folded = page[page.index("<h2>Settings") :].partition("The optimizer")
    optimizer = folded[: folded.index("<h3>")]
    changed, _, same = optimizer.partition("<details>")
    assert "<td>0.001</td><td>1.0e-05</td>" in changed and ">steps<" in changed
    assert ">beta1<" in same and ">beta1<" not in changed


def test_metrics_with_a_stroke_have_their_chart(tmp_path: Path) -> None:
    rows = [step_row(i, **{"rewards/chosen": i / 2}) for i in (1, 2, 3)]
    page = page_of(write_run(tmp_path / "run", [*rows, {"step": 3, "eval_rewards/chosen": 1.5}]))
    assert "rewards/chosen" in page


def test_the_settings_are_those_of_training() -> None:
    for section, ours in zip(SECTIONS, sections(), strict=True):
        assert ours.title == (section.__doc__ or "").splitlines()[0].rstrip(".")
        expected = {f.name: plain(f.default) for f in fields(section) if f.name in ours.defaults}
        own = {f.name for f in fields(section)}
        assert ours.defaults.keys() == own
        assert UNKNOWN not in ours.defaults.values()
        assert ours.defaults == expected


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rows = [
        step_row(1, **{HOSTILE: 1.0, "skipped": HOSTILE + "\x1b[2J\u202e"}),
        step_row(2, **{HOSTILE: 2.0}),
    ]
    rows += [{"step": 2, "eval_loss": 1.0, f"eval_loss/{HOSTILE}": 1.0}]
    path = write_run(tmp_path / HOSTILE.replace("/", "∕"), rows, "steps=2")
    config = yaml.safe_load((path / "config.yaml").read_text())
    config |= {"model": HOSTILE, "task": HOSTILE, HOSTILE: HOSTILE, "data": [{"path": HOSTILE}]}
    header = f"# {HOSTILE}\n"
    (path / "config.yaml").write_text(header + yaml.safe_dump(config))
    sample = {"step": 2, "prompt": HOSTILE, "text": HOSTILE}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    other = shutil.copytree(path, tmp_path / "other")
    for page in (page_of(path), page_of(path, other)):
        elements = assert_harmless(page)
        assert HOSTILE in elements.text
        assert HOSTILE not in page
        assert not {c for c in page if not c.isprintable()} - set("\t\n")


def test_two_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    rows = [step_row(step, loss=1.0) for step in range(1, 6)]
    other = write_run(tmp_path / "second", rows, "steps=8", "lr=2e-3")
    path = tigon.report.write([run, other])
    assert path == run / "comparison.html"
    elements = assert_harmless(path.read_text())
    text = re.sub(r"\s+", " ", elements.text)
    assert "2 runs compared" in text and "stopped · step 5 of 8" in text
    assert "Training loss, last step0.31" in text
    differ = text[text.index("Settings that differ") : text.index("Charts")]
    assert "lr0.0010.002" in differ and "run_dir" not in differ and "beta1" not in differ
    lines = [a for t, a in elements.tags if t == "g" and "data-x" in a]
    names = [a["data-name"] for a in lines]
    assert "A first" in str(names).replace("  ", " ") and "B second" in str(names).replace(
        "  ", " "
    )
    assert "A is not finite in 1 rows: 4." in text


@pytest.mark.parametrize(
    "damage", ["no metrics", "no rows", "half a line", "no config", "bad yaml"]
)
def test_missing_and_damaged_files_are_said(run: Path, damage: str) -> None:
    metrics, config = run / "metrics.jsonl", run / "config.yaml"
    if damage == "no metrics":
        metrics.unlink()
        said = "There is no metrics.jsonl: no step has been recorded."
    elif damage == "no rows":
        metrics.write_bytes(b"")
        said = "metrics.jsonl has no rows: no step has been recorded."
    elif damage == "half a line":
        rows = metrics.read_bytes()
        more = b'\0\0\0\n[1]\n{"step": "x"}\n{"step": 1e9}\n{"step": true}\n' + b"[" * 99999
        metrics.write_bytes(rows + b'{"step": 11, "lo' + more)
        said = "6 lines of metrics.jsonl cannot be read and are left out."
    elif damage == "no config":
        config.unlink()
        said = "There is no config.yaml, so the settings are not known."
    else:
        config.write_bytes(b"a: [\xff\n")
        said = "config.yaml cannot be read: "
    elements = assert_harmless(page_of(run))
    assert said in elements.text
    assert ("finished" in elements.text) == (damage == "half a line")


def test_values_of_any_kind(tmp_path: Path) -> None:
    strange = [0.0, -1.0, 1e308, 1e-320, math.nan, math.inf, 10**400, "x", [1], {"a": 1}, True]
    rows = [step_row(i + 1, loss=value) for i, value in enumerate(strange)]
    path = write_run(tmp_path / "strange", rows, "steps=11")
    assert_harmless(page_of(path))
    same = write_run(tmp_path / "constant", [step_row(1, loss=0.0)])
    elements = assert_harmless(page_of(same))
    assert "There is no evaluation among the metrics." in elements.text


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "config",
    [BOMB + "model: *i\ndata: *i\n", "lr: &a [*a]\n", f"steps: 0x{'f' * 5000}\n", "#" * (1 << 19)],
    ids=["a bomb", "inside itself", "a number", "long"],
)
def test_settings_that_no_page_can_show(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step_row(1)) + "\n")
    page = tigon.report.write([tmp_path]).read_text()
    assert "config.yaml cannot be read" in page and len(page) < 100_000


def test_settings_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("epochs: two\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step_row(1)) + "\n")
    assert "stopped" in tigon.report.write([tmp_path]).read_text()


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "metrics.jsonl", "samples.jsonl", ".exported", ".lock", "hf/config.json"],
)
def test_a_pipe_in_place_of_a_file(run: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / "piped"
    shutil.copytree(run, other)
    (other / "hf").mkdir(exist_ok=True)
    (other / name).unlink(missing_ok=True)
    os.mkfifo(other / name)  # which nobody ever writes
    script = f"import tigon.report; tigon.report.write([{str(other)!r}])"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)


def test_a_line_and_keys_beyond_measure(tmp_path: Path) -> None:
    keys = {f"key{i}": i for i in range(COLUMNS + 5)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write(json.dumps(step_row(1)) + "\n")
        file.truncate(100 << 20)  # zeros
        file.seek(0, os.SEEK_END)
        file.write("\n" + json.dumps({"step": 2, "loss": 1.0} | keys) + "\n")
    found = read(tmp_path)
    assert found.updates == [1, 2] and len(found.columns) == COLUMNS
    assert any("A line of metrics.jsonl" in problem for problem in found.problems)
    assert any("are left out" in problem for problem in found.problems)


def test_sizes_that_are_no_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    for shape in ([10**4000, 10**4000], [10**400, 1.5], [-5], ["a"]):
        header = json.dumps({"a": {"shape": shape}}).encode()
        content = len(header).to_bytes(8, "little") + header
        (tmp_path / "hf" / "model.safetensors").write_bytes(content)
        assert read(tmp_path).parameters is None
        tigon.report.write([tmp_path])


def test_states(tmp_path: Path, run: Path) -> None:
    (run / "config.yaml").write_text("epochs: 1\n")
    assert read(run).is_finished  # the last row has epoch 1.0
    (run / "config.yaml").write_text("epochs: 2\n")
    assert not read(run).is_finished and not read(run).running
    (run / ".exported").write_text("10\n")
    assert read(run).is_finished
    held = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
    holder = subprocess.Popen(
        [sys.executable, "-c", held + "print(flush=True); sys.stdin.read()", str(run / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    (run / ".exported").unlink()
    assert "running · step 10" in page_of(run)
    holder.communicate(b"")
    assert not read(run).running
    rows = [{"step": s, "eval_loss": loss} for s, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0))]
    early = write_run(tmp_path / "early", [*rows, step_row(4)], "steps=9")
    (early / "config.yaml").write_text("patience: 2\nsteps: 9\n")
    assert "ended early · step 4 of 9" in page_of(early)
    (early / "config.yaml").write_text("patience: 3\nsteps: 9\n")
    assert "stopped · step 4 of 9" in page_of(early)


def test_thousands_of_steps(tmp_path: Path) -> None:
    row = json.dumps(step_row(7)).replace('"step": 7', '"step": %d').replace("0.428", "%d.428")
    path = write_run(tmp_path / "long", [])
    text = "".join(row % (i, i % 3) + "\n" for i in range(1, 20_001))
    (path / "metrics.jsonl").write_text(text)
    began = time.process_time()
    out = tigon.report.write([path])
    assert time.process_time() - began < 3  # about 0.3 s on a quiet core
    assert out.stat().st_size < 1_500_000
    assert "the mean of up to 84 steps" in out.read_text()


def test_buckets_keep_extremes_and_means() -> None:
    column = Column()
    for step in range(1, 1001):
        column.add(step, math.nan if 500 < step <= 510 else float(step % 7))
    found = points(column, limit=100)
    assert [(p.first, p.last) for p in found[:2]] == [(1, 10), (11, 20)] and len(found) == 100
    assert (found[0].low, found[0].high, found[0].mean) == (0.0, 6.0, sum(range(7)) / 10 + 0.6)
    assert found[50].empty and not found[51].empty
    assert [p.mean for p in points(column, limit=1000)][:3] == [1.0, 2.0, 3.0]


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
        ([str(run), "--out", str(tmp_path / "none/page.html")], "no directory"),
        ([str(run), "--out", str(tmp_path)], "is a directory: name a file"),
    ):
        assert main(["report", *words]) == 1
        err = capsys.readouterr().err
        assert err.startswith("tigon report: ") and message in err and err.count("\n") == 1
    assert list(empty.iterdir()) == []


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
    assert tigon.report.attempt(run) == "no report: OSError: [Errno 28] full"
    assert (run / "report.html").read_text() == before
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


def test_the_command_imports_no_torch(run: Path) -> None:
    code = (
        "import sys, tigon.cli; tigon.cli.main(['report', sys.argv[1]]);"
        "print([m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert done.stdout.endswith("report.html\n[]\n"), done.stderr


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_in_a_browser(run: Path, tmp_path: Path) -> None:
    """The script runs under the page's policy, shows values, and the page asks for nothing."""
    sample = {"step": 10, "prompt": HOSTILE, "text": HOSTILE}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = page_of(run)
    probe = (
        "const plot = document.querySelector('svg.plot');"
        "plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));"
        "document.title = `asked for ${performance.getEntriesByType('resource').length}`;"
    )
    # The probe must be let in by the policy, as the page's own script is
    script = re.findall(r"<script>(.*?)</script>", page, re.S)[0]
    page = page.replace(_digest(script), _digest(script + probe)).replace(script, script + probe)
    (tmp_path / "page.html").write_text(page)
    log = tmp_path / "net.json"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # the browser's own requests
    command += ["--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}"]
    command += ["--enable-logging=stderr", "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.search(r'<div id="tip" style="[^"]*">training: 3, step 1\nevaluation: 4', done.stdout)
    assert "Content Security Policy" not in done.stderr
    assert "<title>asked for 0</title>" in done.stdout
    assert "page.html" in log.read_text() and "evil.example" not in log.read_text()
