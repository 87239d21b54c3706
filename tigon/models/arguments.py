"""The keywords of a forward pass, declared once for everything that takes them.

# B batch, T tokens, C model dim, V vocab
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, get_args

from torch import Tensor

from tigon.kernels.loss.terms import LossTerm
from tigon.layers import Cache
from tigon.utils.config import suggest

Reduction = Literal["token", "sequence", "sum", "none"]
Keep = int | Tensor  # what logits_to_keep may be
F = TypeVar("F", bound=Callable[..., Any])


class BatchArguments(TypedDict, total=False):
    """What `Batch.of` takes beside `input_ids` [B, T]."""

    attention_mask: Tensor | None  # [B, cached + T], 0 on padding
    position_ids: Tensor | None  # [B or 1, T]; a restart begins a packed sequence
    inputs_embeds: Tensor | None  # [B, T, C], in place of input_ids
    cu_seq_lens: Tensor | None  # [sequences + 1], over the flattened batch
    past_key_values: Cache | None
    use_cache: bool | None
    cu_seq_lens_q: Tensor | None  # transformers' names for the same boundaries
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None  # at least the longest sequence of cu_seq_lens
    max_length_k: int | None
    prefixes: Tensor | None  # int [sequences, 2], on the host: tokens that each goes on from
    dropout_keys: Tensor | None  # int64 [B, T], random bits that an adapter's dropout is drawn from


class LossArguments(TypedDict, total=False):
    """What a loss over labels is made with."""

    loss_weights: Tensor | None  # [B, T], shifted with the labels
    loss_reduction: Reduction | None
    num_items_in_batch: float | Tensor | None
    logits_to_keep: Keep | None
    label_smoothing: float | None
    z_loss: float | None  # its factor (PaLM, arXiv 2204.02311)
    class_weights: Tensor | None  # [V], by target; the denominator does not count them


class TargetArguments(LossArguments, total=False):
    """What `Targets.of` takes beside the batch."""

    labels: Tensor | None  # [B, T], unshifted, -100 ignored
    shift_labels: Tensor | None  # [B, T], already shifted


class OutputArguments(TypedDict, total=False):
    """What comes out."""

    return_logits: bool | None
    logits_at: Tensor | None  # int [n] into the flattened batch, or bool [B, T]: see `forward`
    logits_bytes: int | None  # of logits that exist at a time; None: the head's own
    return_hidden: bool | None  # the last hidden states of all positions, as a teacher's are needed
    metrics: Sequence[str] | str | None
    criteria: Sequence[LossTerm] | None


class ItemArguments(BatchArguments, LossArguments, OutputArguments, total=False):
    """What `num_items` takes beside tokens and labels."""


class PassArguments(BatchArguments, TargetArguments, OutputArguments, total=False):
    """What `forward` takes beside tokens."""


@dataclass
class Defaults:
    """Forward arguments to use when a call does not give them; set on `model.defaults`."""

    logits_to_keep: Keep = 0
    return_logits: bool | None = None
    metrics: Sequence[str] | str = ()
    loss_reduction: Reduction = "token"


BATCH, TARGETS, PASS = (
    frozenset(arguments.__annotations__)
    for arguments in (BatchArguments, TargetArguments, PassArguments)
)


TRANSFORMERS = {
    "attn_implementation": "attention",
    "cache": "past_key_values",  # from 5.24 on
    "device_map": "device",
    "device_mesh": "mesh",
    "torch_dtype": "dtype",
    "tp_plan": "mesh",
}


def check_keywords(function: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """TypeError, as Python's own, for a keyword that is not known."""
    if known.issuperset(given):
        return
    name = next(name for name in given if name not in known)
    message = f"{function}() got an unexpected keyword argument {name!r}"
    here = TRANSFORMERS.get(name)
    hint = f"here: {here!r}" if here in known else suggest(name, known, 0.8)
    raise TypeError("; ".join(filter(None, (message, hint))))


def among(names: frozenset[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given keywords that are named."""
    return {name: value for name, value in given.items() if name in names}


def spelled_out(function: F) -> F:
    """Lists the keywords of `**given: Unpack[...]` in the signature, for help() and callers that
    inspect it."""
    signature = inspect.signature(function)
    *named, rest = signature.parameters.values()
    (arguments,) = get_args(rest.annotation)
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in arguments.__annotations__.items()
    ]
    signature = signature.replace(parameters=[*named, *keywords])
    setattr(function, "__signature__", signature)  # noqa: B010
    return function
