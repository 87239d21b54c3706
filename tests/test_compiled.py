"""Kernels as a GPU has them, compiled without one: the interpreter runs only their Python."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Accesses of 16 bytes in the launches of each kernel; a number that falls means that Triton no
# longer knows of an alignment, and elements are moved one by one. AdamW in bfloat16 reads 4 tensors
# and writes 3 of 8 elements a thread, in float32 each by two accesses.
WIDE = {
    "adamw fp32: adamw._adamw_table_kernel": [14],
    "adamw bf16: adamw._adamw_table_kernel": [7],
    "adamw 8 bits: adamw._adamw_table_kernel": [3],  # weight and gradient; 8 codes are 8 bytes
    "squared_norm bf16: squared_norm._squares_kernel": [8],
    "fp8 rows: _fp8_casts._rows_kernel": [6],
    "fp8 both: _fp8_casts._maxima_kernel": [4],
    "fp8 both: _fp8_casts._tiles_kernel": [8],
    "fp8 both, known: _fp8_casts._tiles_kernel": [8, 6],
    "fp8 rows and maxima, 14336: _fp8_casts._rows_kernel": [2],  # it reads by asynchronous copies
    "fp8 gated silu: _fp8_gated._gated_rows_kernel": [2],
    "nf4 bf16: nf4._nf4_kernel": [5],
    "block fp8 e4m3: block_fp8._block_fp8_kernel": [6],
    "gated_act with product: gated_act._gated_act_backward_kernel": [0],  # 8 bytes
    "rms_norm again: rms_norm._forward_kernel": [6],
    "qk_norm_rope in place, bf16: rope._rope_kernel": [12],
    "qk_norm_rope in place, narrow: rope._rope_kernel": [0],  # fewer numbers than threads
    "qk_norm_rope bf16: rope._rope_kernel": [12, 16],  # forward and back
    "rescale and join: _logits._rescale_kernel": [3, 3],
}


def test_kernels_compile_for_hopper_with_wide_accesses():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.hopper"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["compiled"]
    wide = {name: [counts.get("16", 0) for counts in found[name]] for name in WIDE}
    assert {name: len(each) for name, each in wide.items()} == {k: len(v) for k, v in WIDE.items()}
    short = {
        name: each
        for name, each in wide.items()
        if any(n < wanted for n, wanted in zip(each, WIDE[name], strict=True))
    }
    assert not short
    # Of few numbers, several threads read the same one: none may have been written over by then
    in_place = [
        counts for name in found if "in place" in name and "rope" in name for counts in found[name]
    ]
    assert in_place
    assert not any(counts["exposed"] for counts in in_place)
