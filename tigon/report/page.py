"""Renders the page of one run, or of several: one HTML file that loads nothing."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from tigon.report.charts import charts
from tigon.report.read import Column, RunFiles
from tigon.settings.config import Config
from tigon.utils.terminal import escape_controls

CHARACTERS = 2000  # of a setting
SAMPLES = 12  # steps
DEFAULTS = {field.name: field.default for field in fields(Config)}


def render_page(runs: Sequence[RunFiles]) -> str:
    """Returns the whole document; all text of a run is escaped, control characters too."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, trim_blocks=True)
    functions = (describe_state, facts, figures, settings, differences, select_samples)
    environment.globals.update({function.__name__: function for function in functions})
    html = environment.get_template("page.html").render(runs=runs, charts=[*charts(runs)])
    return escape_controls(html)


def describe_state(run: RunFiles) -> str:
    """Returns whether the run has finished, goes on or was interrupted, and its step."""
    last, steps = run.last_step or 0, run.config.get("steps")
    if run.is_finished:
        return f"finished · {last:,} steps"
    name = "running" if run.running else "ended early" if run.ended_early else "stopped"
    return f"{name} · step {last:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")


def facts(run: RunFiles) -> dict[str, str]:
    """Returns texts by name on what was trained on what, and where, as far as it is known."""
    config, init = run.config, run.config.get("init")
    count = f"{run.parameters:,} parameters" if run.parameters else ""
    size = ", ".join(filter(None, (run.architecture, count)))
    texts = {
        "Model": str(config.get("model") or (f"{init}, from random weights" if init else "")),
        "Size": size, "Task": str(config.get("task", "")), "Machine": run.machine,
        "Data": format_setting(config["data"]) if config.get("data") else "",
        "Held out": format_setting(config["eval_data"]) if config.get("eval_data") else "",
    }  # fmt: skip
    return {name: text for name, text in texts.items() if text}


def format_number(value: float) -> str:
    """Formats four digits, or from 1,000 on a whole number with commas; NaN is "not finite"."""
    if math.isnan(value):
        return "not finite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Formats a duration as 4.2 s, 4m 05s or 1h 04m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    long = f"{hours:,}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
    return f"{seconds:.1f} s" if seconds < 60 else long


# Name -> metric, which number of its column, and its text
FIGURES: dict[str, tuple[str, Callable[[Column], float], Callable[[float], str]]] = {
    "Training loss, last step": ("loss", Column.last, format_number),
    "Eval loss, first": ("eval_loss", lambda c: c.values[0], format_number),
    "Eval loss, last": ("eval_loss", lambda c: c.values[-1], format_number),
    "Eval loss, best": ("eval_loss", lambda c: min(c.finite()), format_number),
    "Eval perplexity, last": ("eval_loss", lambda c: math.exp(min(c.last(), 700)), format_number),
    "Eval accuracy, last": ("eval_accuracy", Column.last, "{:.2%}".format),
    "Tokens seen": ("tokens", lambda c: sum(c.finite()), "{:,.0f}".format),
    "Epochs": ("epoch", Column.last, format_number),
    "Time of training steps": ("step_seconds", lambda c: sum(c.finite()), format_duration),
    "Time waiting for data": ("data_seconds", lambda c: sum(c.finite()), format_duration),
    "Throughput, median, tokens/s": ("tokens_per_second", Column.median, format_number),
    "MFU, median": ("mfu", Column.median, "{:.2%}".format),
    "Peak memory": ("memory_gib", lambda c: max(c.finite()), "{:.2f} GiB".format),
}


def figures(run: RunFiles) -> dict[str, str]:
    """Returns the texts of the key figures by name, without those that have no finite values."""
    columns = {name: run.column(key) for name, (key, *_) in FIGURES.items()}
    texts = {name: text(pick(columns[name])) for name, (_, pick, text) in FIGURES.items()
             if columns[name].finite()}  # fmt: skip
    counts = {"Skipped steps": len(run.skipped), "Rollbacks": len(run.rollbacks)}
    return texts | {name: f"{count:,}" for name, count in counts.items() if count}


def format_setting(value: Any) -> str:
    """Returns a setting as a line of YAML, cut after CHARACTERS."""
    if isinstance(value, list | tuple):
        value = [{k: v for k, v in item.items() if v not in (None, {}, [])}
                 if isinstance(item, dict) else item for item in value]  # fmt: skip
    style: dict[str, Any] = {"default_flow_style": True, "width": 10**9, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **style)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}…"


def settings(run: RunFiles) -> tuple[list[list[str]], list[list[str]]]:
    """Returns rows of the settings that differ from their defaults, and of the others."""
    rows: tuple[list[list[str]], list[list[str]]] = [], []
    for name, value in run.config.items():
        texts = [format_setting(value), format_setting(DEFAULTS.get(name, ""))]
        rows[texts[0] == texts[1]].append([name, *texts])
    return rows


def differences(runs: Sequence[RunFiles]) -> Iterator[list[str]]:
    """Yields each setting that differs, but run_dir and resume, with its value in each run."""
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = [format_setting(run.config[name]) if name in run.config else "–" for run in runs]
        if len(set(values)) > 1 and name not in ("run_dir", "resume"):
            yield [name, *values]


def select_samples(texts: dict[int, str]) -> list[tuple[int, str]]:
    """Returns the samples of at most SAMPLES steps, evenly spaced, as (step, text)."""
    steps, last = sorted(texts), len(texts) - 1
    if last >= SAMPLES:
        steps = [steps[round(i * last / (SAMPLES - 1))] for i in range(SAMPLES)]
    return [(step, texts[step]) for step in steps]
