"""The keyword arguments of a forward pass, declared once for all functions that take them.

# B batch, T tokens, C model dim, V vocab
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, get_args

from torch import Tensor

from tigon.kernels.loss.terms import LossTerm
from tigon.layers import Cache

Reduction = Literal["token", "sequence", "sum", "none"]
Keep = int | Tensor  # the type of logits_to_keep
F = TypeVar("F", bound=Callable[..., Any])


class BatchArguments(TypedDict, total=False):
    """Arguments of `Batch.of` beside `input_ids` [B, T]."""

    attention_mask: Tensor | None  # [B, cached + T], 0 on padding
    position_ids: Tensor | None  # [B or 1, T]; a packed sequence begins where they restart
    inputs_embeds: Tensor | None  # [B, T, C], in place of input_ids
    cu_seq_lens: Tensor | None  # [sequences + 1], over the flattened batch
    past_key_values: Cache | None
    use_cache: bool | None
    cu_seq_lens_q: Tensor | None  # transformers' names for the same boundaries
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None  # at least the longest sequence of cu_seq_lens
    max_length_k: int | None
    prefixes: Tensor | None  # int [sequences, 2], on the host: the tokens that each continues
    dropout_keys: Tensor | None  # int64 [B, T], random seeds of an adapter's dropout


class LossArguments(TypedDict, total=False):
    """Options of a loss over labels."""

    loss_weights: Tensor | None  # [B, T], shifted with the labels
    loss_reduction: Reduction | None
    num_items_in_batch: float | Tensor | None
    logits_to_keep: Keep | None
    label_smoothing: float | None
    z_loss: float | None  # coefficient (PaLM, arXiv 2204.02311)
    class_weights: Tensor | None  # [V], by target; the denominator does not count them


class TargetArguments(LossArguments, total=False):
    """Arguments of `Targets.of` beside the batch."""

    labels: Tensor | None  # [B, T], unshifted, -100 ignored
    shift_labels: Tensor | None  # [B, T], already shifted


class OutputArguments(TypedDict, total=False):
    """Arguments that choose the outputs."""

    return_logits: bool | None
    logits_at: Tensor | None  # int [n] into the flattened batch, or bool [B, T]: see `forward`
    logits_bytes: int | None  # limit of logits in memory at a time; None: the head's default
    return_hidden: bool | None  # last hidden states of all positions, such as a teacher's
    metrics: Sequence[str] | str | None
    criteria: Sequence[LossTerm] | None


class ItemArguments(BatchArguments, LossArguments, OutputArguments, total=False):
    """Arguments of `num_items` beside tokens and labels."""


class PassArguments(BatchArguments, TargetArguments, OutputArguments, total=False):
    """Arguments of `forward` beside tokens."""


@dataclass
class Defaults:
    """Default values of forward arguments; set them on `model.defaults`."""

    logits_to_keep: Keep = 0
    return_logits: bool | None = None
    metrics: Sequence[str] | str = ()
    loss_reduction: Reduction = "token"


BATCH, TARGETS, PASS = (
    frozenset(arguments.__annotations__)
    for arguments in (BatchArguments, TargetArguments, PassArguments)
)


def select_keys(names: frozenset[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments whose names are in `names`, except those that are None."""
    return {n: value for n, value in arguments.items() if n in names and value is not None}


def expand_kwargs_signature(function: F) -> F:
    """Lists the keywords of `**kwargs: Unpack[...]` in the function's signature, for help()."""
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
