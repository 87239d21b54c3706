"""The interfaces of generation (model, tokenizer, streamer), and the checked prompt.

# B rows, T prompt tokens
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from tigon.distributed.collectives import Ranks
from tigon.layers import KVCache, RotaryEmbedding, StaticCache


class GenerationModel(Protocol):
    """The parts of a model that generation calls."""

    config: Any
    generation_config: Any  # a dict, or an object with to_dict()

    @property
    def device(self) -> torch.device: ...

    @property
    def dynamic_rope(self) -> RotaryEmbedding | None:
        """Returns the RoPE whose frequencies change first as a text grows; None if none do."""

    @property
    def communication_groups(self) -> tuple[Ranks, ...]:
        """Returns the groups whose ranks all make the same calls of the model."""

    @property
    def cache_restart(self) -> int | None:
        """Returns the length at which the text is read again into a new cache; None for never."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def static_cache(
        self,
        rows: int,
        capacity: int,
        *,
        chunk: int = 16,
        quantize: Literal["int8"] | None = None,
        rollback: int = 0,
    ) -> StaticCache:
        """Returns an empty cache of `capacity` tokens a row; ValueError if it does not fit."""

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any: ...


class DecodingTokenizer(Protocol):
    """The part of a tokenizer that generation calls."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of the tokens."""


@runtime_checkable
class Streamer(Protocol):
    """transformers' streamers: the prompt, then the new tokens of each step, then the end."""

    def put(self, value: Tensor) -> None:
        """Takes the prompts [B, T], and then the new tokens [B] of each step, on the CPU."""

    def end(self) -> None:
        """Ends the stream, after the last tokens."""


class PromptBatch(NamedTuple):
    """The prompts of a call on the model's device, padded on the left."""

    ids: Tensor  # [B, T]
    mask: Tensor | None  # [B, T], True on real tokens; None: all are

    def lengths(self) -> list[int]:
        """Returns the number of real tokens of each row; the host waits for it."""
        b, t = self.ids.shape
        return [t] * b if self.mask is None else self.mask.sum(1).tolist()

    def repeat(self, n: int) -> Self:
        """Returns prompts with n copies of each row, next to each other."""
        if n == 1:
            return self
        mask = None if self.mask is None else self.mask.repeat_interleave(n, 0)
        return self._replace(ids=self.ids.repeat_interleave(n, 0), mask=mask)

    def unpadded(self) -> list[Tensor]:
        """Returns the real tokens of each row."""
        if self.mask is None:
            return list(self.ids)
        return [ids[real] for ids, real in zip(self.ids, self.mask, strict=True)]


def check_prompt(
    model: GenerationModel, ids: Tensor, mask: Tensor | None, pad: int | None, eos: Collection[int]
) -> PromptBatch:
    """Returns the checked prompt on the model's device, with a mask if there is padding.

    Without a mask, pad tokens are padding unless they are eos tokens too, as in transformers.
    Raises TypeError or ValueError for what is no prompt, and for a model that scores sequences.
    """
    if getattr(model.config, "labels", 0):
        raise ValueError(f"this {type(model).__name__} scores sequences and cannot write any")
    _check_ids(ids, model.config.vocab_size)
    source = "attention_mask"
    if mask is None and pad is not None and pad not in eos:
        mask, source = ids != pad, f"input_ids (pad_token_id={pad}, no attention_mask)"
    if mask is not None:
        mask = _check_mask(mask, ids, source).to(device=model.device, dtype=torch.bool)
        if mask.all():
            mask = None
    return PromptBatch(ids.to(device=model.device, dtype=torch.long), mask)


def check_past(cache: Any, prompt: PromptBatch) -> list[int]:
    """Returns the number of cached tokens of each row; raises if they do not fit the prompts."""
    if not isinstance(cache, KVCache | StaticCache):
        raise TypeError(
            f"past_key_values is a {type(cache).__name__}: give a tigon.layers.KVCache, or what "
            "model.static_cache returns"
        )
    if isinstance(cache, StaticCache):
        cache.refresh()
        cached, lengths = cache.lengths.tolist(), prompt.lengths()
    else:  # padding included
        cached = [cache.length] * (cache.rows if cache.length else len(prompt.ids))
        lengths = [prompt.ids.shape[1]] * len(prompt.ids)
    if len(cached) != len(lengths):
        raise ValueError(f"past_key_values holds {len(cached)} rows, but input_ids {len(lengths)}")
    for row, (before, now) in enumerate(zip(cached, lengths, strict=True)):
        if now <= before:
            raise ValueError(
                f"row {row}: past_key_values holds {before} tokens and input_ids has {now}: give "
                "the whole text, which begins with those, and at least one token more"
            )
    return cached


def _check_ids(ids: Any, vocab: int) -> None:
    """Raises TypeError or ValueError for ids that are no prompt [B, T] of the vocabulary.

    Ids on a GPU are not compared to the vocabulary.
    """
    if isinstance(ids, Mapping):
        raise TypeError(
            f"input_ids is a {type(ids).__name__}: give its parts, as in generate(**encoding)"
        )
    if not isinstance(ids, Tensor):
        raise TypeError(f"input_ids must be a tensor [B, T], not {type(ids).__name__}")
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        one = ": give ids[None] for one prompt" if ids.dim() == 1 else ""
        raise ValueError(
            f"input_ids must be integers [B, T], not {ids.dtype} {tuple(ids.shape)}{one}"
        )
    if ids.numel() == 0:
        raise ValueError(f"input_ids {tuple(ids.shape)} is an empty prompt")
    if ids.device.type == "cpu" and (ids.min() < 0 or ids.max() >= vocab):
        row, column = ((ids < 0) | (ids >= vocab)).nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {column}] is {ids[row, column]}, outside the vocabulary [0, {vocab})"
        )


def _check_mask(mask: Any, ids: Tensor, source: str) -> Tensor:
    """Returns the mask as it is; raises TypeError or ValueError unless it is a tensor with the
    shape of ids whose rows end in a real token. `source` names it in messages."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor [B, T], not {type(mask).__name__}")
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} does not fit input_ids {tuple(ids.shape)}"
        )
    for fine, what in (
        (mask.any(1), "is all padding"),
        (mask[:, -1] != 0, "ends in padding; pad on the left"),
    ):
        if not fine.all():
            raise ValueError(f"row {int(fine.int().argmin())} of {source} {what}")
    return mask
