"""AdamW and SGD, with weights and states in float32, bfloat16 or 8 bits, on the device or the host.

Weights and states in bfloat16 are rounded stochastically: a value between two neighbors becomes the
upper one with the probability of its distance from the lower one, so that the mean over many steps
is the value. Rounding to nearest would lose updates below half the spacing of bfloat16.

States of 8 bits are a code for each element and a scale for each block: block-wise dynamic
quantization (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022), with the table
of bitsandbytes and torchao. A block lies within a row, so that states do not depend on how ranks
divide the rows. Unlike theirs, a positive second moment never becomes 0: beside a momentum that is
not 0, the next update without a gradient would be divided by eps alone.

# R rows, C columns of a rank's part of a parameter as a matrix, K blocks in a row
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

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
from tigon.train.config import Config
from tigon.train.distributed import local
from tigon.train.optim.groups import parameter_groups
from tigon.train.optim.offload import HostMemory
from tigon.utils.random import GOLDEN, WORD, as_int64, mix, mix_, take_16_bits
from tigon.weights import RowSpan, ShardSpec, local_rows

BLOCK = 256  # elements of a block of 8-bit states, at most
MIN_BLOCK = 32  # with shorter blocks, scales would take as much as they save
MAX_LINE = 1 << 30  # elements of a line of a PositionRun: kernels count within one by 32 bits
DTYPES = (torch.float32, torch.bfloat16)  # weights and gradients that the fused kernel updates
SIZE = 1 << 22  # elements updated at a time, which bounds the memory of their float32 copies
ROWS = 64  # slices have a multiple of these: a CPU's vectors then begin as in the whole matrix

States: TypeAlias = Mapping[str, Tensor]  # of one parameter, by name
Shape: TypeAlias = Sequence[int]


def random_bits(seed: int, step: int, positions: Tensor) -> Tensor:
    """Returns 64 random bits (int64) for each position of an element in the whole model (int64).

    SplitMix64 (Steele, Lea and Flood, 2014), whose n-th output can be had without those before:
    each step of each seed is a stream, and an element's position is its place there. So the bits
    depend neither on how ranks divide the model nor on where a run was interrupted.
    """
    bits = positions * as_int64(GOLDEN)
    return mix_(bits.add_(as_int64((stream_seed(seed, step) + GOLDEN) & WORD)))


def stream_seed(seed: int, step: int) -> int:
    """Returns the seed of a step's stream of random bits, as an int64."""
    return as_int64(mix(mix(seed & WORD) + step))


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Rounds float32 values to bfloat16 by random bits, int32 in 0...65535 of the same shape.

    Values that bfloat16 has stay, NaN and infinities too. The sum of the bits and those below the
    mantissa carries into it; the sign is not part of the sum, so that a carry is away from zero.
    """
    raised = (value.contiguous().view(torch.int32) + bits).bitwise_and_(-1 << 16)
    rounded = raised.view(torch.float32)
    # A NaN's bits may carry into the sign
    return torch.where(value.isnan(), value, rounded).bfloat16()


def block_size(columns: int) -> int:
    """Returns the largest power of two, up to BLOCK, that divides a row."""
    return min(BLOCK, columns & -columns)


def quantize(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Returns codes uint8 [R, C] and scales float32 [R, K] of float32 values [R, C].

    A block's scale is its largest absolute value. Without `signed`, no value is negative.
    """
    blocks = value.view(len(value), -1, block_size(value.shape[1]))
    scale = blocks.abs().amax(-1)
    share = blocks / scale.unsqueeze(-1)
    share = torch.where(scale.unsqueeze(-1) > 0, share, 0.0)
    codes = torch.bucketize(share, tables(signed, value.device)[1], right=True, out_int32=True)
    if not signed:
        codes = torch.where(share > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view_as(value), scale


def dequantize(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Returns float32 values [R, C] from codes [R, C] and scales [R, K]."""
    share = tables(signed, codes.device)[0][codes.int()]
    return (share.view(*scale.shape, -1) * scale.unsqueeze(-1)).view(codes.shape)


@cache
def tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the ascending value of each code [256] and the bounds between them [255], in float32.

    The values are those of a block whose largest is 1: seven decades, each of twice as many values
    as the one below it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        positive = (10 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += positive + [-value for value in positive if signed]
    table = torch.tensor(sorted(values), device=device)
    return table, (table[:-1] + table[1:]) / 2


class StateFormat(Protocol):
    """Stores the state `kind` of a parameter as tensors whose names begin with `kind`."""

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]: ...

    def read(self, kept: States, kind: str) -> Tensor:
        """Returns float32 [R, C]."""
        ...

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None: ...


class Float32:
    """States in float32."""

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {kind: (shape, torch.float32)}

    def read(self, kept: States, kind: str) -> Tensor:
        return kept[kind]

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        """Does nothing: `read` returned the stored tensor itself, which the update changed."""


class BFloat16:
    """States in bfloat16, rounded stochastically."""

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {kind: (shape, torch.bfloat16)}

    def read(self, kept: States, kind: str) -> Tensor:
        return kept[kind].float()

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        assert bits is not None
        kept[kind].copy_(round_stochastically(value, bits))


@dataclass(frozen=True)
class EightBit:
    """States in 8 bits, with a float32 scale for each block of elements."""

    signed: bool

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        blocks = (*shape[:-1], shape[-1] // block_size(shape[-1]))
        return {f"{kind}_codes": (shape, torch.uint8), f"{kind}_scale": (blocks, torch.float32)}

    def read(self, kept: States, kind: str) -> Tensor:
        return dequantize(kept[f"{kind}_codes"], kept[f"{kind}_scale"], self.signed)

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        codes, scale = quantize(value, self.signed)
        kept[f"{kind}_codes"].copy_(codes)
        kept[f"{kind}_scale"].copy_(scale)


def zeros(
    formats: Mapping[str, StateFormat], shape: Shape, make: Callable[[Shape, torch.dtype], Tensor]
) -> dict[str, Tensor]:
    """Returns the states of a parameter before its first step."""
    states = {"step": torch.zeros(())}
    for kind, form in formats.items():
        states |= {name: make(*spec) for name, spec in form.tensors(kind, shape).items()}
    return states


def copy_states(states: dict[str, Tensor], source: States) -> dict[str, Tensor]:
    """Copies `source` into `states`; raises ValueError if names, dtypes or shapes differ."""
    actual, expected = (
        {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        for tensors in (source, states)
    )
    if actual != expected:
        raise ValueError(f"states {actual} are not those of this optimizer: {expected}")
    for name, state in states.items():
        state.copy_(source[name])
    return states


def states_of(
    groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, States]]:
    """Yields the parameters that have states in a `state_dict`, with these states.

    The caller checks that groups and `state_dict` have the same number of parameters.
    """
    parameters = [p for group in groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=False):
        if number in state_dict["state"]:
            yield parameter, state_dict["state"][number]


def as_matrix(tensor: Tensor) -> Tensor:
    """Views [..., C] as [R, C]; a vector has rows of one element."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(-1, 1)


class UpdateRule(Protocol):
    """Updates float32 tensors in place; `steps` is the number of steps before this one."""

    def __call__(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[Tensor],
    ) -> None: ...


def update_adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Mapping[str, list[Tensor]],
    steps: list[Tensor],
) -> None:
    """Updates weights and states by AdamW in float32, in plain torch: the definition."""
    beta1, beta2 = group["betas"]
    torch_adamw(
        weights,
        gradients,
        states["exp_avg"],
        states["exp_avg_sq"],
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def update_sgd(
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Mapping[str, list[Tensor]],
    steps: list[Tensor],
) -> None:
    """Updates weights and momentum by SGD in float32, in plain torch: the definition."""
    # torch begins with the gradient, and so does a momentum of zeros
    torch_sgd(
        weights,
        gradients,
        [*states.get("momentum_buffer", [None] * len(weights))],
        fused=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
    )


# The positions of a rank's elements in the whole model, from which random bits are drawn. A rank of
# tensor or expert parallelism has pieces of a parameter, and FSDP divides these by rows. What is
# left lies in runs: rows are one block of the whole, columns are lines that are equally far apart,
# and a packed projection has such a run for each of its parts.


class PositionRun(NamedTuple):
    """Describes `length` elements of a rank's part of a parameter, from its element `first` on.

    The i-th of them, from 0, has the position `position + i // width * pitch + i % width` in the
    model: lines of `width` elements, each `pitch` behind the one before. A block is one line.
    """

    first: int
    length: int
    position: int
    width: int
    pitch: int

    @property
    def lines(self) -> tuple[int, int] | None:
        """Returns width and pitch, or None for one block."""
        return (self.width, self.pitch) if self.width < self.length else None

    def between(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Returns the positions (int64) of its elements among `begin` to `end` of the part."""
        begin, end = max(begin - self.first, 0), min(end - self.first, self.length)
        if begin >= end:
            return torch.empty(0, dtype=torch.int64, device=device)
        if self.lines is None:
            return torch.arange(self.position + begin, self.position + end, device=device)
        at = torch.arange(begin, end, device=device)
        return at.add_(at // self.width, alpha=self.pitch - self.width).add_(self.position)


def runs_of(
    cut: ShardSpec | None, begin: int, count: int, position: int
) -> tuple[PositionRun, ...]:
    """Returns the runs of a rank's part, in the order of its elements.

    `cut` is the shard of tensor or expert parallelism (None: the whole parameter), of which the
    rank has `count` elements from `begin` on, in whole rows. `position` is that of the whole
    parameter's first element.
    """
    every = _block_elements(0, begin + count, 0) if cut is None else _runs(cut)
    found = (_intersect(run, begin, begin + count) for run in every)
    return tuple(run._replace(position=position + run.position) for run in found if run.length)


def positions(runs: Sequence[PositionRun], begin: int, end: int, device: torch.device) -> Tensor:
    """Returns the positions int64 [end - begin] of elements `begin` to `end` of a rank's part."""
    found = [run.between(begin, end, device) for run in runs]
    found = [each for each in found if len(each)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _block_elements(first: int, count: int, position: int) -> Iterator[PositionRun]:
    """Yields the run of `count` elements, if there are any."""
    if count:
        yield PositionRun(first, count, position, count, count)


def _runs(cut: ShardSpec) -> Iterator[PositionRun]:
    """Yields the runs of a whole shard of tensor or expert parallelism."""
    outer, inner = math.prod(cut.shape[: cut.dim]), math.prod(cut.shape[cut.dim + 1 :])
    own, whole = cut.length * inner, cut.shape[cut.dim] * inner
    if not own:
        return
    pieces = [RowSpan(*(inner * n for n in rows)) for rows, _ in cut.pieces]
    source, _, width = pieces[0]
    pitch = whole // len(pieces)
    even = [RowSpan(source + i * pitch, i * width, width) for i in range(len(pieces))]
    # With several pieces the next line after the last one's is the first one's of the next row
    if outer > 1 and pieces == even and pitch * len(pieces) == whole and width < MAX_LINE:
        yield PositionRun(0, outer * own, source, width, pitch)
        return
    for i in range(outer):
        for source, target, length in pieces:
            yield from _block_elements(i * own + target, length, i * whole + source)


def _intersect(run: PositionRun, begin: int, end: int) -> PositionRun:
    """Returns the part of a run, maybe empty, that lies in the elements `begin` to `end`."""
    skipped = max(begin - run.first, 0)
    count = max(min(end - run.first, run.length) - skipped, 0)
    lines, rest = divmod(skipped, run.width)
    assert run.lines is None or not rest  # rows are divided, and lines are within rows
    return PositionRun(
        run.first + skipped - begin,
        count,
        run.position + lines * run.pitch + rest,
        min(run.width, count),
        run.pitch,
    )


def runs_fused(parameter: Tensor) -> bool:
    """Returns whether the kernel updates a parameter; tigon.kernels.use("reference") disables
    it."""
    own = local(parameter)
    return (
        runs_triton(own)
        and own.dtype in DTYPES
        and own.is_contiguous()
        and not own.is_meta
        and (parameter.grad is None or local(parameter.grad).dtype in DTYPES)
    )


class FusedUpdate:
    """Updates all parameters of a group by one AdamW kernel where Triton runs.

    States are those of LowPrecisionOptimizer; values differ by the rounding of float32.
    """

    def __init__(self, seed: int, stochastic: bool) -> None:
        self.seed, self.stochastic = seed, stochastic
        self.squares = SquaredNorm()
        self._kernel: FusedAdamW | None = None

    def update(
        self,
        name: object,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        states: Mapping[Tensor, Mapping[str, Tensor]],
        runs: Mapping[Tensor, Sequence[PositionRun]],
        scale: Tensor | None,
    ) -> None:
        """Updates parameters of a group, all with gradients and with this step counted.

        `name` identifies this set of parameters, so that the kernel reuses its tables.
        """
        own = [p for p in parameters if local(p).numel()]
        if not own:
            return
        counts = torch.stack([states[p]["step"] for p in own]).tolist()
        by_step: dict[int, list[AdamWSlot]] = {}
        for p, count in zip(own, counts, strict=True):
            by_step.setdefault(int(count), []).extend(self._slots(p, states[p], runs[p]))
        beta1, beta2 = group["betas"]
        kernel = self._kernel_on(local(own[0]).device)
        for number, (step, slots) in enumerate(by_step.items()):
            settings = AdamWSettings(
                *(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"]),
                *(step, stream_seed(self.seed, step)),
            )
            kernel((name, number), slots, settings, scale)

    def _slots(
        self, parameter: Tensor, state: Mapping[str, Tensor], runs: Sequence[PositionRun]
    ) -> Iterator[AdamWSlot]:
        """Yields a slot for each run, as a launch takes one position and one pitch per slot."""
        slot = _slot(parameter, state)
        kinds = slot.weight.dtype if self.stochastic else None, slot.exp_avg.dtype
        if torch.bfloat16 not in kinds:
            yield slot  # nothing is drawn
        elif len(runs) == 1:
            yield slot._replace(position=runs[0].position, lines=runs[0].lines)
        else:
            yield from (_slice_slot(slot, run) for run in runs)

    def _kernel_on(self, device: torch.device) -> FusedAdamW:
        if self._kernel is None:
            codes = CodeTables.build(*(tables(signed, device) for signed in (True, False)))
            self._kernel = FusedAdamW(self.stochastic, codes)
        return self._kernel


def _slot(parameter: Tensor, state: Mapping[str, Tensor]) -> AdamWSlot:
    """Returns a parameter's tensors as the kernel takes them."""
    assert parameter.grad is not None
    weight, gradient = local(parameter), local(parameter.grad).contiguous()
    if "exp_avg" in state:
        return AdamWSlot(weight, gradient, state["exp_avg"], state["exp_avg_sq"])
    codes = state["exp_avg_codes"], state["exp_avg_sq_codes"]
    scales = state["exp_avg_scale"], state["exp_avg_sq_scale"]
    return AdamWSlot(weight, gradient, *codes, *scales)


def _slice_slot(slot: AdamWSlot, run: PositionRun) -> AdamWSlot:
    """Returns the part of a slot that one run of elements has."""
    size = slot.weight.numel()

    def part(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        each = size // tensor.numel()  # elements that share a scale
        return tensor.view(-1).narrow(0, run.first // each, run.length // each)

    tensors = (part(tensor) for tensor in slot[:6])
    return AdamWSlot(*tensors)._replace(position=run.position, lines=run.lines)


class UpdateSlice(NamedTuple):
    """Holds rows of a parameter that are updated at once."""

    weight: Tensor  # [R, C]
    gradient: Tensor  # [R, C]
    formats: Mapping[str, StateFormat]  # of each of the rule's states
    states: States  # [R, ...]
    runs: Sequence[PositionRun]  # of the parameter
    first: int  # of its elements, among those that this rank has of the parameter
    step: int  # from 1


class LowPrecisionOptimizer(Optimizer):
    """torch's fused AdamW or SGD, equal to it in every bit where weights and states are float32.

    AdamW with states on a GPU is one kernel over all parameters (`FusedUpdate`), whose values may
    differ by the rounding of float32. This class defines them and runs elsewhere. Float32 tensors
    on the device are updated in place, all of a group by one call. The others are updated SIZE
    elements at a time: read into float32, updated, and written back in their formats. All tensors
    are plain ones with a rank's rows: an operation on DTensors would take Python longer than a GPU.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        state_names: Sequence[str],
        defaults: dict[str, Any],
        *,
        format_of: Callable[[Tensor, str], StateFormat],
        runs: Mapping[Tensor, Sequence[PositionRun]],
        seed: int,
        stochastic: bool,
        memory: HostMemory,
    ) -> None:
        """`defaults` has the rule's settings for groups that lack them, `format_of(parameter,
        name)` the format of a state, `runs` the positions of this rank's elements; `stochastic`
        selects the rounding of bfloat16 weights, else to nearest."""
        self.rule, self.state_names, self.runs, self.seed = rule, state_names, runs, seed
        self.format_of, self.stochastic, self.memory = format_of, stochastic, memory
        self.formats: dict[Tensor, dict[str, StateFormat]] = {}
        self.converted: set[Tensor] = set()  # parameters whose update needs float32 copies
        # The next step multiplies its gradients by this, on the device; used once
        self.scale: Tensor | None = None
        has_kernel = rule is update_adamw and not memory.on_host
        self.fused = FusedUpdate(seed, stochastic) if has_kernel else None
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in param_group["params"]:
            self.formats[p] = {kind: self.format_of(p, kind) for kind in self.state_names}
            whole = p.dtype == torch.float32 and not self.memory.on_host
            if not (whole and all(isinstance(f, Float32) for f in self.formats[p].values())):
                self.converted.add(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.scale = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have gradients."""
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
        """Updates the parameters that have a gradient, and leaves the gradient.

        `parts` has parameters with the index of their group. `name` identifies this set of
        parameters, so that the kernel reuses its tables. `scale` multiplies gradients, on the
        device.
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

    def undo_step(self, parameters: Sequence[Tensor]) -> None:
        """Uncounts the last step of parameters, which a scale of NaN left unchanged."""
        if parameters:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], -1.0)

    def _count(self, parameters: Sequence[Tensor]) -> None:
        """Counts a step of each parameter; makes states of zeros before the first."""
        for p in parameters:
            state = self.state[p]
            if not state:
                state |= self._zeros(p)
        if parameters:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1.0)

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """Allocates a parameter's states."""
        return zeros(self.formats[parameter], local(parameter).shape, self.memory.zeros)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the formats of states, which torch would cast to the dtypes of their parameters."""
        loaded = states_of(self.param_groups, state_dict)
        states = {p: copy_states(self._zeros(p), values) for p, values in loaded}
        super().load_state_dict(state_dict)
        self.state.update(states)

    def _update_whole(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Updates float32 parameters with float32 states in place, by one call."""
        here = [(local(p), local(p.grad), self.state[p]) for p in parameters if p.grad is not None]
        here = [one for one in here if one[0].numel()]
        if not here:
            return
        weights = [weight for weight, _, _ in here]
        gradients = [gradient.contiguous() for _, gradient, _ in here]
        values = {kind: [state[kind] for _, _, state in here] for kind in self.state_names}
        done = (torch.stack([state["step"] for _, _, state in here]) - 1).tolist()
        self.rule(group, weights, gradients, values, _counters(done, weights[0].device))

    def _pieces(self, parameters: Sequence[Tensor]) -> Iterator[UpdateSlice]:
        """Yields slices of the parameters, a few million elements at a time."""
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
                yield UpdateSlice(
                    weight[here],
                    gradient[here],
                    self.formats[p],
                    {name: tensor[here] for name, tensor in rows.items()},
                    self.runs[p],
                    row * columns,
                    int(state["step"]),
                )

    def _update(
        self, group: dict[str, Any], pieces: Sequence[UpdateSlice], states: Iterator[Tensor]
    ) -> None:
        """Updates slices whose states are on the device, in turn in `states`."""
        pieces = [p._replace(states={name: next(states) for name in p.states}) for p in pieces]
        weights = [piece.weight.float() for piece in pieces]
        kinds = self.state_names
        values = {k: [p.formats[k].read(p.states, k) for p in pieces] for k in kinds}
        gradients = [piece.gradient.float() for piece in pieces]
        steps = _counters([piece.step - 1.0 for piece in pieces], pieces[0].weight.device)
        self.rule(group, weights, gradients, values, steps)
        for i, piece in enumerate(pieces):
            self._write(piece, weights[i], {kind: values[kind][i] for kind in kinds})

    def _write(self, piece: UpdateSlice, weight: Tensor, values: States) -> None:
        """Writes an updated slice back, rounded to the dtypes of weight and states."""
        bits: list[Tensor | None] = [None] * (1 + len(values))
        rounds = self.stochastic and piece.weight.dtype == torch.bfloat16
        if rounds or any(isinstance(form, BFloat16) for form in piece.formats.values()):
            end = piece.first + weight.numel()
            at = positions(piece.runs, piece.first, end, weight.device)
            drawn = random_bits(self.seed, piece.step, at.view_as(weight))
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
    """Builds AdamW with states in `float32`, `bfloat16` or `8bit`.

    Raises ValueError if ranks divide columns within a block of 8-bit states.
    """
    blocks = blocks_of(model) if states == "8bit" else {}

    def format_of(parameter: Tensor, kind: str) -> StateFormat:
        if states == "bfloat16":
            return BFloat16()
        if states == "8bit" and blocks.get(parameter, _block(parameter)) >= MIN_BLOCK:
            return EightBit(signed=kind == "exp_avg")
        return Float32()

    return _build_low_precision(
        model,
        config,
        update_adamw,
        ("exp_avg", "exp_avg_sq"),
        format_of,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def blocks_of(model: CausalLM) -> dict[Tensor, int]:
    """Returns the columns of a block of 8-bit states for each parameter with a tensor-parallel
    shard.

    Raises ValueError if the ranks divide a row within a block.
    """
    found: dict[Tensor, int] = {}
    cuts: Mapping[str, ShardSpec] = getattr(model, "shard_specs", {})
    for name, p in model.named_parameters():
        cut = cuts.get(name)
        if cut is None or p.dim() < 2:
            continue
        columns = cut.shape[-1]
        found[p] = block = block_size(columns)
        if cut.dim != p.dim() - 1 or block < MIN_BLOCK:
            continue
        for rows, _ in cut.pieces if p.requires_grad else ():
            if rows.source % block or block_size(rows.length) != block:
                raise ValueError(
                    f"optimizer=adamw_8bit keeps states of {name} in blocks of {block} columns, "
                    f"and this rank has the {rows.length} of {columns} from {rows.source} on: give "
                    "another parallel.tensor, or optimizer=adamw_bf16"
                )
    return found


def _block(parameter: Tensor) -> int:
    """Returns the columns of a block of 8-bit states; 0 for vectors, whose states are float32."""
    return block_size(parameter.shape[-1]) if parameter.dim() > 1 else 0


def sgd(model: CausalLM, config: Config) -> Optimizer:
    """Builds SGD with a momentum in float32."""
    return _build_low_precision(
        model,
        config,
        update_sgd,
        ("momentum_buffer",) if config.momentum else (),
        lambda *_: Float32(),
        momentum=config.momentum or 0.0,
        nesterov=bool(config.nesterov),
    )


def state_bytes(states: str) -> float:
    """Returns the bytes of AdamW's states for each element of a matrix."""
    return {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 * (1 + 4 / BLOCK)}[states]


def _build_low_precision(
    model: CausalLM,
    config: Config,
    rule: UpdateRule,
    state_names: Sequence[str],
    format_of: Callable[[Tensor, str], StateFormat],
    **defaults: Any,
) -> Optimizer:
    """Builds a LowPrecisionOptimizer that knows where this rank's elements are in whole
    parameters."""
    runs: dict[Tensor, tuple[PositionRun, ...]] = {}
    cuts: Mapping[str, ShardSpec] = getattr(model, "shard_specs", {})
    count = 0
    for name, p in model.named_parameters():
        own, row = local_rows(name, p)
        cut = cuts.get(name)
        # Parameters that tensor-parallel ranks replicate are rounded equally on all of them
        runs[p] = runs_of(cut, row * math.prod(p.shape[1:]), own.numel(), count)
        count += p.numel() if cut is None else math.prod(cut.shape)
    return LowPrecisionOptimizer(
        parameter_groups(model, config),
        rule,
        state_names,
        {"lr": config.lr, "weight_decay": 0.0, **defaults},
        format_of=format_of,
        runs=runs,
        seed=config.seed,
        stochastic=config.stochastic_rounding,
        memory=HostMemory(next(model.parameters()).device, config.optimizer_offload),
    )


def _counters(done: Sequence[float], device: torch.device) -> list[Tensor]:
    """Returns step counters in separate tensors, as a fused kernel increments them."""
    if len(set(done)) == 1:  # one kernel makes all
        return [*torch.full((len(done),), done[0], device=device).unbind()]
    return [torch.full((), count, device=device) for count in done]


def _buckets(pieces: Iterator[UpdateSlice]) -> Iterator[list[UpdateSlice]]:
    """Yields slices in lists of at most SIZE elements, unless one slice has more."""
    bucket: list[UpdateSlice] = []
    size = 0
    for piece in pieces:
        if bucket and size + piece.weight.numel() > SIZE:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.weight.numel()
    if bucket:
        yield bucket
