"""Mixtures of experts beside transformers and Liger, and beside dense products, in one run.

Measures `grouped_mlp` with a given random routing at two shapes, forward and backward, against the
experts of transformers and of Liger; what the products would take if they were dense, as one
large matrix product each; and every launch of a layer (`bench/moe_parts.py`). --write-docs puts the
figures into docs/kernels.md; bench/train_step.py measures steps.

Liger tunes its kernels over far more than a hundred configurations, which takes minutes for each
shape: here only over those that `likely` names, in any number of stages, and at the first shape.

# N tokens, C model dim, I intermediate size, E experts, K experts per token
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import harness, measure
from bench.harness import Bench, Job, Record, failure, markdown, report
from bench.measure import ONCE, Effort, Problem, Provider
from bench.moe_parts import measure_parts, parts_table
from bench.peers import PACKAGES, call, imported
from tigon.kernels import grouped_mlp_ref

# N, C, I, E, K; and transformers' experts
SHAPES = {"Qwen3-30B-A3B": (8192, 2048, 768, 128, 8), "Mixtral-8x7B": (8192, 4096, 14336, 8, 2)}
EXPERTS = {
    "Qwen3-30B-A3B": "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts",
    "Mixtral-8x7B": "transformers.models.mixtral.modeling_mixtral:MixtralExperts",
}
PARTS = "parts"
LAYER = Effort(rounds=3, total=60.0, least=3, most=20)
PATIENCE = 600.0  # seconds; Liger tunes

Args = tuple[Tensor, ...]  # x, gate_up, down, chosen, weights


def experts(path: str, implementation: str | None, sizes: Any, args: Args) -> measure.Run:
    """Another library's experts over the same parameters."""
    c, i, e, k = sizes
    config = imported("transformers:Qwen3MoeConfig")(
        hidden_size=c, moe_intermediate_size=i, num_experts=e, num_experts_per_tok=k
    )
    config.num_local_experts, config.intermediate_size = e, i
    if implementation is not None:
        config._experts_implementation = implementation
    with torch.device("meta"):
        module = imported(path)(config)
    x, gate_up, down, chosen, weights = args
    own = {"gate_up_proj": gate_up, "down_proj": down}
    return lambda: torch.func.functional_call(module, own, (x, chosen, weights))


def likely(num_warps: int, **block: int) -> bool:
    """Of Liger's configurations, those that we let it try."""
    if "BLOCK_H" in block:  # adds up rows
        return block["BLOCK_H"] >= 256 and block["BLOCK_K"] == 8
    step = 32 if "BLOCK_M" in block else 64
    return block["BLOCK_N"] == 128 and block["BLOCK_K"] == step and num_warps == 8


def tune_briefly() -> None:
    """Leave Liger's kernels only the configurations that are likely to be the fastest."""
    kernels = importlib.import_module("liger_kernel.ops.fused_moe_kernels")
    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):
            kernel.configs = [c for c in kernel.configs if likely(c.num_warps, **c.kwargs)]


def liger(sizes: Any, args: Args) -> measure.Run:
    tune_briefly()
    return experts("liger_kernel.transformers.swiglu:LigerExperts", None, sizes, args)


def dense(s: int, c: int, i: int) -> dict[str, measure.Run]:
    """The products of all slots with one matrix: forward, and forward and backward together."""
    x, h, y = (torch.randn(s, d, dtype=torch.bfloat16) for d in (c, i, 2 * i))
    up, down = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((2 * i, c), (c, i)))

    def forward() -> None:
        x @ up.T
        h @ down.T

    def both() -> None:
        forward()
        y @ up
        x @ down
        y.T @ x
        x.T @ h

    return {"forward_ms": forward, "both_ms": both}


def definition(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return grouped_mlp_ref(x, gate_up, down, chosen, weights, "silu")


def problem(n: int, c: int, i: int, e: int, k: int, path: str, with_liger: bool) -> Problem:
    bf16 = {"dtype": torch.bfloat16}
    x = torch.randn(n, c, **bf16).requires_grad_()
    gate_up = (torch.randn(e, 2 * i, c, **bf16) * 0.02).requires_grad_()
    down = (torch.randn(e, c, i, **bf16) * 0.02).requires_grad_()
    weights, chosen = torch.randn(n, e).softmax(-1).topk(k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16).requires_grad_()
    leaves = {"x": x, "gate_up": gate_up, "down": down, "weights": weights}
    upstream = torch.randn(n, c, **bf16)
    args, sizes = (x, gate_up, down, chosen, weights), (c, i, e, k)
    providers = [Provider("tigon", call("tigon.kernels:grouped_mlp", *args, "silu"))]
    for kind in ("grouped_mm", "eager"):
        make = partial(experts, path, kind, sizes, args)
        providers.append(Provider(f"transformers {kind}", make))
    if with_liger:
        providers.append(Provider("Liger", partial(liger, sizes, args)))
    rows, shared = (
        {"x": x, "weights": weights, "chosen": chosen},
        {"gate_up": gate_up, "down": down},
    )
    given = definition, rows, shared, ("y",), (upstream,)
    exact = partial(measure.truth, *given, step=n, dtype=torch.float32)  # without TF32
    products = dense(n * k, c, i)
    return Problem(leaves, ("y",), (upstream,), exact, providers, products, patience=PATIENCE)


def layer(name: str, quick: bool, device: str = "cuda") -> Record:
    n, c, i, _, k = SHAPES[name]
    torch.manual_seed(0)
    with torch.device(device):
        what = problem(*SHAPES[name], EXPERTS[name], name == next(iter(SHAPES)))
    found = measure.measure(name, what, ONCE if quick else LAYER)
    providers = {row.pop("name"): row for row in found["providers"]}
    providers["dense"] = found["references"]
    flops = 6 * n * k * c * i
    for row in providers.values():
        if "error" not in row:
            row["forward_tflops"] = flops / row["forward_ms"][1] / 1e9
            row["backward_tflops"] = 2 * flops / backward_ms(row) / 1e9
    return {"shape": SHAPES[name], "flops_forward": flops, "providers": providers}


def backward_ms(row: Record) -> float:
    return row["both_ms"][1] - row["forward_ms"][1]


def layer_table(layers: Record) -> str:
    head = "experts of", "provider", "forward, ms", "TFLOP/s", "/ dense GEMMs"
    head += "backward, ms", "TFLOP/s", "/ dense GEMMs", "largest error", "extra MiB"
    rows = []
    for name, case in layers.items():
        dense = case["providers"]["dense"]
        for provider, row in case["providers"].items():
            rows.append(cells := [name, "dense GEMMs" if provider == "dense" else provider])
            if "error" in row:
                cells.append(failure(row))
                continue
            for mode, ms in ("forward", row["forward_ms"][1]), ("backward", backward_ms(row)):
                rate = row[f"{mode}_tflops"]
                cells += [f"{ms:.3g}", f"{rate:.0f}", f"{rate / dense[f'{mode}_tflops']:.2f}"]
            if "errors" in row:
                error = harness.worst(row["errors"].values())
                cells.append(error if isinstance(error, str) else f"{error:.1e}")
                cells.append(f"{row['peak_mib']:.0f}")
    return markdown(head, rows)


def show(record: Record) -> str:
    """The record as Markdown."""
    tables = {"layers": layer_table, PARTS: parts_table}
    return report(
        record, *(make(record[part]) for part, make in tables.items() if record.get(part))
    )


def run(job: Job) -> None:
    job.record["layers"] = {}
    for name in SHAPES:
        if name in job.only:
            job.add(layers={**job.record["layers"], name: layer(name, job.quick)})
    if PARTS in job.only:
        job.add(parts=measure_parts(next(iter(SHAPES.values())), job.quick))


BENCH = Bench(
    run,
    show,
    (*SHAPES, PARTS),
    "docs/kernels.md",
    libraries=PACKAGES | {"transformers": "transformers"},
)
