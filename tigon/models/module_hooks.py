"""Hooks and patched modules under tensor parallelism, where some modules return partial sums.

Hooks on blocks, norms, attention and MLPs see sums over the ranks; for hooks on other modules there
is a warning.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks

from tigon.layers import BlockInputs, GatedMLP, MoEOutput, SparseMoE

PARTIAL_SUM = (
    "model.layers.{}.{}: {} sees a partial sum of {} ranks, and what it adds is counted on each of "
    "them. Hooks on blocks, norms, self_attn and mlp see sums (docs/parallel.md)"
)
FSDP_HOOKS = "_fsdp_hook_count"  # how many forward hooks of a module are FSDP2's


@contextmanager
def mark_fsdp_hooks(model: nn.Module) -> Iterator[None]:
    """Mark the forward hooks registered in this context as FSDP2's, which change no output."""
    before = {module: len(module._forward_hooks) for module in model.modules()}
    yield
    for module, count in before.items():
        setattr(module, FSDP_HOOKS, len(module._forward_hooks) - count)


def has_user_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks other than FSDP2's."""
    return len(module._forward_hooks) > getattr(module, FSDP_HOOKS, 0)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks other than FSDP2's, or there are global ones."""
    return bool(_global_forward_hooks) or has_user_hooks(module)


@contextmanager
def all_reduce_output(module: nn.Module, ctx: BlockInputs) -> Iterator[None]:
    """In this context the module returns the sum over the tensor ranks, also to its hooks."""
    compute: Any = module.forward
    patched = "forward" in module.__dict__

    def forward(*args: Any) -> Any:
        y = compute(*args)
        total: Any = ctx.reduce_to_region(y.x if isinstance(y, MoEOutput) else y)
        return y._replace(x=total) if isinstance(y, MoEOutput) else total

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if patched:
            module.forward = compute


def warn_partial_sums(blocks: Iterable[Any], ranks: int) -> None:
    """Warns of each hook that sees a partial sum, and of each patched module that returns one."""
    for i, block in enumerate(blocks):
        mlp = getattr(block.mlp, "_orig_mod", block.mlp)  # of torch.compile
        if not isinstance(mlp, GatedMLP | SparseMoE) or "forward" in mlp.__dict__:
            _warn(i, "mlp", "a patched MLP", ranks)
        for parent, name in ((block.mixer_name, "o_proj"), ("mlp", "down_proj")):
            module = getattr(getattr(block, parent), name, None)
            _check_module(module, i, f"{parent}.{name}", ranks)
        if isinstance(mlp, SparseMoE) and not mlp.divided:
            for name in ("experts", "shared_expert"):
                _check_module(mlp._modules.get(name), i, f"mlp.{name}", ranks)


def _check_module(module: nn.Module | None, layer: int, name: str, ranks: int) -> None:
    """Warns of a module that returns partial sums, if it has hooks or is patched."""
    if module is None:
        return
    if has_user_hooks(module):
        _warn(layer, name, "a hook on it", ranks)
    module = getattr(module, "_orig_mod", module)
    if not type(module).forward.__module__.startswith("tigon.") or "forward" in module.__dict__:
        _warn(layer, name, "a patched module", ranks)


def _warn(layer: int, name: str, observer: str, ranks: int) -> None:
    warnings.warn(PARTIAL_SUM.format(layer, name, observer, ranks), stacklevel=2)
