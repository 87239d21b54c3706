"""The norm of all gradients, and clipping by it."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tigon.kernels.norm.grad_norm import SquaredNorm
from tigon.parallel import find_tensor
from tigon.train.distributed import local
from tigon.train.optim.adamw import LowPrecisionOptimizer, runs_fused
from tigon.weights import row_group

PIECE = 2**16  # numbers of which a CPU takes the norm in float32


@torch.no_grad()
def clip(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    """As `clip_gradients`; an optimizer that can takes the factor into its next step, and leaves
    gradients as they are."""
    if not isinstance(optimizer, LowPrecisionOptimizer) or optimizer.fused is None:
        return clip_gradients(model, max_norm)
    optimizer.scale = None  # of a step that was skipped
    given = [p for p in model.parameters() if p.grad is not None]
    if not all(map(runs_fused, given)):
        return clip_gradients(model, max_norm)
    gradients = [g.contiguous() for g in _local_gradients(model)]
    parameter = next(model.parameters())
    squares = torch.zeros((), dtype=torch.float64, device=parameter.device)
    if gradients:
        squares = optimizer.fused.squares(gradients)
    norm = _sum_over_ranks(squares, model).sqrt().float()
    optimizer.scale = _factor(norm, max_norm) if max_norm else None
    return norm


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """The global norm of the gradients, before they are scaled down to max_norm; 0 leaves them.

    float32 whatever the gradients are: torch.nn.utils takes the norm of bfloat16 ones in bfloat16.
    Every rank calls this.
    """
    parameters = list(model.parameters())
    gradients = [g for _, g in _rank_gradients(parameters)]
    counted = _local_gradients(model)
    norm = _combine_norms(_norms(counted), model)
    if max_norm and gradients:
        torch._foreach_mul_(gradients, _factor(norm, max_norm))
    return norm


class BucketedNorm:
    """The same norm, of gradients of which a part is there at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kernels: dict[Hashable, SquaredNorm] = {}  # which keep tables of each part
        self._squares: list[Tensor] = []  # float64, of parts by kernel
        # Of each of the other parameters, or of what is counted of it
        self._norms: dict[Tensor, list[Tensor]] = {}

    def begin(self) -> None:
        self._squares, self._norms = [], {}

    @torch.no_grad()
    def add(self, part: Hashable, named: Mapping[str, Tensor], *, by_kernel: bool) -> None:
        """The gradients of a part, which `part` tells from the others."""
        found = _counted_of(self._model, named.items())
        if not found:
            return
        gradients = [gradient for _, gradient in found]
        if by_kernel:
            kernel = self._kernels.setdefault(part, SquaredNorm())
            self._squares.append(kernel([g.contiguous() for g in gradients]))
            return
        for (p, _), norm in zip(found, _norms(gradients), strict=True):
            self._norms.setdefault(p, []).append(norm)

    @torch.no_grad()
    def total(self) -> Tensor:
        """Returns the norm over all parts. Every rank calls this."""
        model = self._model
        norms = [norm for p in model.parameters() for norm in self._norms.get(p, ())]
        if not self._squares:
            return _combine_norms(norms, model)
        squares = torch.stack([*self._squares, *(norm.double().square() for norm in norms)])
        return _sum_over_ranks(squares.sum(), model).sqrt().float()


def _rank_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The gradients that are there, with their parameters, without the empty ones: a rank may have
    no rows of some."""
    found = [(p, local(p.grad)) for p in parameters if p.grad is not None]
    return [(p, g) for p, g in found if g.numel()]


def _local_gradients(model: nn.Module) -> list[Tensor]:
    """This rank's gradients; what ranks of tensor parallelism have alike is counted on one."""
    return [gradient for _, gradient in _counted_of(model, model.named_parameters())]


def _counted_of(
    model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """As `_counted`, of some of the model's parameters, each with its own."""
    if (tensor := find_tensor(model)) is not None:
        return list(tensor.unique_gradients(named))
    return _rank_gradients(p for _, p in named)


def _norms(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of each. A CPU adds up in order: in float32 a large matrix's norm would be 2e-3 off."""
    if not gradients:
        return ()
    if gradients[0].device.type != "cpu":
        return torch._foreach_norm([*gradients], 2, dtype=torch.float32)
    pieces = (
        torch._foreach_norm(g.reshape(-1).split(PIECE), 2, dtype=torch.float32) for g in gradients
    )
    return [torch.linalg.vector_norm(torch.stack([*norms]).double()) for norms in pieces]


def _combine_norms(norms: Sequence[Tensor], model: nn.Module) -> Tensor:
    """float32, the norm of all ranks' gradients, from the norm of each of this rank's."""
    parameter = next(model.parameters())
    norm = torch.zeros((), device=parameter.device)
    if norms:
        norm = torch.linalg.vector_norm(torch.stack([*norms]))
    if isinstance(parameter, DTensor) or find_tensor(model) is not None:
        norm = _sum_over_ranks(norm.double().square(), model).sqrt()
    return norm.float()


def _sum_over_ranks(squares: Tensor, model: nn.Module) -> Tensor:
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor):
        dist.all_reduce(squares, group=row_group(parameter))
    if (tensor := find_tensor(model)) is not None:
        squares = tensor.ranks.sum(squares)
    return squares


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
