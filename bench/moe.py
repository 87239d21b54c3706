"""Mixtures of experts beside transformers and Liger, and beside dense products, in one run.

python bench/moe.py [--commit DESCRIBED]
python bench/moe.py --write-docs        # needs no GPU: the newest figures into docs/kernels.md

Measures `grouped_mlp` with a given random routing at two shapes, forward and backward, against the
experts of transformers and of Liger; what the products would take if they were dense, as one
large matrix product each; and a training step of a stack of 4 layers of the shape of
Qwen3-30B-A3B. Prints a table and writes bench/results/moe-<gpu>.json.

Liger tunes its kernels over far more than a hundred configurations, which takes minutes for each
shape: here only over those that `likely` names, in any number of stages, and at the first shape.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from bench._common import RESULTS, ROOT, save, stamp
from bench.measure import progress
from bench.peers import imported, versions
from bench.report import insert, markdown
from bench.timing import milliseconds, peak_mib, quantiles, relative_l2

# tokens, model dim, intermediate size, experts, experts per token; and transformers' experts
SHAPES = {"Qwen3-30B-A3B": (8192, 2048, 768, 128, 8), "Mixtral-8x7B": (8192, 4096, 14336, 8, 2)}
EXPERTS = {
    "Qwen3-30B-A3B": "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts",
    "Mixtral-8x7B": "transformers.models.mixtral.modeling_mixtral:MixtralExperts",
}
STACK = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
STACK_TOKENS = (2, 4096)
ROUNDS = 3

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def ours(*_: int) -> Forward:
    from tigon.kernels import grouped_mlp

    return partial(_ours, grouped_mlp)


def _ours(operator: Any, x: Tensor, gate_up: Tensor, down: Tensor, e: Tensor, w: Tensor) -> Tensor:
    return operator(x, gate_up, down, e, w, "silu")


def module(path: str, implementation: str | None, c: int, i: int, e: int, k: int) -> Forward:
    """Another library's experts over the same parameters."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=c, moe_intermediate_size=i, num_experts=e, num_experts_per_tok=k
    )
    config.num_local_experts, config.intermediate_size = e, i
    if implementation is not None:
        config._experts_implementation = implementation
    with torch.device("meta"):
        experts = imported(path)(config)

    def forward(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, w: Tensor) -> Tensor:
        own = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, own, (x, chosen, w))

    return forward


def likely(num_warps: int, **block: int) -> bool:
    """Of Liger's configurations, those that we let it try."""
    if "BLOCK_H" in block:  # adds up rows
        return block["BLOCK_H"] >= 256 and block["BLOCK_K"] == 8
    step = 32 if "BLOCK_M" in block else 64
    return block["BLOCK_N"] == 128 and block["BLOCK_K"] == step and num_warps == 8


def liger(c: int, i: int, e: int, k: int) -> Forward:
    kernels = importlib.import_module("liger_kernel.ops.fused_moe_kernels")
    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):
            kernel.configs = [c for c in kernel.configs if likely(c.num_warps, **c.kwargs)]
    return module("liger_kernel.transformers.swiglu:LigerExperts", None, c, i, e, k)


def layer(name: str) -> dict[str, Any]:
    n, c, i, e, k = SHAPES[name]
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(n, c, **options).requires_grad_()
    gate_up = (torch.randn(e, 2 * i, c, **options) * 0.02).requires_grad_()
    down = (torch.randn(e, c, i, **options) * 0.02).requires_grad_()
    weights, chosen = torch.randn(n, e, device="cuda").softmax(-1).topk(k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16).requires_grad_()
    leaves = [x, gate_up, down, weights]
    upstream = torch.randn(n, c, **options)
    flops = 6 * n * k * c * i

    providers: dict[str, Callable[[], Forward]] = {
        "tigon": ours,
        "transformers grouped_mm": partial(module, EXPERTS[name], "grouped_mm", c, i, e, k),
        "transformers eager": partial(module, EXPERTS[name], "eager", c, i, e, k),
    }
    if name == next(iter(SHAPES)):
        providers["Liger"] = partial(liger, c, i, e, k)
    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    found: dict[str, dict[str, Any]] = {}
    truth: list[Tensor] | None = None
    for provider, make in providers.items():
        progress(f"{name}: {provider}")
        try:
            call = make()
            forward = partial(call, x, gate_up, down, chosen, weights)

            def both(forward: Callable[[], Tensor] = forward) -> Any:
                return torch.autograd.grad(forward(), leaves, upstream)

            values = [forward().detach(), *both()]
        except Exception as error:  # a peer that fails ends its own row
            found[provider] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        truth = exact(leaves, chosen, upstream) if truth is None else truth
        errors = [relative_l2(a, b) for a, b in zip(values, truth, strict=True)]
        names = ("y", "dx", "dgate_up", "ddown", "dweights")
        found[provider] = {"errors": dict(zip(names, errors, strict=True))}
        del values
        found[provider]["peak_mib"] = peak_mib(both)
        runs[provider] = forward, both
    del truth
    torch.cuda.empty_cache()
    runs["dense"] = dense(n * k, c, i)
    samples: dict[str, tuple[list[float], list[float]]] = {p: ([], []) for p in runs}
    progress(f"{name}: timing")
    for _ in range(ROUNDS):  # in turn, so that a change of the clock hits all alike
        for provider, pair in runs.items():
            for out, run in zip(samples[provider], pair, strict=True):
                out += milliseconds(run, total=60.0, least=3, most=20)
    for provider, (forward_ms, both_ms) in samples.items():
        f, b = quantiles(forward_ms), quantiles(both_ms)
        found.setdefault(provider, {}).update(forward_ms=f, both_ms=b)
        found[provider]["forward_tflops"] = flops / f[1] / 1e9
        found[provider]["backward_tflops"] = 2 * flops / (b[1] - f[1]) / 1e9
    return {"shape": SHAPES[name], "flops_forward": flops, "providers": found}


def dense(s: int, c: int, i: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The products of all slots with one matrix: forward, and forward and backward together."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, h, y = (torch.randn(s, d, **options) for d in (c, i, 2 * i))
    up, down = torch.randn(2 * i, c, **options), torch.randn(c, i, **options)

    def forward() -> None:
        x @ up.T
        h @ down.T

    def both() -> None:
        forward()
        y @ up
        x @ down
        y.T @ x
        x.T @ h

    return forward, both


def exact(leaves: list[Tensor], chosen: Tensor, upstream: Tensor) -> list[Tensor]:
    """Value and gradients of the definition in fp32, without TF32."""
    from tigon.kernels import grouped_mlp_ref

    x, gate_up, down, weights = (t.detach().float().requires_grad_() for t in leaves)
    y = grouped_mlp_ref(x, gate_up, down, chosen, weights, "silu")
    return [y.detach(), *torch.autograd.grad(y, [x, gate_up, down, weights], upstream.float())]


def stack() -> dict[str, Any]:
    """Tokens per second of a training step: forward, backward and AdamW, all in bf16."""
    b, t = STACK_TOKENS
    ids = torch.randint(0, STACK["vocab_size"], (b, t), device="cuda")
    found: dict[str, Any] = {}
    for provider, make in {
        "tigon": our_stack,
        "transformers": partial(their_stack, liger=False),
        "transformers + Liger": partial(their_stack, liger=True),
    }.items():
        progress(f"stack: {provider}")
        try:
            torch.manual_seed(0)
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

            def step(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return loss

            for _ in range(2):
                loss = float(step().detach())
            ms = quantiles(milliseconds(step, total=1500.0, least=5, most=8))
            found[provider] = {
                "ms": ms,
                "tokens_per_second": 1e3 * b * t / ms[1],
                "peak_mib": peak_mib(step),
                "loss": loss,
            }
        except Exception as error:
            found[provider] = {"error": f"{type(error).__name__}: {error}"[:300]}
        model = optimizer = step = None  # type: ignore[assignment]
        torch.cuda.empty_cache()
    return {"tokens": STACK_TOKENS, "config": STACK, "providers": found}


def our_stack() -> Any:
    from tigon import Qwen3Moe

    model = Qwen3Moe.from_config(
        {**STACK, "model_type": "qwen3_moe"}, dtype=torch.bfloat16, device="cuda"
    )
    return model.train()


def their_stack(*, liger: bool) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    if liger:
        imported("liger_kernel.transformers:apply_liger_kernel_to_qwen3_moe")()
    config = Qwen3MoeConfig(**STACK, dtype=torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.to(torch.bfloat16).train()


def tables(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    peers = ", ".join(f"{name} {v}" for name, v in record["peers"].items() if v)
    changes = " with uncommitted changes" if record["uncommitted_changes"] else ""
    lines = [
        f"{record['gpu']}, torch {record['torch']}, {peers}; commit {record['commit']}{changes}, "
        f"{record['date'][:10]}.",
        "",
    ]
    head = "experts of", "provider", "forward, ms", "TFLOP/s", "of dense"
    head += "backward, ms", "TFLOP/s", "of dense", "worst error", "extra MiB"
    rows = []
    for name, case in record["layers"].items():
        dense = case["providers"]["dense"]
        for provider, row in case["providers"].items():
            if "error" in row:
                rows.append([name, provider, row["error"].partition(":")[0], *[""] * 7])
                continue
            cells = [name, provider]
            for mode, ms in ("forward", row["forward_ms"][1]), ("backward", backward_ms(row)):
                rate = row[f"{mode}_tflops"]
                cells += [f"{ms:.3g}", f"{rate:.0f}", f"{rate / dense[f'{mode}_tflops']:.2f}"]
            errors = row.get("errors")
            cells.append(f"{max(errors.values()):.1e}" if errors else "")
            cells.append(f"{row['peak_mib']:.0f}" if errors else "")
            rows.append(cells)
    lines += [markdown(head, rows), ""]
    stack = record["stack"]
    b, t = stack["tokens"]
    lines.append(f"A training step of 4 layers of Qwen3-30B-A3B, {b} x {t} tokens, AdamW in bf16:")
    rows = []
    for provider, row in stack["providers"].items():
        if "error" in row:
            rows.append([provider, row["error"].partition(":")[0], "", ""])
            continue
        memory = f"{row['peak_mib'] / 1024:.1f}"
        rows.append([provider, f"{row['ms'][1]:.4g}", f"{row['tokens_per_second']:.0f}", memory])
    head = "provider", "ms", "tokens/s", "extra GiB"
    return "\n".join([*lines, "", markdown(head, rows)])


def backward_ms(row: dict[str, Any]) -> float:
    return row["both_ms"][1] - row["forward_ms"][1]


def write_docs() -> None:
    """The newest record, between its markers."""
    records = [json.loads(path.read_text()) for path in RESULTS.glob("moe-*.json")]
    newest = max(records, key=lambda record: record["date"])
    insert(tables(newest), ROOT / "docs/kernels.md", "moe")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", help="of a copy without git: git describe --always --dirty")
    parser.add_argument("--write-docs", action="store_true", help="put the newest into docs")
    args = parser.parse_args()
    if args.write_docs:
        write_docs()
        return 0
    if not torch.cuda.is_available():
        print("bench/moe.py needs a CUDA GPU")
        return 1
    gpu = torch.cuda.get_device_name()
    import transformers

    record: dict[str, Any] = {
        **stamp("tigon", "bench/*.py", described=args.commit),
        "gpu": gpu,
        "peers": {**versions(), "transformers": transformers.__version__},
        "layers": {},
    }
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    for name in SHAPES:
        record["layers"][name] = layer(name)
        save(RESULTS / f"moe-{slug}.json", record)
    record["stack"] = stack()
    save(RESULTS / f"moe-{slug}.json", record)
    print(tables(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
