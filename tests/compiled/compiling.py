"""Compiles what a launch would run on a GPU, and lists accesses that have to be wide."""

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

from tests.compiled.branches import watch
from tigon.kernels import runtime, use
from tigon.kernels.mlp import grouped_mlp_passes, grouped_product
from tigon.kernels.mlp.grouped_product import _aligned
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
    "rms_norm again: rms_norm_kernels.norm_forward_kernel": [6],
    "qk_norm_rope in place, bf16: rope._rope_kernel": [12],
    "qk_norm_rope in place, narrow: rope._rope_kernel": [0],  # fewer numbers than threads
    "qk_norm_rope bf16: rope._rope_kernel": [12, 16],  # forward and back
    "rescale and join: logits._rescale_kernel": [3, 3],
}
COUNTED = {name.rpartition(": ")[0] for name in WIDE}
# Of each kernel that takes tens of KiB of shared memory, the launches that take most
LARGE = {
    "append_attention fp16, wide, window",
    "append_attention latents of 320 numbers",
    "append_attention latents of 576 numbers",
    "append_attention latents, fp32",
    "append_attention heads of 512 numbers, fp32, window",
    "append_attention packed, latents",
    "gated_delta_rule fp32",
    "gated_delta_rule few heads, fp16",
    "low rank fp32",
    "fp8 rows and maxima, 14336",
    "fp8 gated silu",
    "rms_norm wide",
    "grouped_mlp gpt-oss",
}
UNSPILLED = ("wide_attention bf16", "wide_attention fp16, packed")  # registers hold all, or nearly
MOST_STACK = 64  # bytes of a thread; Triton 3.9 spills a few registers where 3.6 spills none
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
Forms = Iterable[tuple[str, Callable[[], object]]]  # by their names: what launches kernels
ACCESS = re.compile(r"\b(?:ld|st)\.global\b[\w.:]*?(?:\.v(\d))?\.b(\d+)\s")
# Bytes of shared memory that a program may have, by compute capability times ten
SHARED = {
    sm: kib << 10 for sm, kib in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}

# Of a launch: how many accesses have so many bytes; writes before which no barrier stands behind
# the reads; and bytes of shared memory
Counts = dict[int | str, int]
compiled: dict[str, list[Counts]] = collections.defaultdict(list)  # the launches of each kernel
failed: dict[str, str] = {}  # why, by form and kernel
form = ""  # of the launches to come
sm = 90  # compute capability times ten
early = True  # launches are small, and may start before the previous kernel's end
last_stage: str | None = None  # after which Triton's compiler is left, before machine code
_add_stages = CUDABackend.add_stages


def zeros(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    """Stands for any numbers: nothing reads them."""
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])


def in_place(name: str) -> bool:
    """Where several threads may read one number: none may have been written over by then."""
    return "in place" in name and "rope" in name


class Done(Exception):
    """The rest of the compiler is left out."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata


class Driver:
    """What a launch asks of Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(capability: int = 90) -> None:
    """From now on launchers take tensors on the CPU for tensors on a GPU of this capability."""
    global sm
    sm = capability
    driver.set_active(Driver())
    runtime.INTERPRETED = True  # launch on the CPU
    runtime.SHARED_OFF_GPUS = SHARED[sm]
    grouped_product._triton_supports = lambda *tensors: sm >= 90 and _aligned(*tensors)
    # What a launch would have written is indexed with
    grouped_mlp_passes.sort_slots = lambda experts, number, *_, **__: sort_slots_ref(
        experts, number
    )
    torch.set_num_threads(1)
    JITFunction.__getitem__ = _compiling
    CUDABackend.add_stages = _with_an_exit
    watch()


def _with_an_exit(self: CUDABackend, stages: dict[str, Any], *rest: Any) -> None:
    _add_stages(self, stages, *rest)
    if last_stage is None:
        return
    run = stages[last_stage]

    def stage(source: Any, metadata: dict[str, Any]) -> None:
        run(source, metadata)
        raise Done(metadata)

    stages[last_stage] = stage


def compile_form(name: str, launch: Callable[[], object], *, small: bool, quick: bool) -> None:
    """Compiles the kernels of a form; with `quick` as far as something is looked at."""
    global form, early, last_stage
    form, early, last_stage = name, small, None
    if quick and sm != 90:
        last_stage = "llir"  # shared memory is known from there on
    elif quick and not (name in COUNTED or in_place(name)):
        last_stage = "ttir"
    try:
        with use("triton"):
            launch()
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"


def _compiling(kernel: JITFunction, grid: Any) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        name = f"{form}: {kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        if "PDL" in options and early and sm >= 90:
            options |= {"PDL": True, "launch_pdl": True}
        try:
            result = kernel.warmup(*args, grid=grid, **options)
        except Done as done:
            launches = compiled[name]  # it is in this form
            if "shared" in done.metadata:
                launches.append({"shared": done.metadata["shared"]})
        except Exception as error:  # the other kernels of the form are compiled nevertheless
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            compiled[name].append(_look_at(result, name))
        if any(counts["shared"] > SHARED[sm] for counts in compiled[name]):
            failed[name] = f"{compiled[name]}: there are {SHARED[sm]} bytes of shared memory"

    return launch


def _look_at(result: Any, name: str) -> Counts:
    """Counts accesses to memory; whether registers suffice is looked at on Hopper alone."""
    if sm == 90 and form in UNSPILLED and (size := stack_of(result.asm["cubin"])) > MOST_STACK:
        failed[name] = f"{size} bytes of stack: registers are spilled"
    ptx = result.asm["ptx"]
    sizes = (int(v or 1) * int(bits) // 8 for v, bits in ACCESS.findall(ptx))
    counts: Counts = collections.Counter(sizes)
    return counts | {"exposed": exposed(ptx), "shared": result.metadata.shared}


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
