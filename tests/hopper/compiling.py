"""What a launch asks of Triton's driver and of a GPU: here it compiles for sm_90 instead."""

import collections
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.hopper.branches import watch
from tigon.kernels import _grouped_gemm, _triton, use

Forms = Iterable[tuple[str, Callable[[], object]]]  # by their names: what launches kernels
ACCESS = re.compile(r"\b(?:ld|st)\.global\b[\w.:]*?(?:\.v(\d))?\.b(\d+)\s")
SHARED = 227 << 10  # bytes of shared memory that a program may have

# Of a launch: how many accesses have so many bytes, and writes before which no barrier stands
# behind the reads
Counts = dict[int | str, int]
compiled: dict[str, list[Counts]] = collections.defaultdict(list)  # the launches of each kernel
failed: dict[str, str] = {}  # why, by form and kernel
form = ""  # of the launches to come
early = True  # launches are small, and may start before the previous kernel's end


class Hopper:
    """What a launch asks of Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend() -> None:
    """From now on launchers take tensors on the CPU for tensors on an H100."""
    driver.set_active(Hopper())
    _triton.INTERPRETED = True  # launch on the CPU
    _grouped_gemm._triton_serves = lambda x, weight: _grouped_gemm._aligned(x, weight)
    torch.set_num_threads(1)
    JITFunction.__getitem__ = _compiling
    watch()


def compile_form(name: str, launch: Callable[[], object], *, small: bool = True) -> None:
    global form, early
    form, early = name, small
    try:
        with use("triton"):
            launch()
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"


def _compiling(kernel: JITFunction, grid: Any) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        name = f"{form}: {kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        if "PDL" in options and early:
            options |= {"PDL": True, "launch_pdl": True}
        try:
            result = kernel.warmup(*args, grid=grid, **options)
        except Exception as error:  # the other kernels of the form are compiled nevertheless
            failed[name] = f"{type(error).__name__}: {error}"
            return
        if result.metadata.shared > SHARED:
            failed[name] = f"{result.metadata.shared} bytes of shared memory: there are {SHARED}"
        ptx = result.asm["ptx"]
        sizes = (int(v or 1) * int(bits) // 8 for v, bits in ACCESS.findall(ptx))
        counts: Counts = collections.Counter(sizes)
        compiled[name].append(counts | {"exposed": exposed(ptx)})

    return launch


def exposed(ptx: str) -> int:
    """Writes of a kernel before whose threads have all read what they read before."""
    count, reading = 0, False
    for name in re.findall(r"\b(ld\.global|st\.global|bar\.sync)\b", ptx):
        if name == "st.global":
            count += reading
        else:
            reading = name == "ld.global"
    return count
