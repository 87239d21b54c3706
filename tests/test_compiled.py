"""Kernels as a GPU has them, compiled without one: the interpreter runs only their Python."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Accesses of 16 bytes in a program of each kernel; a number that falls means that Triton no longer
# knows of an alignment, and elements are moved one by one. AdamW in bfloat16 reads 4 tensors and
# writes 3 of 8 elements a thread, in float32 each by two accesses.
WIDE = {
    "float32 _adamw_table_kernel": 14,
    "bfloat16 _adamw_table_kernel": 7,
    "8 bits _adamw_table_kernel": 3,  # of weight and gradient; 8 codes are 8 bytes
    "_squares_kernel": 8,
    "_rows_kernel": 6,
    "_maxima_kernel": 4,
    "_tiles_kernel": 8,
    "_gated_act_backward_kernel": 0,  # 8 bytes
    "_forward_kernel": 6,
    "whole _rope_kernel": 12,
    "narrow _rope_kernel": 0,  # fewer numbers than threads
    "away _rope_kernel": 12,
    "back _rope_kernel": 16,
    "_rescale_kernel": 3,
}


def test_kernels_compile_for_hopper_with_wide_accesses(tmp_path):
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.hopper"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == WIDE.keys()
    short = {name: sizes for name, sizes in found.items() if sizes.get("16", 0) < WIDE[name]}
    assert not short
    # Of few numbers, several threads read the same one: none may have been written over by then
    in_place = [found[f"{name} _rope_kernel"] for name in ("whole", "narrow")]
    assert not any(sizes["exposed"] for sizes in in_place)
