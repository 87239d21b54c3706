"""The page: plain HTML with its style and script inside. All text of a run is escaped, control
characters too."""

import base64
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import yaml

from tigon.report.chart import Chart, figure
from tigon.report.figures import bucket_note, charts, compared, key_figures, letter
from tigon.report.read import RunFiles, Sample
from tigon.report.settings import UNKNOWN, Section, plain, sections
from tigon.utils.terminal import escape_controls

HERE = Path(__file__).parent
PROMPTS, TEXTS, CHARACTERS = 8, 12, 4000  # of the samples that are shown, at most
VALUE = 2000  # characters of a setting
PLACES = ("run_dir", "resume")  # settings that differ between any two runs


def page(runs: Sequence[RunFiles]) -> str:
    """The whole document of one run, or of several side by side."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    names = _names(runs)
    title = names[0] if len(runs) == 1 else " and ".join((", ".join(names[:-1]), names[-1]))
    body = _one(runs[0]) if len(runs) == 1 else _several(runs, names)
    # Nothing may be loaded from anywhere, and only these two texts may act
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return escape_controls(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)} · Tigon</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n{body}</main>\n<footer>Written by Tigon on {now}. "
        "This page is one file and loads nothing.</footer>\n"
        f'<div id="tip" hidden></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """The directories' names, or their paths where two have the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _one(run: RunFiles) -> str:
    parts = [
        f"<header><h1>{escape(run.name)} {_state(run)}</h1>\n{_about(run)}</header>\n",
        _problems([run], [run.name]),
        _cards(run),
        _drawings(charts(run)),
        _samples(run.samples),
        _settings(run),
    ]
    return "".join(parts)


def _several(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    items = "".join(
        f'<li><strong class="letter">{letter(i)}</strong> '
        f"<div><h2>{escape(name)} {_state(run)}</h2>{_about(run)}</div></li>"
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
    )
    lettered = [f"{letter(i)}  {name}" for i, name in enumerate(names)]
    figures = [key_figures(run) for run in runs]
    keys = dict.fromkeys(key for each in figures for key in each)
    rows = ([key, *(each.get(key, "–") for each in figures)] for key in keys)
    heads = ["", *(f"{letter(i)} {name}" for i, name in enumerate(names))]
    return (
        f'<header><h1>{len(runs)} runs compared</h1><ol class="runs">{items}</ol></header>\n'
        f"{_problems(runs, names)}"
        f"<section><h2>Final figures</h2>{_table(heads, rows, 'figures')}</section>\n"
        f"{_differences(runs, heads)}"
        f"{_drawings(compared(runs, lettered))}"
    )


def _state(run: RunFiles) -> str:
    last, planned = run.last_step, run.config.get("steps")
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    if run.is_finished:
        kind, text = "finished", f"finished · {last:,} steps"
    elif run.ended_early and not run.running:
        kind, text = "finished", f"ended early · step {last:,}{of}"
    elif run.running:
        kind, text = "running", f"running · step {last or 0:,}{of}"
    elif last is None:
        kind, text = "stopped", "no steps"
    else:
        kind, text = "stopped", f"stopped · step {last:,}{of}"
    return f'<span class="state {kind}">{text}</span>'


def _about(run: RunFiles) -> str:
    """What was trained on what, and where."""
    config, facts = run.config, {}
    model = config.get("model") or config.get("init")
    if model:
        origin = "" if config.get("model") else ", from random weights"
        size = f"{run.parameters:,} parameters" if run.parameters else ""
        more = ", ".join(filter(None, (run.architecture, size)))
        facts["Model"] = f"{model}{origin}" + (f" ({more})" if more else "")
    for key, name in (("data", "Data"), ("eval_data", "Held out")):
        if config.get(key):
            facts[name] = _sources(config[key])
    if "task" in config:
        facts["Task"] = str(config["task"])
    if run.machine:
        facts["Machine"] = run.machine
    items = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return f'<dl class="about">{items}</dl>' if items else ""


def _sources(entries: Any) -> str:
    def one(entry: Any) -> str:
        if not isinstance(entry, dict):
            return str(entry)
        name = f"{entry['name']}: " if entry.get("name") else ""
        weight = f" (weight {entry['weight']})" if entry.get("weight") is not None else ""
        return f"{name}{entry.get('path', '')}{weight}"

    if isinstance(entries, dict):  # {math: a.jsonl, chat: b.jsonl}
        return ", ".join(f"{name}: {one(entry)}" for name, entry in entries.items())
    return ", ".join(map(one, entries)) if isinstance(entries, list) else one(entries)


def _problems(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    several = len(runs) > 1
    items = "".join(
        f"<li>{escape(f'{name}: ' * several + problem)}</li>"
        for run, name in zip(runs, names, strict=True)
        for problem in run.problems
    )
    return f'<ul class="problems">{items}</ul>\n' if items else ""


def _cards(run: RunFiles) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in key_figures(run).items()
    )
    return f'<section><h2>Key figures</h2><dl class="cards">{items}</dl></section>\n' * bool(items)


def _drawings(found: Sequence[Chart]) -> str:
    if not found:
        return ""
    figures = "".join(figure(chart) for chart in found)
    note = f"<p class='note'>{note}</p>" if (note := bucket_note(found)) else ""
    return f'<section><h2>Charts</h2>{note}<div class="charts">\n{figures}</div></section>\n'


def _samples(samples: Sequence[Sample]) -> str:
    """For each prompt what the model said, evaluation by evaluation; the newest is open."""
    if not samples:
        return ""
    prompts: dict[str, dict[int, str]] = {}
    for sample in samples:  # a step that came again replaces what it was
        prompts.setdefault(sample.prompt, {})[sample.step] = sample.text
    notes = []
    if len(prompts) > PROMPTS:
        notes.append(f"The first {PROMPTS} of {len(prompts):,} prompts are shown.")
    parts = []
    for prompt, texts in itertools.islice(prompts.items(), PROMPTS):
        steps = sorted(texts)
        if len(steps) > TEXTS:
            notes.append(f"{TEXTS} of {len(steps):,} evaluations are shown, evenly spread.")
            steps = [steps[round(i * (len(steps) - 1) / (TEXTS - 1))] for i in range(TEXTS)]
        rows = "".join(_sample(step, texts[step], step in (steps[0], steps[-1])) for step in steps)
        parts.append(f'<article><p class="prompt">{_quoted(prompt)}</p>{rows}</article>')
    notes = [f"<p class='note'>{escape(note)}</p>" for note in dict.fromkeys(notes)]
    return f"<section><h2>Samples</h2>{''.join(notes)}{''.join(parts)}</section>\n"


def _sample(step: int, text: str, is_open: bool) -> str:
    when = "before training" if step == 0 else f"step {step:,}"
    opened = " open" * is_open
    return f"<details{opened}><summary>{when}</summary><pre>{_quoted(text)}</pre></details>"


def _quoted(text: str) -> str:
    if not text:
        return "<em>(empty)</em>"
    more = len(text) - CHARACTERS
    rest = f" <em>({more:,} more characters)</em>" if more > 0 else ""
    return escape(text[:CHARACTERS]) + rest


def _settings(run: RunFiles) -> str:
    """By section: what differs from the defaults, and the rest folded."""
    if not run.config:
        return ""
    known = [name for section in sections() for name in section.defaults]
    others = {name: UNKNOWN for name in run.config if name not in known}
    parts = []
    for section in (*sections(), Section("Other settings", others)):
        there = {name: d for name, d in section.defaults.items() if name in run.config}
        changed = [name for name, default in there.items() if plain(run.config[name]) != default]
        if not there:
            continue
        rows = (
            [name, text(run.config[name]), "" if there[name] is UNKNOWN else text(there[name])]
            for name in changed
        )
        same = [[name, text(run.config[name])] for name in there if name not in changed]
        parts.append(f"<h3>{escape(section.title)}</h3>")
        parts.append(
            _table(["Setting", "Value", "Default"], rows, "settings changed") if changed else ""
        )
        if same:
            count = f"{len(same)} at {'its default' if len(same) == 1 else 'their defaults'}"
            rest = _table(["Setting", "Value"], same, "settings")
            parts.append(f"<details><summary>{count}</summary>{rest}</details>")
    return (
        "<section><h2>Settings</h2><p class='note'>What differs from the defaults is shown; "
        f"the rest is folded.</p>{''.join(parts)}</section>\n"
    )


def _differences(runs: Sequence[RunFiles], heads: Sequence[str]) -> str:
    names = [name for section in sections() for name in section.defaults]
    names += [name for run in runs for name in run.config if name not in names]
    rows = []
    for name in dict.fromkeys(names):
        values = [text(run.config[name]) if name in run.config else "–" for run in runs]
        if len(set(values)) > 1 and name not in PLACES:
            rows.append([name, *values])
    if machines := {run.machine for run in runs} - {""}:
        rows += [["machine", *(run.machine for run in runs)]] * (len(machines) > 1)
    inner = _table(["Setting", *heads[1:]], rows, "settings") if rows else "<p>None differ.</p>"
    return f"<section><h2>Settings that differ</h2>{inner}</section>\n"


def text(value: Any) -> str:
    """A setting as YAML writes it on one line; of an entry of data, what it says."""
    if isinstance(value, list):
        value = [_said(item) if isinstance(item, dict) else item for item in value]
    written = yaml.safe_dump(
        value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False
    )
    written = written.removesuffix("\n").removesuffix("\n...")
    return written if len(written) <= VALUE else f"{written[:VALUE]}…"


def _said(entry: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in entry.items() if value not in (None, {}, [])}


def _table(heads: Sequence[str], rows: Iterator[list[str]] | list[list[str]], kind: str) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
