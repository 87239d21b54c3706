"""Each layer of Tigon beside that of transformers, on the same inputs.

# B batch, T tokens, C model dim
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.models import CausalLM

LAYER_TOLERANCE = 1e-5  # of a token's largest value, fp32


@dataclass(frozen=True)
class LayerError:
    """How far a layer's output is from transformers', of the token where it is farthest."""

    name: str  # as in checkpoints, without "model."
    error: float  # largest difference of a token's values, as a share of its largest value
    allowed: float = LAYER_TOLERANCE

    @property
    def departs(self) -> bool:
        """Returns whether it is more than rounding."""
        return not self.error <= self.allowed


@torch.no_grad()
def compare_layers(ours: CausalLM, reference: Any, ids: Tensor) -> list[LayerError]:
    """Compares embedding, layers, last norm and head, in order, on ids [B, T]; both models are in
    fp32 and evaluation mode.

    Each layer reads what transformers' layer has read, so that an error stays where it is made.
    Raises ValueError for a model of transformers without a list of layers.
    """
    candidates = (reference.get_decoder(), getattr(reference, "model", None))
    decoder = next((d for d in candidates if hasattr(d, "layers")), None)
    if decoder is None:
        raise ValueError(f"{type(reference).__name__} has no list of layers to compare with")
    blocks = list(decoder.layers)[: len(ours.model.layers)]
    with _record(blocks) as read, _record([reference.get_output_embeddings()]) as last:
        expected = reference(ids)
    inputs, outputs = [first for first, _ in read], [out for _, out in read]
    (normed, _), *_ = last
    measured: dict[str, Tensor] = {}

    def give_input(i: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if i == 0:
            measured["embed_tokens"] = _stream(*args[:2])
        return (inputs[i].view_as(args[0]), None, *args[2:])

    def take_output(i: int, out: tuple[Any, ...]) -> tuple[Any, ...]:
        measured[f"layers.{i}"] = _stream(*out[:2])
        return (outputs[i].view_as(out[0]), None, *out[2:])

    handles = []
    for i, block in enumerate(ours.model.layers):
        handles.append(block.register_forward_pre_hook(lambda _, args, i=i: give_input(i, args)))
        handles.append(block.register_forward_hook(lambda _, __, out, i=i: take_output(i, out)))
    try:
        out = ours(ids, return_logits=True, return_hidden=True)
    finally:
        for handle in handles:
            handle.remove()
    assert out.hidden is not None and out.logits is not None
    measured |= {"norm": out.hidden, "lm_head": out.logits}
    theirs = [inputs[0], *outputs, normed, expected.logits]
    pairs = zip(measured.items(), theirs, strict=True)
    return [LayerError(name, _error(x, y.view_as(x))) for (name, x), y in pairs]


def report_layers(errors: Sequence[LayerError]) -> str:
    """Formats the errors as a table, and names the first layer that departs."""
    lines = [f"{'layer, on equal inputs':<24}{'measured':>12}{'allowed':>12}"]
    lines += [f"{e.name:<24}{e.error:>12.3g}{e.allowed:>12.3g}" for e in errors]
    first = next((e for e in errors if e.departs), None)
    if first is None:
        return "\n".join([*lines, "no layer departs from transformers"])
    verdict = f"{first.name} is the first to depart, by {first.error:.3g} of its largest value"
    return "\n".join([*lines, verdict])


@contextmanager
def _record(modules: list[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Records first input and first output of each call of the modules, in their order."""
    calls: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        first = args[0] if args else kwargs["hidden_states"]
        calls.append((first, out[0] if isinstance(out, tuple) else out))

    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _stream(x: Tensor, residual: Tensor | None) -> Tensor:
    """Returns the residual stream between two blocks, of which a branch may not be added yet."""
    return x if residual is None else residual + x


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference of a token, as a share of its largest value: single tokens
    have values that are thousands of times larger than the others'."""
    differences = (ours.float() - theirs.float()).abs().amax(-1)
    return (differences / theirs.abs().amax(-1).clamp(min=1e-30)).max().item()
