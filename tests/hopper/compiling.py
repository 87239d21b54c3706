"""Compiles for sm_90 what a launch would run on a GPU, and lists accesses that have to be wide."""

import collections
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.hopper.branches import watch
from tigon.kernels import runtime, use
from tigon.kernels.mlp import grouped_mlp, grouped_product
from tigon.kernels.mlp.slot_order import sort_slots_ref

# Accesses of 16 bytes in the launches of each kernel; a number that falls means that Triton no
# longer knows of an alignment, and elements are moved one by one. AdamW in bfloat16 reads 4 tensors
# and writes 3 of 8 elements a thread, in float32 each by two accesses.
WIDE = {
    "adamw fp32: adamw._adamw_table_kernel": [14],
    "adamw bf16: adamw._adamw_table_kernel": [7],
    "adamw bf16, lines: adamw._adamw_table_kernel": [7],
    "adamw 8 bits: adamw._adamw_table_kernel": [3],  # weight and gradient; 8 codes are 8 bytes
    "squared_norm bf16: grad_norm._squares_kernel": [8],
    "fp8 rows: fp8_casts._rows_kernel": [6],
    "fp8 both: fp8_casts._maxima_kernel": [4],
    "fp8 both: fp8_casts._tiles_kernel": [8],
    "fp8 both, known: fp8_casts._tiles_kernel": [8, 6],
    "fp8 rows and maxima, 14336: fp8_casts._rows_kernel": [2],  # it reads by asynchronous copies
    "fp8 gated silu: fp8_mlp._gated_rows_kernel": [2],
    "fp8 gated silu: fp8_mlp._gated_tiles_kernel": [22],
    "nf4 bf16: quantized._nf4_kernel": [5],
    "block fp8 e4m3: quantized._block_fp8_kernel": [6],
    "gated_act with product: gated_act._gated_act_backward_kernel": [0],  # 8 bytes
    "expert_rows: permute._spread_kernel": [8, 0],  # rows of tokens; few numbers of each
    "expert_rows: permute._combine_kernel": [4, 0],
    # without what it waits for
    "one_shot_sum torch.bfloat16: one_shot_all_reduce._one_shot_kernel": [4],
    "rms_norm again: rms_norm._forward_kernel": [6],
    "qk_norm_rope in place, bf16: rope._rope_kernel": [12],
    "qk_norm_rope in place, narrow: rope._rope_kernel": [0],  # fewer numbers than threads
    "qk_norm_rope bf16: rope._rope_kernel": [12, 16],  # forward and back
    "rescale and join: logits._rescale_kernel": [3, 3],
}
COUNTED = {name.rpartition(": ")[0] for name in WIDE}
UNSPILLED = ("wide_attention bf16", "wide_attention fp16, packed")  # registers hold all, or nearly
MOST_STACK = 64  # bytes of a thread; Triton 3.9 spills a few registers where 3.6 spills none
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
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
to_the_end = True  # to machine code, or else through Triton's front end alone
_add_stages = CUDABackend.add_stages


def zeros(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    """Stands for any numbers: nothing reads them."""
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])


def in_place(name: str) -> bool:
    """Where several threads may read one number: none may have been written over by then."""
    return "in place" in name and "rope" in name


class FrontEndDone(Exception):
    """The rest of the compiler is left out."""


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
    grouped_product._triton_supports = lambda x, weight: grouped_product._aligned(x, weight)
    # What a launch would have written is indexed with
    grouped_mlp.sort_slots = lambda experts, number, *_, **__: sort_slots_ref(experts, number)
    torch.set_num_threads(1)
    JITFunction.__getitem__ = _compiling
    CUDABackend.add_stages = _with_an_exit
    watch()


def _with_an_exit(self: CUDABackend, stages: dict[str, Any], *rest: Any) -> None:
    _add_stages(self, stages, *rest)
    first = stages["ttir"]

    def stage(*given: Any) -> Any:
        result = first(*given)
        if not to_the_end:
            raise FrontEndDone
        return result

    stages["ttir"] = stage


def compile_form(name: str, launch: Callable[[], object], *, small: bool, quick: bool) -> None:
    """Compiles the kernels of a form; with `quick` to the end only where their code is counted."""
    global form, early, to_the_end
    form, early = name, small
    to_the_end = not quick or name in COUNTED or in_place(name)
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
        except FrontEndDone:
            compiled[name]  # it is in this form
            return
        except Exception as error:  # the other kernels of the form are compiled nevertheless
            failed[name] = f"{type(error).__name__}: {error}"
            return
        if result.metadata.shared > SHARED:
            failed[name] = f"{result.metadata.shared} bytes of shared memory: there are {SHARED}"
        if form in UNSPILLED and (size := stack_of(result.asm["cubin"])) > MOST_STACK:
            failed[name] = f"{size} bytes of stack: registers are spilled"
        ptx = result.asm["ptx"]
        sizes = (int(v or 1) * int(bits) // 8 for v, bits in ACCESS.findall(ptx))
        counts: Counts = collections.Counter(sizes)
        compiled[name].append(counts | {"exposed": exposed(ptx)})

    return launch


def stack_of(cubin: bytes) -> int:
    """Bytes of a kernel's stack, which holds what registers do not."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\bSTACK:(\d+)", usage)[-1])


def exposed(ptx: str) -> int:
    """Writes of a kernel before whose threads have all read what they read before."""
    count, reading = 0, False
    for name in re.findall(r"\b(ld\.global|st\.global|bar\.sync)\b", ptx):
        if name == "st.global":
            count += reading
        else:
            reading = name == "ld.global"
    return count
