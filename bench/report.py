"""The figures of bench/kernels.py as text, and as Markdown between markers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PLOT = "docs/kernels.svg"
COLUMNS = ("tigon", "eager", "torch.compile", "Liger", "QuACK", "CCE")
MODES = {"forward": "forward", "both": "forward + backward"}
NOT_TARGET = "dweight, no target"  # gradient error where CCE's filter bites


def newest(directory: Path) -> Record:
    """The newest whole run; if there is none, the newest part of one."""
    records = [
        json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("kernels-*.json")
    ]
    if not records:
        raise FileNotFoundError(f"no kernels-*.json in {directory}: run bench/kernels.py on a GPU")
    return max(records, key=lambda record: (record["complete"], record["date"]))


def title(case: Record) -> str:
    return " ".join(part for part in (case["variant"], case["shape"]) if part)


def provider(case: Record, name: str) -> Record | None:
    return next((p for p in case["providers"] if p["name"] == name), None)


def took(result: Record | None, mode: str) -> float | None:
    """Median ms."""
    return result[f"{mode}_ms"][1] if result is not None and f"{mode}_ms" in result else None


def bound(record: Record, case: Record, mode: str, name: str) -> float | None:
    """The ms that a provider's time is divided by, which `case["against"]` names."""
    if case["against"] == "floor":
        return case["floor_ms"].get(mode)
    if case["against"] == "three GEMMs":
        return case["gemms_ms"][1] if mode == "both" else None
    for other in record["cases"]:
        same = other["operator"] == case["operator"] and other["shape"] == case["shape"]
        if same and other["variant"] == "dense":
            return took(provider(other, name), mode)
    return None


def ratio(record: Record, case: Record, result: Record | None, mode: str) -> float | None:
    time = took(result, mode)
    if result is None or time is None:
        return None
    base = bound(record, case, mode, result["name"])
    return time / base if base else None


def gradient_error(result: Record) -> float | str | None:
    """The worst of the whole gradients; a NaN is text, and worse than any number."""
    errors = [
        value
        for name, value in result.get("errors", {}).items()
        if name.startswith("d") and name != NOT_TARGET
    ]
    broken = [error for error in errors if isinstance(error, str)]
    return broken[0] if broken else max(errors, default=None)


def verdicts(record: Record, case: Record, result: Record) -> dict[str, tuple[float, float, bool]]:
    """For every target of the case that can be judged: reached, aimed at, and whether met."""
    found = {}
    for mode, most in case["targets"].items():
        reached = ratio(record, case, result, mode)
        if reached is not None:
            found[MODES[mode]] = (reached, most, reached <= most)
    memory = case["memory"]
    if memory == "Liger":
        memory = (provider(case, "Liger") or {}).get("peak_mib")
    if memory is not None and "peak_mib" in result:
        found["MiB"] = (result["peak_mib"], memory, result["peak_mib"] <= memory)
    return found


def figure(value: float | str | None, digits: int = 3) -> str:
    """Rounded for the eye only: the JSON keeps every digit."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(record: Record, name: str) -> str:
    version = record["peers"].get(name)
    return f"{name} {version}" if version else name


def stamped(record: Record) -> str:
    changes = " with uncommitted changes" if record["uncommitted_changes"] else ""
    libraries = [label(record, name) for name, version in record["peers"].items() if version]
    speed = record["copy"]["bytes_per_second"] / 1e12
    return (
        f"{record['gpu']}, torch {record['torch']}, triton {record['triton']}, "
        f"{', '.join(libraries) or 'no other library'}; commit {record['commit']}{changes}, "
        f"{record['date'][:10]}; a large copy in the same run: {speed:.2f} TB/s."
    )


def cell(record: Record, case: Record, name: str) -> str:
    result = provider(case, name)
    if result is None:
        return ""
    if "error" in result:
        return "fails"
    return f"{figure(took(result, 'both'))} ({figure(ratio(record, case, result, 'both'))})"


def first_shapes(record: Record) -> list[Record]:
    """One case for every operator and variant."""
    first: dict[tuple[str, str], Record] = {}
    for case in record["cases"]:
        first.setdefault((case["operator"], case["variant"]), case)
    return list(first.values())


def summary(record: Record, *, short: bool = False) -> str:
    """One row per case: forward + backward of ours and of every peer that was there."""
    measured = {p["name"] for case in record["cases"] for p in case["providers"]}
    names = [name for name in COLUMNS if name in measured]
    rows = []
    for case in first_shapes(record) if short else record["cases"]:
        if case["variant"] == "peaked":
            continue
        best = min(
            (took(provider(case, name), "both") or float("inf") for name in names), default=0.0
        )
        cells = []
        for name in names:
            text = cell(record, case, name)
            fastest = took(provider(case, name), "both") == best
            cells.append(f"**{text}**" if text and fastest else text)
        base = bound(record, case, "both", "tigon")
        against = "its dense time" if case["against"] == "dense" else case["against"]
        aim = case["targets"].get("both")
        judged = verdicts(record, case, provider(case, "tigon") or {}).get(MODES["both"])
        target = f"≤ {aim:.2f}, {'met' if judged and judged[2] else 'missed'}" if aim else ""
        bound_ms = f"{against} {figure(base)}"
        rows.append([f"`{case['operator']}`", title(case), bound_ms, *cells, target])
    head = ["operator", "shape", "bound, ms", *(label(record, name) for name in names), "target"]
    return (
        "Forward + backward in ms, and in brackets how many times the bound that is; the fastest "
        f"is bold.\n{stamped(record)}\n\n{markdown(head, rows)}"
    )


def detail(record: Record, operator: str) -> str:
    """Everything measured of one operator, one row per case and provider."""
    rows = []
    cases = [case for case in record["cases"] if case["operator"] == operator]
    filtered = any(NOT_TARGET in p.get("errors", {}) for case in cases for p in case["providers"])
    for case in cases:
        for result in case["providers"]:
            row = [title(case), result["name"]]
            if "error" in result:
                rows.append([*row, result["error"].splitlines()[0].replace("|", "\\|")[:80]])
                rows[-1] += [""] * (6 + filtered)
                continue
            for mode in MODES:
                row.append(figure(took(result, mode)))
                row.append(figure(ratio(record, case, result, mode)))
            row += [figure(result["peak_mib"]), figure(gradient_error(result), 2)]
            if filtered:
                row.append(figure(result["errors"].get(NOT_TARGET), 2))
            judged = verdicts(record, case, result) if result["name"].startswith("tigon") else {}
            row.append(
                ", ".join(
                    f"{what} {'met' if met else 'missed'} ({figure(most)})"
                    for what, (_, most, met) in judged.items()
                )
            )
            rows.append(row)
    head = ["case", "provider", "forward, ms", "x bound", "forward + backward, ms", "x bound"]
    head += ["extra MiB", "gradient error", *(["of dW without a target"] if filtered else [])]
    head.append("targets")
    return markdown(head, rows)


def host(record: Record) -> str:
    rows = [
        [p["name"], figure(p["forward_us"][1]), figure(p["both_us"][1])]
        for p in record["host"]["providers"]
        if "error" not in p
    ]
    return markdown(["provider", "forward, µs", "forward + backward, µs"], rows)


def details(record: Record) -> str:
    parts = [summary(record)]
    for operator in dict.fromkeys(case["operator"] for case in record["cases"]):
        parts.append(f"### `{operator}`, all figures\n\n{detail(record, operator)}")
    if "host" in record:
        shape = record["host"]["shape"]
        parts.append(f"### Host time per call, `rms_norm` {shape}\n\n{host(record)}")
    return "\n\n".join(parts)


def console(record: Record, operator: str) -> str:
    """What a run prints of one operator."""
    if operator == "host":
        return f"\nhost time per call, rms_norm {record['host']['shape']}\n{host(record)}"
    lines = [f"\n{detail(record, operator)}"]
    for case in record["cases"]:
        if case["operator"] != operator:
            continue
        name = f"{operator} {title(case)}"
        for mode, floor in case["floor_ms"].items():
            copied = case["copy_ms"][mode][1]
            time = took(provider(case, "tigon"), mode)
            behind = f", tigon {time / copied:.3f} x copy" if time else ""
            lines.append(
                f"{name}: {MODES[mode]} floor {floor:.4f} ms, copy {copied:.4f} ms{behind}"
            )
        if "gemms_ms" in case:
            parts = ", ".join(f"{k} {q[1]:.3f}" for k, q in case["gemm_parts_ms"].items())
            lines.append(f"{name}: three GEMMs {case['gemms_ms'][1]:.3f} ms (alone {parts})")
        lines += [f"{name}: {note} {value:.3f}" for note, value in case["notes"].items()]
        for result in case["providers"]:
            if result["name"].split()[0] != "tigon":
                continue
            for what, (reached, most, met) in verdicts(record, case, result).items():
                word = "met" if met else "MISSED"
                lines.append(
                    f"{name}: {result['name']}, {what}: {word}, {reached:.4g} for {most:.4g}"
                )
    return "\n".join(lines)


def between(text: str, block: str, name: str, kind: str = "kernels") -> str:
    """`text` with `block` between its markers of that kind."""
    begin, end = f"<!-- {kind}:begin -->", f"<!-- {kind}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{name} does not hold {begin} and {end} once each")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{block}\n{end}{after}"


def insert(block: str, path: Path, kind: str) -> None:
    """`block` into the file, between its markers of that kind."""
    path.write_text(between(path.read_text(encoding="utf-8"), block, path.name, kind), "utf-8")


def blocks(record: Record) -> dict[str, str]:
    """What stands between the markers of each file."""
    link = "![times the bound, per operator and library]"
    return {
        "README.md": f"{link}({PLOT})\n\n{summary(record, short=True)}",
        "docs/kernels.md": f"{link}({Path(PLOT).name})\n\n{details(record)}",
    }


def write_docs(record: Record, root: Path) -> None:
    """All files or none: the markers of every one are looked for first."""
    texts = {
        root / name: between((root / name).read_text(encoding="utf-8"), block, name)
        for name, block in blocks(record).items()
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
