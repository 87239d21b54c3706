"""Compiles kernels for sm_90, which needs no GPU: prints how each one reads and writes, as JSON.

The launchers run as they are, with tensors on the CPU, and each launch compiles instead.
"""

import collections
import json
import re
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tigon.kernels import _triton, use
from tigon.kernels._codes import Codes
from tigon.kernels._fp8_casts import cast_both, cast_rows
from tigon.kernels._logits import rescale_and_join
from tigon.kernels.adamw import FusedAdamW, Settings, Slot
from tigon.kernels.gated_act import gradient_and_product
from tigon.kernels.qk_norm_rope import qk_norm_rope
from tigon.kernels.rms_norm import normed_again
from tigon.kernels.squared_norm import SquaredNorm
from tigon.train.optim import eight_bit

FP32, BF16, CODES = torch.float32, torch.bfloat16, torch.uint8
CPU = torch.device("cpu")
ACCESS = re.compile(r"\b(?:ld|st)\.global\b[\w.:]*?(?:\.v(\d))?\.b(\d+)\s")


class Hopper:
    """What a launch asks of Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


# Of a launch: how many accesses have so many bytes, and writes before which no barrier stands
# behind the reads
found: dict[str, dict[int | str, int]] = {}
label = ""  # of the launches to come


def compiling(kernel: JITFunction, grid: Any) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        ptx = compiled.asm["ptx"]
        sizes = (int(v or 1) * int(bits) // 8 for v, bits in ACCESS.findall(ptx))
        counts: dict[int | str, int] = collections.Counter(sizes)
        found[f"{label} {kernel.fn.__name__}".strip()] = counts | {"exposed": exposed(ptx)}

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


def slot(weight: torch.dtype, states: torch.dtype) -> Slot:
    w, g = (torch.zeros(8, 256, dtype=weight) for _ in range(2))
    m, v = (torch.zeros(8, 256, dtype=states) for _ in range(2))
    scales = [torch.zeros(8, 1) if states == CODES else None for _ in range(2)]
    return Slot(w, g, m, v, 0, *scales)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=BF16)


def rotate(kv_heads: int, width: int, *, overwrite: bool) -> list[Tensor]:
    qkv = bf16(1, 8, (2 + 2) * kv_heads * width).requires_grad_() * 1
    angles = bf16(1, 8, width // 2)
    sizes = {"heads": 2 * kv_heads, "kv_heads": kv_heads}
    return list(qk_norm_rope(qkv, angles, angles, **sizes, overwrite=overwrite))


def main() -> None:
    global label
    driver.set_active(Hopper())
    _triton.INTERPRETED = True  # launch on the CPU
    JITFunction.__getitem__ = compiling
    codes = Codes.of(*(eight_bit.tables(signed, CPU) for signed in (True, False)))
    settings = Settings(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3, stream=-(2**62))
    with use("triton"):
        for name, one in {
            "float32": slot(FP32, FP32),
            "bfloat16": slot(BF16, BF16),
            "8 bits": slot(BF16, CODES),
        }.items():
            label = name
            FusedAdamW(stochastic=True, codes=codes)(0, [one], settings, torch.ones(()))
        label = ""
        SquaredNorm()([bf16(64, 64)])
        cast_rows(bf16(64, 2048), fused=True)
        cast_both(bf16(64, 2048), fused=True)
        gradient_and_product(bf16(8, 2048), bf16(8, 4096), "silu", True)
        for name, sizes in {"whole": (8, 128), "narrow": (1, 32)}.items():
            label = name
            rotate(*sizes, overwrite=True)
        label = "away"
        outputs = rotate(8, 128, overwrite=False)
        label = "back"
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
        label = ""
        normed_again(bf16(8, 2048), torch.ones(8), None, bf16(2048), 0.0, True)
        rescale_and_join(torch.zeros(64, 64), torch.zeros(60, 64), torch.ones(()), BF16)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
