"""Whether numbers are numbers."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def all_finite(
    tensors: Iterable[Tensor], device: torch.device, *, most: float = math.inf
) -> Tensor:
    """A boolean on `device`, without a copy of any floating tensor: none has NaN, infinity, or what
    is larger than `most`."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    good = [torch.ones((), dtype=torch.bool, device=device)]
    for group in groups.values():
        largest = torch.stack(_largest(group))
        fits = torch.isfinite(largest) & (largest <= most)
        good.append(fits.all().to(device))
    return torch.stack(good).all()


def _largest(group: list[Tensor]) -> list[Tensor] | tuple[Tensor, ...]:
    """The largest magnitude of each; NaN where there is one."""
    if group[0].device.type == "cpu":  # where the norm takes six times as long
        return [torch.maximum(-low, high) for low, high in map(torch.aminmax, group)]
    return torch._foreach_norm(group, math.inf)
