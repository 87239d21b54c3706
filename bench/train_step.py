"""Whole training steps beside transformers + Liger, each side in turn on one GPU.

A step is forward, backward and AdamW, with bf16 weights, gradients and states on both sides, the
same weights, drawn by their names, and the same tokens. No blocks are recomputed unless the case
says so; of LoRA's cases the peer has PEFT, and adapters alone have gradients; of QLoRA's it has its
projections in bitsandbytes' layers, with the same 4 bits. The peer has torch's fused AdamW and its
best settings, which short trials choose: its attention (flash-attn-4 where it works there), its
experts, wider chunks of Liger's head where its own are short, and torch.compile with CUDA graphs in
the cases where ours has CUDA graphs. The record keeps what they chose for later commits with the
same libraries; `--again` tries anew. In each round both sides are built, trained and freed in turn
in one process; a ratio is the median over the rounds.

Cases are added to one record as they come, in the order asked: what it has of a case, at this
commit, is not measured again. So a run that is cut off goes on with the same command, and parts can
be asked for by name.

    python -m bench train_step                          # all that is missing
    python -m bench train_step 1B Gemma3 --limit 500    # cases by parts of their names
    python -m bench train_step --write-docs             # needs no GPU
"""

import time

from bench import train_report
from bench.harness import ROOT, Bench, Job, Record, progress
from bench.processes import spawn
from bench.train_cases import CASES, GRAPHS, TINY_TOKENS, Case
from bench.train_peer import CHUNKS, case_head_chunks, options_of
from bench.train_side import Request

SIDE = ROOT / "bench/train_side.py"
LIBRARIES = {
    "transformers": "transformers",
    "Liger": "liger-kernel",
    "bitsandbytes": "bitsandbytes",
    "PEFT": "peft",
    "flash-attn-4": "flash-attn-4",
    "FLA": "fla-core",
    "causal-conv1d": "causal-conv1d",
    "torch": "torch",
    "triton": "triton",
}
TRIALS = ("tried", "options", "libraries")  # what a case has of them
COMPILED = ", compiled"  # how names of options with torch.compile end
LEAST_SECONDS = 20.0  # below which no process is started


def begun(name: str, case: Case, job: Job) -> Record:
    """What the record has of a case at this commit, of as many rounds as both sides have."""
    tokens = case.rows * (TINY_TOKENS if job.options.tiny else case.tokens)
    known = next((c for c in job.record["cases"] if c["name"] == name), None)
    commit = job.record["commit"]
    if known is None or job.options.again or known["commit"] != commit:
        trials = settled(known, case, job)
        return {"name": name, "commit": commit, "tokens": tokens, "profile": {}, **trials} | {
            "settings": case.settings,
            "date": job.record["date"],
            "libraries": job.record["libraries"],
            "rounds": {side: [] for side in case.sides},
        }
    rounds = {
        side: [row for row in rows if "error" not in row] for side, rows in known["rounds"].items()
    }
    whole = min(map(len, rounds.values()))
    return known | {"rounds": {side: rows[:whole] for side, rows in rounds.items()}}


def settled(known: Record | None, case: Case, job: Job) -> Record:
    """What another commit's trials have found of the peer, or ones cut off, with the same
    libraries; their choice counts if all that is tried now was among them."""
    found = {} if job.options.again or known is None else known.get("trials", known)
    now = job.record["libraries"]
    if not found or dict.fromkeys(now) | found["libraries"] != now:
        return {"tried": {}}
    names = [options.name for options in options_of(case, "cuda")]
    tried = {name: row for name, row in found["tried"].items() if plain(name) in names}
    whole = {*names[: len(names) // (1 + case.experts)]} <= tried.keys()
    if case_head_chunks(case):
        whole &= any(CHUNKS in name for name in tried)
    if GRAPHS[0] in case.settings:
        whole &= any(name.endswith(COMPILED) for name in tried)
    return {"tried": tried} | (
        {"options": found["options"]} if whole and "options" in found else {}
    )


def plain(name: str) -> str:
    """The name of settings without torch.compile and wider chunks."""
    return name.removesuffix(COMPILED).partition(f", {CHUNKS}")[0]


def missing(found: Record, case: Case, job: Job) -> Request | None:
    """What is left to measure of a case."""
    options = job.options
    rounds = max(0, options.rounds - min(map(len, found["rounds"].values())))
    profile = tuple(side for side in case.sides if side not in found["profile"])
    limit = "limit" not in found and not case.own and not case.rank
    if not (rounds or profile or limit):
        return None
    return Request(
        case=found["name"],
        rounds=rounds,
        liger=job.record["libraries"]["Liger"] is not None,
        options=found.get("options"),
        tried=found["tried"],
        profile=profile,
        limit=limit,
        seconds=0.01 if options.tiny else options.seconds,
        tiny=options.tiny,
    )


def add(found: Record, line: Record) -> None:
    """A line of a process to what is known of its case."""
    kind = line.pop("kind")
    if kind == "round":
        found["rounds"][line.pop("side")].append(line)
    elif kind == "tried":
        found["tried"][line.pop("name")] = line
    elif kind == "profile":
        found["profile"][line["side"]] = line["milliseconds"]
    elif kind == "ended":
        found["ended"] = line["error"]
    else:
        found[kind] = line


def measure(job: Job) -> None:
    """Fill the record, saved whenever a line has come, until time is up."""
    until = time.monotonic() + job.options.limit
    for name in job.only:
        case = CASES[name]
        found = begun(name, case, job)
        request = missing(found, case, job)
        if request is None:
            progress(f"{name}: is measured")
            continue
        left = until - time.monotonic()
        if left < LEAST_SECONDS and not job.options.tiny:
            progress(f"{name}: no time is left for it")
            continue
        found.pop("ended", None)
        for line in spawn(request, min(left, job.options.each), SIDE):
            add(found, line)
            job.add(cases=updated(job.record["cases"], found))
        print(train_report.case_lines(found), flush=True)


def updated(cases: list[Record], found: Record) -> list[Record]:
    """The cases with this one; until it has a round of both sides, an older one stays, with what
    trials have found."""
    known = next((case for case in cases if case["name"] == found["name"]), None)
    if known is not None and not all(found["rounds"].values()):
        found = known | {"trials": {key: found[key] for key in TRIALS if key in found}}
    others = [case for case in cases if case["name"] != found["name"]]
    return sorted([*others, found], key=lambda case: list(CASES).index(case["name"]))


def run(job: Job) -> None:
    known = job.resume()
    job.record["cases"] = known.get("cases", [])
    began = time.monotonic()
    measure(job)
    seconds = time.monotonic() - began
    job.record["device_seconds"] = known.get("device_seconds", 0.0) + seconds
    there = {case["name"] for case in job.record["cases"] if "ended" not in case}
    job.whole = not job.tiny and set(CASES) <= there


OPTIONS = (
    ("cases", {"nargs": "*", "help": "as --only"}),
    ("--rounds", {"type": int, "default": 3}),
    ("--seconds", {"type": float, "default": 4.0, "help": "timed steps of a side in a round"}),
    ("--limit", {"type": float, "default": 560.0, "help": "seconds that this call may take"}),
    ("--each", {"type": float, "default": 150.0, "help": "seconds that a case of it may take"}),
    ("--again", {"action": "store_true", "help": "measure cases that the record has"}),
)
BENCH = Bench(
    *(run, train_report.show, tuple(CASES)),
    blocks=train_report.blocks,
    draw=train_report.plot,
    options=OPTIONS,
    libraries=LIBRARIES,
    needed=("Liger",),
    tiny=True,
)
