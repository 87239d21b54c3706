"""What Tigon's operators are compared with: the usual plain-torch formulas, and other libraries.

The formulas are those of transformers' modelling files. Where those upcast to fp32, fp64 stays:
the truth that errors are measured against is the same formula in fp64.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import Provider, Run

PACKAGES = {"Liger": "liger-kernel", "QuACK": "quack-kernels", "CCE": "cut-cross-entropy"}
PACKAGES |= {"FLA": "fla-core"}


def imported(path: str) -> Callable[..., Any]:
    """The function `module:name`, imported when it is asked for."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def call(path: str, *args: Any, **kwargs: Any) -> Callable[[], Run]:
    """What makes a run of the function `module:name` with these arguments."""
    return lambda: partial(imported(path), *args, **kwargs)


def tigon(name: str, *args: Any, **kwargs: Any) -> Provider:
    return Provider("tigon", call(f"tigon.kernels:{name}", *args, **kwargs))


def liger(name: str, *args: Any, overwrites: tuple[Tensor, ...] = (), **kwargs: Any) -> Provider:
    make = call(f"liger_kernel.transformers.functional:{name}", *args, **kwargs)
    return Provider("Liger", make, overwrites=overwrites)


def quack(path: str, *args: Any, **kwargs: Any) -> Provider:
    return Provider("QuACK", call(f"quack.{path}", *args, **kwargs))


def plain(formula: Callable[..., Any], *args: Any) -> list[Provider]:
    """The formula as it stands, and compiled."""
    return [
        Provider("eager", lambda: partial(formula, *args)),
        Provider("torch.compile", lambda: partial(compiled(formula), *args)),
    ]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def random_model(name: str, config: dict[str, Any], device: str, attention: str = "sdpa") -> Any:
    """A model of transformers with random weights in bf16, by the name of its classes."""
    given = {key: value for key, value in config.items() if key != "model_type"}
    own = imported(f"transformers:{name}Config")(**given, dtype=torch.bfloat16)
    make: Any = imported(f"transformers:{name}ForCausalLM")
    with torch.device(device):
        model = make._from_config(own, attn_implementation=attention)
    return model.to(torch.bfloat16)


def cce(*, exact: bool) -> Callable[..., Any]:
    """CCE as it is by default, which leaves out small gradients, or without that filter."""
    function = imported("cut_cross_entropy:linear_cross_entropy")
    if not exact:
        return function
    kinds = imported("cut_cross_entropy.linear_cross_entropy:LinearCrossEntropyImpl").__members__
    # 25.1.1, the newest on PyPI, has no such name: there the filter is an argument
    without = {"impl": "cce_exact"} if "CCE_EXACT" in kinds else {"filter_eps": None}
    return partial(function, **without)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normed(x: Tensor, eps: float) -> Tensor:
    h = wide(x)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * normed(x, eps).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (normed(x, eps) * (1.0 + wide(weight))).to(x.dtype)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return llama_norm(total, weight, eps), total


def sandwich(
    x: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual + gemma_norm(x, post_weight, eps)
    return gemma_norm(total, weight, eps), total


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    return (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.sigmoid()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (llama_norm(x, weight, eps) * F.silu(wide(gate))).to(x.dtype)


def conv(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, T, C] and weight [C, W], as transformers' own code has it without other packages."""
    taps, tokens = weight.shape[1], x.shape[1]
    y = F.conv1d(x.mT, weight[:, None], padding=taps - 1, groups=len(weight))
    return y[..., :tokens].mT


def conv_qkv(
    x: Tensor, weight: Tensor, key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = key_heads * key_dim
    q, k, v = F.silu(conv(x, weight)).split((size, size, len(weight) - 2 * size), -1)

    def unit(u: Tensor) -> Tensor:
        u = wide(u.unflatten(-1, (key_heads, key_dim)))
        return u * torch.rsqrt((u * u).sum(-1, keepdim=True) + 1e-6)

    return (unit(q) * key_dim**-0.5).to(x.dtype), unit(k).to(x.dtype), v


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [B, T, heads, D]; cos and sin [1, T, D], in the dtype of q as transformers has it."""

    def rotated(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x * cos[:, None] + turned * sin[:, None]).transpose(1, 2)

    return rotated(q), rotated(k)


def norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return rope(llama_norm(q, q_weight, eps), llama_norm(k, k_weight, eps), cos, sin)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(wide(logits), targets, reduction=reduction)


def linear_cross_entropy(hidden: Tensor, targets: Tensor, weight: Tensor, reduction: str) -> Tensor:
    return cross_entropy(hidden @ weight.T, targets, reduction)
