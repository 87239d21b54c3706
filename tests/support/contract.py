"""The loss of DESIGN's forward contract, computed by loops over full logits in float64."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon.models import CausalLM

# No size is the product of two others, head_dim is not hidden / heads, kv heads are shared
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 56,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "rms_norm_eps": 1e-3,
}
V = TINY["vocab_size"]


def tiny_llama(**changes: Any) -> tigon.Llama:
    """fp32, in training mode, with weights so random and large that no mistake hides."""
    return tiny(tigon.Llama, **changes)


def tiny(family: type[CausalLM], **changes: Any) -> Any:
    """A model of the family with TINY's sizes, fp32 and random as `tiny_llama`."""
    torch.manual_seed(0)
    model = family.from_config({**TINY, **changes}, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1 else 0.2 * torch.randn_like(p))
    return model


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of logits [B, T, V] that predict the next of labels [B, T], by a loop."""
    logp = logits.double().log_softmax(-1)
    return mean(
        -logp[b, t, int(labels[b, t + 1])]
        for b in range(labels.shape[0])
        for t in range(labels.shape[1] - 1)
        if labels[b, t + 1] != -100
    )


def mean(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).mean()


def gradients(loss: Tensor, model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
    """Gradients of every trainable parameter, by name."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trainable.values()), **kwargs)
    return dict(zip(trainable, found, strict=True))


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rel: float = 1e-5
) -> None:
    """Each within `rel` of the largest entry of the expected one."""
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 0, f"{name}: a zero gradient compares nothing"
        error = (actual[name] - grad).abs().max()
        assert error <= rel * grad.abs().max(), f"{name}: {error} of {grad.abs().max()}"


def tokens(batch: int = 2, length: int = 13, ignored: float = 0.3) -> tuple[Tensor, Tensor]:
    """Random ids and labels, of which a share is ignored."""
    ids = torch.randint(0, V, (batch, length))
    return ids, ids.masked_fill(torch.rand(batch, length) < ignored, -100)


class Outputs(TorchDispatchMode):
    """Shapes of everything computed, of the results of matrix products, and calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        self.products: list[torch.Size] = []
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.shapes.append(tensor.shape)
                if func._opname in ("mm", "addmm", "bmm"):
                    self.products.append(tensor.shape)
        return out
