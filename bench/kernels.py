"""Every operator beside its peers, and beside what the hardware allows, in one run on one GPU.

docs/kernels.md says how to read the figures; --write-docs puts them there.

# N rows, C model dim, I intermediate size, V vocab, B batch, T tokens, H heads, K kv heads, D head
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import triton

from bench import kernels_report, operators
from bench.harness import Bench, Job, Record, installed, progress
from bench.measure import ONCE, Effort, Problem, host_time, measure
from bench.peers import PACKAGES
from bench.timing import MIB
from tigon.plan.cost import STREAMED

BF16 = 2
LOGITS_BYTES = 2**30  # what linear_cross_entropy may hold of logits, by its contract
COPY_BYTES = 2**33  # read and written by the copy that stands for the bandwidth
STREAMING = Effort(rounds=2, total=50.0, least=5, most=60)
GEMMS = Effort(rounds=2, total=60.0, least=3, most=10)
HOST, HOST_SHAPE = "host", (2048, 4096)


@dataclass(frozen=True)
class Case:
    operator: str
    shape: str
    sizes: tuple[int, ...]
    targets: dict[str, float]  # at most so many times the bound; "both" is forward + backward
    bytes: dict[str, int]  # that each mode has to move
    variant: str = ""
    against: Literal["floor", "three GEMMs", "dense"] = "floor"
    memory: Literal["Liger"] | float | None = None  # at most this many MiB, or what Liger takes
    modes: tuple[str, ...] = ("forward", "both")

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.operator, self.variant, self.shape) if part)


# At most so many times the bound, which is what STREAMED of tigon.plan.cost has to move:
# forward, and forward and backward
STREAMED_AIMS = {
    "rms_norm": (1.08, 1.15),
    "rms_norm_residual": (1.08, 1.10),
    "sandwich_norm": (1.08, 1.10),
    "gated_act": (1.03, 1.05),
    "sigmoid_gate": (1.03, 1.05),
    "rope": (1.10, 1.15),
    "qk_norm_rope": (1.10, 1.15),
}


def streamed(operator: str, *sizes: int, variant: str = "") -> Case:
    (forward, backward), (first, both) = STREAMED[operator], STREAMED_AIMS[operator]
    elements, extra = sizes[0] * sizes[-1], 0
    shape = "x".join(map(str, sizes))
    if "rope" in operator:
        b, t, h, k, d = sizes
        elements, shape = b * t * (h + k) * d, f"B{b} T{t} {h}/{k}x{d}"
        # v is a view on the way out, but dv has to get into the packed gradient on the way back
        extra = 2 * b * t * k * d if operator == "qk_norm_rope" else 0
    moved = {"forward": BF16 * forward * elements}
    moved["both"] = moved["forward"] + BF16 * (backward * elements + extra)
    memory: Any = None if "rope" in operator else "Liger"
    aims = {"forward": first, "both": both}
    return Case(operator, shape, sizes, aims, moved, variant, memory=memory)


def linear_attention(
    operator: str, shape: str, *sizes: int, elements: int, tensors: tuple[int, int] = (2, 3)
) -> Case:
    """What stands before and behind a gated delta rule: it moves so many tensors of `elements`
    forward, and backward. 1.4 times their floor are 70 % of the bandwidth."""
    moved = {"forward": BF16 * elements * tensors[0], "both": BF16 * elements * sum(tensors)}
    return Case(operator, shape, sizes, {"forward": 1.4, "both": 1.4}, moved)


def causal_conv_qkv(b: int, t: int, k: int, h: int, d: int) -> Case:
    elements = b * t * (2 * k + h) * d
    shape = f"B{b} T{t} {k}/{h}x{d}"
    return linear_attention("causal_conv_qkv", shape, b, t, k, h, d, elements=elements)


def cross_entropy(n: int, v: int) -> Case:
    moved = {"both": 2 * BF16 * n * v}  # every logit in once, every gradient out once
    memory = 1.01 * BF16 * n * v / MIB  # 1 % for what is kept per row
    return Case("cross_entropy", f"{n}x{v}", (n, v), {"both": 1.25}, moved, memory=memory)


def linear_cross_entropy(n: int, c: int, v: int, most: float) -> list[Case]:
    d_hidden, d_weight = BF16 * n * c, (BF16 + 4) * v * c  # the latter in fp32, and then rounded
    memory = (LOGITS_BYTES + d_hidden + d_weight) / MIB
    name = ("linear_cross_entropy", f"{n}, {c}, {v}", (n, c, v))
    return [
        Case(*name, {"both": most}, {}, "dense", "three GEMMs", memory),
        Case(*name, {"both": 0.40}, {}, "30 % valid", "dense", memory, ("both",)),
        Case(*name, {}, {}, "peaked", "three GEMMs", memory, ("both",)),
    ]


CASES: list[Case] = [
    *(streamed("rms_norm", n, c) for n, c in ((16384, 4096), (16384, 2048), (8192, 1152))),
    streamed("rms_norm", 131072, 128),
    streamed("rms_norm_residual", 16384, 4096),
    *(streamed("sandwich_norm", 16384, c) for c in (4096, 2560)),
    *(
        streamed("gated_act", 16384, i, variant=act)
        for act in ("silu", "gelu_tanh")
        for i in (14336, 11008, 18944, 6912)
    ),
    streamed("sigmoid_gate", 8192, 4096),
    streamed("rope", 2, 8192, 32, 8, 128),
    streamed("qk_norm_rope", 2, 8192, 32, 8, 128),
    causal_conv_qkv(1, 8192, 16, 32, 128),
    causal_conv_qkv(8, 1024, 16, 16, 128),
    linear_attention("causal_conv", "B4 T4096 2048", 4, 4096, 2048, 3, elements=2**25),
    linear_attention("gated_norm", "262144x128", 262144, 128, elements=2**25, tensors=(3, 5)),
    *(cross_entropy(n, v) for n, v in ((8192, 128256), (16384, 151936), (8192, 262144))),
    *linear_cross_entropy(8192, 4096, 128256, 1.05),
    *linear_cross_entropy(16384, 2048, 151936, 1.05),
    *linear_cross_entropy(8192, 1152, 262144, 1.10),
    *linear_cross_entropy(8192, 2560, 262144, 1.10),
    *linear_cross_entropy(8192, 1024, 151936, 1.10),
]
OPERATORS = (*dict.fromkeys(case.operator for case in CASES), HOST)


def build(case: Case, device: str, libraries: dict[str, str | None]) -> Problem:
    """The case's problem, with the providers that are installed."""
    torch.manual_seed(0)
    given = (*case.sizes, case.variant) if case.variant else case.sizes
    with torch.device(device):
        problem = getattr(operators, case.operator)(*given)
    lacking = {name for name, version in libraries.items() if version is None}
    problem.providers = [p for p in problem.providers if p.name.split()[0] not in lacking]
    return problem


def measured(
    case: Case, libraries: dict[str, str | None], quick: bool, device: str = "cuda"
) -> Record:
    """All figures of one case but its floor."""
    torch._dynamo.reset()  # more than 8 shapes of one function, and it would stop compiling
    effort = STREAMING if case.against == "floor" else GEMMS
    effort = ONCE if quick or case.variant == "peaked" else effort
    found = measure(case.name, build(case, device, libraries), effort, case.modes)
    parts = found.pop("references")
    if parts:
        found["gemms_ms"] = parts.pop("gemms_ms")
        found["gemm_parts_ms"] = parts
    return asdict(case) | found


def floors(case: Case, bandwidth: float, quick: bool) -> Record:
    """The time of the case's bytes at `bandwidth`, and of a copy that moves as many."""
    effort = ONCE if quick else STREAMING
    return {
        "floor_ms": {mode: 1e3 * moved / bandwidth for mode, moved in case.bytes.items()},
        "copy_ms": {mode: effort.copy(moved) for mode, moved in case.bytes.items()},
    }


def chosen(operator: str, quick: bool) -> list[Case]:
    cases = [case for case in CASES if case.operator == operator]
    first = {case.variant: case for case in reversed(cases)}  # the first shape of each variant
    return [case for case in cases if not quick or case is first[case.variant]]


def run(job: Job) -> None:
    libraries = {name: installed(package) for name, package in PACKAGES.items()}
    copy = STREAMING.bandwidth(COPY_BYTES)
    rate = copy["bytes_per_second"]
    job.record |= {"triton": triton.__version__, "cuda": torch.version.cuda, "peers": libraries}
    job.record |= {"copy": copy, "quick": job.quick, "cases": []}
    missing = [name for name, version in libraries.items() if version is None]
    progress(f"copy {rate / 1e12:.2f} TB/s; not installed: {missing or 'nothing'}")
    for operator in job.only:
        if operator == HOST:
            case = streamed("rms_norm", *HOST_SHAPE)
            providers = host_time(HOST, build(case, "cuda", libraries))
            job.add(host={"shape": case.shape, "providers": providers})
        for case in chosen(operator, job.quick):
            figures = measured(case, libraries, job.quick) | floors(case, rate, job.quick)
            job.add(cases=[*job.record["cases"], figures])
        job.add(kernels_report.console(job.record, operator))
    return ""


SHOWN = {"blocks": kernels_report.blocks, "draw": kernels_report.plot}
BENCH = Bench(run, kernels_report.summary, OPERATORS, **SHOWN)
