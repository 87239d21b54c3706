"""The figures of bench/kernels.py as one bar chart; needs matplotlib."""

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench.harness import Record
from bench.kernels_report import COLUMNS, first_shapes, label, provider, ratio

# the same figures give the same file, with text that can be searched
STYLE: dict[Any, Any] = {"svg.hashsalt": "tigon", "svg.fonttype": "none"}
TOP = 3.0  # where bars end
SHADES = ("#c1272d", "#9a9a9a", "#e3a857", "#4f7cac", "#6a9a5b", "#8d6a9f")


def named(case: Record) -> str:
    lines = [case["operator"].replace("_", " "), case["variant"].replace("_", " "), case["shape"]]
    return "\n".join(fill(line, 13, break_long_words=False) for line in lines if line)


def plot(record: Record, path: Path) -> None:
    """A group of bars per operator: how many times the bound each library takes."""
    alike = ("30 % valid", "peaked")  # of what is drawn already
    cases = [case for case in first_shapes(record) if case["variant"] not in alike]
    width = 0.84 / len(COLUMNS)
    whole = Figure(figsize=(11, 4.5))
    axes = whole.subplots()
    for index, (name, shade) in enumerate(zip(COLUMNS, SHADES, strict=True)):
        offset = (index - (len(COLUMNS) - 1) / 2) * width
        bars = {
            place + offset: value
            for place, case in enumerate(cases)
            if (value := ratio(record, case, provider(case, name), "both")) is not None
        }
        if not bars:
            continue
        heights = [min(value, TOP) for value in bars.values()]
        axes.bar(list(bars), heights, 0.95 * width, label=label(record, name), color=shade)
        for (x, value), height in zip(bars.items(), heights, strict=True):
            axes.annotate(
                f"{value:.2f}",
                (x, height),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6,
                rotation=90,
            )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_ylim(0, 1.12 * TOP)
    axes.set_ylabel("forward + backward, times the bound")
    axes.set_xticks(range(len(cases)), map(named, cases), fontsize=7)
    axes.margins(x=0.01)
    axes.set_title(
        "1 is what the hardware allows: the bytes at the bandwidth of a copy; for "
        f"linear_cross_entropy its three GEMMs\n{record['gpu']}, bf16; bars end at {TOP:g}",
        fontsize=8,
    )
    axes.legend(fontsize=7, ncols=len(COLUMNS), loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context(STYLE):
        whole.savefig(path, bbox_inches="tight", dpi=150, metadata=metadata)
