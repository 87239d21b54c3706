"""What a launch asks of Triton's driver and of a GPU: here it compiles for sm_90 instead."""

import collections
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.hopper.branches import taken, watch
from tigon.kernels import runtime, use
from tigon.kernels.mlp import grouped_mlp

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
to_the_end = True  # all kernels, or else those with something new
# Of each kernel that was compiled to the end: ways of its branches, and dtypes of its arguments
finished: dict[str, set[Any]] = collections.defaultdict(set)
_known: Callable[[], bool]  # of the kernel that is being compiled: whether nothing in it is new
_add_stages = CUDABackend.add_stages


class Known(Exception):
    """Nothing new would be compiled."""


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
    runtime.INTERPRETED = True  # launch on the CPU
    grouped_mlp._triton_supports = lambda x, weight: grouped_mlp._aligned(x, weight)
    torch.set_num_threads(1)
    JITFunction.__getitem__ = _compiling
    CUDABackend.add_stages = _with_an_exit
    watch()


def _with_an_exit(self: CUDABackend, stages: dict[str, Any], *rest: Any) -> None:
    _add_stages(self, stages, *rest)
    first = stages["ttir"]

    def stage(*given: Any) -> Any:
        result = first(*given)
        if _known() and not to_the_end:
            raise Known
        return result

    stages["ttir"] = stage


def _is_known(name: str, arguments: dict[str, Any]) -> bool:
    dtypes = tuple((key, x.dtype) for key, x in arguments.items() if isinstance(x, torch.Tensor))
    found = {*taken, dtypes}
    known = found <= finished[name]
    finished[name] |= found
    return known


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
        global _known
        own = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        name = f"{form}: {own}"
        if "PDL" in options and early:
            options |= {"PDL": True, "launch_pdl": True}
        _known = partial(_is_known, own, dict(zip(kernel.arg_names, args, strict=False)) | options)
        before = set(taken)
        taken.clear()
        try:
            result = kernel.warmup(*args, grid=grid, **options)
        except Known:
            compiled[name]  # it is in this form
            return
        except Exception as error:  # the other kernels of the form are compiled nevertheless
            failed[name] = f"{type(error).__name__}: {error}"
            return
        finally:
            taken.update(before)
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
