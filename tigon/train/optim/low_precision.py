"""AdamW computed in float32, with weights and states that are kept in fewer bits or on the host.

R rows, C columns: a rank's part of a parameter as a matrix.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from tigon.models import CausalLM
from tigon.train.config import Config
from tigon.train.optim import eight_bit
from tigon.train.optim.groups import parameter_groups
from tigon.train.optim.offload import Memory
from tigon.train.optim.rounding import draws, round_stochastically, sixteen
from tigon.weights import own_rows

SIZE = 1 << 22  # elements updated at a time, which bounds the memory of their float32 copies
ROWS = 64  # pieces have a multiple of these: a CPU's vectors then begin where they would in a whole
SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # AdamW's states


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


class Piece(NamedTuple):
    """Rows of a parameter that are updated at once."""

    weight: Tensor  # [R, C]
    gradient: Tensor  # [R, C]
    formats: Mapping[str, Format]  # of each of AdamW's states
    states: States  # [R, ...]
    position: int  # of its first element among all of the model
    step: int  # from 1


class StoredAdamW(Optimizer):
    """torch's fused AdamW, equal to it in every bit where weights and states are float32.

    Each update takes weights, gradients and states of SIZE elements, in float32, and gives back
    weights and states as they are kept. States are plain tensors of a rank's own rows.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        format_of: Callable[[Tensor, str], Format],
        positions: Mapping[Tensor, int],
        seed: int,
        stochastic: bool,
        memory: Memory,
    ) -> None:
        """`format_of(parameter, state)`; `positions`: of each parameter's first element here among
        all of the model; `stochastic`: rounding of bfloat16 weights, else to nearest."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.format_of, self.positions, self.seed = format_of, positions, seed
        self.stochastic, self.memory = stochastic, memory

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        buckets = [
            (group, bucket)
            for group in self.param_groups
            for bucket in _buckets(self._pieces(group["params"]))
        ]
        self.memory.visit(
            [[t for piece in bucket for t in piece.states.values()] for _, bucket in buckets],
            lambda i, states: self._update(*buckets[i], iter(states)),
        )
        return loss

    def _pieces(self, parameters: Sequence[Tensor]) -> Iterator[Piece]:
        for p in parameters:
            if p.grad is None:
                continue
            formats = {kind: self.format_of(p, kind) for kind in SIGNED}
            local, state = _local(p.detach()), self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                for kind, form in formats.items():
                    for name, (shape, dtype) in form.tensors(kind, local.shape).items():
                        state[name] = self.memory.zeros(shape, dtype)
            state["step"] += 1
            if not local.numel():
                continue
            weight, gradient = _rows(local), _rows(_local(p.grad).contiguous())
            rows = {name: _rows(tensor) for name, tensor in state.items() if name != "step"}
            columns = weight.shape[1]
            count = max(1, SIZE // columns // ROWS) * ROWS
            for row in range(0, len(weight), count):
                here = slice(row, row + count)
                yield Piece(
                    weight[here],
                    gradient[here],
                    formats,
                    {name: tensor[here] for name, tensor in rows.items()},
                    self.positions[p] + row * columns,
                    int(state["step"]),
                )

    def _update(
        self, group: dict[str, Any], pieces: Sequence[Piece], states: Iterator[Tensor]
    ) -> None:
        """`states`: those of the pieces in turn, on the device."""
        pieces = [p._replace(states={name: next(states) for name in p.states}) for p in pieces]
        weights = [piece.weight.float() for piece in pieces]
        values = {k: [p.formats[k].read(p.states, k) for p in pieces] for k in SIGNED}
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            [piece.gradient.float() for piece in pieces],
            values["exp_avg"],
            values["exp_avg_sq"],
            [],
            [torch.full((), p.step - 1.0, device=p.weight.device) for p in pieces],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for i, piece in enumerate(pieces):
            self._write(piece, weights[i], {kind: values[kind][i] for kind in SIGNED})

    def _write(self, piece: Piece, weight: Tensor, values: States) -> None:
        bits: list[Tensor | None] = [None] * 3
        rounds = self.stochastic and piece.weight.dtype == torch.bfloat16
        if rounds or any(isinstance(form, BFloat16) for form in piece.formats.values()):
            drawn = draws(self.seed, piece.step, piece.position, weight.numel(), weight.device)
            bits = [sixteen(drawn.view_as(weight), i) for i in range(3)]
        if weight is not piece.weight:
            piece.weight.copy_(round_stochastically(weight, bits[0]) if rounds else weight)
        for (kind, value), own in zip(values.items(), bits[1:], strict=True):
            piece.formats[kind].write(piece.states, kind, value, own)


def build(model: CausalLM, config: Config, states: str) -> Optimizer:
    """AdamW with states of float32, bfloat16 or 8bit."""
    positions: dict[Tensor, int] = {}
    count = 0
    for name, p in model.named_parameters():
        _, first = own_rows(name, p)
        positions[p] = count + first * math.prod(p.shape[1:])
        count += p.numel()
    return StoredAdamW(
        parameter_groups(model, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        format_of=lambda p, kind: _format(states, p, kind),
        positions=positions,
        seed=config.seed,
        stochastic=config.stochastic_rounding,
        memory=Memory(next(model.parameters()).device, config.optimizer_offload),
    )


def state_bytes(states: str) -> float:
    """Of a matrix's element."""
    return {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 * (1 + 4 / eight_bit.BLOCK)}[states]


def _format(states: str, parameter: Tensor, kind: str) -> Format:
    if states == "bfloat16":
        return BFloat16()
    block = eight_bit.block_size(parameter.shape[-1]) if parameter.dim() > 1 else 0
    if states == "8bit" and block >= eight_bit.LEAST:
        return EightBit(SIGNED[kind])
    return Float32()


def _buckets(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Of at most SIZE elements, unless one piece has more."""
    bucket: list[Piece] = []
    size = 0
    for piece in pieces:
        if bucket and size + piece.weight.numel() > SIZE:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.weight.numel()
    if bucket:
        yield bucket


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(tensor: Tensor) -> Tensor:
    """[..., C] as [R, C]; a vector has rows of one element."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(-1, 1)
