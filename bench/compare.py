"""Two checkouts of Tigon in one run on one machine: training steps, decoding, host time.

python bench/compare.py --base CHECKOUT [CASE ...]   # parts of names; `compile` if asked for
python bench/compare.py --table

Training steps are forward and backward without an optimizer, in bf16 with random weights. Each side
runs in processes of its own, base, new, base, new, and so on. Prints a table of the medians with
base / new (above 1, the new tree is faster) and whether both give the same loss and the same
tokens, and writes bench/results/compare-<gpu>.json; a part of a run goes into bench/out.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench._common import RESULTS, ROOT, save, stamp
from bench.compare_side import CASES, Record
from bench.measure import BEGIN, progress
from bench.report import figure, markdown

SIDE = Path(__file__).with_name("compare_side.py")
SIDES = ("base", "new")
LEAST = {"step": 0.99, "decode": 0.99, "host": 1.0}  # base / new
SAME = ("loss", "gradient_norm", "tokens_crc")


def run_side(tree: Path, names: Sequence[str], tiny: bool, limit: float) -> dict[str, Record]:
    """What one process prints, by case; a case that the limit ends has an error."""
    with tempfile.TemporaryDirectory() as cold:  # torch.compile's caches, empty
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
            "TORCHINDUCTOR_CACHE_DIR": cold,
        }
        process = subprocess.Popen(
            [sys.executable, "-P", str(SIDE), "tiny" if tiny else "full", *names],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        ended = None
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit:g} s"
            os.killpg(process.pid, signal.SIGKILL)  # with the workers of torch.compile
            out, _ = process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith(('{"tree', '{"case'))]
    if lines and Path(lines[0]["tree"]) != tree.resolve():
        raise RuntimeError(f"{tree} was to be measured, but {lines[0]['tree']} was imported")
    found = {line.pop("case"): line for line in lines[1:]}
    ended = ended or f"the process ended with status {process.returncode}"
    return {name: found.get(name, {"error": ended}) for name in names}


def measure(base: Path, names: Sequence[str], options: argparse.Namespace) -> list[Record]:
    trees = {"base": base.resolve(), "new": ROOT}
    runs: dict[str, dict[str, list[Record]]] = {n: {s: [] for s in SIDES} for n in names}
    timed = [case.name for case in CASES if case.name in names and case.kind in LEAST]
    for number in range(options.rounds if timed else 0):
        for side in SIDES:
            progress(f"round {number + 1} of {options.rounds}: {side}")
            for name, row in run_side(trees[side], timed, options.tiny, options.limit).items():
                runs[name][side].append(row)
    for case in CASES:
        for side in SIDES if case.name in names and case.kind not in LEAST else ():
            progress(f"{case.name}: {side}")
            row = run_side(trees[side], [case.name], options.tiny, options.limit)
            runs[case.name][side].append(row[case.name])
    return [
        {"name": case.name, "kind": case.kind, **runs[case.name]}
        for case in CASES
        if case.name in names
    ]


def took(case: Record, side: str, key: str = "ms") -> float | None:
    """The median over the rounds."""
    values = [row[key] for row in case[side] if key in row]
    return median(values) if values else None


def ratio(case: Record) -> float | None:
    base, new = (took(case, side) for side in SIDES)
    return base / new if base and new else None


def failure(case: Record) -> str | None:
    return next((f"{s}: {r['error']}" for s in SIDES for r in case[s] if "error" in r), None)


def agreement(case: Record) -> str:
    """Whether all rounds of both sides give the same, and what, if they do not."""
    parts = []
    for key in SAME:
        sides = [sorted({row[key] for row in case[side] if key in row}) for side in SIDES]
        if any(sides) and sides[0] == sides[1]:
            parts.append(f"same {key} {', '.join(map(str, sides[0]))}")
        elif any(sides):
            base, new = (", ".join(map(str, values)) or "none" for values in sides)
            parts.append(f"{key} {base} -> {new}")
    return "; ".join(parts).replace("_", " ")


def table(record: Record) -> str:
    rows, compiled = [], []
    for case in record["cases"]:
        if case["kind"] not in LEAST:
            for side in SIDES:
                row = case[side][0]
                keys = ("compile_s", "graphs", "ms", "eager_ms", "loss", "eager_loss")
                cells = [f"{row[key]:.6g}" if key in row else "" for key in keys]
                compiled.append([case["name"], side, *cells, row.get("error", "")])
            continue
        times = [figure(took(case, side), 4) for side in SIDES]
        pairs = zip(case["base"], case["new"], strict=True)
        each = [a["ms"] / b["ms"] for a, b in pairs if "ms" in a and "ms" in b]
        memory = [figure(took(case, side, "peak_mib")) for side in SIDES]
        rounds = ", ".join(f"{value:.3f}" for value in each)
        said = failure(case) or agreement(case)
        rows.append([case["name"], *times, figure(ratio(case), 4), rounds, *memory, said])
    head = ["case", "base, ms", "new, ms", "base / new", "of each round"]
    head += ["base, MiB", "new, MiB", "results"]
    parts = [markdown(head, rows)] if rows else []
    if compiled:
        head = ["case", "tree", "first compiled step, s", "graphs", "ms", "eager, ms"]
        parts.append(markdown([*head, "loss", "eager loss", "failure"], compiled))
    return "\n\n".join(parts)


def verdicts(record: Record) -> Iterator[str]:
    for case in record["cases"]:
        least, reached = LEAST.get(case["kind"]), ratio(case)
        if least is None:
            continue
        if reached is None:
            yield f"not measured: {case['name']}"
        else:
            word = "met" if reached >= least else "MISSED"
            yield f"{word}: {case['name']}, base / new: {reached:.3f} for {least:.2f}"


def show(record: Record) -> str:
    changes = " with uncommitted changes" if record["uncommitted_changes"] else ""
    head = (
        f"{record['machine']}, torch {record['torch']}, triton {record['triton']}; "
        f"base {record['base']}, new {record['commit']}{changes}, {record['date'][:10]}; "
        f"{record['rounds']} rounds."
    )
    return "\n\n".join([head, table(record), "\n".join(verdicts(record))])


def described(tree: Path) -> str:
    """The commit of a checkout; a copy inside of another repository does not know its own."""
    if not (tree / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help="; ".join(case.name for case in CASES))
    parser.add_argument("--base", type=Path, help="the checkout to compare this one with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=200.0, help="seconds that a process may take"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="what git describe --always --dirty says, without git")
    parser.add_argument("--base-commit", help="the same of the base")
    parser.add_argument("--table", action="store_true", help="print the newest run as Markdown")
    options = parser.parse_args(arguments)
    if options.table:
        files = sorted(RESULTS.glob("compare-*.json"))
        if not files:
            parser.error(f"no compare-*.json in {RESULTS}")
        print(show(json.loads(files[-1].read_text(encoding="utf-8"))))
        return
    usual = [case.name for case in CASES if case.kind in LEAST]
    names = [c.name for c in CASES if any(part in c.name for part in options.cases)] or usual
    if options.cases and not all(any(p in c.name for c in CASES) for p in options.cases):
        parser.error(f"{', '.join(options.cases)}; there are {'; '.join(c.name for c in CASES)}")
    if options.base is None or not (options.base / "tigon").is_dir():
        parser.error(
            f"--base {options.base} holds no tigon/; give another checkout of this project"
        )
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.tiny:
        parser.error("measuring needs a CUDA GPU, or --tiny; --table needs neither")
    machine = torch.cuda.get_device_name() if on_gpu else "CPU"
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    whole = set(usual) <= set(names) and not options.tiny
    out = options.out or (RESULTS if whole else ROOT / "bench/out") / f"compare-{slug}.json"
    import triton

    record = {
        **stamp("tigon", "bench/*.py", described=options.commit),
        "base": options.base_commit or described(options.base),
        "machine": machine,
        "triton": triton.__version__,
        "rounds": options.rounds,
        "tiny": options.tiny,
        "complete": whole,
        "cases": measure(options.base, names, options),
    }
    save(out, record | {"seconds": time.perf_counter() - BEGIN})
    print(show(record))
    progress(f"wrote {out}")


if __name__ == "__main__":
    main()
