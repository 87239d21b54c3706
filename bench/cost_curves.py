"""What a training step costs over length, batch and model size, beside its peer and its prediction.

A step is that of bench/train_step.py: forward, backward and AdamW in bf16, on the same weights and
random tokens, without recomputation. Ours runs from CUDA graphs in steps of at most 4,096 tokens,
as it comes; the peer is not compiled, as it is in bench/train_step.py. It has the faster of two
attentions, but in the longest step flash-attn-4 if that works. A model is built once for all its
points, and the sides do not take turns; a time is the median of some steps, and the longest step is
made once. What does not fit is recorded as such. The prediction is that of `tigon plan`, made when
a record is shown; its constants are fitted to most of these steps (bench/plan.py). Several GPUs are
those of bench/parallel.py and bench/plan.py.

    python -m bench cost_curves                  # all
    python -m bench cost_curves --write-docs     # of docs/performance.md; needs no GPU

# B rows of a step, T tokens of a row
"""

import gc
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from bench import harness, plan
from bench.compare_side import laps
from bench.cost_points import CURVES, POINTS, SHORT, Point
from bench.harness import Bench, Job, Record, figure, markdown, progress, report
from bench.timing import peaks, reset_peaks
from bench.train_cases import OURS, PEER, Batch, ours
from bench.train_peer import CHUNKS, options_of, peer
from bench.train_report import LOSS_WITHIN
from bench.train_side import FIRST, Training, free
from bench.train_step import LIBRARIES
from tigon.plan import Constants

WARMED = 2**14  # up to which a step is first made some times, untimed
ONCE = 2**17  # from which it is made once
SECONDS = 2.0  # of the timed steps of a point
WITHIN = 0.1  # of a prediction
PREDICTED = "tigon plan"
PICTURES = {"speed": "docs/cost_speed.svg", "memory": "docs/cost_memory.svg"}
LINES = {OURS: ("#c1272d", "o-"), PEER: ("#9a9a9a", "s-"), PREDICTED: ("#4f7cac", "+--")}


def measure(training: Training, point: Point, device: str, tiny: bool) -> Record:
    """Milliseconds of a step and its peak."""
    vocab, tokens = training.model.config.vocab_size, point.rows * point.tokens
    training.inputs = Batch.of(point.case, vocab, device, tiny).ours()
    free()
    reset_peaks()
    if tokens < ONCE:
        losses = [training.step() for _ in range(FIRST if tokens <= WARMED else 0)]
        return training.timed(0.0 if tiny else SECONDS) | {"losses": [float(x) for x in losses]}
    return {"ms": laps(training.step, 1)[0], "steps": 1} | peaks()


def guarded(
    training: Training, point: Point, device: str, tiny: bool, attention: str = ""
) -> Record:
    """The same, with an attention of the peer's, or its error; what was allocated is free again."""
    try:
        if attention:
            training.model.set_attn_implementation(attention)
        return measure(training, point, device, tiny)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    training.inputs = {}
    training.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    return found


def measure_peer(training: Training, point: Point, device: str, tiny: bool) -> Record:
    """With the fastest of the attentions that are tried; losses are those of the first of them."""
    tried: dict[str, Record] = {}
    for options in options_of(point.case, device):
        if point.rows * point.tokens >= ONCE and any("ms" in row for row in tried.values()):
            break
        tried[options.attention] = found = guarded(training, point, device, tiny, options.attention)
        if "OutOfMemoryError" in found.get("error", ""):
            break  # another one takes no less
    best = min(tried, key=lambda name: tried[name].get("ms", float("inf")))
    losses = [row["losses"] for row in tried.values() if "losses" in row][:1]
    times = {name: row.get("ms", row.get("error")) for name, row in tried.items()}
    more = {"losses": losses[0]} if losses else {}
    return tried[best] | more | {"attention": best, "tried": times}


def measure_side(job: Job, side: str, points: Sequence[Point]) -> None:
    """All points of a model that is built once, each recorded as it comes."""
    tiny = job.options.tiny
    device = "cpu" if tiny else "cuda"
    case = points[0].case
    if side == OURS:
        made = ours(case, side, device, tiny)
    else:
        liger = job.record["libraries"]["Liger"] is not None
        made = peer(case, options_of(case, device)[-1], device, tiny, liger)
    training = Training(*made, {})
    for point in points:
        progress(f"{point.name}: {side}")
        one = guarded if side == OURS else measure_peer
        job.append(
            "points", {"name": point.name, "side": side, **one(training, point, device, tiny)}
        )


def run(job: Job) -> None:
    job.record |= {"points": []}
    points = [point for point in POINTS if point.name in job.only]
    for _, group in groupby(points, key=lambda p: (p.model, p.case.settings)):
        some = list(group)
        for side in (OURS, PEER):
            try:
                measure_side(job, side, some)
            except Exception as error:  # of building it
                said = f"{type(error).__name__}: {error}"[:300]
                job.append("points", {"name": some[0].name, "side": side, "error": said})
            free()


# What is shown


@cache
def predict(point: Point) -> Record:
    """As `tigon plan` does."""
    found = plan.compare(plan.at_point(point, 1.0, 1.0), Constants.read())
    return {"ms": 1e3 * found.seconds, "allocated_gib": found.gib}


def figures_of(record: Record, point: Point) -> dict[str, Record]:
    """By side, with the prediction."""
    rows = {row["side"]: row for row in record["points"] if row["name"] == point.name}
    return rows | {PREDICTED: predict(point)} if rows else {}


def value(row: Record, point: Point, kind: str) -> float | None:
    """Tokens per second, or GiB."""
    if "ms" not in row:
        return None
    if kind == "speed":
        return 1e3 * point.rows * point.tokens / row["ms"]
    return row.get("allocated_gib")


def cell(row: Record | None, point: Point) -> str:
    if row is None:
        return "not measured"
    if "error" in row:
        return harness.failure(row, 40)
    return f"{value(row, point, 'speed'):,.0f}, {figure(value(row, point, 'memory'))}"


def errors(record: Record) -> Iterator[tuple[Point, list[float]]]:
    """How far predictions of time and of memory are off."""
    for point in POINTS:
        sides = figures_of(record, point)
        mine = sides.get(OURS, {})
        if "ms" in mine:
            pairs = ((sides[PREDICTED][key], mine.get(key)) for key in ("ms", "allocated_gib"))
            yield point, [a / b - 1 for a, b in pairs if b]


def ratio(sides: dict[str, Record], point: Point, kind: str) -> float | None:
    """Ours over the peer's."""
    theirs, mine = (value(sides.get(side, {}), point, kind) for side in (PEER, OURS))
    return mine / theirs if mine and theirs else None


def tried_attentions(row: Record, point: Point) -> list[str]:
    """Older records do not say: both in short steps, else the one that was measured."""
    every = [options.attention for options in options_of(point.case, "cuda")]
    return list(row.get("tried", every if point.case.settings else [row["attention"]]))


def attention_cell(row: Record, point: Point) -> str:
    """The peer's attention, and those that it might have been faster with."""
    if "attention" not in row:
        return ""
    known = tried_attentions(row, point)
    lacking = [o.attention for o in options_of(point.case, "cuda") if o.attention not in known]
    return row["attention"] + f" ({' and '.join(lacking)} not tried)" * bool(lacking)


def table(record: Record) -> str:
    """A row for each point."""
    off = dict(errors(record))
    head = ["step", f"{PEER}: tok/s, GiB", "its attention", "Tigon: tok/s, GiB"]
    head += ["steps timed, of each", "tok/s ratio", "memory ratio"]
    head += [f"`{PREDICTED}`: tok/s, GiB", "error of time, of memory"]
    rows = []
    for point in POINTS:
        if not (sides := figures_of(record, point)):
            continue
        theirs, mine = (sides.get(side) for side in (PEER, OURS))
        cells = [point.name, cell(theirs, point), attention_cell(theirs or {}, point)]
        steps = ", ".join(str((row or {}).get("steps", "-")) for row in (theirs, mine))
        cells += [cell(mine, point), steps]
        faster, larger = (ratio(sides, point, kind) for kind in ("speed", "memory"))
        said = ", peer not compiled" * bool(point.case.settings)
        cells += [f"{faster:.2f}{said}" if faster else "", f"{larger:.2f}" if larger else ""]
        wrong = ", ".join(f"{error:+.1%}" for error in off.get(point, ()))
        rows.append([*cells, cell(sides[PREDICTED], point), wrong])
    return markdown(head, rows)


def not_compiled(record: Record) -> str:
    """What the ratios of short steps are of."""
    sides = {point: figures_of(record, point) for point in POINTS if point.case.settings}
    times = [row["ms"] for rows in sides.values() if "ms" in (row := rows.get(PEER, {}))]
    if not times:
        return ""
    return (
        f"**Not the best peer.** In steps of at most {SHORT:,} tokens Tigon runs from CUDA graphs, "
        "and the peer, without `torch.compile` and its graphs, waits for launches: its steps take "
        f"{min(times):.0f} to {max(times):.0f} ms, whatever their tokens. Liger's head, in chunks "
        f"of 32 to 128 tokens, also reads its weight up to 32 times there ({CHUNKS} makes them "
        "longer). What the peer would reach with both is not shown."
    )


def noise(record: Record) -> str:
    """How far steps of a point differ, where launches do not decide."""
    long = {point.name for point in POINTS if not point.case.settings}
    rows = [row for row in record["points"] if row["name"] in long and row.get("steps", 0) > 1]
    said = "**Noise.** The sides do not take turns: Tigon has all points of a model, then the peer."
    if not rows:
        return said
    spread = max(row["ms_most"] / row["ms_least"] for row in rows)
    return (
        f"{said} In steps of more than {SHORT:,} tokens of which several were timed, the slowest "
        f"takes up to {spread:.2f} times as long as the fastest: ratios nearer to 1 than that do "
        "not tell the sides apart."
    )


def first_losses(record: Record) -> Iterator[str]:
    """Of both sides as each model is built, the only ones that are of the same weights."""
    same, unknown, wrong = [], [], []
    known = [point for point in POINTS if len(figures_of(record, point)) == 3]
    for _, group in groupby(known, key=lambda point: (point.model, point.case.settings)):
        point = next(group)
        theirs, mine = (figures_of(record, point)[side] for side in (PEER, OURS))
        if not (theirs.get("losses") and mine.get("losses")):
            continue
        if len(tried_attentions(theirs, point)) > 1 and "tried" not in theirs:
            unknown.append(point.name)  # its losses are of the second attention
            continue
        a, b = theirs["losses"][0], mine["losses"][0]
        same.append(f"{point.name}: {a:.5f} and {b:.5f}")
        if not abs(b - a) <= LOSS_WITHIN * abs(a):
            wrong.append(f"WRONG: {point.name}: first loss {a:.4f} and {b:.4f}")
    if same:
        yield f"Losses of the first step, the peer's and Tigon's: {'; '.join(same)}."
    if unknown:
        yield (
            f"Not compared: {'; '.join(unknown)}, where the record has losses of the peer's second "
            "attention, on weights that the first has trained."
        )
    yield from wrong


def misses(record: Record) -> str:
    """Which predictions are beyond WITHIN, and which of steps that the plan is not fitted to."""
    known = dict(errors(record))
    wrong = [p.name for p, off in known.items() if any(abs(error) > WITHIN for error in off)]
    shapes = {(m.model, m.rows, m.tokens) for m in plan.measured() if m.fitted}
    new = [p.name for p in known if (p.model, p.rows, p.tokens) not in shapes]
    but = f", but for {'; '.join(wrong)}" if wrong else ""
    apart = f", but for {'; '.join(new)}" if new else ""
    return (
        f"Times and memory of `{PREDICTED}` are within {WITHIN:.0%} of what was measured{but}. Its "
        f"constants of time are fitted to steps of these models, rows and tokens{apart}."
    )


def show(record: Record) -> str:
    notes = not_compiled(record), noise(record), " ".join(first_losses(record))
    return report(record, table(record), *notes, misses(record))


def blocks(record: Record) -> dict[str, str]:
    names = {"speed": "tokens per second", "memory": "peak memory"}
    links = [
        f"![{names[kind]} over length, batch and size]({path.removeprefix('docs/')})"
        for kind, path in PICTURES.items()
    ]
    return {"docs/performance.md": "\n\n".join([*links, show(record)])}


def draw(record: Record, root: Path = harness.ROOT) -> None:
    """A picture for speed and one for memory."""
    titles = {"speed": "tokens per second", "memory": "peak memory, GiB"}
    for kind, path in PICTURES.items():
        plot(record, kind, titles[kind], root / path)


def plot(record: Record, kind: str, title: str, path: Path) -> None:
    """A panel for each curve; a cross where memory does not suffice."""
    from matplotlib.figure import Figure  # an extra

    whole = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, (label, curve) in zip(whole.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        axes.set(xscale="log", xlabel=label)
        for side, (color, style) in LINES.items():
            shown = [
                (at, point, figures_of(record, point).get(side, {})) for point, at in curve.items()
            ]
            found = [(at, y) for at, point, row in shown if (y := value(row, point, kind))]
            label = f"{side}, not compiled" if side == PEER else side
            axes.plot(*zip(*found, strict=True), style, color=color, label=label, markersize=4)
            for at in (at for at, _, row in shown if "OutOfMemoryError" in row.get("error", "")):
                axes.plot(at, 0.04, "x", color=color, transform=axes.get_xaxis_transform())
                axes.annotate(
                    "out of memory", (at, 0.04), (-6, -3), fontsize=6, color=color, ha="right",
                    xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                )  # fmt: skip
        places = list(curve.values())
        axes.set_xticks(places, [format_place(at) for at in places], fontsize=6)
        axes.tick_params(labelsize=6)
        axes.tick_params(which="minor", bottom=False, labelbottom=False)
        axes.set_ylim(bottom=0.0)
        axes.xaxis.label.set_size(7)
        axes.spines[["top", "right"]].set_visible(False)
    whole.axes[1].legend(fontsize=6)  # where there is room
    whole.suptitle(f"{title} of a training step; {record['machine']}, bf16", fontsize=8)
    harness.save_picture(whole, path)


def format_place(at: float) -> str:
    return f"{at // 1024}k" if at >= 1024 else f"{at:g}"


BENCH = Bench(
    run,
    show,
    [point.name for point in POINTS],
    blocks=blocks,
    draw=draw,
    libraries=LIBRARIES,
    needed=("Liger",),
    tiny=True,
)
