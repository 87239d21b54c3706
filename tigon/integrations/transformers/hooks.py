"""Hooks that others set for one pass, in the pass that backward makes of a block again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# What a module has of them, by the names of torch's attributes
KINDS = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"
Hooks = dict[nn.Module, dict[str, dict[int, Any]]]


def keep_hooks(block: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run`, a function that calls the block, with the hooks before its modules as they are
    now, whenever it is called.

    PEFT sets hooks for one pass, by which aLoRA's adapters learn where to begin; backward computes
    a checkpointed block when they are gone.
    """
    hooks = {m: _copy_hooks(m) for m in block.modules() if m._forward_pre_hooks}
    if not hooks:
        return run

    def run_with_hooks(*args: Any) -> Any:
        with _replace_hooks(hooks):
            return run(*args)

    return run_with_hooks


def _copy_hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Returns a module's hooks by kind, and by the number that torch gives each."""
    return {kind: dict(getattr(module, kind)) for kind in KINDS}


@contextmanager
def _replace_hooks(hooks: Hooks) -> Iterator[None]:
    """Gives modules these hooks in the body of a `with`."""
    before = {module: _copy_hooks(module) for module in hooks}
    _set_hooks(hooks)
    try:
        yield
    finally:
        _set_hooks(before)


def _set_hooks(hooks: Mapping[nn.Module, Mapping[str, Mapping[int, Any]]]) -> None:
    """Gives modules these hooks in place of their own."""
    for module, kinds in hooks.items():
        for kind, values in kinds.items():
            own = getattr(module, kind)  # in place: handles remove hooks from it
            own.clear()
            own.update(values)
