"""How optimizer states are kept.

R rows, C columns: a rank's part of a parameter as a matrix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tigon.train.optim import eight_bit
from tigon.train.optim.rounding import round_stochastically

States = Mapping[str, Tensor]  # of one parameter, by name
Shape = Sequence[int]


class Format(Protocol):
    """How a state of the name `kind` is kept: as tensors whose names begin with it."""

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]: ...

    def read(self, kept: States, kind: str) -> Tensor:
        """float32 [R, C]"""
        ...

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None: ...


class Float32:
    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {kind: (shape, torch.float32)}

    def read(self, kept: States, kind: str) -> Tensor:
        return kept[kind]

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        """Nothing to do: what was read is what is kept."""


class BFloat16:
    """With stochastic rounding: exp_avg_sq changes by a share of 1 - beta2, which is less than
    half the spacing of bfloat16 where beta2 is above 0.998."""

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {kind: (shape, torch.bfloat16)}

    def read(self, kept: States, kind: str) -> Tensor:
        return kept[kind].float()

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        assert bits is not None
        kept[kind].copy_(round_stochastically(value, bits))


@dataclass(frozen=True)
class EightBit:
    signed: bool

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        blocks = (*shape[:-1], shape[-1] // eight_bit.block_size(shape[-1]))
        return {f"{kind}_codes": (shape, torch.uint8), f"{kind}_scale": (blocks, torch.float32)}

    def read(self, kept: States, kind: str) -> Tensor:
        return eight_bit.dequantize(kept[f"{kind}_codes"], kept[f"{kind}_scale"], self.signed)

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        codes, scale = eight_bit.quantize(value, self.signed)
        kept[f"{kind}_codes"].copy_(codes)
        kept[f"{kind}_scale"].copy_(scale)


def zeros(
    formats: Mapping[str, Format], shape: Shape, make: Callable[[Shape, torch.dtype], Tensor]
) -> dict[str, Tensor]:
    """The states of a parameter before its first step."""
    states = {"step": torch.zeros(())}
    for kind, form in formats.items():
        states |= {name: make(*how) for name, how in form.tensors(kind, shape).items()}
    return states


def filled(states: dict[str, Tensor], given: States) -> dict[str, Tensor]:
    """With the given numbers. ValueError unless they are of the same names, dtypes and shapes."""
    found, expected = (
        {name: (tuple(t.shape), t.dtype) for name, t in of.items()} for of in (given, states)
    )
    if found != expected:
        raise ValueError(f"states {found} are not those of this optimizer: {expected}")
    for name, state in states.items():
        state.copy_(given[name])
    return states


def states_of(
    groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, States]]:
    """Each parameter of an optimizer's groups that has states in a `state_dict`, and these.

    That there are as many of both is for the caller to check.
    """
    parameters = [p for group in groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=False):
        if number in state_dict["state"]:
            yield parameter, state_dict["state"][number]


def as_matrix(tensor: Tensor) -> Tensor:
    """[..., C] as [R, C]; a vector has rows of one element."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(-1, 1)
