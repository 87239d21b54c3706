"""The folders of runs: a checkpoint of the trainer, and what the report reads."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.config import keys_of
from tests.fuzz.harness import Case, Files, Link, Target
from tests.fuzz.junk import altered, damaged, dump, values
from tests.fuzz.weights import header
from tests.small import write_chats, write_model
from tigon.report.page import describe_state, facts, figures, settings
from tigon.report.read import read
from tigon.train import main
from tigon.train.export import load_checkpoint

STEP = "checkpoints/step-00000001"
CONFIG, RUN, SUMS = f"{STEP}/config.json", f"{STEP}/run.json", f"{STEP}/SHA256SUMS"
GENERATION, WEIGHTS = f"{STEP}/generation_config.json", f"{STEP}/weights-00000.safetensors"
METRICS, SETTINGS = "metrics.jsonl", "config.yaml"
YAML = ("!!bool x", '!!int ""', '!!float ""', "!!timestamp x", "2020-99-99", "1:1:1", "9" * 5000)
YAML += ("1:" * 99 + "1.0", ".inf", "-.nan", "0x", "!!set {a, b}", "!!omap [a: 1]", "!!map [x]")
YAML += ("!!int [x]", "[{path: 3}]", "{<<: {a: 1}}", "&a [*a]", "{? [a] : b}", "[a", "\t", "-")
YAML += ("\x1b[2J", "*x", "=")
SET = ("steps", "epochs", "patience", "data", "eval_data", "model", "init", "run_dir", "lr")
SET += ("\x1b", "~")


def write(folder: Path) -> None:
    """Train a run of one step."""
    beside = folder.parent
    settings = {"run_dir": folder, "model": write_model(beside / "model"), "steps": 1}
    settings |= {"data": write_chats(beside / "train.jsonl", 9), "seq_len": 64, "batch_size": 1}
    settings |= {"device": "cpu", "export": "false", "save_every": 1, "optimizer": "sgd"}
    main([f"{key}={value}" for key, value in settings.items()])
    # Of its usual length, reading it takes most of the time
    (folder / "config.yaml").write_text("steps: 1\nsave_every: 1\n")


def load(folder: Path) -> None:
    run = read(folder)
    for describe in (describe_state, facts, figures, settings):  # drawing takes most of a second
        describe(run)
    load_checkpoint(folder / STEP)


def sums(files: Files, changed: dict[str, Any]) -> bytes:
    """Write the SHA256SUMS with which the changed files pass for complete ones."""
    lines = files[SUMS].decode().splitlines()
    for name, content in changed.items():
        plain = name.removeprefix(f"{STEP}/")
        if isinstance(content, bytes) and name.startswith(STEP):
            lines = [line for line in lines if not line.endswith(f"  {plain}")]
            lines.append(f"{hashlib.sha256(content).hexdigest()}  {plain}")
    return "".join(f"{line}\n" for line in lines).encode()


@st.composite
def cases(draw: Any, files: Files) -> Case:
    names = [CONFIG, CONFIG, RUN, GENERATION, WEIGHTS, SUMS, METRICS, SETTINGS]
    name = draw(st.sampled_from(names))
    content = files[name]
    if name == METRICS:
        row = st.dictionaries(
            st.sampled_from(["step", "loss", "lr", "\x1b[2J"]), values, max_size=3
        )
        rows = st.lists(row.map(dump), max_size=3)
        strategy = st.one_of(damaged(content), rows.map(lambda r: content + b"\n".join(r) + b"\n"))
    elif name == SETTINGS:
        line = st.builds("{}: {}\n".format, st.sampled_from(SET), st.sampled_from(YAML))
        lines = st.lists(line, max_size=3).map(lambda some: "".join(some).encode())
        strategy = st.one_of(lines, damaged(content))
    elif name == SUMS:
        strategy = damaged(content)
    elif name == WEIGHTS:
        strategy = st.one_of(header(content), damaged(content))
    else:
        parsed = json.loads(content)
        known = keys_of(parsed, "llama") if name == CONFIG else sorted(parsed)
        strategy = st.one_of(altered(parsed, known).map(dump), damaged(content))
    links = st.sampled_from([None, Link("../../../secret.json"), Link("/etc/hostname")])
    case: dict[str, Any] = {name: draw(strategy if draw(st.integers(0, 9)) else links)}
    if name != SUMS and draw(st.integers(0, 4)):
        case[SUMS] = sums(files, case)
    return case


TARGETS = [Target("run", 1 / 4, write, cases, load)]
