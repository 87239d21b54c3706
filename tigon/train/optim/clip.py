"""Clipping of gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.train.parallel import local


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """The global norm of the gradients, before they are scaled down to max_norm; 0 leaves them.

    float32 whatever the gradients are: torch.nn.utils takes the norm of bfloat16 ones in bfloat16.
    Every rank calls this.
    """
    parameters = list(model.parameters())
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    gradients = [g for g in gradients if g.numel()]  # a rank may have no rows of some
    norm = torch.zeros((), device=parameters[0].device)
    if gradients:
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if isinstance(parameters[0], DTensor):
        squares = norm.double().square()
        dist.all_reduce(squares, group=parameters[0].device_mesh.get_group())
        norm = squares.sqrt().float()
    if max_norm and gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
