"""What tests of attention on a GPU share: batches of every layout, a tiny model, its errors."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tigon.kernels import AttentionMask
from tigon.kernels.attention.api import VARLEN_BACKENDS
from tigon.kernels.attention.backends import OBSTACLES, AttentionRequest, capability, missing

B, T, K = 2, 261, 2


def segments(*lengths: int) -> dict[str, Tensor]:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {"segment_ids": ids.view(B, T)}


PADDING = torch.stack([torch.arange(T) >= 60, torch.arange(T) < 201])
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packed": segments(100, 1, 160, 7, 254),
    "even": segments(*[87] * 6),
    "many": segments(*([100] + [1] * 137 + [2] * 12) * B),  # 300: above 256 flash-attn-4 searches
    "padded": {"key_mask": PADDING},
    "prefixes": segments(100, 60, 101, 200, 61)
    | {"cu_seq_lens": torch.tensor([0, 100, 160, 261, 461, 522], dtype=torch.int32)}
    | {"prefixes": torch.tensor([[0, 0], [0, 80], [0, 80], [0, 0], [261, 400]]), "longest": 200},
}


def on_gpu(layout: str) -> dict[str, Any]:
    """But for what the host has to know."""
    host = ("prefixes", "longest")
    return {name: x if name in host else x.cuda() for name, x in LAYOUTS[layout].items()}


class Combination(NamedTuple):
    head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    layout: str = "rows"
    groups: int = 4  # query heads for each kv head
    causal: bool = True

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._asdict().items())


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def need(name: str, head_dim: int = 64, **request: bool) -> None:
    """Skip where this machine has no such backend, or it cannot do this."""
    asked = AttentionRequest(sm=capability(0), head_dim=head_dim, **{"grad": True} | request)
    reason = missing(0).get(name) or OBSTACLES[name](asked)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


def tensors(c: Combination, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    heads = (c.groups * K, K, K)
    return [
        torch.randn(B, T, n, c.head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for n in heads
    ]


def forward(function: Any, c: Combination, leaves: list[Tensor], **options: Any) -> Tensor:
    given = on_gpu(c.layout)
    mask = AttentionMask(T, causal=c.causal, **given, **options)
    out = function(*leaves, mask=mask, window=c.window, softcap=c.softcap)
    for plan in mask.plans.values():  # of the function under test
        as_rows = c.layout == "even" and plan.choice.name in VARLEN_BACKENDS
        assert (plan.even is not None) == as_rows
    return out


def run(function: Any, c: Combination, leaves: list[Tensor], upstream: Tensor, **options: Any):
    """The output and the gradients of q, k and v."""
    out = forward(function, c, leaves, **options)
    return [out * (upstream != 0), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def eager(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, window: Any, softcap: Any):
    """What transformers spells out, in the dtype of its input but for the softmax."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask.bias(window, q.dtype, q.device)
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LENGTHS = (300, 1, 215, 84)
CU = torch.tensor([0, 300, 301, 516, 600], dtype=torch.int32)


def shaken(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.08) if p.dim() > 1 else p.uniform_(0.7, 1.3)
    return model


def losses(model: Any, ids: Tensor, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(ids, labels=ids, **batch, loss_reduction="none").loss
    loss.sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def wrong(a: Any, b: Any) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()
