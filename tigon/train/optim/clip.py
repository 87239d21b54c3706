"""Clipping of gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tigon.parallel import find_tensor
from tigon.train.optim.fused import runs_fused
from tigon.train.optim.low_precision import Stored
from tigon.train.parallel import local
from tigon.weights import row_group


@torch.no_grad()
def clip(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    """As `clip_gradients`; an optimizer that can takes the factor into its next step, and leaves
    gradients as they are."""
    if not isinstance(optimizer, Stored) or optimizer.fused is None:
        return clip_gradients(model, max_norm)
    optimizer.scale = None  # of a step that was skipped
    given = [p for p in model.parameters() if p.grad is not None]
    if not all(map(runs_fused, given)):
        return clip_gradients(model, max_norm)
    gradients = [g.contiguous() for g in _counted(model)]
    parameter = next(model.parameters())
    squares = torch.zeros((), dtype=torch.float64, device=parameter.device)
    if gradients:
        squares = optimizer.fused.squares(gradients)
    norm = _over_ranks(squares, model, parameter).sqrt().float()
    optimizer.scale = _factor(norm, max_norm) if max_norm else None
    return norm


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """The global norm of the gradients, before they are scaled down to max_norm; 0 leaves them.

    float32 whatever the gradients are: torch.nn.utils takes the norm of bfloat16 ones in bfloat16.
    Every rank calls this.
    """
    parameters = list(model.parameters())
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    gradients = [g for g in gradients if g.numel()]
    norm = torch.zeros((), device=parameters[0].device)
    if counted := _counted(model):
        norms = torch._foreach_norm(counted, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if isinstance(parameters[0], DTensor):
        norm = _over_ranks(norm.double().square(), model, parameters[0]).sqrt().float()
    if max_norm and gradients:
        torch._foreach_mul_(gradients, _factor(norm, max_norm))
    return norm


def _counted(model: nn.Module) -> list[Tensor]:
    """This rank's gradients; what several ranks have alike is counted on one."""
    if (tensor := find_tensor(model)) is not None:
        return tensor.counted(model)
    found = [local(p.grad) for p in model.parameters() if p.grad is not None]
    return [g for g in found if g.numel()]  # a rank may have no rows of some


def _over_ranks(squares: Tensor, model: nn.Module, parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        dist.all_reduce(squares, group=row_group(parameter))
    if (tensor := find_tensor(model)) is not None:
        squares = tensor.ranks.sum(squares)
    return squares


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
