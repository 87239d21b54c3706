"""The figures of bench/train_step.py as text, and as a bar chart."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Record, figure, heading, judge, markdown, verdict
from bench.train_cases import CASES, GRAPHS, IN_BACKWARD, PADDED, PEER, RECOMPUTED, Case
from bench.train_limit import ADAMW, PASSES, PRODUCTS
from bench.train_peer import CHUNKS, WIDER, case_head_chunks, options_of
from tigon.data.examples import format_count

PICTURE, DOCUMENT = "docs/train_step.svg", "docs/performance.md"
# Of the first loss, on the same weights: both are means of thousands of tokens' losses in fp32, of
# logits in bf16, whose rounding is of either sign. The norm of all gradients, of bf16 as well, is
# no mean.
LOSS_WITHIN, NORM_WITHIN = 2e-3, 2e-2
FP8_WITHIN = 5e-2, 1e-2  # of the norm, and of each loss: a factor's mantissa has 3 bits
LEFT_MIB = 256.0  # at most that before a model is built: tables of libraries, and no other model
MEMORY = {  # parts of a peak, in GiB: by what allocation is read when
    "weights": "weights",
    "states": "optimizer states",
    "kept": "saved for backward",
    "gradients": "all gradients, after backward",
}
KIND = {PRODUCTS: "GEMMs", PASSES: "memory-bound kernels (norms, RoPE, activation, head)"}


def good(case: Record, side: str) -> list[Record]:
    """The rounds of a side without those that failed."""
    return [row for row in case["rounds"][side] if "error" not in row]


def took(case: Record, side: str, key: str = "ms") -> float | None:
    """The median over the rounds."""
    values = [row[key] for row in good(case, side) if key in row]
    return median(values) if values else None


def sides_of(case: Record) -> tuple[str, str]:
    """The other side's name, and that of the one that is judged."""
    return CASES[case["name"]].sides


def speed_ratio(case: Record) -> float | None:
    """Tokens per second, over the other side's: the median over the rounds, in each of which both
    took turns."""
    other, mine = (case["rounds"][side] for side in sides_of(case))
    pairs = [(a, b) for a, b in zip(other, mine, strict=False) if "ms" in a and "ms" in b]
    return median(a["ms"] / b["ms"] for a, b in pairs) if pairs else None


def memory_ratio(case: Record) -> float | None:
    other, mine = (peak(case, side) for side in sides_of(case))
    return mine / other if mine and other else None


def peak(case: Record, side: str, key: str = "allocated_gib") -> float | None:
    values = [row[key] for row in good(case, side) if key in row]
    return max(values, default=None)


def share(case: Record) -> float | None:
    """Of the composed limit."""
    ms = took(case, sides_of(case)[1])
    return case["limit"]["total"] / ms if ms and "limit" in case else None


def rate(case: Record, side: str) -> float | None:
    ms = took(case, side)
    return 1e3 * case["tokens"] / ms if ms else None


def disagreement(case: Record) -> str:
    """How the first step of both sides differs beyond bf16, or nothing. Later ones also depend on
    how weights are rounded: to nearest, a bf16 weight loses most updates."""
    rows = [good(case, side) for side in sides_of(case)]
    if not all(rows):
        return ""
    other, mine = (row[0] for row in rows)
    norm_within, first_within = NORM_WITHIN, LOSS_WITHIN
    if CASES[case["name"]].own:
        norm_within, first_within = FP8_WITHIN
    said = []
    a, b = other["losses"][0], mine["losses"][0]
    if not abs(b - a) <= first_within * abs(a):
        said.append(f"first loss {a:.4f} and {b:.4f}")
    a, b = other["gradient_norm"], mine["gradient_norm"]
    if not abs(b - a) <= norm_within * a:
        said.append(f"norm of the first gradients {a:.4g} and {b:.4g}")
    return "; ".join(said)


def lacks(case: Record) -> list[str]:
    """What the peer has now and did not have in this record, so that a ratio may be too good."""
    target, tried = CASES[case["name"]], case["tried"]
    if target.own:
        return []
    found = []
    if target.model.startswith("Qwen3.5"):
        names = {"FLA": "flash-linear-attention", "causal-conv1d": "causal-conv1d"}
        found += [said for name, said in names.items() if not case["libraries"].get(name)]
    else:
        offered = options_of(target, "cuda")
        first = [options.name for options in offered if options.experts == offered[0].experts]
        found += [name for name in first if name not in tried]
    if case_head_chunks(target) and not any(CHUNKS in name for name in tried):
        found.append(f"{CHUNKS}={WIDER} of Liger's head")
    if GRAPHS[0] in target.settings and not any("compiled" in name for name in tried):
        found.append("torch.compile")
    return found


def notes(cases: list[Record]) -> Iterator[str]:
    """What is not alike on both sides, by case."""
    some = [case for case in cases if not CASES[case["name"]].own]
    if without := [f"- {case['name']}: {'; '.join(lacks(case))}" for case in some if lacks(case)]:
        said = (
            "**Not the best peer.** These ratios may be too good: the peer lacked what it has in "
        )
        said += "this benchmark now. The picture leaves them out, and none counts as met."
        yield "\n".join([said, "", *without])
    if early := [case["name"] for case in some if IN_BACKWARD[0] in case["settings"]]:
        said = (
            f"**Memory.** Tigon has `{IN_BACKWARD[0]}`, which frees each gradient in backward. The "
        )
        yield f"{said}peer's AdamW comes after it, when all are alive: {'; '.join(early)}."
    setting = RECOMPUTED[0].partition("=")[0]
    if again := [case["name"] for case in some if any(setting in s for s in case["settings"])]:
        said = f"**Recomputed.** Tigon has `{setting}`, which gives up speed for memory; the peer,"
        yield f"{said} which could do so too, keeps what it computes: {'; '.join(again)}."
    rows = {case["name"]: case.get("options", {}).get("rows") for case in some}
    if padded := [name for name, kind in rows.items() if kind == PADDED]:
        yield f"**Padded rows.** Tigon packs chats, and the peer pads each: {'; '.join(padded)}."


def verdicts(case: Record) -> Iterator[str]:
    name, target = case["name"], CASES[case["name"]]
    other = sides_of(case)[0]
    lines = [verdict(f"{name}: tokens/s over {other}", speed_ratio(case), target.speed)]
    if target.memory is not None:
        what = f"{name}: peak memory over {other}"
        lines.append(verdict(what, memory_ratio(case), target.memory, most=True))
    yield from (line for line in lines if not (lacks(case) and line.startswith("met")))
    if target.share is not None:
        yield verdict(f"{name}: share of the composed limit", share(case), target.share)
    left = max((r["left_mib"] for side in sides_of(case) for r in good(case, side)), default=0.0)
    if left > LEFT_MIB:
        yield f"WRONG: {name}: {left:.0f} MiB were allocated before a model was built"
    if differ := disagreement(case):
        yield f"WRONG: {name}: the sides disagree: {differ}"


def failures(case: Record) -> list[str]:
    """First lines of what went wrong in rounds."""
    found = [
        f"{side}: {row['error'].splitlines()[0][:120]}"
        for side, rows in case["rounds"].items()
        for row in rows
        if "error" in row
    ]
    return list(dict.fromkeys([*found, *([case["ended"]] if "ended" in case else [])]))


def attention(case: Record, side: str) -> str:
    rows = good(case, side)
    return ", ".join(rows[0]["attention"]) if rows else ""


def row(case: Record) -> list[str]:
    target = CASES[case["name"]]
    cells = [case["name"]]
    for side in sides_of(case):
        speed, size = rate(case, side), peak(case, side)
        cells.append(f"{speed:,.0f}, {figure(size)}" if speed and size else figure(speed, 5))
    aims = [(speed_ratio(case), target.speed, "≥"), (memory_ratio(case), target.memory, "≤")]
    aims.append((share(case), target.share, "≥"))
    for value, aim, sign in aims:
        bound = f" ({sign} {aim:g})" if aim is not None else ""
        if value is None:
            cells.append(bound.strip(" ()"))
        else:
            text = f"{value:.2f}" if aim is None else judge(value, aim, sign == "≤", 2)[1]
            cells.append(f"{text}{bound}")
    return cells


def summary(record: Record) -> str:
    """One row per case: both sides, and the ratios beside their targets."""
    head = ["training step", f"{PEER}: tok/s, GiB", "Tigon: tok/s, GiB", "tok/s ratio"]
    table = markdown([*head, "memory ratio", "share of the limit"], map(row, record["cases"]))
    rounds = sorted({len(good(case, side)) for case in record["cases"] for side in sides_of(case)})
    counts = " or ".join(map(str, rounds))
    note = f"\n\nRounds: {counts}. In brackets: targets. Share of the limit: the composed "
    note += "limit's time over Tigon's."
    if missing := [name for name in CASES if name not in {c["name"] for c in record["cases"]}]:
        note += f" Not measured: {'; '.join(missing)}."
    if any(CASES[case["name"]].own for case in record["cases"]):
        note += f" fp8 cases are compared with Tigon's own bf16 step, not with {PEER}."
    said = [f"{heading(record, {})}, the last run.", table + note, *notes(record["cases"])]
    return "\n\n".join(said)


def case_lines(case: Record) -> str:
    """What a run prints of a case."""
    lines = [f"\n{case['name']}:"]
    for side in sides_of(case):
        each = ", ".join(f"{r['ms']:.2f}" for r in good(case, side))
        sizes = [peak(case, side, key) for key in ("allocated_gib", "reserved_gib")]
        losses = ", ".join(f"{x:.4f}" for x in good(case, side)[0]["losses"]) if each else ""
        gib = " / ".join(figure(size) for size in sizes)
        lines.append(
            f"  {side}: ms of each round {each}; peak allocated / reserved {gib} GiB; "
            f"losses {losses}; attention {attention(case, side)}"
        )
    lines += [f"  tried: {name}: {found(tried)}" for name, tried in case["tried"].items()]
    lines += [f"  {line}" for line in (*verdicts(case), *failures(case))]
    return "\n".join(lines)


def found(tried: Record) -> str:
    return f"{tried['ms']:.1f} ms" if "ms" in tried else tried["error"].splitlines()[0][:120]


def time_table(case: Record) -> str:
    """Milliseconds by kind of work: the limit, Tigon, the other side."""
    other, mine = sides_of(case)
    limit = case.get("limit", {}).get("milliseconds", {})
    columns = [case["profile"].get(side, {}) for side in (mine, other)]
    if not limit or not any(columns):
        return ""
    kinds = dict.fromkeys([*limit, *(k for c in columns for k in c if k != "waiting")])
    rows = []
    for kind in kinds:
        values = [limit.get(kind), *(column.get(kind) for column in columns)]
        if any(value and value >= 0.005 for value in values):
            rows.append([KIND.get(kind, kind), *(figure(v) if v else "" for v in values)])
    steps = [took(case, side) for side in (mine, other)]
    busy = [sum(v for k, v in column.items() if k != "waiting") for column in columns]
    gaps = [figure(max(0.0, s - b)) if s and b else "" for s, b in zip(steps, busy, strict=True)]
    rows.append(["GPU idle", "", *gaps])
    total = case["limit"]["total"]
    rows.append(["**step**", f"**{figure(total, 4)}**", *(f"**{figure(s, 4)}**" for s in steps)])
    return markdown(["ms", "limit", mine, other], rows)


LEFT = 0.3  # where the bars of the picture begin
LEAST = 1e-3  # GiB that a table shows; the scalars of a step take some bytes


def shown(gib: float | None) -> float | None:
    return gib if gib is None or gib >= LEAST else 0.0


def memory_table(case: Record) -> str:
    """GiB by what holds them; parts do not add up to the peak, where not all are alive."""
    other, mine = sides_of(case)
    firsts = [good(case, side)[:1] for side in (mine, other)]
    if not all(firsts) or peak(case, mine) is None:
        return ""
    parts = [first[0]["gib"] for first in firsts]
    floor = {"weights": 2.0, "states": 4.0, "gradients": 2.0}  # bytes of a parameter, in bf16
    count = case.get("limit", {}).get("parameters")
    rows = []
    for key, said in MEMORY.items():
        least = figure(floor[key] * count / 2**30) if count and key in floor else ""
        rows.append([said, least, *(figure(shown(part[key])) for part in parts)])
    for key, said in (("allocated_gib", "peak, allocated"), ("reserved_gib", "peak, reserved")):
        rows.append([f"**{said}**", "", *(figure(peak(case, s, key)) for s in (mine, other))])
    return markdown(["GiB", "limit", mine, other], rows)


def limit_lines(case: Record) -> str:
    """What the limit is made of."""
    limit = case["limit"]
    speed = limit["bytes_per_second"] / 1e12
    milliseconds, moved = limit["milliseconds"], limit["bytes"]
    achieved = limit["flops"] / milliseconds[PRODUCTS] / 1e9
    backends = ", ".join(dict.fromkeys(layer["backend"] for layer in limit["attention"]))
    passes = ", ".join(f"{kind} {figure(1e3 * n / speed / 1e12)}" for kind, n in moved.items())
    gigabytes = ADAMW * limit["parameters"] / 1e9
    return (
        f"The limit: GEMMs at {achieved:.0f} TFLOP/s on average, attention by {backends} "
        f"alone, a copy at {speed:.2f} TB/s; memory-bound kernels in ms: {passes}; AdamW moves "
        f"{gigabytes:.3g} GB."
    )


def show(record: Record) -> str:
    """A section for every case that has a limit."""
    parts = [summary(record), "\n".join(v for case in record["cases"] for v in verdicts(case))]
    for case in record["cases"]:
        sections = [time_table(case), memory_table(case)]
        if "limit" in case and all(sections[:1]):
            sections.append(limit_lines(case))
        if not any(sections):
            continue
        used = "; ".join(f"{side}: {attention(case, side)}" for side in sides_of(case))
        rounds = len(good(case, sides_of(case)[1]))
        stamp = f"Commit {case['commit']}, {case['date'][:10]}, {format_count(rounds, 'round')}. "
        versions = ", ".join(f"{name} {v}" for name, v in case["libraries"].items() if v)
        stamp += f"{versions}. Attention: {used}."
        if case["settings"]:
            stamp += f" Settings of {sides_of(case)[1]}: {', '.join(case['settings'])}."
        tried = "; ".join(f"{name} {found(t)}" for name, t in case["tried"].items())
        stamp += f" Settings tried for the peer: {tried}." if tried else ""
        parts += [f"### {case['name']}", stamp, *filter(None, sections)]
    return "\n\n".join(part for part in parts if part)


def blocks(record: Record) -> dict[str, str]:
    """What stands between the markers of each file."""
    link = "![tokens per second and peak memory compared with the peer]"
    return {DOCUMENT: f"{link}({PICTURE.removeprefix('docs/')})\n\n{show(record)}"}


def plot(record: Record, path: Any = harness.ROOT / PICTURE) -> None:
    """Two bars per case: tokens per second and peak memory, over the other side's; a case whose
    peer lacked something has none."""
    from matplotlib.figure import Figure  # an extra

    shown = [case for case in record["cases"] if speed_ratio(case) and not lacks(case)]
    bars: list[tuple[str, str, Callable[[Record], float | None], Callable[[Case], Any]]] = [
        ("tokens per second: more is better", "#c1272d", speed_ratio, lambda c: c.speed),
        ("peak memory: less is better", "#4f7cac", memory_ratio, lambda c: c.memory),
    ]
    whole = Figure(figsize=(9, 0.45 * len(shown) + 1))
    axes = whole.subplots()
    for at, (label, shade, ratio, target) in zip((-0.2, 0.2), bars, strict=True):
        for place, case in enumerate(shown):
            value, aim = ratio(case), target(CASES[case["name"]])
            if value is None:
                continue
            axes.barh(place + at, value, 0.38, color=shade, label=label if place == 0 else None)
            style: dict[str, Any] = {"color": "white", "fontsize": 7, "va": "center"}
            axes.annotate(
                f"{value:.2f}", (LEFT, place + at), (4, 0), textcoords="offset points", **style
            )
            if aim is not None:
                axes.plot([aim, aim], [place + at - 0.19, place + at + 0.19], "k-", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
    axes.minorticks_off()
    axes.set_xlim(left=LEFT)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    names = []
    for case in shown:
        other = " over Tigon in bf16" if CASES[case["name"]].own else ""
        early = ", updates in backward" if IN_BACKWARD[0] in case["settings"] else ""
        names.append(f"{case['name']}{other}{early}")
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.tick_params(labelsize=7)
    axes.set_title(
        f"Tigon / {PEER}, a training step; lines are targets\n{record['machine']}, bf16", fontsize=8
    )
    axes.legend(fontsize=7, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    harness.save_picture(whole, path)
