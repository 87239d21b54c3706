"""From the command to the fine-tuned model: each library as it comes, on the same files.

A checkpoint with random weights and 20,000 ragged chats lie on the disk. Each side is a process of
its own: it starts, tokenizes and packs, loads, trains some steps, evaluates once, and writes the
model. Weights, gradients and states are bf16 on all sides, but adapters float32, as is the default
of all; rows, tokens of a row, steps and learning rate are the same, only assistants' turns are
learned, and tokens are those of chats, without padding. After the last step our loss must not be
higher; a peer's may be, as torch's AdamW rounds small updates of bf16 weights away, and ours rounds
at random. Files are in the page cache and Python's bytecode is compiled beforehand; caches of
compiled kernels and of data are empty for each side.

Sides take turns, and of several rounds the one with the median time counts. Ratios are of rounds at
one commit, on one host; of several peers the one with the least ratio counts. A round that the
record has at this commit, with as many steps, is not measured again: a run that is cut off goes on
with the same command. So a record may have sides of several commits, and each row of the table
names its own.

    python -m bench end_to_end --only "1B full" --steps 60
    python -m bench end_to_end --tiny            # tiny models on the CPU
    python -m bench end_to_end --write-docs      # needs no GPU
"""

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench import end_to_end_files as files
from bench import harness
from bench.end_to_end_side import COMPILE, STEPS, Request
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress, report
from bench.processes import environment, lines
from bench.train_cases import MODELS
from bench.varlen import VARLEN

DOCUMENT = "docs/performance.md"
OURS = "Tigon"
SPEED, MEMORY, FIRST_STEP = 1.5, 0.8, 20.0  # targets beside the best peer; seconds, for 8B
APART = 0.02  # that a loss on held-out chats may be higher, after as many steps in another order
UNEVEN = 1.2  # times a median step: more is a step that is held up
CHATS, HELD_OUT = 20_000, 200
LENGTH, ROWS, RANK = 8192, 2, 16
START_SECONDS, STEP_SECONDS = 120.0, 3.0  # that a side may take, beside and for its steps
LIBRARIES = {
    "transformers": "transformers",
    "TRL": "trl",
    "datasets": "datasets",
    "Liger": "liger-kernel",
    "PEFT": "peft",
    "flash-attn-4": "flash-attn-4",
    "triton": "triton",
}
IMPORTS = ("import tigon.train", "from trl import SFTTrainer", "import liger_kernel.transformers")
PACKAGES = ("tigon", "transformers", "trl", "datasets", "accelerate", "peft", "liger_kernel")
PACKAGES += ("flash_attn", "quack", "cutlass", "pyarrow", "pandas", "huggingface_hub")
UNUSED = r"/(transformers/models|tests?)/"  # nearly all of it, which would take longest


@dataclass(frozen=True)
class Case:
    """A model, and what of it is trained."""

    model: str  # of bench/train_cases.py's MODELS
    rank: int = 0  # of adapters
    limit: float | None = None  # the most seconds from start to first step


CASES = {
    "1B full": Case("Llama-3.2-1B"),
    "8B LoRA": Case("Llama-3.1-8B", RANK, FIRST_STEP),
    "8B full": Case("Llama-3.1-8B", 0, FIRST_STEP),
    "Qwen3-MoE full": Case("Qwen3-30B-A3B"),
    "1B LoRA": Case("Llama-3.2-1B", RANK),
    "Qwen3-MoE LoRA": Case("Qwen3-30B-A3B", RANK),
}
USUAL = ("1B full", "8B LoRA", "8B full", "Qwen3-MoE full")
TRL = "TRL, gradient_checkpointing=False"
FLASH = {"library": "TRL", "attention": "flash_attention_4"}
SIDES: dict[str, dict[str, Any]] = {  # fields of a Request
    OURS: {"library": "tigon"},
    TRL: FLASH,
    # FlashAttention-2 as torch has it, which compiles nothing before the first step
    f"{TRL}, {VARLEN}": {"library": "TRL", "attention": VARLEN},
    "TRL": FLASH | {"checkpointing": True},  # its default
}


def clean(caches: Path, tiny: bool) -> dict[str, str]:
    """The environment of a side, whose caches are empty."""
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_DATASETS_CACHE", "TIGON_CACHE")
    names += ("XDG_CACHE_HOME", "CUTE_DSL_CACHE_DIR")
    folders = {name: caches / name.lower() for name in names}
    for folder in folders.values():
        folder.mkdir(parents=True)
    return environment(**folders, **({"CUDA_VISIBLE_DEVICES": ""} if tiny else {}))


def write_files(job: Job, root: Path, case: Case) -> None:
    tiny = job.options.tiny
    began = time.monotonic()
    count = (300, 20) if tiny else (CHATS, HELD_OUT)
    files.write(files.Request(str(root), case.model, *count, tiny))
    progress(f"files of {case.model}: {time.monotonic() - began:.1f} s")


def import_once(root: Path) -> None:
    """Compiles the bytecode of the libraries on all cores, and imports each, so that no side waits
    for that or for the disk."""
    if (root / "imported").exists():
        return
    began = time.monotonic()
    found = [spec for name in PACKAGES if (spec := find_spec(name)) is not None]
    folders = [path for spec in found for path in spec.submodule_search_locations or ()]
    list(lines(["-m", "compileall", "-q", "-j", "0", "-x", UNUSED, *folders], 120, root / "log"))
    with ThreadPoolExecutor() as pool:  # at the same time
        list(pool.map(lambda code: list(lines(["-c", code], 120, root / f"{code}.log")), IMPORTS))
    (root / "imported").touch()
    progress(f"bytecode and imports: {time.monotonic() - began:.1f} s")


def run_side(job: Job, root: Path, of: str, name: str) -> Record:
    """A side of the case of this name once; of one that did not end, how far it came."""
    options, case = job.options, CASES[of]
    chats, tiny = root / f"chats-{300 if options.tiny else CHATS}", options.tiny
    slug = re.sub(r"[^\w.-]+", "-", f"end_to_end-{of}-{name}")
    log = (job.out.parent / f"{slug}.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as directory:
        here, env = Path(directory), clean(Path(directory, "caches"), tiny)
        began = time.monotonic()
        request = Request(
            **SIDES[name],
            began=began,
            model=str(root / case.model),
            data=str(chats / "train.jsonl"),
            eval_data=str(chats / "eval.jsonl"),
            run_dir=str(here / "run"),
            length=256 if tiny else LENGTH,
            rows=ROWS,
            steps=options.steps,
            lr=2e-4 if case.rank else 1e-5,
            rank=case.rank,
            experts="num_experts" in MODELS[case.model][2],
            tiny=tiny,
        )
        arguments = ["-m", "bench.end_to_end_side", json.dumps(asdict(request))]
        limit = options.limit or START_SECONDS + STEP_SECONDS * options.steps
        *said, found = lines(arguments, limit, log, env=env, cwd=here)
        found["wall"] = time.monotonic() - began
    if "error" in found:
        found |= read_progress(said[-1], found["wall"]) if said else {}
        progress(f"{name}: {found['error']}")
    found |= {key: job.record[key] for key in ("commit", "date", "libraries")}
    return found | {"cores": len(os.sched_getaffinity(0)), "asked": options.steps}


def read_progress(last: Record, wall: float) -> Record:
    """The seconds of each phase until a side was stopped, by the last that its clock has said."""
    phases, now = last["phases"], last["phase"]
    phases[now] = phases.get(now, 0.0) + wall - sum(phases.values())
    return {"phases": phases, "steps": last["steps"]}


def rounds_of(job: Job, case: str, side: str) -> list[Record]:
    """The rounds of a side at this commit and with as many steps, but for those that failed."""
    known = job.record["cases"].get(case, {}).get(side, {})
    same = {"commit": job.record["commit"], "asked": job.options.steps}
    rounds = [known, *known.get("others", ())]
    return [of for of in rounds if "error" not in of and same.items() <= of.items()]


def middle(rounds: list[Record]) -> Record:
    """The round with the median time, with the others beside it; the last one if it failed."""
    known = [{k: v for k, v in found.items() if k != "others"} for found in rounds]
    if "error" not in known[-1]:
        known.sort(key=lambda found: found["wall"])
    found = known.pop(-1 if "error" in known[-1] else len(known) // 2)
    return found | ({"others": known} if known else {})


def measure(job: Job, root: Path) -> None:
    asked, rounds = job.options.sides.split(";"), job.options.rounds
    for name in job.only:
        done = {side: 0 if job.options.again else len(rounds_of(job, name, side)) for side in asked}
        if min(done.values()) >= rounds:
            progress(f"{name}: is measured")
            continue
        with ThreadPoolExecutor() as pool:
            imports = pool.submit(import_once, root)
            write_files(job, root, CASES[name])
            imports.result()
        job.add()  # the GPU's memory goes back
        for number, side in ((n, side) for n in range(rounds) for side in asked if done[side] <= n):
            progress(f"{name}: {side}, round {number + 1} of {rounds}")
            known = rounds_of(job, name, side)[:number]
            found = run_side(job, root, name, side)
            job.record["cases"].setdefault(name, {})[side] = middle([*known, found])
            job.add()
            print(markdown(HEAD, [row(name, side, found)]), flush=True)


# What the figures say


def seconds_of(found: Record) -> dict[str, float]:
    """Seconds of each part, which add up to the time of the process. Warm-up is what steps take
    beyond so many median steps: kernels that are compiled, whatever else the first ones do, and
    later steps that are held up."""
    phases = dict(found["phases"])
    steps = phases.pop(STEPS) + phases.pop(COMPILE)
    usual = min(steps, median(found["gaps"]) * found["steps"]) if found["gaps"] else steps
    parts = {name: phases[name] for name in ("start", "data", "model")}
    parts |= {"warm-up": steps - usual, STEPS: usual}
    parts |= {name: phases[name] for name in ("evaluation", "save")}
    return parts | {"other": found["wall"] - sum(parts.values())}


def speed(found: Record) -> float | None:
    """Tokens a second over all."""
    return None if "error" in found else found["tokens"] / found["wall"]


def peak(found: Record) -> float | None:
    """GiB, as the allocator of torch counts them."""
    return found.get("allocated_gib")


HEAD = ["case", "side", "commit", "tokens/s over all", "peak GiB", "to the first step, s", "all, s"]
PARTS = ["start", "data", "model", "warm-up", STEPS, "evaluation", "save", "other"]
HEAD += PARTS


def row(case: str, side: str, found: Record) -> list[str]:
    names = [case, side, found.get("commit", "")]
    if "error" in found:
        came = [f"; {name} {figure(seconds)}" for name, seconds in found.get("phases", {}).items()]
        came += [f", {found['steps']} steps"] if came else []
        return [*names, harness.failure(found) + "".join(came)]
    parts = seconds_of(found)
    cells = [f"{speed(found):,.0f}", figure(peak(found)), figure(found["first_step"])]
    walls, wall = [of["wall"] for of in (found, *found.get("others", ()))], figure(found["wall"])
    if len(walls) > 1:
        wall += f" ({figure(min(walls))} to {figure(max(walls))} in {len(walls)} rounds)"
    return [*names, *cells, wall, *(figure(parts[p]) for p in PARTS)]


def ours_beside(sides: Record, peer: str) -> Record:
    """Tigon's rounds at this peer's commit, as one side: they ran on the same host."""
    ours, commit = sides[OURS], sides[peer].get("commit")
    known = [of for of in (ours, *ours.get("others", ())) if of.get("commit") == commit]
    return middle(known) if known else ours


def best_peer(sides: Record) -> str:
    """The measured peer over which Tigon has the least tokens a second, if there is one."""

    def ratio(name: str) -> float:
        ours, theirs = speed(ours_beside(sides, name)), speed(sides[name])
        return ours / theirs if ours and theirs else math.inf

    known = [name for name, found in sides.items() if name != OURS and "error" not in found]
    return min(known, key=ratio, default="")


def unmeasured(cases: Record) -> Iterator[str]:
    """Cases and sides that have no figures, also those that failed and those that are not usual."""
    for case in CASES:
        sides = [s for s in SIDES if "error" in cases.get(case, {}).get(s, {"error": ""})]
        if sides:
            yield case if len(sides) == len(SIDES) else f"{case}: {' and '.join(sides)}"


def verdicts(name: str, sides: Record) -> list[str]:
    ours, best = sides.get(OURS, {"error": ""}), best_peer(sides)
    if "error" in ours:
        return [f"not measured: {name}: {OURS}"]
    pair = (ours_beside(sides, best), sides[best]) if best else (ours, {"error": ""})
    rates, peaks = [speed(found) for found in pair], [peak(found) for found in pair]
    ratio = rates[0] / rates[1] if rates[0] and rates[1] else None
    memory = peaks[0] / peaks[1] if peaks[0] and peaks[1] else None
    said = [
        harness.verdict(f"{name}: tokens/s over all, over that of {best or TRL}", ratio, SPEED),
        harness.verdict(
            f"{name}: peak memory over that of {best or TRL}", memory, MEMORY, most=True
        ),
    ]
    if (limit := CASES[name].limit) is not None:
        what = f"{name}: seconds from start to first step"
        said.append(harness.verdict(what, ours["first_step"], limit, most=True))
    losses = {n: of["eval_loss"] for n, of in sides.items() if "error" not in of}
    if losses[OURS] > (1 + APART) * min(losses.values()):
        said.append(f"WRONG: {name}: the loss on held-out chats is higher: {losses}")
    return said


def learned(sides: Record) -> str:
    """How many tokens each side has trained on and learned, of one case."""
    parts = [
        f"{name} {found['tokens'] / found['steps']:,.0f} tokens a step, of which "
        f"{found['learned'] / found['steps']:,.0f} are learned, to a held-out loss of "
        f"{found['eval_loss']:.4f}"
        for name, found in sides.items()
        if "error" not in found
    ]
    return "; ".join(parts)


def steps_alone(name: str, sides: Record) -> str:
    """How fast steps after the first are beside the best peer's: what a long run comes near to. The
    mean has those that are held up, too."""
    best = best_peer(sides) if OURS in sides else ""
    ours, theirs = (ours_beside(sides, best), sides[best]) if best else ({}, {})
    if not (ours.get("gaps") and theirs.get("gaps")):
        return ""

    def ratio(usual: Callable[[list[float]], float]) -> float:
        mine, other = (of["tokens"] / of["steps"] / usual(of["gaps"]) for of in (ours, theirs))
        return mine / other

    said = f"{name}: tokens/s of steps alone, over those of {best}: {ratio(median):.2f} by "
    said += f"the median, {ratio(fmean):.2f} by the mean of those after the first"
    held_up = [
        f"{count} of {len(of['gaps'])} of {who} take more than {UNEVEN} times the median, "
        f"{sum(of['gaps']) - len(of['gaps']) * median(of['gaps']):.1f} s in all"
        for who, of in ((OURS, ours), ("the peer", theirs))
        if (count := sum(gap > UNEVEN * median(of["gaps"]) for gap in of["gaps"])) > 2
    ]
    return "; ".join([said, *held_up]) + "."


def title_of(record: Record, cases: Record) -> str:
    """What all sides have in common; commits are those of the rows."""
    steps = sorted({found["asked"] for sides in cases.values() for found in sides.values()})
    known = (of.get("libraries", record["libraries"]) for s in cases.values() for of in s.values())
    differ = any(libraries != record["libraries"] for libraries in known)
    said = f"{heading(record)}, the last run; {' or '.join(map(str, steps))} steps."
    return said + " Libraries differ between rows: see the record." * differ


def show(record: Record) -> str:
    cases = {name: record["cases"][name] for name in CASES if name in record["cases"]}
    rows = [row(name, side, of) for name, sides in cases.items() for side, of in sides.items()]
    notes = [f"{name}: {learned(sides)}." for name, sides in cases.items() if learned(sides)]
    notes += [note for name, sides in cases.items() if (note := steps_alone(name, sides))]
    said = [line for name, sides in cases.items() for line in verdicts(name, sides)]
    if lacking := list(unmeasured(cases)):
        notes.append(f"Not measured: {'; '.join(lacking)}.")
    title = title_of(record, cases)
    return report(record, markdown(HEAD, rows), *notes, said, title=title)


def run(job: Job) -> None:
    options = job.options
    if unknown := [side for side in options.sides.split(";") if side not in SIDES]:
        raise SystemExit(f"no side {unknown[0]}; there are {'; '.join(SIDES)}")
    job.record["cases"] = job.resume().get("cases", {})
    root = options.root / ("tiny" if options.tiny else "files")
    root.mkdir(parents=True, exist_ok=True)
    measure(job, root.resolve())
    job.whole = not options.tiny and all(
        side in job.record["cases"].get(name, {}) for name in CASES for side in SIDES
    )


OPTIONS = (
    ("--sides", {"default": ";".join(SIDES), "help": "with semicolons; default: %(default)s"}),
    ("--steps", {"type": int, "default": 200, "help": "optimizer steps of a side"}),
    ("--limit", {"type": float, "help": "seconds that a side may take; default: by its steps"}),
    ("--root", {"type": Path, "default": Path(tempfile.gettempdir(), "end_to_end")}),
    ("--rounds", {"type": int, "default": 3, "help": "of a side; they take turns"}),
    ("--again", {"action": "store_true", "help": "measure what the record has"}),
)
BENCH = Bench(
    run,
    show,
    list(CASES),
    DOCUMENT,
    unasked=[name for name in CASES if name not in USUAL],
    options=OPTIONS,
    libraries=LIBRARIES,
    tiny=True,
)
