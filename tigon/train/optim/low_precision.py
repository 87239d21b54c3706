"""AdamW and SGD in float32, with weights and states that are kept in fewer bits or on the host.

R rows, C columns: a rank's part of a parameter as a matrix.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.train.config import Config
from tigon.train.distributed import local
from tigon.train.optim import eight_bit, formats
from tigon.train.optim.formats import BFloat16, EightBit, Float32, Format, States, as_matrix
from tigon.train.optim.fused import Fused, runs_fused
from tigon.train.optim.groups import parameter_groups
from tigon.train.optim.offload import Memory
from tigon.train.optim.positions import Run, positions, runs_of
from tigon.train.optim.rounding import draws, round_stochastically
from tigon.train.optim.rules import SGD, AdamW, Rule
from tigon.utils.random import take_16_bits
from tigon.weights import Cut, own_rows

SIZE = 1 << 22  # elements updated at a time, which bounds the memory of their float32 copies
ROWS = 64  # pieces have a multiple of these: a CPU's vectors then begin where they would in a whole


class Piece(NamedTuple):
    """Rows of a parameter that are updated at once."""

    weight: Tensor  # [R, C]
    gradient: Tensor  # [R, C]
    formats: Mapping[str, Format]  # of each of the rule's states
    states: States  # [R, ...]
    runs: Sequence[Run]  # of the parameter
    first: int  # of its elements, among those that this rank has of the parameter
    step: int  # from 1


class Stored(Optimizer):
    """torch's fused AdamW or SGD, equal to it in every bit where weights and states are float32.

    AdamW with states on a GPU is one kernel over all parameters (`fused.py`), whose values may
    differ by the rounding of float32. What follows defines it, and runs elsewhere. What is float32
    and on the device is updated in place, all of a group by one call. Of the rest an update takes
    weights, gradients and states of SIZE elements, in float32, and gives back weights and states
    as they are kept. All tensors are plain ones of a rank's own rows: of DTensors, each operation
    would take Python longer than a GPU.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: Rule,
        defaults: dict[str, Any],
        *,
        format_of: Callable[[Tensor, str], Format],
        runs: Mapping[Tensor, Sequence[Run]],
        seed: int,
        stochastic: bool,
        memory: Memory,
    ) -> None:
        """`defaults`: what the rule reads from groups that lack it; `format_of(parameter, state)`;
        `runs`: where in the model the elements are that this rank has of each parameter;
        `stochastic`: rounding of bfloat16 weights, else to nearest."""
        self.rule, self.runs, self.seed = rule, runs, seed
        self.format_of, self.stochastic, self.memory = format_of, stochastic, memory
        self.formats: dict[Tensor, dict[str, Format]] = {}
        self.converted: set[Tensor] = set()  # whose update needs copies of what is kept
        # What the next step multiplies the gradients that are there by, on the device; used once
        self.scale: Tensor | None = None
        may = isinstance(rule, AdamW) and not memory.on_host
        self.fused = Fused(seed, stochastic) if may else None
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in param_group["params"]:
            self.formats[p] = {kind: self.format_of(p, kind) for kind in self.rule.states}
            whole = p.dtype == torch.float32 and not self.memory.on_host
            if not (whole and all(isinstance(f, Float32) for f in self.formats[p].values())):
                self.converted.add(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.scale = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        scale, self.scale = self.scale, None
        parts = [(i, group["params"]) for i, group in enumerate(self.param_groups)]
        self.update(parts, scale=scale)
        return loss

    @torch.no_grad()
    def update(
        self,
        parts: Iterable[tuple[int, Sequence[Tensor]]],
        name: object = None,
        scale: Tensor | None = None,
    ) -> None:
        """A step of those among some parameters that have a gradient, which stays.

        `parts`: parameters by the index of their group. `name`: theirs together, by which the
        kernel knows its tables again. `scale`: what gradients are multiplied by, on the device.
        """
        buckets = []
        for i, parameters in parts:
            group = self.param_groups[i]
            given = [p for p in parameters if p.grad is not None]
            self._count(given)
            # Fused updates do not: a backward pass that needs the weights as they were raises
            torch.autograd.graph.increment_version([local(p) for p in given])
            if self.fused is not None:
                by_kernel = [p for p in given if runs_fused(p)]
                key = name, i
                self.fused.update(key, group, by_kernel, self.state, self.runs, scale)
                if len(by_kernel) == len(given):
                    continue
                given = [p for p in given if not runs_fused(p)]
            if scale is not None and given:
                torch._foreach_mul_([local(p.grad) for p in given if p.grad is not None], scale)
            self._update_whole(group, [p for p in given if p not in self.converted])
            pieces = self._pieces([p for p in given if p in self.converted])
            buckets += [(group, bucket) for bucket in _buckets(pieces)]
        self.memory.visit(
            [[t for piece in bucket for t in piece.states.values()] for _, bucket in buckets],
            lambda i, states: self._update(*buckets[i], iter(states)),
        )

    def take_back(self, parameters: Sequence[Tensor]) -> None:
        """Their last updates, by a scale of NaN, changed nothing: they do not count as steps."""
        if parameters:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], -1.0)

    def _count(self, parameters: Sequence[Tensor]) -> None:
        """One more step of each; before the first, states of zeros."""
        for p in parameters:
            state = self.state[p]
            if not state:
                state |= self._zeros(p)
        if parameters:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1.0)

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        return formats.zeros(self.formats[parameter], local(parameter).shape, self.memory.zeros)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's own gives states the dtypes and the device of their parameters."""
        given = formats.states_of(self.param_groups, state_dict)
        states = {p: formats.filled(self._zeros(p), own) for p, own in given}
        super().load_state_dict(state_dict)
        self.state.update(states)

    def _update_whole(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """In place and by one call, as nothing is converted."""
        here = [(local(p), local(p.grad), self.state[p]) for p in parameters if p.grad is not None]
        here = [one for one in here if one[0].numel()]
        if not here:
            return
        weights = [weight for weight, _, _ in here]
        gradients = [gradient.contiguous() for _, gradient, _ in here]
        values = {kind: [state[kind] for _, _, state in here] for kind in self.rule.states}
        done = (torch.stack([state["step"] for _, _, state in here]) - 1).tolist()
        self.rule(group, weights, gradients, values, _counters(done, weights[0].device))

    def _pieces(self, parameters: Sequence[Tensor]) -> Iterator[Piece]:
        for p in parameters:
            own, state = local(p), self.state[p]
            if not own.numel():
                continue
            assert p.grad is not None
            weight, gradient = as_matrix(own), as_matrix(local(p.grad).contiguous())
            rows = {name: as_matrix(tensor) for name, tensor in state.items() if name != "step"}
            columns = weight.shape[1]
            count = max(1, SIZE // columns // ROWS) * ROWS
            for row in range(0, len(weight), count):
                here = slice(row, row + count)
                yield Piece(
                    weight[here],
                    gradient[here],
                    self.formats[p],
                    {name: tensor[here] for name, tensor in rows.items()},
                    self.runs[p],
                    row * columns,
                    int(state["step"]),
                )

    def _update(
        self, group: dict[str, Any], pieces: Sequence[Piece], states: Iterator[Tensor]
    ) -> None:
        """`states`: those of the pieces in turn, on the device."""
        pieces = [p._replace(states={name: next(states) for name in p.states}) for p in pieces]
        weights = [piece.weight.float() for piece in pieces]
        kinds = self.rule.states
        values = {k: [p.formats[k].read(p.states, k) for p in pieces] for k in kinds}
        gradients = [piece.gradient.float() for piece in pieces]
        steps = _counters([piece.step - 1.0 for piece in pieces], pieces[0].weight.device)
        self.rule(group, weights, gradients, values, steps)
        for i, piece in enumerate(pieces):
            self._write(piece, weights[i], {kind: values[kind][i] for kind in kinds})

    def _write(self, piece: Piece, weight: Tensor, values: States) -> None:
        bits: list[Tensor | None] = [None] * (1 + len(values))
        rounds = self.stochastic and piece.weight.dtype == torch.bfloat16
        if rounds or any(isinstance(form, BFloat16) for form in piece.formats.values()):
            end = piece.first + weight.numel()
            at = positions(piece.runs, piece.first, end, weight.device)
            drawn = draws(self.seed, piece.step, at.view_as(weight))
            bits = [take_16_bits(drawn, i) for i in range(len(bits))]
        of_weight, *of_states = bits
        if rounds:
            assert of_weight is not None
            weight = round_stochastically(weight, of_weight)
        if weight is not piece.weight:
            piece.weight.copy_(weight)
        for (kind, value), own in zip(values.items(), of_states, strict=True):
            piece.formats[kind].write(piece.states, kind, value, own)


def adamw(model: CausalLM, config: Config, states: str) -> Optimizer:
    """With states of float32, bfloat16 or 8bit. ValueError where ranks divide columns within a
    block of the last."""
    blocks = blocks_of(model) if states == "8bit" else {}

    def format_of(parameter: Tensor, kind: str) -> Format:
        if states == "bfloat16":
            return BFloat16()
        if states == "8bit" and blocks.get(parameter, _block(parameter)) >= eight_bit.LEAST:
            return EightBit(signed=kind == "exp_avg")
        return Float32()

    betas = (config.beta1, config.beta2)
    return _stored(model, config, AdamW(), format_of, betas=betas, eps=config.eps)


def blocks_of(model: CausalLM) -> dict[Tensor, int]:
    """Columns of a block of states of 8 bits in the whole row, by parameter that ranks of tensor
    parallelism divide. ValueError where they divide a row within a block."""
    found: dict[Tensor, int] = {}
    cuts: Mapping[str, Cut] = getattr(model, "cuts", {})
    for name, p in model.named_parameters():
        cut = cuts.get(name)
        if cut is None or p.dim() < 2:
            continue
        columns = cut.shape[-1]
        found[p] = block = eight_bit.block_size(columns)
        if cut.dim != p.dim() - 1 or block < eight_bit.LEAST:
            continue
        for rows, _ in cut.pieces if p.requires_grad else ():
            if rows.source % block or eight_bit.block_size(rows.length) != block:
                raise ValueError(
                    f"optimizer=adamw_8bit keeps states of {name} in blocks of {block} columns, "
                    f"and this rank has the {rows.length} of {columns} from {rows.source} on: give "
                    "another parallel.tensor, or optimizer=adamw_bf16"
                )
    return found


def _block(parameter: Tensor) -> int:
    """Columns of a block of states of 8 bits; 0 of vectors, whose states are float32."""
    return eight_bit.block_size(parameter.shape[-1]) if parameter.dim() > 1 else 0


def sgd(model: CausalLM, config: Config) -> Optimizer:
    """With a momentum of float32."""
    momentum, nesterov = config.momentum or 0.0, bool(config.nesterov)
    return _stored(
        model, config, SGD(momentum), lambda *_: Float32(), momentum=momentum, nesterov=nesterov
    )


def state_bytes(states: str) -> float:
    """Of AdamW, for each element of a matrix."""
    return {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 * (1 + 4 / eight_bit.BLOCK)}[states]


def _stored(
    model: CausalLM,
    config: Config,
    rule: Rule,
    format_of: Callable[[Tensor, str], Format],
    **defaults: Any,
) -> Optimizer:
    runs: dict[Tensor, tuple[Run, ...]] = {}
    cuts: Mapping[str, Cut] = getattr(model, "cuts", {})
    count = 0
    for name, p in model.named_parameters():
        own, row = own_rows(name, p)
        cut = cuts.get(name)
        # What several ranks of tensor parallelism have is rounded alike on all of them
        runs[p] = runs_of(cut, row * math.prod(p.shape[1:]), own.numel(), count)
        count += p.numel() if cut is None else math.prod(cut.shape)
    return Stored(
        parameter_groups(model, config),
        rule,
        {"lr": config.lr, "weight_decay": 0.0, **defaults},
        format_of=format_of,
        runs=runs,
        seed=config.seed,
        stochastic=config.stochastic_rounding,
        memory=Memory(next(model.parameters()).device, config.optimizer_offload),
    )


def _counters(done: Sequence[float], device: torch.device) -> list[Tensor]:
    """Each in memory of its own, as a fused kernel counts them up."""
    if len(set(done)) == 1:  # one kernel makes all
        return [*torch.full((len(done),), done[0], device=device).unbind()]
    return [torch.full((), count, device=device) for count in done]


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
