"""Hooks that others set for one pass, in the pass that backward makes of a block again."""

from collections.abc import Callable
from typing import Any

from torch import nn

# What a module has of them, by the names of torch's attributes
KINDS = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"


def keep_hooks(block: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run`, a function that calls the block, with the hooks before its modules as they are
    now, whenever it is called.

    PEFT sets hooks for one pass, by which aLoRA's adapters learn where to begin; backward computes
    a checkpointed block when they are gone.
    """
    hooked = [module for module in block.modules() if module._forward_pre_hooks]
    if not hooked:
        return run
    kept = [{kind: vars(module)[kind].copy() for kind in KINDS} for module in hooked]

    def run_with_hooks(*args: Any) -> Any:
        own = [{kind: vars(module)[kind] for kind in KINDS} for module in hooked]
        _set_hooks(hooked, kept)
        try:
            return run(*args)
        finally:
            _set_hooks(hooked, own)

    return run_with_hooks


def _set_hooks(modules: list[nn.Module], hooks: list[dict[str, Any]]) -> None:
    for module, kinds in zip(modules, hooks, strict=True):
        vars(module).update(kinds)
