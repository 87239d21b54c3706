"""Training steps of one model divided over two GPUs in each way, beside one GPU and transformers.

bf16 weights, gradients and states; the same weights and rows on every side. The peer of tensor
parallelism is transformers + Liger under torch's parallelize_module, with transformers' plan of
Llama for attention and MLPs; all else every rank computes whole, the head too, whose loss Liger
fuses. The peer of context parallelism has torch's context_parallel, a ring of SDPA, as accelerate
does. Rates are
tokens per second and GPU. Mixtures of experts (Qwen3-30B-A3B's shape with 8 layers) are put
beside transformers + Liger with its grouped GEMMs, under FSDP2 and with its own expert
parallelism, which can train since 5.22 and is left out before.

    python -m bench parallel                 # about 400 s; starts the processes itself
    python -m bench parallel --rounds 1 tensor
"""

import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress, report, verdict
from bench.train_cases import LLAMA_8B, MODELS, PEER
from bench.train_multi import Side as Ranks
from bench.train_multi import run_first, settings, write_inputs
from bench.train_multi_side import CONTEXT_PEER, EXPERT_PEER, FIRST, TENSOR_PEER, TIGON
from bench.train_step import LIBRARIES
from tests.support.small import EXPERTS as SMALL_EXPERTS
from tests.support.small import LLAMA
from tigon.train.config import Parallel

GPUS, TOKENS = 2, 8192
EXPERTS = MODELS["Qwen3-30B-A3B"][2]
MODULE = "transformers.distributed.expert_parallel"


@dataclass(frozen=True)
class Side:
    kind: str  # as bench/train_multi_side.py calls it
    rows: int  # of a step
    tokens: int = TOKENS  # of a row
    gpus: int = GPUS
    parallel: str = ""  # the dimension that has both GPUs
    experts: bool = False
    beside: str = ""  # the side whose rate is compared
    aim: float | None = None


ONE, LONG = "tigon, one GPU", "tigon, one GPU, a row of 16,384"
LONG_CONTEXT = "tigon, context, a row of 16,384"
TORCH = f"{PEER}, parallelize_module"
CONTEXT, CONTEXT_TORCH = "tigon, context", f"{PEER}, context_parallel"
FSDP, FSDP_TORCH = "tigon, experts, FSDP2", f"{PEER}, experts, FSDP2"
EXPERT, EXPERT_TORCH = "tigon, experts, expert", f"{PEER}, experts, ep_size"
SIDES = {
    ONE: Side("tigon", 1, gpus=1),
    TORCH: Side(TENSOR_PEER, 1, parallel="tensor"),
    "tigon, tensor": Side("tigon", 1, parallel="tensor", beside=TORCH, aim=1.1),
    CONTEXT_TORCH: Side(CONTEXT_PEER, 1, parallel="context"),
    CONTEXT: Side("tigon", 1, parallel="context", beside=CONTEXT_TORCH, aim=1.1),
    LONG: Side("tigon", 1, 2 * TOKENS, gpus=1),
    LONG_CONTEXT: Side("tigon", 1, 2 * TOKENS, parallel="context"),
    FSDP_TORCH: Side("peer-keep", GPUS, experts=True),
    EXPERT_TORCH: Side(EXPERT_PEER, GPUS, experts=True),
    FSDP: Side("tigon", GPUS, experts=True, beside=FSDP_TORCH),
    # The faster one of the peer's two where both were measured
    EXPERT: Side("tigon", GPUS, parallel="expert", experts=True, beside=FSDP_TORCH, aim=1.1),
}


def offered() -> dict[str, Side]:
    """Those whose dimension this Tigon has, or this transformers."""
    known = ("", *Parallel.__dataclass_fields__)
    found = {name: side for name, side in SIDES.items() if side.parallel in known}
    if not has_expert_parallelism():
        del found[EXPERT_TORCH]
    return found


def has_expert_parallelism() -> bool:
    """Whether transformers is there, and new enough."""
    try:
        return find_spec(MODULE) is not None
    except ImportError:  # of the package, which is not there, or lacks another
        return False


def arguments(root: Path, side: Side, tiny: bool) -> list[str]:
    tokens = 32 * side.tokens // TOKENS if tiny else side.tokens
    more = [f"batch_size={side.rows}", f"seq_len={tokens}"]
    more += [f"parallel.{side.parallel}={side.gpus}"] if side.parallel else []
    return settings(root, Ranks(side.kind, side.gpus, tuple(more)), tiny)


def prepare(root: Path, side: Side, tiny: bool) -> None:
    small = SMALL_EXPERTS | {"num_experts": 4, "tie_word_embeddings": False}
    experts = small if tiny else EXPERTS
    shape = experts if side.experts else (LLAMA if tiny else LLAMA_8B)
    (root / "config.json").write_text(json.dumps(shape))


def attentions(side: Side, tiny: bool) -> list[str]:
    """The peer's, the fastest first; Tigon chooses its own, and torch's ring is one of SDPA."""
    alone = tiny or side.kind in (TIGON, CONTEXT_PEER)
    return ["sdpa"] if alone else ["flash_attention_4", "sdpa"]


def measure(job: Job) -> None:
    tiny = job.options.tiny
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_inputs(root, tiny)
        for number in range(job.options.rounds):
            for name in job.only:
                side, rows = SIDES[name], job.record["sides"].setdefault(name, [])
                progress(f"round {number + 1} of {job.options.rounds}: {name}")
                began = time.monotonic()
                prepare(root, side, tiny)
                ways, given = attentions(side, tiny), arguments(root, side, tiny)
                found = run_first(root, name, side, given, ways, job.options.limit)
                when = {"run": job.record["date"], "commit": job.record["commit"]}
                rows.append(found | when | {"seconds": time.monotonic() - began})
                job.add()


def rates(record: Record, name: str) -> dict[tuple[str, int], float]:
    """Tokens per second and GPU, by run and round."""
    side, found, of_run = SIDES[name], {}, Counter[str]()
    for row in record["sides"].get(name, ()):
        key = row["run"], of_run[row["run"]]
        of_run[row["run"]] += 1
        if "ms" in row:
            found[key] = 1e3 * side.rows * side.tokens / side.gpus / row["ms"]
    return found


def ratio(record: Record, name: str, other: str) -> float | None:
    """Of rates in the same run; None: the two were never in one."""
    own, of_other = rates(record, name), rates(record, other)
    both = [own[key] / of_other[key] for key in own if key in of_other]
    return median(both) if both else None


def missing(record: Record) -> list[str]:
    """The sides of the ratios that are not known yet."""
    open_ones = {
        n for n, side in SIDES.items() if side.beside and ratio(record, n, side.beside) is None
    }
    wanted = open_ones | {SIDES[name].beside for name in open_ones}
    return [name for name in offered() if name in wanted]


def verdicts(record: Record) -> list[str]:
    said = []
    for name, side in SIDES.items():
        if side.aim is not None:
            value = ratio(record, name, side.beside)
            said.append(verdict(f"{name} over {side.beside}", value, side.aim))
    return said + [f"WRONG: {fault}" for fault in differences(record)]


# Sides with the same weights and rows
ALIKE: tuple[set[str], ...] = (
    {ONE, TORCH, "tigon, tensor", CONTEXT, CONTEXT_TORCH},
    {LONG, LONG_CONTEXT},
    {FSDP, FSDP_TORCH, EXPERT, EXPERT_TORCH},
)
# Of first losses; and of later ones, among Tigon's sides and among the peer's, whose updates are
# rounded in different ways
FIRST_APART, LATER_APART = 3e-4, 5e-3


def differences(record: Record) -> list[str]:
    """Sides of one run whose losses are further apart than roundings make them."""
    found = []
    for alike in ALIKE:
        losses: dict[str, dict[str, list[float]]] = {}  # by run, as others may draw other weights
        for name in sorted(alike):
            for row in record["sides"].get(name, ()):
                if "ms" in row:
                    losses.setdefault(row["run"], {})[name] = row["losses"]
        for sides in losses.values():
            groups = [(FIRST_APART, 0, sides)]
            for kind in (PEER, TIGON):
                own = {name: values for name, values in sides.items() if name.startswith(kind)}
                groups += [(LATER_APART, step, own) for step in range(1, FIRST)]
            for most, step, some in groups:
                values = {name: of[step] for name, of in some.items() if step < len(of)}
                first = next(iter(values.values()), 0.0)
                if not all(abs(loss - first) <= most * first for loss in values.values()):
                    found.append(f"losses of step {step + 1} differ: {values}")
    return found


def show(record: Record) -> str:
    rows = []
    for name, side in SIDES.items():
        each = record["sides"].get(name, [])
        speeds = rates(record, name).values()
        if not speeds:
            rows += [[name, harness.failure(each[0])]] if each else []
            continue
        sizes = [row["allocated_gib"] for row in each if "allocated_gib" in row]
        beside = ratio(record, name, side.beside) if side.beside else None
        cells = [f"{median(speeds):,.0f}", figure(max(sizes, default=None)), figure(beside)]
        commits = ", ".join(dict.fromkeys(row["commit"] for row in each if "ms" in row))
        rows.append([name, *cells, "" if beside is None else side.beside, commits])
    head = ("run", "tok/s per GPU", "peak GiB", "times the peer, in one run", "peer", "commit")
    title = f"{heading(record)}, the last run."
    return report(record, markdown(head, rows), verdicts(record), title=title)


def run(job: Job) -> None:
    # Sides that this run leaves out stay as they were
    old = {} if job.tiny else job.resume().get("sides", {})
    job.record["sides"] = {name: rows for name, rows in old.items() if name not in job.only}
    measure(job)
    job.whole = set(offered()) <= set(job.record["sides"]) and not job.tiny


OPTIONS = (
    ("cases", {"nargs": "*", "help": "as --only"}),
    ("--rounds", {"type": int, "default": 3}),
    ("--limit", {"type": float, "default": 120.0, "help": "seconds that a side may take"}),
)
DOCUMENT = "docs/parallel.md"
BENCH = Bench(
    run,
    show,
    tuple(offered()),
    DOCUMENT,
    options=OPTIONS,
    libraries=LIBRARIES,
    needed=("Liger",),
    tiny=True,
    gpus=GPUS,
    each_machine=True,
)
