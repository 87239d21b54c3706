"""The figures of bench/kernels.py as text, and as one bar chart."""

from pathlib import Path
from textwrap import fill

from bench import harness
from bench.harness import Record, failure, figure, host_table, markdown, row_of, verdict

PICTURE = "docs/kernels.svg"
COLUMNS = ("tigon", "eager", "torch.compile", "Liger", "QuACK", "CCE")
MODES = {"forward": "forward", "both": "forward + backward"}
TOP = 3.0  # where bars end
SHADES = ("#c1272d", "#9a9a9a", "#e3a857", "#4f7cac", "#6a9a5b", "#8d6a9f")
NOT_TARGET = "dweight, no target"  # gradient error where CCE's filter bites


def title(case: Record) -> str:
    return " ".join(part for part in (case["variant"], case["shape"]) if part)


def took(result: Record, mode: str) -> float | None:
    """Median ms."""
    return result[f"{mode}_ms"][1] if f"{mode}_ms" in result else None


def bound(record: Record, case: Record, mode: str, name: str) -> float | None:
    """The ms that a provider's time is divided by, which `case["against"]` names."""
    if case["against"] == "floor":
        return case["floor_ms"].get(mode)
    if case["against"] == "three GEMMs":
        return case["gemms_ms"][1] if mode == "both" else None
    dense = (case["operator"], case["shape"], "dense")
    for other in record["cases"]:
        if (other["operator"], other["shape"], other["variant"]) == dense:
            return took(row_of(other, name), mode)
    return None


def ratio(record: Record, case: Record, result: Record, mode: str) -> float | None:
    time = took(result, mode)
    base = bound(record, case, mode, result["name"]) if time is not None else None
    return time / base if time is not None and base else None


def gradient_error(result: Record) -> float | str | None:
    """The worst of the whole gradients."""
    errors = result.get("errors", {}).items()
    return harness.worst(e for name, e in errors if name[0] == "d" and name != NOT_TARGET)


def verdicts(record: Record, case: Record, result: Record) -> dict[str, tuple[float, float, bool]]:
    """For every target of the case that can be judged: reached, aimed at, and whether met."""
    found = {}
    for mode, most in case["targets"].items():
        reached = ratio(record, case, result, mode)
        if reached is not None:
            found[MODES[mode]] = (reached, most, reached <= most)
    memory = case["memory"]
    if memory == "Liger":
        memory = row_of(case, "Liger").get("peak_mib")
    if memory is not None and "peak_mib" in result:
        found["MiB"] = (result["peak_mib"], memory, result["peak_mib"] <= memory)
    return found


def times_bound(record: Record, case: Record, result: Record, mode: str) -> str:
    """How many times the bound: with more digits where we miss a target by less than they show."""
    text = figure(value := ratio(record, case, result, mode))
    aim = case["targets"].get(mode) if result["name"].startswith("tigon") else None
    if value is None or aim is None or value <= aim or float(text) > aim:
        return text
    return harness.judge(value, aim, True, 2)[1]


def label(record: Record, name: str) -> str:
    return " ".join(filter(None, (name, record["peers"].get(name))))


def cell(record: Record, case: Record, name: str, best: float) -> str:
    result = row_of(case, name)
    ms = took(result, "both")
    if ms is None:
        return "fails" if "error" in result else ""
    text = f"{figure(ms)} ({times_bound(record, case, result, 'both')})"
    return f"**{text}**" if ms == best else text


def first_shapes(record: Record) -> list[Record]:
    """One case for every operator and variant."""
    first: dict[tuple[str, str], Record] = {}
    for case in record["cases"]:
        first.setdefault((case["operator"], case["variant"]), case)
    return list(first.values())


def summary(record: Record) -> str:
    """One row per case: forward + backward of ours and of every peer that was there."""
    measured = {p["name"] for case in record["cases"] for p in case["providers"]}
    names = [name for name in COLUMNS if name in measured]
    rows = []
    for case in record["cases"]:
        if case["variant"] == "peaked":
            continue
        found = (took(row_of(case, name), "both") for name in names)
        best = min(filter(None, found), default=0.0)
        against = "own dense time" if case["against"] == "dense" else case["against"]
        aim = case["targets"].get("both")
        judged = verdicts(record, case, row_of(case, "tigon")).get(MODES["both"])
        target = f"≤ {aim:.2f}, {'met' if judged and judged[2] else 'missed'}" if aim else ""
        base = f"{against} {figure(bound(record, case, 'both', 'tigon'))}"
        cells = (cell(record, case, name, best) for name in names)
        rows.append([f"`{case['operator']}`", title(case), base, *cells, target])
    head = ["operator", "shape", "bound, ms", *(label(record, name) for name in names), "target"]
    where = harness.heading(record, {"triton": record["triton"], **record["peers"]})
    speed = record["copy"]["bytes_per_second"] / 1e12
    return (
        "Forward + backward in ms, and in brackets that time over the bound; the fastest is bold.\n"
        f"{where}; a large copy in the same run: {speed:.2f} TB/s.\n\n"
        f"{markdown(head, rows)}"
    )


def detail(record: Record, operator: str) -> str:
    """Everything measured of one operator, one row per case and provider."""
    cases = [case for case in record["cases"] if case["operator"] == operator]
    filtered = any(NOT_TARGET in p.get("errors", {}) for case in cases for p in case["providers"])
    rows = []
    for case, result in ((c, result) for c in cases for result in c["providers"]):
        rows.append(row := [title(case), result["name"]])
        if "error" in result:
            row.append(failure(result, 80))
            continue
        for mode in MODES:
            row += [figure(took(result, mode)), times_bound(record, case, result, mode)]
        row += [figure(result["peak_mib"]), figure(gradient_error(result), 2)]
        row += [figure(result["errors"].get(NOT_TARGET), 2)] * filtered
        judged = verdicts(record, case, result) if result["name"].startswith("tigon") else {}
        said = (f"{k} {'met' if m else 'missed'} ({figure(x)})" for k, (_, x, m) in judged.items())
        row.append(", ".join(said))
    head = ["case", "provider", "forward, ms", "/ bound", "forward + backward, ms", "/ bound"]
    head += ["extra MiB", "gradient error"]
    head += [*["dW error, rows of no target"] * filtered, "targets"]
    return markdown(head, rows)


def details(record: Record) -> str:
    parts = [summary(record)]
    operators = dict.fromkeys(case["operator"] for case in record["cases"])
    parts += [f"### `{name}`, all figures\n\n{detail(record, name)}" for name in operators]
    if "host" in record:
        table = host_table("provider", record["host"]["providers"])
        shape = record["host"]["shape"]
        parts.append(f"### Host time per call, `rms_norm` {shape}\n\n{table}")
    return "\n\n".join(parts)


def console(record: Record, operator: str) -> str:
    """What a run prints of one operator."""
    if operator == "host":
        return host_table("host time per call, rms_norm", record["host"]["providers"])
    lines = [detail(record, operator), ""]
    for case in (case for case in record["cases"] if case["operator"] == operator):
        name = f"{operator} {title(case)}"
        bounds = {f"{MODES[mode]} floor": ms for mode, ms in case["floor_ms"].items()}
        bounds |= {f"{MODES[mode]} copy": ms[1] for mode, ms in case["copy_ms"].items()}
        if "gemms_ms" in case:
            parts = {"three GEMMs": case["gemms_ms"], **case["gemm_parts_ms"]}
            bounds |= {k: ms[1] for k, ms in parts.items()}
        bounds |= case["notes"]
        lines.append(f"{name}: " + ", ".join(f"{k} {value:.4g}" for k, value in bounds.items()))
        for result in (p for p in case["providers"] if p["name"].startswith("tigon")):
            for what, (reached, most, _) in verdicts(record, case, result).items():
                what = f"{name}: {result['name']}, {what}"
                lines.append(verdict(what, reached, most, most=True))
    return "\n".join(lines)


def blocks(record: Record) -> dict[str, str]:
    """What stands between the markers of each file."""
    link = "![time over the bound, per operator and library]"
    return {"docs/kernels.md": f"{link}({PICTURE.removeprefix('docs/')})\n\n{details(record)}"}


def tick(case: Record) -> str:
    lines = [case["operator"].replace("_", " "), case["variant"].replace("_", " "), case["shape"]]
    return "\n".join(fill(line, 13, break_long_words=False) for line in lines if line)


def plot(record: Record, path: Path = harness.ROOT / PICTURE) -> None:
    """A group of bars per operator: how many times the bound each library takes."""
    from matplotlib.figure import Figure  # an extra

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
            if (value := ratio(record, case, row_of(case, name), "both")) is not None
        }
        if not bars:
            continue
        heights = [min(value, TOP) for value in bars.values()]
        axes.bar(list(bars), heights, 0.95 * width, label=label(record, name), color=shade)
        for (x, value), height in zip(bars.items(), heights, strict=True):
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 6, "rotation": 90}
            axes.annotate(f"{value:.2f}", (x, height), (0, 2), **style)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_ylim(0, 1.12 * TOP)
    axes.set_ylabel("forward + backward, times the bound")
    axes.set_xticks(range(len(cases)), map(tick, cases), fontsize=7)
    axes.margins(x=0.01)
    axes.set_title(
        "1 is what the hardware allows: the bytes at the bandwidth of a copy; for "
        f"linear_cross_entropy its three GEMMs\n{record['gpu']}, bf16; bars end at {TOP:g}",
        fontsize=8,
    )
    axes.legend(fontsize=7, ncols=len(COLUMNS), loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes.spines[["top", "right"]].set_visible(False)
    harness.save_picture(whole, path)
