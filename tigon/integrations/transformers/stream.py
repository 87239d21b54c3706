"""Blocks and norms as transformers has them: of the whole residual stream.

Natively a block returns a branch beside the stream that it is not yet added to, which the next norm
adds in one pass. Whoever calls a norm, sets a hook on a norm or a block, forward or backward, or
puts a block into a module of his own gets the sum; torch's global hooks of all modules see the
native calls.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tigon.layers import AddRMSNorm
from tigon.models.base import LanguageModel
from tigon.models.decoder import TransformerBlock

Keep: TypeAlias = Callable[[list[Any]], None]  # takes what else a block returns
INTERNAL_MODULES = "torch.", "tigon."  # modules whose hooks take what blocks return natively


class MixedIn:
    """A mixin of native modules whose class is made as needed; see `mix_in`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies the module by the two classes that its own is made of."""
        mixin, kind = type(self).__bases__
        return _new_module, (mixin, kind, type(self).__name__), self.__dict__


def mix_in(module: Any, mixin: Any, name: str) -> None:
    """Makes the module, in place, one of a class of this name with the mixin before its own."""
    if not isinstance(module, mixin):
        kind: Any = type(module)
        module.__class__ = _mix(mixin, kind, name)


@cache
def _mix(mixin: Any, kind: Any, name: str) -> Any:
    return type(name, (mixin, kind), {"__module__": __name__, "__doc__": kind.__doc__})


def _new_module(mixin: Any, kind: Any, name: str) -> Any:
    """Makes an empty module, whose state pickle or copy sets."""
    cls = _mix(mixin, kind, name)
    return cls.__new__(cls)


class WholeBlock(MixedIn):
    """A block whose hooks get the stream before it, and the stream with all its branches."""

    def __call__(self, x: Tensor, *inputs: Any, recompute: bool = False, **options: Any) -> Any:
        block, call = cast(Any, self), cast(Any, super()).__call__
        if recompute:
            return checkpoint(keep_hooks(block, partial(call, **options)), x, use_reentrant=False)
        if options or not is_hooked(block):
            return call(x, *inputs, **options)
        return call_with_stream(call, x, *inputs)

    def forward(
        self, x: Tensor, *args: Any, inputs: tuple[Any, ...] = (), keep: Keep | None = None
    ) -> Any:
        """Returns what the native block does; in a call for others, which gives the stream alone by
        position, the stream alone."""
        if keep is None:
            return super().forward(x, *args)  # type: ignore[misc]
        branch, stream, *rest = super().forward(x, None, *inputs)  # type: ignore[misc]
        keep(rest)
        return add_branch(branch, stream)


class WrappedBlock:
    """A block as the decoder calls it, in a module of others that gets and returns the stream."""

    def __init__(self, module: nn.Module):
        """Raises TypeError for a module without a block."""
        block = find_block(module)
        self.module, self.parameters = module, module.parameters
        self.mixer, self.rope_index, self.kv_source = block.mixer, block.rope_index, block.kv_source

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return call_with_stream(self.module, *inputs, **options)


def is_wrapped(layer: nn.Module) -> bool:
    """Whether a layer is a module of others, which torch's are not: these hand on all that they
    get."""
    own = isinstance(layer, TransformerBlock)
    return not own and not type(layer).__module__.startswith(INTERNAL_MODULES)


def find_block(layer: nn.Module) -> TransformerBlock:
    """Returns the block that a layer is or has; TypeError if there is none."""
    for module in layer.modules():
        if isinstance(module, TransformerBlock):
            return module
    raise TypeError(
        f"{type(layer).__name__} in model.layers has no block in it: wrap one, or remove the layer "
        "by del model.model.layers[i]"
    )


def call_with_stream(
    call: Callable[..., Any], x: Tensor, residual: Tensor | None, *inputs: Any, **options: Any
) -> Any:
    """Calls a block, or what has one in it, with the stream alone by position, and returns what a
    native block does."""
    extra: list[Any] = []  # what else the native block returns
    # A bound method, since FSDP2 copies lists that it looks for tensors in
    options |= {"inputs": inputs, "keep": extra.extend}
    stream = call(add_branch(x, residual), **options)
    return stream, None, *(extra or [None])


class WholeNorm(MixedIn):
    """A norm of the sum of branch and stream: called with one tensor, it norms that one alone, and
    its hooks get the sum and its norm."""

    def __call__(self, x: Tensor, *others: Any) -> Any:
        if not others or not is_hooked(self):
            return super().__call__(x, *others)  # type: ignore[misc]
        residual, post = (*others, None)[:2]
        stream = add_branch(x if post is None else post(x), residual)
        return super().__call__(stream), stream  # type: ignore[misc]

    def forward(self, x: Tensor, *others: Any) -> Any:
        """Returns the norm [..., C] of x, or with others what the native norm does."""
        if others:
            return super().forward(x, *others)  # type: ignore[misc]
        return super().forward(x, None)[0]  # type: ignore[misc]


def show_stream(native: LanguageModel, reference: nn.Module) -> None:
    """Makes the model's blocks and norms those of the whole stream, by the names of the classes of
    `reference`, transformers' model."""
    for path, module in native.named_modules():
        if isinstance(module, TransformerBlock):
            mix_in(module, WholeBlock, type(reference.get_submodule(path)).__name__)
        elif isinstance(module, AddRMSNorm):
            mix_in(module, WholeNorm, type(reference.get_submodule(path)).__name__)


def add_branch(branch: Tensor, residual: Tensor | None = None) -> Tensor:
    """Returns the stream: the sum of a branch and what it is not yet added to."""
    return branch if residual is None else residual + branch


def is_hooked(module: Any) -> bool:
    """Whether a hook is set that is neither torch's, such as FSDP's, nor Tigon's."""
    forward = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    backward = *module._backward_pre_hooks.values(), *module._backward_hooks.values()
    modules = ((getattr(hook, "__module__", None) or "") for hook in (*forward, *backward))
    return any(not name.startswith(INTERNAL_MODULES) for name in modules)


# Hooks that others set for one pass, in the pass that backward makes of a block again

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
