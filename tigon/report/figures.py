"""The figures that matter of a run, and its charts."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tigon.report.axis import number
from tigon.report.chart import TRAINING, Chart, Line, Mark, shown
from tigon.report.read import RunFiles
from tigon.report.series import POINTS, Column, points

MARKS = 2000  # in a chart, at most
NAMED = 5  # steps that are named where values are not finite


@dataclass(frozen=True)
class Plot:
    """A chart of a key of metrics.jsonl, and of its twin of evaluations."""

    key: str
    title: str
    unit: str = ""
    percent: bool = False
    from_zero: bool = False


PLOTS = (
    Plot("loss", "Loss", "nats per token"),
    Plot("accuracy", "Accuracy", "of the next token", percent=True),
    Plot("lr", "Learning rate", from_zero=True),
    Plot("grad_norm", "Gradient norm", "before clipping"),
    Plot("tokens_per_second", "Throughput", "tokens/s", from_zero=True),
    Plot("mfu", "MFU", "of the peak FLOPS", percent=True, from_zero=True),
    Plot("memory_gib", "Peak memory", "GiB", from_zero=True),
    Plot("data_share", "Waiting for data", "of a step", percent=True, from_zero=True),
)
# Neither drawn nor of use to people by the step
SILENT = {
    *("epoch", "tokens", "supervised_tokens", "eval_tokens", "seconds"),
    *("step_seconds", "data_seconds", "memory_reserved_gib"),
}
TITLES = {
    "nll": "Cross-entropy",
    "entropy": "Entropy",
    "max_logit": "Largest logit",
    "z": "Log-normaliser",
    "aux_loss": "Balance loss of experts",
    "expert_imbalance": "Busiest expert, in means",
}


def key_figures(run: RunFiles) -> dict[str, str]:
    """Name -> value, of what the metrics have."""
    return dict(_figures(run))


def _figures(run: RunFiles) -> Iterator[tuple[str, str]]:
    loss, evaluated = run.column("loss"), run.column("eval_loss")
    if loss.steps:
        yield "Training loss, last step", number(loss.last())
    if (best := evaluated.lowest()) is not None:
        first, last = evaluated.values[0], evaluated.values[-1]
        if len(evaluated.steps) > 1 and evaluated.steps[0] == 0:
            yield "Eval loss, before training", number(first)
        yield "Eval loss, last", number(last)
        if best[0] != evaluated.steps[-1]:
            yield "Eval loss, best", f"{number(best[1])} at step {best[0]:,}"
        yield "Eval perplexity, last", number(_exp(last))
    if (accuracy := run.column("eval_accuracy")).steps:
        yield "Eval accuracy, last", shown(accuracy.values[-1], True)
    if run.last_step is not None:
        yield "Steps", f"{run.last_step:,}"
    if tokens := run.column("tokens").finite():
        yield "Tokens seen", f"{int(sum(tokens)):,}"
    if (epoch := run.column("epoch")).finite():
        yield "Epochs", number(epoch.last())
    if seconds := run.column("step_seconds").finite():
        yield "Time of training steps", duration(sum(seconds))
        waited = sum(run.column("data_seconds").finite())
        yield "Waiting for data", f"{100 * waited / max(sum(seconds), 1e-9):.2g} % of it"
    if speeds := run.column("tokens_per_second").finite():
        yield "Throughput, median", f"{number(statistics.median(speeds))} tokens/s"
    if mfu := run.column("mfu").finite():
        yield "MFU, median", shown(statistics.median(mfu), True)
    if memory := run.column("memory_gib").finite():
        yield "Peak memory", f"{max(memory):.2f} GiB"
    if run.skipped:
        yield "Skipped steps", f"{len(run.skipped):,}"
    if run.rollbacks:
        yield "Rollbacks", f"{len(run.rollbacks):,}"


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.nan


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02d} s"
    return f"{hours:,} h {minutes:02d} min"


def charts(run: RunFiles) -> list[Chart]:
    """Of one run: training and evaluation in one chart."""
    found = []
    for plot in _plots([run]):
        lines = [
            *_line(run.column(plot.key), TRAINING, plot.key, 0),
            *_line(run.column(f"eval_{plot.key}"), "evaluation", "eval", 1, marked=True),
        ]
        named = _named([run], plot.key)
        if lines:
            wide = plot.key == "loss"
            found.append(_chart(plot, lines, [run], plot.title, wide=wide))
        if named:
            columns = [run.column(f"eval_{plot.key}/{name}") for name in named]
            pairs = enumerate(zip(named, columns, strict=True))
            lines = [x for i, (name, c) in pairs for x in _line(c, name, name, i, marked=True)]
            found.append(_chart(plot, lines, [], f"{plot.title} by data set"))
    return found


def compared(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Chart]:
    """Of several runs: a line for each in every chart."""
    limit = max(40, 2 * POINTS // (len(runs) + 1))
    found = []
    for plot in _plots(runs):
        keys = {plot.key: plot.title, f"eval_{plot.key}": f"{plot.title}, evaluation"}
        keys |= {f"eval_{plot.key}/{n}": f"{plot.title}, {n}" for n in _named(runs, plot.key)}
        for key, title in keys.items():
            lines, marked = [], key.startswith("eval_")
            for i, (run, name) in enumerate(zip(runs, names, strict=True)):
                lines += _line(run.column(key), name, letter(i), i, marked=marked, limit=limit)
            if lines:
                wide = key in ("loss", "eval_loss")
                missing = [(i, run.column(key).missing()) for i, run in enumerate(runs)]
                notes = [
                    f"{letter(i)} is not finite in {len(m):,} rows: {_named_steps(m)}."
                    for i, m in missing
                    if m
                ]
                found.append(replace(_chart(plot, lines, [], title, wide=wide), notes=notes))
    return found


def letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"{index + 1}"


def _plots(runs: Sequence[RunFiles]) -> list[Plot]:
    """The usual ones, then one for every other key of the metrics."""
    keys = list(dict.fromkeys(key for run in runs for key in run.columns))
    named = {key.removeprefix("eval_loss/") for key in keys if key.startswith("eval_loss/")}
    bases = []
    for key in keys:
        base, _, which = key.removeprefix("eval_").partition("/")
        if key not in SILENT:  # rewards/chosen is a metric, and no data set's
            bases.append(base if which in named else key.removeprefix("eval_"))
    usual = {plot.key for plot in PLOTS}
    others = [key for key in dict.fromkeys(bases) if key not in usual and key not in SILENT]
    return [*PLOTS, *(Plot(key, TITLES.get(key, key.replace("_", " "))) for key in others)]


def _named(runs: Sequence[RunFiles], key: str) -> list[str]:
    """The data sets that have an evaluation of their own."""
    prefix = f"eval_{key}/"
    found = (k.removeprefix(prefix) for run in runs for k in run.columns if k.startswith(prefix))
    return list(dict.fromkeys(found))


def _line(
    column: Column, name: str, label: str, style: int, *, marked: bool = False, limit: int = POINTS
) -> list[Line]:
    if not column.finite():
        return []
    return [Line(name, label.replace("_", " "), points(column, limit), style, marked)]


def _chart(
    plot: Plot, lines: list[Line], runs: Sequence[RunFiles], title: str, wide: bool = False
) -> Chart:
    notes, marks = [], []
    for run in runs:
        for key, what in ((plot.key, "steps"), (f"eval_{plot.key}", "evaluations")):
            missing = run.column(key).missing()
            if missing:
                marks += [Mark(s, "nonfinite", f"step {s}: not finite") for s in missing]
                notes.append(f"Not finite in {len(missing):,} {what}: {_named_steps(missing)}.")
        if plot.key in ("loss", "grad_norm"):
            marks += [Mark(s, "skipped", f"step {s} skipped: {why}") for s, why in run.skipped]
            marks += [Mark(s, "rollback", f"rollback before step {s}") for s in run.rollbacks]
    if len(marks) > MARKS:
        notes.append(f"The first {MARKS:,} of {len(marks):,} marks are drawn.")
    return Chart(
        title,
        plot.unit,
        lines,
        marks[:MARKS],
        notes,
        percent=plot.percent,
        from_zero=plot.from_zero,
        wide=wide,
    )


def bucket_note(found: Sequence[Chart]) -> str:
    """How many steps a point stands for; nothing if each step is drawn."""
    sizes = (p.last - p.first + 1 for c in found for x in c.lines for p in x.points if not x.marked)
    size = max(sizes, default=1)
    if size == 1:
        return ""
    return (
        f"A point of a line is the mean of up to {size:,} steps, and the band reaches from their "
        "lowest to their highest value."
    )


def _named_steps(steps: Sequence[int]) -> str:
    first = ", ".join(f"{step:,}" for step in steps[:NAMED])
    return f"{first} and {len(steps) - NAMED:,} more" if len(steps) > NAMED else first
