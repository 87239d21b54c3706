"""AdamW and SGD, with weights and states in float32, bfloat16 or 8 bits, on the device or the host.

# R rows, C columns of a rank's part of a parameter as a matrix
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from tigon.kernels.norm.grad_norm import SquaredNorm
from tigon.kernels.optim.adamw import AdamWSettings, AdamWSlot, FusedAdamW
from tigon.kernels.optim.low_bits import CodeTables
from tigon.kernels.runtime import runs_triton
from tigon.models import CausalLM
from tigon.settings.config import Config
from tigon.train.distributed import local
from tigon.train.optim.groups import parameter_groups
from tigon.train.optim.low_precision import (
    MIN_BLOCK,
    States,
    block_size,
    read_state,
    round_stochastically,
    stream_seed,
    tables,
    write_state,
)
from tigon.train.optim.offload import HostMemory
from tigon.train.optim.positions import PositionRun, positions, runs_of
from tigon.utils.memory import split_by_size
from tigon.utils.random import random_bits, take_16_bits
from tigon.weights import local_rows

DTYPES = (torch.float32, torch.bfloat16)  # weights and gradients that the fused kernel updates
MOMENTS = ("exp_avg", "exp_avg_sq")
EIGHT_BIT_MOMENTS = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale", "exp_avg_sq_scale")
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
SIZE = 1 << 22  # elements updated at a time, which bounds the memory of their float32 copies
ROWS = 64  # slices have a multiple of these: a CPU's vectors then begin as in the whole matrix

# Takes a group's settings, weights, gradients, states by name, and for each weight the steps before
# this one; updates weights and states, all float32, in place
UpdateRule: TypeAlias = Callable[
    [dict[str, Any], list[Tensor], list[Tensor], Mapping[str, list[Tensor]], list[Tensor]], None
]


def as_matrix(tensor: Tensor) -> Tensor:
    """Returns a view of [..., C] as [R, C]; of a vector as [R, 1]."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(-1, 1)


def update_adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Mapping[str, list[Tensor]],
    steps: list[Tensor],
) -> None:
    """Updates weights and states by AdamW in float32, in plain torch: the definition."""
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    settings |= zip(("beta1", "beta2"), group["betas"], strict=True)
    m, v = states["exp_avg"], states["exp_avg_sq"]
    options: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False}
    torch_adamw(weights, gradients, m, v, [], steps, **options, **settings)


def update_sgd(
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Mapping[str, list[Tensor]],
    steps: list[Tensor],
) -> None:
    """Updates weights and momentum by SGD in float32, in plain torch: the definition."""
    settings = {name: group[name] for name in ("lr", "weight_decay", "momentum", "nesterov")}
    # torch begins with the gradient, and so does a momentum of zeros
    momenta = [*states.get("momentum_buffer", [None] * len(weights))]
    options: dict[str, Any] = {"fused": True, "dampening": 0.0, "maximize": False}
    torch_sgd(weights, gradients, momenta, **options, **settings)


class UpdateSlice(NamedTuple):
    """Holds rows of a parameter that the definition updates at once."""

    weight: Tensor  # [R, C]
    gradient: Tensor  # [R, C]
    states: States  # [R, ...]
    runs: Sequence[PositionRun]  # of the parameter
    first: int  # of its elements, among those that this rank has of the parameter
    step: int  # from 1
    copied: int  # elements that are copied to float32


class LowPrecisionOptimizer(Optimizer):
    """torch's fused AdamW or SGD, equal to it in every bit where weights and states are float32.

    AdamW with states on a GPU is one kernel over all parameters, whose values may differ by the
    rounding of float32; the definition, which runs elsewhere, is the rule in plain torch. What is
    not float32 on the device is read into float32, updated and written back, SIZE elements at a
    time. All tensors are plain ones with a rank's rows: an operation on DTensors would take Python
    longer than a GPU.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        state_names: Sequence[str],
        defaults: dict[str, Any],
        *,
        dtype_of: Callable[[Tensor], torch.dtype],
        runs: Mapping[Tensor, Sequence[PositionRun]],
        seed: int,
        stochastic: bool,
        memory: HostMemory,
    ) -> None:
        """`defaults` has the rule's settings for groups that lack them, `dtype_of` a parameter's
        dtype of states (uint8: 8 bits with scales), `runs` the positions of this rank's elements;
        `stochastic` selects the rounding of bfloat16 weights, else to nearest."""
        self.rule, self.state_names, self.runs, self.seed = rule, state_names, runs, seed
        self.dtype_of, self.stochastic, self.memory = dtype_of, stochastic, memory
        self.has_kernel = rule is update_adamw and not memory.on_host
        self.squares = SquaredNorm()  # of the gradients whose update is the kernel's
        super().__init__(groups, defaults)

    @cached_property
    def kernel(self) -> FusedAdamW:
        """The fused kernel with its tables of codes, made at the first use."""
        codes = CodeTables.build(*(tables(signed, self.memory.device) for signed in (True, False)))
        return FusedAdamW(self.stochastic, codes)

    def uses_kernel(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether the kernel, unless it is turned off, updates all of these."""
        return self.has_kernel and all(map(_fits_kernel, parameters))

    def is_copied(self, parameter: Tensor) -> bool:
        """Returns whether the definition updates copies of a parameter or its states."""
        is_float32 = parameter.dtype == self.dtype_of(parameter) == torch.float32
        return self.memory.on_host or not is_float32

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: None = None, *, scale: Tensor | None = None
    ) -> None:
        """Updates all parameters that have gradients, which `scale` multiplies if it is given."""
        parts = [(i, group["params"]) for i, group in enumerate(self.param_groups)]
        self.update(parts, scale=scale)

    @torch.no_grad()
    def update(
        self,
        parts: Iterable[tuple[int, Sequence[Tensor]]],
        name: object = None,
        scale: Tensor | None = None,
        squares: list[Tensor] | None = None,
    ) -> None:
        """Updates the parameters that have a gradient, and leaves the gradient.

        `parts` has parameters with the index of their group. `name` identifies this set of
        parameters, so that the kernel reuses its tables. `scale` multiplies gradients, on the
        device. To `squares`, if it is given, sums of the squares of those gradients are appended
        that the kernel uses: it reads them anyway.
        """
        buckets = []
        for i, parameters in parts:
            group = self.param_groups[i]
            parameters = [p for p in parameters if p.grad is not None]
            self._count_step(parameters)
            # Fused updates do not: a backward pass that needs the weights as they were raises
            torch.autograd.graph.increment_version([local(p) for p in parameters])
            parameters = [p for p in parameters if local(p).numel()]
            by_kernel = [p for p in parameters if self.has_kernel and _fits_kernel(p)]
            self._launch((name, i), group, by_kernel, scale, squares)
            if len(by_kernel) == len(parameters):
                continue
            rest = [p for p in parameters if not (self.has_kernel and _fits_kernel(p))]
            if scale is not None:
                torch._foreach_mul_([local(p.grad) for p in rest if p.grad is not None], scale)
            slices = (part for p in rest for part in self._slices(p))
            lists = split_by_size(slices, lambda part: part.copied, SIZE)
            buckets += [(group, bucket) for bucket in lists]
        self.memory.visit(
            [[t for part in bucket for t in part.states.values()] for _, bucket in buckets],
            lambda i, states: self._update(*buckets[i], iter(states)),
        )

    @torch.no_grad()
    def launch_first_update(self, scale: Tensor | None) -> None:
        """Launches the kernel as the first step does, for parameters on which FakeTensorMode is:
        they have no values, and so their steps cannot be counted."""
        for i, group in enumerate(self.param_groups):
            parameters = [p for p in group["params"] if p.grad is not None]
            if self.uses_kernel(parameters):
                self.state.update({p: self._zeros(p) | {"step": 1} for p in parameters})
                self._launch((None, i), group, parameters, scale, None)

    def undo_step(self, parameters: Sequence[Tensor]) -> None:
        """Uncounts the last step of parameters, which a scale of NaN left unchanged."""
        if parameters:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], -1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the dtypes of states; ValueError if names, dtypes or shapes differ."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        loaded = {}
        for p, number in zip(parameters, numbers, strict=False):  # torch compares the lengths
            if (source := state_dict["state"].get(number)) is None:
                continue
            loaded[p] = states = self._zeros(p)
            found, expected = (
                {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
                for tensors in (source, states)
            )
            if found != expected:
                raise ValueError(f"states {found} are not those of this optimizer: {expected}")
            for name, state in states.items():
                state.copy_(source[name])
        super().load_state_dict(state_dict)
        self.state.update(loaded)

    def _count_step(self, parameters: Sequence[Tensor]) -> None:
        """Counts a step of each parameter; makes states of zeros before the first."""
        for p in parameters:
            if not (state := self.state[p]):
                state |= self._zeros(p)
        if parameters:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1.0)

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns the states of a parameter before its first step."""
        shape, dtype = local(parameter).shape, self.dtype_of(parameter)
        states = {"step": torch.zeros((), device="cpu")}
        for kind in self.state_names:
            if dtype == torch.uint8:
                blocks = *shape[:-1], shape[-1] // block_size(shape[-1])
                states[f"{kind}_codes"] = self.memory.zeros(shape, dtype)
                states[f"{kind}_scale"] = self.memory.zeros(blocks, torch.float32)
            else:
                states[kind] = self.memory.zeros(shape, dtype)
        return states

    def _launch(
        self,
        name: object,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        scale: Tensor | None,
        squares: list[Tensor] | None,
    ) -> None:
        """Updates parameters by the kernel: one launch for those with the same count of steps."""
        by_step: dict[int, list[AdamWSlot]] = {}
        for p in parameters:
            by_step.setdefault(int(self.state[p]["step"]), []).extend(self._slots(p))
        for number, (step, slots) in enumerate(by_step.items()):
            settings = AdamWSettings(
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                stream=stream_seed(self.seed, step),
            )
            self.kernel((name, number), slots, settings, scale, squares)

    def _slots(self, parameter: Tensor) -> Iterator[AdamWSlot]:
        """Yields a parameter's tensors as the kernel takes them: one position and pitch a slot."""
        state, runs = self.state[parameter], self.runs[parameter]
        assert parameter.grad is not None
        moments = [state[name] for name in (MOMENTS if "exp_avg" in state else EIGHT_BIT_MOMENTS)]
        tensors = [local(parameter), local(parameter.grad).contiguous(), *moments]
        rounded = moments[0].dtype, parameter.dtype if self.stochastic else None
        if torch.bfloat16 not in rounded:
            yield AdamWSlot(*tensors)
        elif len(runs) == 1:
            yield AdamWSlot(*tensors)._replace(position=runs[0].position, lines=runs[0].lines)
        else:
            for run in runs:
                parts = []
                for tensor in tensors:
                    block = tensors[0].numel() // tensor.numel()  # elements that share a scale
                    parts.append(tensor.view(-1).narrow(0, run.first // block, run.length // block))
                yield AdamWSlot(*parts)._replace(position=run.position, lines=run.lines)

    def _slices(self, parameter: Tensor) -> Iterator[UpdateSlice]:
        """Yields a parameter whole if it is updated in place, else SIZE elements at a time."""
        assert parameter.grad is not None
        weight, gradient = local(parameter), local(parameter.grad).contiguous()
        states, runs = dict(self.state[parameter]), self.runs[parameter]
        step = int(states.pop("step"))
        if not self.is_copied(parameter):
            yield UpdateSlice(weight, gradient, states, runs, 0, step, 0)
            return
        weight, gradient = as_matrix(weight), as_matrix(gradient)
        states = {name: as_matrix(tensor) for name, tensor in states.items()}
        columns = weight.shape[1]
        count = max(1, SIZE // columns // ROWS) * ROWS
        for row in range(0, len(weight), count):
            rows = slice(row, row + count)
            part, part_states = weight[rows], {name: t[rows] for name, t in states.items()}
            first, size = row * columns, part.numel()
            yield UpdateSlice(part, gradient[rows], part_states, runs, first, step, size)

    def _update(
        self, group: dict[str, Any], bucket: Sequence[UpdateSlice], states: Iterator[Tensor]
    ) -> None:
        """Updates slices by the definition; `states` yields theirs on the device, in turn."""
        stored = [{name: next(states) for name in part.states} for part in bucket]
        weights = [part.weight.float() for part in bucket]
        gradients = [part.gradient.float() for part in bucket]
        values = {kind: [read_state(s, kind) for s in stored] for kind in self.state_names}
        counts = _step_counters([part.step - 1.0 for part in bucket], weights[0].device)
        self.rule(group, weights, gradients, values, counts)
        for i, part in enumerate(bucket):
            if part.copied:
                new = {kind: values[kind][i] for kind in self.state_names}
                self._write(part._replace(states=stored[i]), weights[i], new)

    def _write(self, part: UpdateSlice, weight: Tensor, values: States) -> None:
        """Writes an updated slice back, rounded to the dtypes of weight and states."""
        drawn = torch.empty(0, device="cpu")
        rounds = self.stochastic and part.weight.dtype == torch.bfloat16
        if rounds or any(state.dtype == torch.bfloat16 for state in part.states.values()):
            end = part.first + weight.numel()
            at = positions(part.runs, part.first, end, weight.device).view_as(weight)
            drawn = random_bits(stream_seed(self.seed, part.step), at)
        for i, (kind, value) in enumerate(values.items(), 1):
            write_state(part.states, kind, value, drawn, i)
        if rounds:
            weight = round_stochastically(weight, take_16_bits(drawn, 0))
        if weight is not part.weight:
            part.weight.copy_(weight)


def _step_counters(counts: Sequence[float], device: torch.device) -> list[Tensor]:
    """Returns each count as a separate float32 scalar, which a fused kernel increments."""
    if len(set(counts)) == 1:  # one kernel makes all
        return [*torch.full((len(counts),), counts[0], device=device).unbind()]
    return [torch.full((), count, device=device) for count in counts]


def _fits_kernel(parameter: Tensor) -> bool:
    """Returns whether the fused kernel takes the parameter with its gradient on its device."""
    own = local(parameter)
    return (
        runs_triton(own)
        and own.dtype in DTYPES
        and own.is_contiguous()
        and not own.is_meta
        and (parameter.grad is None or local(parameter.grad).dtype in DTYPES)
    )


def adamw(model: CausalLM, config: Config, states: str) -> Optimizer:
    """Builds AdamW with such states; ValueError if ranks divide columns within a block."""
    blocks = blocks_of(model) if states == "8bit" else {}

    def dtype_of(parameter: Tensor) -> torch.dtype:
        # Vectors and short blocks stay in float32
        columns = parameter.shape[-1] if parameter.dim() > 1 else 0
        if states == "8bit" and blocks.get(parameter, block_size(columns)) < MIN_BLOCK:
            return torch.float32
        return STATE_DTYPES[states]

    betas = config.beta1, config.beta2
    return _build(model, config, update_adamw, MOMENTS, dtype_of, betas=betas, eps=config.eps)


def blocks_of(model: CausalLM) -> dict[Tensor, int]:
    """Returns the columns of a block of 8-bit states for tensor-parallel parameters."""
    blocks: dict[Tensor, int] = {}
    for name, p in model.named_parameters():
        spec = model.shard_specs.get(name)
        if spec is None or p.dim() < 2:
            continue
        columns = spec.shape[-1]
        blocks[p] = block = block_size(columns)
        if spec.dim != p.dim() - 1 or block < MIN_BLOCK:
            continue
        for rows, _ in spec.pieces if p.requires_grad else ():
            if rows.source % block or block_size(rows.length) != block:
                raise ValueError(
                    f"optimizer=adamw_8bit keeps states of {name} in blocks of {block} columns, "
                    f"and this rank has the {rows.length} of {columns} from {rows.source} on: give "
                    "another parallel.tensor, or optimizer=adamw_bf16"
                )
    return blocks


def sgd(model: CausalLM, config: Config) -> Optimizer:
    """Builds SGD, with a momentum in float32 if the settings have one."""
    names = ("momentum_buffer",) if config.momentum else ()
    settings = {"momentum": config.momentum or 0.0, "nesterov": bool(config.nesterov)}
    return _build(model, config, update_sgd, names, lambda _: torch.float32, **settings)


def _build(
    model: CausalLM,
    config: Config,
    rule: UpdateRule,
    state_names: Sequence[str],
    dtype_of: Callable[[Tensor], torch.dtype],
    **defaults: Any,
) -> Optimizer:
    """Returns an optimizer of the trained parameters by `rule`, with the positions of this rank's
    elements in the whole model; `defaults` are the rule's settings."""
    runs: dict[Tensor, tuple[PositionRun, ...]] = {}
    count = 0
    for name, p in model.named_parameters():
        own, row = local_rows(name, p)
        spec = model.shard_specs.get(name)
        # Parameters that tensor-parallel ranks replicate are rounded equally on all of them
        runs[p] = runs_of(spec, row * math.prod(p.shape[1:]), own.numel(), count)
        count += p.numel() if spec is None else math.prod(spec.shape)
    return LowPrecisionOptimizer(
        parameter_groups(model, config),
        rule,
        state_names,
        {"lr": config.lr, "weight_decay": 0.0, **defaults},
        dtype_of=dtype_of,
        runs=runs,
        seed=config.seed,
        stochastic=config.stochastic_rounding,
        memory=HostMemory(next(model.parameters()).device, config.optimizer_offload),
    )
