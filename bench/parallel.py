"""Training steps of one model divided over two GPUs in each way, beside one GPU and transformers.

bf16 weights, gradients and states; the same weights and rows on every side. The peers are
transformers + Liger: under FSDP2, with and without giving up gathered weights after forward; under
torch's parallelize_module, with transformers' plan of Llama for attention and MLPs, where all else
every rank computes whole, the head too, whose loss Liger fuses; and with torch's context_parallel,
a ring of SDPA, as accelerate does. Rates are tokens per second and GPU. Mixtures of experts
(Qwen3-30B-A3B's shape with 8 layers) are put beside transformers + Liger with its grouped GEMMs,
under FSDP2 and with its own expert parallelism, which can train since 5.22 and is left out before.

    python -m bench parallel                 # about 500 s; starts the processes itself
    python -m bench parallel --rounds 1 tensor
"""

from collections import Counter
from importlib.util import find_spec
from statistics import median

from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, report, verdict
from bench.layouts import (
    CASES,
    EXPERTS,
    LIMIT,
    TOKENS,
    Side,
    commits,
    differences,
    measure,
    measured,
    peak,
)
from bench.layouts_side import CONTEXT_PEER, EXPERT_PEER, TENSOR_PEER
from bench.train_cases import PEER
from bench.train_step import LIBRARIES
from tigon.plan import Layout

GPUS = 2
MODULE = "transformers.distributed.expert_parallel"
SHARDED, CONTEXT = Layout(fsdp=GPUS), Layout(context=GPUS)
RESHARD, KEEP = f"{PEER}, FSDP2", f"{PEER}, FSDP2 without resharding"
TORCH, CONTEXT_TORCH = f"{PEER}, parallelize_module", f"{PEER}, context_parallel"
EXPERT_FSDP, EXPERT_TORCH = f"{PEER}, experts, FSDP2", f"{PEER}, experts, ep_size"
ONE, GRADIENTS = "tigon, one GPU", "tigon, sharding=gradients"
OVER_ONE = 0.97  # tokens per second and GPU over those of one GPU
SIDES = {
    ONE: Side(),
    RESHARD: Side(SHARDED, "peer-reshard"),
    KEEP: Side(SHARDED, "peer-keep"),
    "tigon, FSDP2": Side(SHARDED, beside=KEEP),
    GRADIENTS: Side(Layout(fsdp=GPUS, sharding="gradients"), beside=KEEP, aim=1.09),
    TORCH: Side(Layout(tensor=GPUS), TENSOR_PEER),
    "tigon, tensor": Side(Layout(tensor=GPUS), beside=TORCH, aim=1.1),
    CONTEXT_TORCH: Side(CONTEXT, CONTEXT_PEER),
    "tigon, context": Side(CONTEXT, beside=CONTEXT_TORCH, aim=1.1),
    "tigon, one GPU, a row of 16,384": Side(tokens=2 * TOKENS),
    "tigon, context, a row of 16,384": Side(CONTEXT, tokens=2 * TOKENS),
    EXPERT_FSDP: Side(SHARDED, "peer-keep", EXPERTS),
    EXPERT_TORCH: Side(SHARDED, EXPERT_PEER, EXPERTS),
    "tigon, experts, FSDP2": Side(SHARDED, model=EXPERTS, beside=EXPERT_FSDP),
    # The faster one of the peer's two where both were measured
    "tigon, experts, expert": Side(
        Layout(fsdp=GPUS, expert=GPUS), model=EXPERTS, beside=EXPERT_FSDP, aim=1.1
    ),
}


def offered() -> list[str]:
    """The sides that this transformers has."""
    return [name for name in SIDES if name != EXPERT_TORCH or has_expert_parallelism()]


def has_expert_parallelism() -> bool:
    """Whether transformers is there, and new enough."""
    try:
        return find_spec(MODULE) is not None
    except ImportError:  # of the package, which is not there, or lacks another
        return False


def rates(record: Record, name: str) -> dict[tuple[str, int], float]:
    """Tokens per second and GPU, by run and round."""
    found, of_run = {}, Counter[str]()
    for row in record["sides"].get(name, ()):
        key = row["run"], of_run[row["run"]]
        of_run[row["run"]] += 1
        if "ms" in row:
            found[key] = 1e3 * SIDES[name].rate / row["ms"]
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
    said.append(verdict(f"{GRADIENTS} over {ONE}", ratio(record, GRADIENTS, ONE), OVER_ONE))
    return said + differences(record, SIDES)


def show(record: Record) -> str:
    rows = []
    for name, side in SIDES.items():
        each = record["sides"].get(name, [])
        speeds = rates(record, name).values()
        if not speeds:
            rows += [[name, harness.failure(each[0])]] if each else []
            continue
        beside = ratio(record, name, side.beside) if side.beside else None
        cells = [f"{median(speeds):,.0f}", figure(peak(each)), figure(beside)]
        peer = "" if beside is None else side.beside
        rows.append([name, *cells, peer, commits(measured(record, name))])
    head = ("run", "tok/s per GPU", "peak GiB", "times the peer, in one run", "peer", "commit")
    title = f"{heading(record)}, the last run."
    return report(record, markdown(head, rows), verdicts(record), title=title)


def run(job: Job) -> None:
    # Sides that this run leaves out stay as they were
    old = {} if job.tiny else job.resume().get("sides", {})
    job.record["sides"] = {name: rows for name, rows in old.items() if name not in job.only}
    measure(job, SIDES)
    job.whole = set(offered()) <= set(job.record["sides"]) and not job.tiny


BENCH = Bench(
    run,
    show,
    offered(),
    "docs/parallel.md",
    options=(CASES, ("--rounds", {"type": int, "default": 3}), LIMIT),
    libraries=LIBRARIES,
    needed=("Liger",),
    tiny=True,
    gpus=GPUS,
    each_machine=True,
)
