"""What generation needs of a model, a tokenizer and a streamer; and how its parts meet.

# B rows at first, b rows now, n tokens of a step
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tigon.layers import RotaryEmbedding, StaticCache
from tigon.layers.collectives import Ranks


class Model(Protocol):
    config: Any
    generation_config: Any  # a dict, or an object with to_dict()

    @property
    def device(self) -> torch.device: ...

    @property
    def turning_rope(self) -> RotaryEmbedding | None: ...

    @property
    def together(self) -> tuple[Ranks, ...]: ...

    @property
    def cache_restart(self) -> int | None: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def static_cache(
        self, rows: int, capacity: int, *, chunk: int = 16, quantize: Literal["int8"] | None = None
    ) -> StaticCache: ...

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any: ...


class Decodes(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


@runtime_checkable
class Streamer(Protocol):
    """transformers' streamers: the prompt, then the new tokens of each step, then the end."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class Steps(Protocol):
    """The work on the device, a step at a time; it never waits for the values of tokens."""

    can_remove_rows: bool

    def __call__(self, remaining: int) -> Tensor:
        """The next tokens [b, n], ABSENT where a row has fewer; `remaining` calls at most."""
        ...

    def select(self, index: Tensor) -> None:
        """Keep these of the b rows."""
        ...
