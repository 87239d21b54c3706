"""Clipping of gradients."""

import math

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """The global norm of the gradients, before they are scaled down to max_norm; 0 leaves them."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
