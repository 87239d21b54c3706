"""Whether weights, optimizer states and averages are numbers."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tigon.train.optim import Ema
from tigon.train.parallel import local
from tigon.weights import all_finite


def check_finite(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    ema: Ema | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises FloatingPointError, naming the first, where a weight, a state or an average is NaN or
    infinite, or would be in `dtype`.

    In a process group every rank calls this and all raise alike; one collective, and one wait for
    the device.
    """
    found = [(name, p.detach()) for name, p in model.named_parameters()]
    if optimizer is not None:
        for name, p in model.named_parameters():
            states = optimizer.state.get(p, {}).items()
            found += [(f"{kind} of {name}", s) for kind, s in states if isinstance(s, Tensor)]
    if ema is not None:
        found += [(f"average of {name}", value) for name, value in ema.values.items()]
    own = [(name, local(t)) for name, t in found]
    floating = [(name, t) for name, t in own if t.is_floating_point() and t.numel()]
    most = math.inf if dtype is None else torch.finfo(dtype).max
    device = next(model.parameters()).device
    good = all_finite([t for _, t in floating], device, most=most).float()
    if dist.is_initialized():
        dist.all_reduce(good, dist.ReduceOp.MIN)
    if good.item():
        return
    bad = [name for name, t in floating if not all_finite([t], t.device, most=most)]
    everywhere: list[list[str] | None] = [bad]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, bad)
    names = sorted({name for names in everywhere for name in names or ()})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = "" if dtype is None else f" in {dtype}"
    raise FloatingPointError(f"not finite{where}: {', '.join(names[:3])}{more}")
