"""Hooks, and modules in place of ours, where ranks share each layer: what some modules return there
is a part of a sum, which the block makes afterwards.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tigon.layers import Context, GatedMLP, Routed, SparseMoE

PART = (
    "model.layers.{}.{}: {} is given this rank's part of a sum over {} ranks, and what it adds is "
    "counted on each of them. Hooks on blocks, norms, self_attn and mlp see sums (docs/parallel.md)"
)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks see what the module returns, others than those of FSDP2."""
    return bool(module._forward_hooks) and not hasattr(module, "_get_fsdp_state")


@contextmanager
def summing(module: nn.Module, ctx: Context) -> Iterator[None]:
    """In it the module returns the sum over ranks, and its hooks see that."""

    def sum_parts(_module: nn.Module, _given: Any, y: Any) -> Any:
        total: Any = ctx.summed(y.x if isinstance(y, Routed) else y)
        return y._replace(x=total) if isinstance(y, Routed) else total

    handle = module.register_forward_hook(sum_parts, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def warn_of_parts(blocks: Iterable[Any], ranks: int) -> None:
    """A warning for each hook that sees a part of a sum, and for each module in place of an MLP."""
    for i, block in enumerate(blocks):
        for name in ("o_proj", "down_proj"):
            owner = block.mixer_name if name == "o_proj" else "mlp"
            product = getattr(getattr(block, owner), name, None)
            if product is not None and has_hooks(product):
                _warn(i, f"{owner}.{name}", "a hook on it", ranks)
        mlp = getattr(block.mlp, "_orig_mod", block.mlp)  # of torch.compile
        if not isinstance(mlp, GatedMLP | SparseMoE) or "forward" in mlp.__dict__:
            _warn(i, "mlp", "what is in place of the MLP", ranks)
        elif isinstance(mlp, SparseMoE) and not mlp.divided:
            for name in ("experts", "shared_expert"):
                if (inner := mlp._modules.get(name)) is not None and has_hooks(inner):
                    _warn(i, f"mlp.{name}", "a hook on it", ranks)


def _warn(layer: int, name: str, who: str, ranks: int) -> None:
    warnings.warn(PART.format(layer, name, who, ranks), stacklevel=2)
