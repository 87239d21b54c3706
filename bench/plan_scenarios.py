"""The plans that docs/scale.md shows, which bench/plan.py writes."""

import json
from pathlib import Path

from bench.harness import Record, markdown
from bench.train_cases import MODELS
from tigon.data.examples import format_count
from tigon.plan import LayoutPlan, make_plan, read_job
from tigon.plan.report import format_reasons, table_rows

GPU = "h200"  # that plans are for, and that constants are fitted to


def config(dim: int, mlp: int, layers: int, heads: int) -> Record:
    """A Llama 3.1 of these sizes. Source: arXiv 2407.21783, table 3."""
    sizes = {"hidden_size": dim, "intermediate_size": mlp, "num_hidden_layers": layers}
    return MODELS["Llama-3.1-8B"][2] | sizes | {"num_attention_heads": heads, "head_dim": 128}


LLAMAS = {
    "8B": MODELS["Llama-3.1-8B"][2],
    "70B": config(8192, 28672, 80, 64),
    "405B": config(16384, 53248, 126, 128),
}
MI = 2**20
# Model, GPUs, tokens of a row, of a step
SCENARIOS = {
    "8b-8": ("8B", 8, 8192, MI),
    "70b-64": ("70B", 64, 8192, 4 * MI),
    "70b-1024": ("70B", 1024, 8192, 16 * MI),
    "405b-4096": ("405B", 4096, 8192, 16 * MI),
    "8b-8-long": ("8B", 8, MI, MI),
}


def planned(name: str, folder: Path) -> LayoutPlan:
    """With the defaults of `tigon train`: float32 weights and states."""
    model, gpus, tokens, batch = SCENARIOS[name]
    path = folder / f"{model}.json"
    path.write_text(json.dumps(LLAMAS[model] | {"max_position_embeddings": 2 * MI}))
    return make_plan(read_job(str(path), gpus, GPU, tokens, batch), limit=5)


def scenario(plan: LayoutPlan) -> str:
    """As Markdown, in a document between other text."""
    best, (head, *rows) = plan.choices[0], table_rows(plan)
    whole = sum(p.numel() for p in plan.job.shapes.shard(1).parameters())
    days = 1e12 / (best.step.rate * plan.job.gpus) / 86400
    held = best.memory.kinds.items()
    kinds = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in held if size > 2**30 / 20)
    took = ", ".join(f"{kind} {seconds:.3g}" for kind, seconds in best.step.largest)
    tokens = plan.job.batch_rows * plan.job.seq_len
    return "\n\n".join(
        [
            f"{whole / 1e9:,.1f} billion parameters on {plan.job.gpus:,} GPUs; "
            f"{format_count(plan.job.batch_rows, 'row')} of {plan.job.seq_len:,} tokens per step, "
            f"{tokens:,} in all.",
            markdown(head, rows),
            f"Memory of the first layout in GiB: {kinds}. Its step in seconds: {took}. "
            f"10<sup>12</sup> tokens take {days:,.1f} days.",
            "\n".join(f"- {line.strip()}" for line in format_reasons(plan)[1:]),
        ]
    ).rstrip()
