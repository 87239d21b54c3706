"""Draws the metrics of runs as line charts, in SVG by matplotlib."""

import warnings
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

import numpy as np

from tigon.report.read import Column, RunFiles
from tigon.utils.json import list_first

POINTS, LINES = 240, 3  # points of a line, at most; with more lines each has fewer
STEPS = 5  # that a note names
LOG_SPREAD = 20  # a maximum of so many medians makes the scale logarithmic
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "tigon", "text.parse_math": False, "font.size": 9,
    "axes.grid": True, "grid.alpha": 0.3, "axes.formatter.limits": (-4, 6),
    "legend.frameon": False, "axes.prop_cycle": "cycler('color', ['#0a58ad', '#c2410c', '#15803d', "
    "'#86198f', '#7a5c00', '#475569']) + cycler('linestyle', ['-', '--', ':', '-.', '--', ':']) + "
    "cycler('marker', ['o', 's', '^', 'D', 'v', 'P'])",
}  # fmt: skip
# Key of metrics.jsonl -> title, unit, whether the value is a share, whether the axis begins at 0
PLOTS: dict[str, tuple[str, str, bool, bool]] = {
    "loss": ("Loss", "nats per token", False, False),
    "accuracy": ("Accuracy", "of the next token", True, False),
    "lr": ("Learning rate", "", False, True),
    "grad_norm": ("Gradient norm", "before clipping", False, False),
    "tokens_per_second": ("Throughput", "tokens/s", False, True),
    "mfu": ("MFU", "of the peak FLOPS", True, True),
    "memory_gib": ("Peak memory", "GiB", False, True),
    "data_share": ("Waiting for data", "of a step", True, True),
    "nll": ("Cross-entropy", "", False, False),
    "max_logit": ("Largest logit", "", False, False),
    "z": ("Log-normalizer", "", False, False),
    "aux_loss": ("Balance loss of experts", "", False, False),
    "expert_imbalance": ("Busiest expert, in means", "", False, False),
}
UNDRAWN = {
    "epoch", "tokens", "supervised_tokens", "eval_tokens", "seconds", "step_seconds",
    "data_seconds", "memory_reserved_gib",
}  # fmt: skip
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
Line = tuple[str, Column, bool]  # label, values, whether they are of evaluations


def charts(runs: Sequence[RunFiles]) -> Iterator[dict[str, Any]]:
    """Yields title, unit, svg, notes and width: training beside evaluation, or a line per run."""
    keys = list(dict.fromkeys(key for run in runs for key in run.columns))
    sets = [key.removeprefix("eval_loss/") for key in keys if key.startswith("eval_loss/")]
    shown = [key for key in keys if key not in UNDRAWN]
    metrics = [key.removeprefix("eval_").removeprefix("eval/") for key in shown]
    bases = [m.partition("/")[0] if m.partition("/")[2] in sets else m for m in metrics]
    for key in dict.fromkeys([*PLOTS, *bases]):
        title, *style = PLOTS.get(key, (key.replace("_", " "), "", False, False))
        names = [f"eval_{key}/{name}" for name in sets]
        measured = f"eval/{key}" if f"eval/{key}" in keys else f"eval_{key}"  # a task's, or a loss
        if len(runs) == 1:
            run, pair = runs[0], (("training", key), ("evaluation", measured))
            lines = [(label, run.column(name), name != key) for label, name in pair]
            marks = run if key in ("loss", "grad_norm") else None
            yield from chart(title, style, lines, key == "loss", marks)
            lines = [(s, run.column(name), True) for s, name in zip(sets, names, strict=True)]
            yield from chart(f"{title} by data set", style, lines)
            continue
        titles = [title, f"{title}, evaluation", *(f"{title}, {name}" for name in sets)]
        for name, text in zip((key, measured, *names), titles, strict=True):
            lines = [(f"{i}: {run.name}", run.column(name), name != key)
                     for i, run in enumerate(runs, 1)]  # fmt: skip
            yield from chart(text, style, lines, name in ("loss", "eval_loss"))


def chart(
    title: str, style: Sequence[Any], lines: Sequence[Line], wide: bool = False,
    marks: RunFiles | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields one chart, of the lines with finite values, or none without any; `marks` is the run
    whose skipped steps and rollbacks are drawn."""
    unit, share, from_zero = style
    lines = [line for line in lines if line[1].finite()]
    if lines:
        limit = max(40, POINTS * LINES // max(LINES, len(lines)))
        svg = draw(lines, limit, share, from_zero, wide, marks)
        notes = [*describe(lines, limit, share, marks)]
        yield {"title": title, "unit": unit, "svg": svg, "notes": notes, "wide": wide}


def describe(
    lines: Sequence[Line], limit: int, share: bool, marks: RunFiles | None
) -> Iterator[str]:
    """Yields the notes below a chart: each line's first and last value, steps without a finite one,
    and the skipped steps and rollbacks of `marks`."""
    for label, column, _ in lines:
        size, values, missing = -(-len(column.steps) // limit), column.finite(), column.missing()
        first, last = (f"{100 * v:.4g} %" if share else f"{v:.4g}" for v in (values[0], values[-1]))
        mean = f"; a point is the mean of {size:,} steps" if size > 1 else ""
        yield f"{label}: {first} at first, {last} at last{mean}"
        if missing:
            yield f"{label} is not finite in {len(missing):,} rows: {shorten(missing)}"
    if marks is not None and marks.skipped:
        reasons = ", ".join(dict.fromkeys(reason for _, reason in marks.skipped))
        yield f"skipped: {shorten([step for step, _ in marks.skipped])} ({reasons[:200]})"
    if marks is not None and marks.rollbacks:
        yield f"rollbacks before {shorten(marks.rollbacks)}"


def draw(
    lines: Sequence[Line], limit: int, share: bool, from_zero: bool, wide: bool,
    marks: RunFiles | None,
) -> str:  # fmt: skip
    """Returns the SVG element of a chart; raises ImportError without matplotlib."""
    try:
        from matplotlib import rc_context, ticker
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "the report's curves need matplotlib: pip install 'tigon[report]'"
        raise ImportError(message) from error
    out, extremes, top = StringIO(), list[float](), 0.15 + 0.2 * -(-(len(lines) + 2) // 3)
    width, height = 10.4 if wide else 5.2, 2.8 + top
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that no font has, and of buckets without values
        figure = Figure((width, height))
        figure.subplots_adjust(0.65 / width, 0.45 / height, 0.99, 1 - top / height)
        axes = figure.add_subplot()
        by_step = axes.get_xaxis_transform()
        for label, column, evaluated in lines:
            size, missing = -(-len(column.steps) // limit), column.missing()
            x, values = np.nanmean(buckets(column.steps, size), 1), buckets(column.values, size)
            mean, low, high = (f(values, 1) for f in (np.nanmean, np.nanmin, np.nanmax))
            marker = 5 if evaluated and len(x) <= 60 else 1
            (line,) = axes.plot(x, mean, markersize=marker, label=f" {label[:30]}")
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
            axes.plot(missing, [0.02] * len(missing), "kx", transform=by_step)
            extremes += [np.nanmin(low), np.nanmax(high), np.nanmedian(mean)]
        if marks is not None and marks.skipped:
            steps = [step for step, _ in marks.skipped]
            axes.plot(steps, [0.98] * len(steps), "kv", label="skipped step", transform=by_step)
        if marks is not None and marks.rollbacks:
            axes.vlines(marks.rollbacks, 0, 1, "k", ":", label="rollback", transform=by_step)
        if from_zero and min(extremes) >= 0:
            axes.set_ylim(0, 1.08 * max(extremes) or 1)
        elif min(extremes) > 0 and max(extremes) > LOG_SPREAD * np.median(extremes[2::3]):
            axes.set_yscale("log")
        if share:
            axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        FigureCanvasSVG(figure).print_svg(out, metadata=METADATA)
    return out.getvalue()[out.getvalue().index("<svg") :]


def buckets(values: Sequence[float], size: int) -> "np.ndarray[Any, Any]":
    """Returns the values in rows of `size`, the last one filled up with NaN."""
    table = np.full(-(-len(values) // size) * size, np.nan)
    table[: len(values)] = values
    return table.reshape(-1, size)


def shorten(steps: Sequence[int]) -> str:
    """Returns the first STEPS steps in words, and how many more there are."""
    return f"step {list_first([f'{step:,}' for step in steps], STEPS)}"
