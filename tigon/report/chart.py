"""Line charts as SVG: readable without colour, with values that page.js shows under the pointer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from tigon.report.axis import Scale, number, step_scale, tick_text, value_scale
from tigon.report.series import Point

STYLES = 6  # of lines in page.css: colour, dashes; and markers here
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",  # circle
    "M-3.6 -3.6h7.2v7.2h-7.2z",  # square
    "M0 -4.6L4.4 3.4h-8.8z",  # triangle
    "M0 -5L5 0L0 5L-5 0z",  # diamond
    "M0 4.6L4.4 -3.4h-8.8z",  # triangle that points down
    "M-4.2 -1.4h2.8v-2.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8z",  # cross
)
MARKED = 60  # points of a line with markers, at most
TRAINING = "training"  # the name of a line that needs no legend where it is alone
LABELS = 12  # lines with their name at their end, at most
LABEL_HEIGHT = 14


@dataclass(frozen=True)
class Line:
    """With at least one point that is not empty. `label` is short and stands at the line's end;
    `name` is in the legend."""

    name: str
    label: str
    points: Sequence[Point]
    style: int
    marked: bool = False  # a marker for each point, as evaluations have

    @property
    def last(self) -> float:
        return next((p.mean for p in reversed(self.points) if not p.empty), math.nan)


@dataclass(frozen=True)
class Mark:
    """Of a step: a triangle above the chart for a skipped one, a line for a rollback, a cross at
    the bottom for a value that is not finite."""

    step: float
    kind: str  # skipped, rollback, nonfinite
    text: str


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = ()
    percent: bool = False
    from_zero: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Frame:
    """A drawing's size in its own units, and where the plot lies in it."""

    width: float
    height: float
    left: float = 54
    right: float = 66
    top: float = 16
    bottom: float = 38
    name: str = field(default="small")

    def x(self, share: float) -> float:
        return self.left + share * (self.width - self.left - self.right)

    def y(self, share: float) -> float:
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


SMALL = Frame(400, 236)
WIDE = Frame(1040, 330, left=58, right=92, name="large")


def figure(chart: Chart) -> str:
    """The chart as a <figure>: its title, legend, drawing and notes."""
    scale = _values(chart)
    unit = ", ".join(filter(None, (chart.unit, "log scale" if scale.log else "")))
    unit = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    frames = (WIDE, SMALL) if chart.wide else (SMALL,)
    drawings = "".join(_drawing(chart, scale, frame) for frame in frames)
    notes = "".join(f"<p>{escape(note)}</p>" for note in chart.notes)
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}">'
        f"<figcaption><h3>{escape(chart.title)}{unit}</h3>{_legend(chart)}</figcaption>"
        f"{drawings}{notes}</figure>\n"
    )


def key(line: Line) -> str:
    """A piece of the line, for a legend."""
    marker = f'<path class="marker" d="{MARKERS[line.style % STYLES]}"/>' if line.marked else ""
    return (
        f'<svg class="key s{line.style % STYLES}" viewBox="-17 -7 34 14" width="34" height="14" '
        f'aria-hidden="true"><path class="line" d="M-17 0H17"/>{marker}</svg>'
    )


def _legend(chart: Chart) -> str:
    shown_lines = chart.lines if len(chart.lines) > 1 or chart.lines[0].name != TRAINING else ()
    items = "".join(f"<li>{key(line)} {escape(line.name)}</li>" for line in shown_lines)
    kinds = {mark.kind: None for mark in chart.marks}
    signs = {"skipped": "▼ skipped step", "rollback": "┊ rollback", "nonfinite": "✕ not finite"}
    items += "".join(f'<li class="sign">{signs[kind]}</li>' for kind in kinds)
    return f'<ul class="legend">{items}</ul>' if items else ""


def _values(chart: Chart) -> Scale:
    seen = [p for line in chart.lines for p in line.points if not p.empty]
    means, lows, highs = [p.mean for p in seen], [p.low for p in seen], [p.high for p in seen]
    return value_scale(lows, highs, means, chart.from_zero)


def _steps(chart: Chart) -> Scale:
    seen = [point for line in chart.lines for point in line.points]
    return step_scale(min(p.first for p in seen), max(p.last for p in seen))


def _drawing(chart: Chart, values: Scale, frame: Frame) -> str:
    steps = _steps(chart)
    lines = "".join(_line(line, chart, steps, values, frame) for line in chart.lines)
    return (
        f'<svg class="plot {frame.name}" viewBox="0 0 {frame.width:g} {frame.height:g}" '
        f'role="img" tabindex="0" aria-label="{escape(_summary(chart))}" '
        f'data-low="{steps.low:g}" data-high="{steps.high:g}" '
        f'data-left="{frame.left:g}" data-right="{frame.right:g}">'
        f"{_axes(chart, steps, values, frame)}"
        f"{''.join(_marks(chart.marks, steps, frame))}{lines}"
        f"{''.join(_labels(chart, values, frame))}"
        f'<path class="cursor" d="M0 {frame.top:g}V{frame.height - frame.bottom:g}"/></svg>'
    )


def _summary(chart: Chart) -> str:
    """For people who hear the page."""
    parts = [chart.title]
    for line in chart.lines:
        seen = [p for p in line.points if not p.empty]
        if seen:
            first, last = shown(seen[0].mean, chart.percent), shown(seen[-1].mean, chart.percent)
            parts.append(f"{line.name}: {first} at first, {last} at last")
    return "; ".join(parts)


def shown(value: float, percent: bool) -> str:
    return f"{100 * value:.4g} %" if percent and not math.isnan(value) else number(value)


def _axes(chart: Chart, steps: Scale, values: Scale, frame: Frame) -> str:
    factor = 100 if chart.percent else 1
    end, base = frame.width - frame.right, frame.height - frame.bottom
    parts = ['<g class="axis">']
    ticks = values.ticks(6)
    gap = ticks[1] - ticks[0] if len(ticks) > 1 else values.high - values.low
    for value in ticks:
        y = frame.y(values.at(value))
        size = value if values.log else gap
        text = tick_text(factor * value, factor * size) + (" %" if chart.percent else "")
        parts.append(f'<path class="grid" d="M{frame.left:g} {y:.1f}H{end:g}"/>')
        parts.append(f'<text x="{frame.left - 6:g}" y="{y + 4:.1f}" class="end">{text}</text>')
    whole = [step for step in steps.ticks(8 if frame is WIDE else 4) if step == int(step)]
    gap = whole[1] - whole[0] if len(whole) > 1 else 1
    for step in whole:
        x = frame.x(steps.at(step))
        parts.append(f'<path class="tick" d="M{x:.1f} {base:g}v4"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{base + 17:g}" class="mid">{tick_text(step, gap)}</text>'
        )
    middle = (frame.left + end) / 2
    parts.append(f'<path class="base" d="M{frame.left:g} {base:g}H{end:g}"/>')
    parts.append(f'<text x="{middle:g}" y="{frame.height - 5:g}" class="mid title">step</text></g>')
    return "".join(parts)


def _line(line: Line, chart: Chart, steps: Scale, values: Scale, frame: Frame) -> str:
    def spot(point: Point, value: float) -> str:
        return f"{frame.x(steps.at(point.x)):.1f} {frame.y(values.at(value)):.1f}"

    band, path, alone = [], [], []
    for part in _parts(line.points):
        if len(part) == 1:
            alone.append(part[0])
            continue
        path.append("M" + "L".join(spot(p, p.mean) for p in part))
        if any(p.low < p.high for p in part):
            edge = [spot(p, p.high) for p in part] + [spot(p, p.low) for p in reversed(part)]
            band.append(f"M{'L'.join(edge)}Z")
    marked = [p for p in line.points if not p.empty] if line.marked else alone
    marked = marked if len(marked) <= MARKED else alone
    shape = MARKERS[line.style % STYLES]
    markers = "".join(
        f'<path class="marker" transform="translate({spot(p, p.mean)})" d="{shape}"/>'
        for p in marked
    )
    data = _data(line, chart.percent)
    return (
        f'<g class="series s{line.style % STYLES}" {data}>'
        + (f'<path class="band" d="{"".join(band)}"/>' if band else "")
        + (f'<path class="line" d="{"".join(path)}"/>' if path else "")
        + f"{markers}</g>"
    )


def _parts(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Without the empty points, which are gaps."""
    part: list[Point] = []
    for point in points:
        if point.empty:
            if part:
                yield part
            part = []
        else:
            part.append(point)
    if part:
        yield part


def _data(line: Line, percent: bool) -> str:
    """What page.js shows: numbers without quotes, names escaped."""
    factor = 100 if percent else 1
    bucketed = any(p.first < p.last for p in line.points)

    def row(values: Iterator[float]) -> str:
        return " ".join("-" if math.isnan(v) else f"{factor * v:.5g}" for v in values)

    parts = {
        "name": line.name,
        "unit": " %" if percent else "",
        "x": " ".join(str(p.last) for p in line.points),
        "y": row(p.mean for p in line.points),
    }
    if bucketed:
        parts["first"] = " ".join(str(p.first) for p in line.points)
        parts["min"] = row(p.low for p in line.points)
        parts["max"] = row(p.high for p in line.points)
    return " ".join(f'data-{name}="{escape(text)}"' for name, text in parts.items())


def _labels(chart: Chart, values: Scale, frame: Frame) -> Iterator[str]:
    """Each line's name beside its last point, moved apart where they would overlap; of a line that
    is alone its last value."""
    if len(chart.lines) > LABELS:
        return
    alone = len(chart.lines) == 1 and chart.lines[0].name == TRAINING
    # Their values, from the top down
    ends = sorted(((line.last, line) for line in chart.lines), key=lambda end: -end[0])
    heights = [frame.y(values.at(last)) for last, _ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + LABEL_HEIGHT)
    floor = frame.height - frame.bottom + 4
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], floor)
        floor = heights[i] - LABEL_HEIGHT
    x = frame.width - frame.right + 6
    for y, (last, line) in zip(heights, ends, strict=True):
        text = shown(last, chart.percent) if alone else line.label
        text = escape(cut(text, 10 if frame is SMALL else 13))
        yield f'<text class="label s{line.style % STYLES}" x="{x:g}" y="{y + 4:.1f}">{text}</text>'


def cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def _marks(marks: Sequence[Mark], steps: Scale, frame: Frame) -> Iterator[str]:
    """One at each place where one can be told from another."""
    base, taken = frame.height - frame.bottom, set()
    for mark in marks:
        if not steps.low <= mark.step <= steps.high:
            continue
        x = frame.x(steps.at(mark.step))
        if (place := (mark.kind, round(x / 3))) in taken:
            continue
        taken.add(place)
        shape = {
            "skipped": f"M{x:.1f} {frame.top:g}l-4 -8h8z",
            "rollback": f"M{x:.1f} {frame.top:g}V{base:g}",
            "nonfinite": f"M{x - 3:.1f} {base - 3:g}l6 6m0 -6l-6 6",
        }[mark.kind]
        title = f"<title>{escape(mark.text)}</title>"
        yield f'<path class="mark {mark.kind}" d="{shape}">{title}</path>'
