"""Kernels as a GPU has them, compiled without one: the interpreter runs only their Python."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.compiled.compiling import SHARED, WIDE, in_place
from tests.compiled.specializations import DEFAULT_MOST, MODELS, MOST, OPERATORS
from tigon.kernels import runtime
from tigon.kernels.attention.decode import holds_tile
from tigon.kernels.delta import gated_delta, gated_delta_backward
from tigon.kernels.delta.gated_delta_tiles import fits

slow = pytest.mark.slow


def run(module: str, *options: str) -> dict[str, Any]:
    """What a command prints, in a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compiled(*options: str) -> dict[str, Any]:
    """What the command found of each kernel; all has to compile."""
    return run("tests.compiled", *options)["compiled"]


@pytest.mark.timeout(1200)  # --slow: two minutes of both cores, more beside other tests
def test_kernels_compile_for_hopper_with_wide_accesses(request: pytest.FixtureRequest) -> None:
    found = compiled(*([] if request.config.option.slow else ["--quick"]))
    wide = {name: [counts.get("16", 0) for counts in found[name]] for name in WIDE}
    assert {name: len(each) for name, each in wide.items()} == {k: len(v) for k, v in WIDE.items()}
    short = {
        name: each
        for name, each in wide.items()
        if any(n < wanted for n, wanted in zip(each, WIDE[name], strict=True))
    }
    assert not short
    written = [counts for name in found if in_place(name) for counts in found[name]]
    assert written
    assert not any(counts["exposed"] for counts in written)


# Compute capability, part of forms' names, and a kernel that they launch; sm_86 is as sm_89, sm_100
# has as much shared memory as Hopper
LAUNCHES = [
    ("89", "latents of 320", "_append_attention_kernel"),
    ("120", "grouped_mlp", "_grouped_product_kernel"),
    pytest.param("89", "append", "_append_attention_kernel", marks=slow),
    pytest.param("80", "append", "_append_attention_kernel", marks=slow),
    pytest.param("89", "few heads", "_states_kernel", marks=slow),
    pytest.param("80", "gated_delta_rule fp32", "_states_kernel", marks=slow),
    pytest.param("89", "low rank", "_low_rank_shares_kernel", marks=slow),
    pytest.param("89", "wide", "norm_backward_kernel", marks=slow),
    pytest.param("120", "fp8", "_gated_rows_kernel", marks=slow),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("capability", "form", "kernel"), LAUNCHES)
def test_large_launches_fit_into_shared_memory(capability: str, form: str, kernel: str) -> None:
    found = compiled("--capability", capability, "--quick", form)
    launches = [counts for name in found if name.endswith(kernel) for counts in found[name]]
    assert launches
    assert all(20 << 10 < counts["shared"] <= SHARED[int(capability)] for counts in launches)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param((OPERATORS, "llama"), id="some"),
        pytest.param(MODELS.keys() - {"llama"}, id="others", marks=slow),
    ],
)
def test_shapes_compile_few_kernels_again(names: tuple[str, ...]) -> None:
    """Nor does a server that is ready compile any."""
    for name, found in run("tests.compiled.specializations", *names).items():
        assert not found["late"], name
        for kernel, (count, differences) in found["kernels"].items():
            most = MOST.get(kernel, MOST.get(kernel.rpartition(".")[2], DEFAULT_MOST))
            assert count <= most, (name, kernel, differences)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("llama", "qwen3_moe"), id="some"),
        pytest.param(MODELS.keys() - {"llama", "qwen3_moe"}, id="others", marks=slow),
    ],
)
def test_a_pass_finds_what_was_compiled_side_by_side(names: tuple[str, ...]) -> None:
    for name, found in run("tests.compiled.side_by_side", *names).items():
        assert found["found"] >= 10, name
        assert not found["missed"], name


def test_configurations_of_an_autotuner_are_compiled_before_it_measures() -> None:
    assert run("tests.compiled.autotuned") == {"found": 3, "hits": 3, "times": 0}


@pytest.mark.parametrize("sm", SHARED)
def test_plain_torch_runs_where_no_launch_fits(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SHARED_OFF_GPUS", SHARED[sm])
    large = SHARED[sm] >= SHARED[80]
    for width, dtype, held in (
        (128, torch.float32, True),
        (576, torch.bfloat16, True),
        (576, torch.float32, large),
    ):
        q = torch.empty(1, 1, 1, width, dtype=dtype)
        assert holds_tile(q, q) == held, (width, dtype)
    for width, dtype, held in (
        (64, torch.float32, True),
        (128, torch.bfloat16, True),
        (128, torch.float32, large),
    ):
        assert fits(torch.empty(1, 1, 1, width, dtype=dtype)) == held, (width, dtype)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
@pytest.mark.parametrize("sm", [(9, 0), (10, 0), (12, 0)])
def test_delta_rule_without_a_compiler_for_its_gradients(
    version: str, sm: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles = gated_delta_backward._compiles.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: sm)
    monkeypatch.setattr(gated_delta_backward.triton, "__version__", version)
    assert compiles(0) == (version == "3.9.0" or sm != (10, 0))
    monkeypatch.setattr(gated_delta, "_served", lambda *_: True)
    monkeypatch.setattr(gated_delta, "gradients_compile", lambda x: False)
    monkeypatch.setattr(gated_delta, "_GatedDeltaRule", None)
    q, k, v = (torch.ones(1, 3, 1, 16, requires_grad=True) for _ in "qkv")
    g, beta = (torch.zeros(1, 3, 1) for _ in "gb")
    o, _ = gated_delta.gated_delta_rule(q, k, v, g, beta)
    assert o.grad_fn is not None
