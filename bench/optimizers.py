"""The optimizer's step beside torch's, on Llama-3.2-1B's shape on one GPU.

Weights are float32, or bfloat16 where a name says so: those are rounded stochastically by ours, and
to nearest by torch, whose states are bfloat16 too. "definition": without the kernel of AdamW.

Ours is what a run has: parameters that FSDP2 shards, here over one rank. torch's has plain ones,
for Muon with q, k, v, gate and up apart, so that both orthogonalise the same matrices, and with
fused AdamW for what Muon leaves. The two take turns, in several rounds; a time is the median over
the steps of all rounds, from an idle device to an idle device. States are what stays allocated
after the first step.
"""

from collections.abc import Callable
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tigon
from bench import timing
from bench.compare_side import LLAMA_1B
from bench.harness import Bench, Job, Record, figure, markdown, progress, report, verdict
from tests.support.small import LLAMA
from tigon.kernels import use
from tigon.train import load, start
from tigon.train.distributed import shard
from tigon.train.optim import OPTIMIZERS, build_optimizer, hidden_matrices

MOST = {"adamw": 1.05, "adamw_bf16 of bfloat16": 0.75, "sgd": 1.05, "muon": 1.0}  # of torch's time
OF_BFLOAT16, DEFINITION = " of bfloat16", " definition"
CASES = [
    *OPTIMIZERS,
    *(f"{name}{OF_BFLOAT16}" for name in ("adamw", "adamw_bf16", "adamw_8bit")),
    f"adamw_bf16{OF_BFLOAT16}{DEFINITION}",
]
SETTINGS = {"sgd": ["momentum=0.9"]}
Parameters = dict[str, nn.Parameter]


def adamw(parameters: Parameters, hidden: set[str]) -> list[Optimizer]:
    return [torch.optim.AdamW(parameters.values(), 1e-4, (0.9, 0.95), fused=True)]


def sgd(parameters: Parameters, hidden: set[str]) -> list[Optimizer]:
    return [torch.optim.SGD(parameters.values(), 1e-4, 0.9)]


def muon(parameters: Parameters, hidden: set[str]) -> list[Optimizer]:
    rest = {name: p for name, p in parameters.items() if name not in hidden}
    matrices = [parameters[name] for name in hidden]
    whole = torch.optim.Muon(matrices, 1e-4, 0.0, adjust_lr_fn="match_rms_adamw")
    return [whole, *adamw(rest, set())]


TORCH: dict[str, Callable[[Parameters, set[str]], list[Optimizer]]] = {
    "adamw": adamw,
    f"adamw_bf16{OF_BFLOAT16}": adamw,
    "sgd": sgd,
    "muon": muon,
}


def build(name: str, tiny: bool) -> tigon.Llama:
    device, dtype = "cpu" if tiny else "cuda", torch.float32
    if OF_BFLOAT16 in name:
        dtype = torch.bfloat16
    return tigon.Llama.from_config(LLAMA if tiny else LLAMA_1B, dtype=dtype, device=device)


def ours(name: str, job: Job) -> Record:
    tiny = job.options.tiny
    settings = ["run_dir=a", "model=m", "data=d", f"optimizer={name.split()[0]}", "lr=1e-4"]
    if OF_BFLOAT16 in name:
        settings.append("param_dtype=bfloat16")
    path: Literal["reference", "auto"] = "reference" if DEFINITION in name else "auto"
    with start("cpu" if tiny else "cuda") as world, use(path):
        model = build(name, tiny)
        shard(model, world, torch.float32 if tiny else torch.bfloat16)
        optimizer = build_optimizer(model, load(None, [*settings, *SETTINGS.get(name, [])]))
        return timed(list(model.parameters()), [optimizer], job)


def theirs(name: str, job: Job) -> Record:
    model = build(name, job.options.tiny)
    matrices, parts = hidden_matrices(model), model.layout()
    apart: Parameters = {}
    for parameter, p in model.named_parameters():
        rows = [part.shape[0] for part in parts[parameter]]
        for part, own in zip(parts[parameter], p.detach().split(rows), strict=True):
            apart[part.name] = nn.Parameter(own.clone())
    hidden = {part.name for parameter in matrices for part in parts[parameter]}
    del model, p, own
    return timed(list(apart.values()), TORCH[name](apart, hidden), job)


def timed(parameters: list[Tensor], optimizers: list[Optimizer], job: Job) -> Record:
    """Milliseconds of each step, and GiB of states."""
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    times, before = [], timing.allocated()
    for _ in range(3 + job.options.steps):
        began = timing.now()
        for optimizer in optimizers:
            optimizer.step()
        times.append(1e3 * (timing.now() - began))
        if len(times) == 1:
            states = (timing.allocated() - before) / 2**30
    return {"ms": times[3:], "states_gib": states}


def measured(name: str, job: Job) -> Record:
    found: Record = {"name": name, "ours": [], "torch": []}
    for n in range(job.options.rounds):
        progress(f"{name}, round {n + 1}")
        found["ours"].append(ours(name, job))
        if not job.options.tiny:
            torch.cuda.empty_cache()
        if name in TORCH:
            found["torch"].append(theirs(name, job))
        if not job.options.tiny:
            torch.cuda.empty_cache()
    return found


def step_ms(rounds: list[Record]) -> float | None:
    return median(ms for found in rounds for ms in found["ms"]) if rounds else None


def ratio(case: Record) -> float | None:
    a, b = step_ms(case["ours"]), step_ms(case["torch"])
    return None if a is None or b is None else a / b


def show(record: Record) -> str:
    rows = [
        [
            case["name"],
            figure(step_ms(case["ours"])),
            figure(step_ms(case["torch"])),
            figure(ratio(case)),
            *(figure(case[s][0]["states_gib"] if case[s] else None) for s in ("ours", "torch")),
        ]
        for case in record["cases"]
    ]
    head = ["optimizer", "tigon, ms", "torch, ms", "tigon / torch"]
    head += ["states of tigon, GiB", "of torch, GiB"]
    ends = [
        verdict(f"{case['name']}: time over torch's", ratio(case), MOST[case["name"]], most=True)
        for case in record["cases"]
        if case["name"] in MOST
    ]
    return report(record, markdown(head, rows), ends)


def run(job: Job) -> None:
    for name in job.only:
        job.append("cases", measured(name, job))


OPTIONS = (
    ("--rounds", {"type": int, "default": 3}),
    ("--steps", {"type": int, "default": 20, "help": "steps that are timed in a round"}),
)
BENCH = Bench(run, show, CASES, "docs/optimizers.md", options=OPTIONS, tiny=True)
