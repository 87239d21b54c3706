"""The keywords of a call under transformers' names, and what is captured while the blocks run.

# B batch, T tokens, C model dim, E experts, L layers
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.transformers.stream import add_branch, find_block, is_hooked, is_wrapped
from tigon.layers.router import Router, Routing
from tigon.models.arguments import BATCH, PASS, select_keys
from tigon.models.base import LanguageModel
from tigon.models.inputs import BOUNDS, Batch
from tigon.utils.config import check_keywords, suggest

# Of transformers' processors, collators and trainers; they change nothing in a text model
IGNORED = frozenset(("token_type_ids", "cache_position", "mm_token_type_ids"))
OUTPUTS = frozenset(
    ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
)
KNOWN = PASS | IGNORED | OUTPUTS | {"input_ids", "skip_logits", "seq_idx", "cache"}
# Keywords of forward whose defaults `tigon_options` may set: those that are no tensors
DEFAULTS: dict[str, Any] = {
    "return_logits": bool,
    "metrics": (str, tuple, list),
    "loss_reduction": str,
    "label_smoothing": (int, float),
    "z_loss": (int, float),
    "logits_bytes": int,
}
REDUCTIONS = ("token", "sequence")  # those that Trainer's accumulation goes with


def check_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of `tigon_options`; TypeError for what is no mapping, for an unknown name or a
    value that is none of its kind, ValueError for a loss_reduction that is no mean."""
    if not isinstance(options, Mapping | None):
        raise TypeError(f'tigon_options={options!r} is no mapping: give {{"metrics": "accuracy"}}')
    options = dict(options or {})
    for name, value in options.items():
        if name not in DEFAULTS:
            hint = suggest(name, DEFAULTS) or f"known are {', '.join(DEFAULTS)}"
            raise TypeError(f"tigon_options has {name!r}, which is no option; {hint}")
        if not isinstance(value, DEFAULTS[name]):
            raise TypeError(f"tigon_options: {name}={value!r} has another type than forward takes")
    reduction = options.get("loss_reduction", "token")
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"tigon_options: loss_reduction={reduction!r} is not one of {REDUCTIONS}; give "
            "loss_reduction to the call itself"
        )
    return options


def make_batch(native: LanguageModel, arguments: Mapping[str, Any]) -> Batch:
    """Resolves the inputs of a call, of which `seq_idx` [B, T], the number of each token's
    sequence, gives bounds unless there are others; TypeError for an unknown keyword."""
    check_keywords("forward", arguments, KNOWN)
    refuse_liger(native.model.norm.__dict__.get("forward"))
    chosen = select_keys(BATCH - {"past_key_values", "use_cache"}, arguments)
    if (cache := arguments.get("cache")) is not None:
        chosen["past_key_values"] = cache.native
    seq_idx = arguments.get("seq_idx")
    if seq_idx is not None and not any(chosen.get(name) is not None for name in BOUNDS):
        chosen["cu_seq_lens"] = find_bounds(seq_idx)
    batch = Batch.of(native, arguments.get("input_ids"), **chosen)
    layers = () if batch.mask.key_mask is None else native.model.layers
    if any(is_wrapped(layer) or is_hooked(layer) for layer in layers):
        batch.drops_padding = False  # others take states [B, T, C]
    return batch


def refuse_liger(forward: Any) -> None:
    """Raises ValueError for a replaced `forward` that is one of Liger's."""
    if (getattr(forward, "__module__", None) or "").startswith("liger_kernel"):
        raise ValueError(
            "use_liger_kernel=True replaces layers of transformers, and Tigon's have fused kernels "
            "already: leave it out, and load the model again, since its norms are changed"
        )


def find_bounds(seq_idx: Tensor) -> Tensor:
    """Finds the bounds, int32 [sequences + 1] over the flattened batch, of the runs of equal
    numbers in the rows of `seq_idx` [B, T]."""
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_tensor([seq_idx.numel()])]).int()


class CapturedStates:
    """What hooks have seen of a pass: the stream before each block, and the logits of routers."""

    def __init__(self) -> None:
        self.streams: list[Tensor] = []  # [B, T, C] of each block
        self.router_logits: list[Tensor] = []  # [B * T, E] of each layer with experts

    def hidden_states(self, last: Tensor | None) -> tuple[Tensor, ...] | None:
        """The L + 1 hidden states, with the normed `last` [B, T, C]; None if none were wanted."""
        return (*self.streams, last) if self.streams and last is not None else None

    def logits_of_routers(self) -> Any:
        """The routers' logits as a tuple; None if none were wanted, or there is no router."""
        return tuple(self.router_logits) or None


@contextmanager
def capture(
    native: LanguageModel, batch: Batch, hidden_states: bool, router_logits: bool
) -> Iterator[CapturedStates]:
    """Captures what is asked for, in passes of the body of a `with`, at the batch's positions."""
    captured = CapturedStates()

    def keep_input(block: nn.Module, args: tuple[Any, ...]) -> None:
        captured.streams.append(add_branch(*args[:2]))

    def keep_output(block: nn.Module, args: Any, output: Any) -> None:
        is_stream = isinstance(output, Tensor)  # with hooks of others, or in a module of theirs
        captured.streams.append(output if is_stream else add_branch(*output[:2]))

    def keep_logits(router: nn.Module, args: Any, routing: Routing) -> None:
        captured.router_logits.append(routing.logits)

    if hidden_states or router_logits:
        batch.drops_padding = False
    with ExitStack() as hooks:  # which removes them
        if hidden_states:
            blocks = [find_block(layer) for layer in native.model.layers]
            hooks.enter_context(blocks[0].register_forward_pre_hook(keep_input))
            for block in blocks[:-1]:
                hooks.enter_context(block.register_forward_hook(keep_output))
        if router_logits:
            for module in native.model.modules():
                if isinstance(module, Router):
                    hooks.enter_context(module.register_forward_hook(keep_logits))
        yield captured
