"""The figures of bench/kernels.py as text."""

from bench.harness import Record, failure, figure, heading, markdown, newest, verdict, worst

PICTURE = "docs/kernels.svg"
COLUMNS = ("tigon", "eager", "torch.compile", "Liger", "QuACK", "CCE")
MODES = {"forward": "forward", "both": "forward + backward"}
NOT_TARGET = "dweight, no target"  # gradient error where CCE's filter bites


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
    """The worst of the whole gradients."""
    errors = result.get("errors", {}).items()
    return worst(error for name, error in errors if name.startswith("d") and name != NOT_TARGET)


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


def label(record: Record, name: str) -> str:
    version = record["peers"].get(name)
    return f"{name} {version}" if version else name


def stamped(record: Record) -> str:
    libraries = {"triton": record["triton"], **record["peers"]}
    speed = record["copy"]["bytes_per_second"] / 1e12
    return f"{heading(record, libraries)}; a large copy in the same run: {speed:.2f} TB/s."


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
            rows.append(row)
            if "error" in result:
                row.append(failure(result, 80))
                continue
            for mode in MODES:
                row.append(figure(took(result, mode)))
                row.append(figure(ratio(record, case, result, mode)))
            row += [figure(result["peak_mib"]), figure(gradient_error(result), 2)]
            if filtered:
                row.append(figure(result["errors"].get(NOT_TARGET), 2))
            ours = result["name"].startswith("tigon")
            judged = verdicts(record, case, result) if ours else {}
            said = [
                f"{k} {'met' if met else 'missed'} ({figure(m)})"
                for k, (_, m, met) in judged.items()
            ]
            row.append(", ".join(said))
    head = ["case", "provider", "forward, ms", "x bound", "forward + backward, ms", "x bound"]
    head += ["extra MiB", "gradient error", *(["of dW without a target"] if filtered else [])]
    return markdown([*head, "targets"], rows)


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
            if result["name"].split()[0] == "tigon":
                for what, (reached, most, _) in verdicts(record, case, result).items():
                    what = f"{name}: {result['name']}, {what}"
                    lines.append(verdict(what, reached, most, most=True))
    return "\n".join(lines)


def blocks(records: list[Record]) -> dict[str, str]:
    """What stands between the markers of each file."""
    record = newest(records)
    link, path = "![times the bound, per operator and library]", PICTURE
    return {
        "README.md": f"{link}({path})\n\n{summary(record, short=True)}",
        "docs/kernels.md": f"{link}({path.removeprefix('docs/')})\n\n{details(record)}",
    }
