"""AdamW by one kernel over all parameters of a rank, where Triton's kernels run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.norm.grad_norm import SquaredNorm
from tigon.kernels.optim.adamw import FusedAdamW, Settings, Slot
from tigon.kernels.optim.low_bits import Codes
from tigon.kernels.runtime import runs_triton
from tigon.train.distributed import local
from tigon.train.optim import eight_bit
from tigon.train.optim.positions import Run
from tigon.train.optim.rounding import stream

DTYPES = (torch.float32, torch.bfloat16)  # of weights and gradients


def runs_fused(parameter: Tensor) -> bool:
    """Whether the kernel updates a parameter; tigon.kernels.use("reference") says that none is."""
    own = local(parameter)
    return (
        runs_triton(own)
        and own.dtype in DTYPES
        and own.is_contiguous()
        and not own.is_meta
        and (parameter.grad is None or local(parameter.grad).dtype in DTYPES)
    )


class Fused:
    """What `Stored` is for AdamW; its states are the same, and values are within the rounding of
    float32."""

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
        runs: Mapping[Tensor, Sequence[Run]],
        scale: Tensor | None,
    ) -> None:
        """Of parameters of a group, together known as `name`; each has its gradient, and has
        counted this step."""
        own = [p for p in parameters if local(p).numel()]
        if not own:
            return
        counts = torch.stack([states[p]["step"] for p in own]).tolist()
        by_step: dict[int, list[Slot]] = {}
        for p, count in zip(own, counts, strict=True):
            by_step.setdefault(int(count), []).extend(self._slots(p, states[p], runs[p]))
        beta1, beta2 = group["betas"]
        kernel = self._kernel_on(local(own[0]).device)
        for number, (step, slots) in enumerate(by_step.items()):
            settings = Settings(
                *(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"]),
                *(step, stream(self.seed, step)),
            )
            kernel((name, number), slots, settings, scale)

    def _slots(
        self, parameter: Tensor, state: Mapping[str, Tensor], runs: Sequence[Run]
    ) -> Iterator[Slot]:
        """One for each run, as a launch knows no more of where elements are."""
        slot = _slot(parameter, state)
        kinds = slot.weight.dtype if self.stochastic else None, slot.exp_avg.dtype
        if torch.bfloat16 not in kinds:
            yield slot  # nothing is drawn
        elif len(runs) == 1:
            yield slot._replace(position=runs[0].position, lines=runs[0].lines)
        else:
            yield from (_of_run(slot, run) for run in runs)

    def _kernel_on(self, device: torch.device) -> FusedAdamW:
        if self._kernel is None:
            codes = Codes.of(*(eight_bit.tables(signed, device) for signed in (True, False)))
            self._kernel = FusedAdamW(self.stochastic, codes)
        return self._kernel


def _slot(parameter: Tensor, state: Mapping[str, Tensor]) -> Slot:
    assert parameter.grad is not None
    weight, gradient = local(parameter), local(parameter.grad).contiguous()
    if "exp_avg" in state:
        return Slot(weight, gradient, state["exp_avg"], state["exp_avg_sq"])
    codes = state["exp_avg_codes"], state["exp_avg_sq_codes"]
    scales = state["exp_avg_scale"], state["exp_avg_sq_scale"]
    return Slot(weight, gradient, *codes, *scales)


def _of_run(slot: Slot, run: Run) -> Slot:
    size = slot.weight.numel()

    def part(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        each = size // tensor.numel()  # elements that share a scale
        return tensor.view(-1).narrow(0, run.first // each, run.length // each)

    tensors = (part(tensor) for tensor in slot[:6])
    return Slot(*tensors)._replace(position=run.position, lines=run.lines)
