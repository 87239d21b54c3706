"""Keeps optimizer states in host memory, and copies them to the device while they are used."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class HostMemory:
    """Allocates states on the device, or with `offload` in pinned host memory."""

    def __init__(self, device: torch.device, offload: bool = False) -> None:
        self.device = device
        self.on_host = offload and device.type == "cuda"
        if self.on_host:
            self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a state of zeros, in pinned host memory or on the device."""
        if self.on_host:
            return torch.zeros(shape, dtype=dtype, pin_memory=True, device="cpu")
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def visit(
        self, groups: Sequence[Sequence[Tensor]], use: Callable[[int, list[Tensor]], None]
    ) -> None:
        """Calls use(i, tensors) with each group's tensors on the device, copying the next one."""
        if not self.on_host:
            for i, group in enumerate(groups):
                use(i, list(group))
            return
        main = torch.cuda.current_stream(self.device)
        ahead = self._fetch(groups[0]) if groups else []
        for i, group in enumerate(groups):
            here = ahead
            main.wait_stream(self._inward)
            for tensor in here:
                tensor.record_stream(main)
            if i + 1 < len(groups):
                ahead = self._fetch(groups[i + 1])
            use(i, here)
            self._outward.wait_stream(main)
            with torch.cuda.stream(self._outward):
                for host, tensor in zip(group, here, strict=True):
                    host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(self._outward)
        self._outward.synchronize()  # a checkpoint reads them without the device

    def _fetch(self, group: Sequence[Tensor]) -> list[Tensor]:
        """Begins to copy tensors to the device on the incoming stream; returns the copies."""
        with torch.cuda.stream(self._inward):
            return [host.to(self.device, non_blocking=True) for host in group]
