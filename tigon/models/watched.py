"""Hooks, and modules in place of ours, where ranks share each layer: what some modules return there
is a part of a sum, which the block makes afterwards.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks

from tigon.layers import BlockInputs, GatedMLP, MoEOutput, SparseMoE

PART = (
    "model.layers.{}.{}: {} is given this rank's part of a sum over {} ranks, and what it adds is "
    "counted on each of them. Hooks on blocks, norms, self_attn and mlp see sums (docs/parallel.md)"
)


FSDP_HOOKS = "_hooks_of_fsdp"  # how many of a module's are FSDP2's, which pass on what it returns


@contextmanager
def hooks_of_fsdp(model: nn.Module) -> Iterator[None]:
    """Those that are registered in it are FSDP2's."""
    before = {module: len(module._forward_hooks) for module in model.modules()}
    yield
    for module, count in before.items():
        setattr(module, FSDP_HOOKS, len(module._forward_hooks) - count)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether hooks on the module see what it returns, others than those of FSDP2."""
    return len(module._forward_hooks) > getattr(module, FSDP_HOOKS, 0)


def has_hooks(module: nn.Module) -> bool:
    """The same, or hooks for all modules."""
    return bool(_global_forward_hooks) or has_own_hooks(module)


@contextmanager
def summing(module: nn.Module, ctx: BlockInputs) -> Iterator[None]:
    """In it the module returns the sum over ranks, and all of its hooks see that."""
    compute: Any = module.forward
    patched = "forward" in module.__dict__

    def forward(*given: Any) -> Any:
        y = compute(*given)
        total: Any = ctx.reduce_to_region(y.x if isinstance(y, MoEOutput) else y)
        return y._replace(x=total) if isinstance(y, MoEOutput) else total

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if patched:
            module.forward = compute


def warn_of_parts(blocks: Iterable[Any], ranks: int) -> None:
    """A warning for each hook that sees a part of a sum, and for each module in place of ours that
    is to return one."""
    for i, block in enumerate(blocks):
        mlp = getattr(block.mlp, "_orig_mod", block.mlp)  # of torch.compile
        if not isinstance(mlp, GatedMLP | SparseMoE) or "forward" in mlp.__dict__:
            _warn(i, "mlp", "what is in place of the MLP", ranks)
        for owner, name in ((block.mixer_name, "o_proj"), ("mlp", "down_proj")):
            _warn_of(getattr(getattr(block, owner), name, None), i, f"{owner}.{name}", ranks)
        if isinstance(mlp, SparseMoE) and not mlp.divided:
            for name in ("experts", "shared_expert"):
                _warn_of(mlp._modules.get(name), i, f"mlp.{name}", ranks)


def _warn_of(module: nn.Module | None, layer: int, name: str, ranks: int) -> None:
    if module is None:
        return
    if has_own_hooks(module):
        _warn(layer, name, "a hook on it", ranks)
    module = getattr(module, "_orig_mod", module)
    ours = type(module).forward.__module__.startswith("tigon.")
    if not ours or "forward" in module.__dict__:
        _warn(layer, name, "what is in place of it", ranks)


def _warn(layer: int, name: str, who: str, ranks: int) -> None:
    warnings.warn(PART.format(layer, name, who, ranks), stacklevel=2)
