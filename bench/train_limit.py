"""What a training step would take if nothing but its necessary work took time: the composed limit.

Its matrix products at the rate of each shape alone; attention at the time of the backend that Tigon
takes, alone; what streams through memory, and the optimizer, at the bandwidth of a copy. All is
measured in the process that times the step, on the same GPU.

# M tokens, N and K of a product x [M, K] @ w [N, K].T, S rows that experts compute, V vocab
"""

from collections import Counter
from typing import Any

import torch
from torch import nn

import tigon
from bench.harness import Record
from bench.kernels import BF16
from bench.timing import copy_bandwidth, took
from bench.train_cases import MODELS, OURS, Batch, Case, settings, shape_of
from tigon.kernels import AttentionMask, attention
from tigon.layers import LMHead, SoftmaxAttention, SparseMoE
from tigon.layers.lora import MATRICES
from tigon.plan.cost import kernel_bytes

# Of a parameter and its step, all in bf16: reads weight, gradient and two states, writes all but
# the gradient
ADAMW = 7 * BF16
PRODUCTS, ATTENTION, PASSES, OPTIMIZER = (
    "matrix products",
    "attention",
    "fused kernels",
    "optimizer",
)


def composed(case: Case, batch: Batch, tiny: bool) -> Record:
    """Milliseconds of each kind of work, and what they are made of."""
    name = MODELS[case.model][0]
    model = getattr(tigon, name).from_config(
        shape_of(case, tiny), dtype=torch.bfloat16, device="meta"
    )
    recompute = settings(case, OURS).activation_checkpointing
    again = 1 if recompute is True else 0  # forwards of the blocks that are made once more
    device = str(batch.ids.device)
    bandwidth = copy_bandwidth(device, 2**20 if tiny else 2**32)
    products = [
        {"m": m, "n": n, "k": k, "count": count, **product(m, n, k, device)}
        for (m, n, k), count in products_of(model, batch).items()
    ]
    vocab = model.lm_head.weight.shape[0]
    for row in products:
        passes = 1 + again * (row["n"] != vocab)
        row["ms"] = row["count"] * (passes * row["forward"] + row["dx"] + row["dw"])
    layers = [
        {"window": window, "count": count, **attended(model, window, batch)}
        for window, count in Counter(m.window for m in model.modules() if is_attention(m)).items()
    ]
    for row in layers:
        row["ms"] = row["count"] * (row["both"] + again * row["forward"])
    tokens = batch.ids.numel()
    moved = kernel_bytes(model, tokens, recomputed=again, learned=batch.supervised / tokens)
    parameters = sum(p.numel() for p in model.parameters())
    milliseconds = {
        PRODUCTS: sum(row["ms"] for row in products),
        ATTENTION: sum(row["ms"] for row in layers),
        PASSES: 1e3 * sum(moved.values()) / bandwidth,
        OPTIMIZER: 1e3 * ADAMW * parameters / bandwidth,
    }
    return {
        "milliseconds": milliseconds,
        "total": sum(milliseconds.values()),
        "bytes_per_second": bandwidth,
        "products": products,
        "attention": layers,
        "bytes": moved,
        "parameters": parameters,
        "flops": sum(6 * r["m"] * r["n"] * r["k"] * r["count"] for r in products),
    }


def products_of(model: nn.Module, batch: Batch) -> Counter[tuple[int, int, int]]:
    """How often each M, N, K; experts as one dense product of as many rows, the head for the
    tokens that are learned."""
    found: Counter[tuple[int, int, int]] = Counter()
    tokens = batch.ids.numel()
    for module in model.modules():
        if isinstance(module, LMHead):
            found[batch.supervised, *module.weight.shape] += 1
        elif isinstance(module, nn.Linear):
            found[tokens, *module.weight.shape] += 1
        elif isinstance(module, SparseMoE):
            for name in MATRICES:
                found[tokens * module.per_token, *module.experts.matrix_shape(name)] += 1
    return found


def product(m: int, n: int, k: int, device: str) -> dict[str, float]:
    """Milliseconds of a product and of its two gradients."""
    options: Any = {"dtype": torch.bfloat16, "device": device}
    x, w, dy = (torch.randn(*shape, **options) for shape in ((m, k), (n, k), (m, n)))
    runs = {"forward": lambda: x @ w.T, "dx": lambda: dy @ w, "dw": lambda: dy.T @ x}
    return {name: took(run) for name, run in runs.items()}


def is_attention(module: nn.Module) -> bool:
    return isinstance(module, SoftmaxAttention)


def attended(model: nn.Module, window: int | None, batch: Batch) -> Record:
    """Milliseconds of one layer's attention, forward and both, by which backend."""
    layer: Any = next(m for m in model.modules() if is_attention(m) and m.window == window)
    (b, t), device = batch.ids.shape, batch.ids.device
    heads = (layer.heads, layer.kv_heads, layer.kv_heads)
    options: Any = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    leaves = [torch.randn(b, t, n, layer.head_dim, **options) for n in heads]
    more: Record = {}
    if batch.lengths is not None:
        ids = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))
        more = {"segment_ids": ids.view(b, t).to(device)}
        more |= {"cu_seq_lens": batch.bounds, "longest": max(batch.lengths)}
    mask = AttentionMask(t, **more)
    given = {"mask": mask, "window": window, "softcap": layer.softcap}
    if layer.sinks is not None:
        given["sinks"] = torch.zeros(layer.heads, **options)
    upstream = torch.randn_like(attention(*leaves, **given))

    def both() -> Any:
        return torch.autograd.grad(attention(*leaves, **given), leaves, upstream)

    found = {"forward": took(lambda: attention(*leaves, **given)), "both": took(both)}
    return found | {"backend": next(iter(mask.plans.values())).choice.name}
