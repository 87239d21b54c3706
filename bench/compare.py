"""Two checkouts of Tigon in one run on one machine: training steps, decoding, host time.

python -m bench compare --base CHECKOUT [CASE ...]   # parts of names; `compile` if asked for
python -m bench compare --table

Training steps are forward and backward without an optimizer, in bf16 with random weights. Each side
runs in processes of its own, base, new, base, new, and so on. Prints a table of the medians with
base / new (above 1, the new tree is faster) and whether both give the same loss and the same
tokens, and writes bench/results/compare-<gpu>.json; a part of a run goes into bench/out.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from bench import harness
from bench.compare_side import CASES
from bench.harness import ROOT, Bench, Job, Record, figure, markdown, progress, report, verdict
from bench.processes import NO_GPU, environment, lines

SIDE = ROOT / "bench/compare_side.py"
SIDES = ("base", "new")
LEAST = {"step": 0.99, "decode": 0.99, "host": 1.0}  # base / new
SAME = ("loss", "gradient_norm", "tokens_crc")
TIMED = ("case", "base, ms", "new, ms", "base / new", "of each round")
TIMED += ("base, MiB", "new, MiB", "results")
COMPILED = {"first compiled step, s": "compile_s", "graphs": "graphs", "ms": "ms"}
COMPILED |= {"eager, ms": "eager_ms", "loss": "loss", "eager loss": "eager_loss"}


def run_side(
    tree: Path, names: Sequence[str], tiny: bool, limit: float, **more: str
) -> dict[str, Record]:
    """What one process prints, by case; a case that the limit ends has an error."""
    env = environment(tree, **(NO_GPU if tiny else {}), **more)
    found, ended = dict[str, Record](), ""
    for line in lines([str(SIDE), "tiny" if tiny else "full", *names], limit, env=env):
        kind = line.pop("kind")
        if kind == "tree" and Path(line["tree"]) != tree.resolve():
            raise RuntimeError(f"{tree} was to be measured, but {line['tree']} was imported")
        if kind == "case":
            found[line.pop("case")] = line
        elif kind == "ended":
            ended = line["error"]
    return {name: found.get(name, {"error": ended}) for name in names}


def measure(base: Path, job: Job) -> None:
    """Fill the record's cases, saved whenever a process has ended."""
    trees = {"base": base.resolve(), "new": ROOT}
    rounds, tiny, limit = job.options.rounds, job.options.tiny, job.options.limit
    kinds = {name: CASES[name][0] for name in job.only}
    rows = {
        name: {"name": name, "kind": kind, "base": [], "new": []} for name, kind in kinds.items()
    }
    timed = [name for name, kind in kinds.items() if kind in LEAST]
    turns = [(f"round {n + 1} of {rounds}", timed) for n in range(rounds if timed else 0)]
    turns += [(name, [name]) for name in kinds if name not in timed]
    for turn, names in turns:
        for side, tree in trees.items():
            progress(f"{turn}: {side}")
            with tempfile.TemporaryDirectory() as cold:
                more = {} if names is timed else {"TORCHINDUCTOR_CACHE_DIR": cold}
                found = run_side(tree, names, tiny, limit, **more)
            for name, row in found.items():
                rows[name][side].append(row)
            job.add(cases=list(rows.values()))


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
    timed, compiled = [], []
    for case in record["cases"]:
        if case["kind"] not in LEAST:
            for side, row in ((s, row) for s in SIDES for row in case[s]):
                cells = (f"{row[key]:.6g}" if key in row else "" for key in COMPILED.values())
                compiled.append([case["name"], side, *cells, row.get("error", "")])
            continue
        times = [figure(took(case, side), 4) for side in SIDES]
        pairs = zip(case["base"], case["new"], strict=False)  # cut off, a run lacks the last
        each = (f"{a['ms'] / b['ms']:.3f}" for a, b in pairs if "ms" in a and "ms" in b)
        ratios = figure(ratio(case), 4), ", ".join(each)
        memory = (figure(took(case, side, "peak_mib")) for side in SIDES)
        timed.append([case["name"], *times, *ratios, *memory, failure(case) or agreement(case)])
    tables = {TIMED: timed, ("case", "tree", *COMPILED, "failure"): compiled}
    return "\n\n".join(markdown(head, rows) for head, rows in tables.items() if rows)


def verdicts(record: Record) -> Iterator[str]:
    for case in record["cases"]:
        if case["kind"] in LEAST:
            yield verdict(f"{case['name']}, base / new", ratio(case), LEAST[case["kind"]])


def show(record: Record) -> str:
    libraries = {"triton": record["triton"], "base": record["base"]}
    head = f"{harness.heading(record, libraries)}; {record['rounds']} rounds."
    return report(record, table(record), verdicts(record), title=head)


def described(tree: Path) -> str:
    """The commit of a checkout; a copy inside of another repository does not know its own."""
    itself = (tree / ".git").exists()
    return harness.git("describe", "--always", "--dirty", cwd=tree) if itself else ""


def checkout(path: str) -> Path:
    if not (Path(path) / "tigon").is_dir():
        raise argparse.ArgumentTypeError(f"{path} holds no tigon/; give a checkout of this project")
    return Path(path)


def run(job: Job) -> None:
    base: Path | None = job.options.base
    if base is None:
        raise SystemExit("give the checkout to compare this one with: --base CHECKOUT")
    commit = job.options.base_commit or described(base) or "unknown"
    job.record |= {"base": commit}
    job.record |= {"triton": harness.installed("triton"), "rounds": job.options.rounds}
    measure(base, job)


OPTIONS = (
    ("cases", {"nargs": "*", "help": "as --only"}),
    ("--base", {"type": checkout, "help": "the checkout to compare this one with"}),
    ("--base-commit", {"help": "what git describe says of it, for a copy without git"}),
    ("--rounds", {"type": int, "default": 3}),
    ("--limit", {"type": float, "default": 200.0, "help": "seconds that a process may take"}),
)
ASKED = [name for name, (kind, *_) in CASES.items() if kind not in LEAST]
MORE = {"unasked": ASKED, "options": OPTIONS, "tiny": True}
BENCH = Bench(run, show, list(CASES), **MORE)
