"""Every operator registered, compiled, without numbers, and replayed by a CUDA graph."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.kernels.cases import CASES, FP8, KINDS, MORE_KINDS, SHAPES
from tests.kernels.conftest import CUDA
from tests.kernels.layer_cases import B, D, H, K
from tests.kernels.op_case import Inputs, OpCase, learned
from tests.kernels.operators import ALWAYS, SLOW, gradients, kinds_and_fp8, random_like, small_steps

__all__ = ["small_steps"]


class Registered(TorchDispatchMode):
    """Calls of our own operators in torch.library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tigon":
            copied = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs or {}))
            self.calls[f"{func}{[a is None for a in args]}"] = (func, *copied)
        return func(*args, **(kwargs or {}))


@pytest.mark.traced
@kinds_and_fp8
def test_registered_operators_keep_torchs_rules(case: OpCase, kernels_only: None) -> None:
    inputs = case.make()
    with Registered() as seen:
        found = case.run(inputs)
        gradients(found, inputs, random_like(found))
        with torch.no_grad():
            case.run(inputs)
    if {"x", "a"} <= inputs.keys() and not CUDA:
        pytest.skip("low-rank additions are torch's own on a CPU")
    assert seen.calls
    for func, args, kwargs in seen.calls.values():
        torch.library.opcheck(func, args, kwargs, test_utils=("test_schema", "test_faketensor"))


DYNAMIC: dict[str, Any] = {  # of another number of rows
    "rms_norm, gate, residual": ((4, 5, 33),),
    "sandwich_norm": ((4, 5, 33),),
    "rms_norm_add": ((4, 5, 33),),
    "qk_norm_rope": (B, 4, H, K, D, D, B),
    "gated_act, silu": (4, 5, 202),
    "sigmoid_gate": ((4, 5, 33),),
    "grouped_mlp, silu": (4, 16, 24, 5, 2),
}
# Tracing takes a second or two; what has the autograd function of another kind is slow
SAME_NODE = ("lora_grouped_mlp, frozen base", "linear_kl, 0.3, sum", "selected_logprobs")
TRACED = [
    pytest.param(name, marks=pytest.mark.slow if name in SAME_NODE + MORE_KINDS else ())
    for name in (*KINDS, *([] if CUDA else ["fp8_linear"]), *MORE_KINDS)
]


@pytest.mark.traced
@pytest.mark.parametrize("name", TRACED)
def test_compiled_is_eager(name: str, kernels_only: None) -> None:
    case, dynamic = (CASES | FP8)[name], name in DYNAMIC
    torch._dynamo.reset()
    compiled = torch.compile(
        case.operator, fullgraph=True, dynamic=dynamic, backend="inductor" if CUDA else "aot_eager"
    )
    for size in (None, DYNAMIC[name]) if dynamic else (None,):
        inputs = case.make(size)
        expected, found = case.run(inputs), case.run(inputs, compiled)
        ups = random_like(found)
        results = [[*y, *gradients(y, inputs, ups)] for y in (found, expected)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=2e-5)
    torch._dynamo.reset()


def described(case: OpCase, inputs: Inputs) -> list[Any]:
    """Shape and dtype of each output and gradient, if it has one."""
    leaves = {
        name: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }
    found = case.run(leaves)
    grads: Any = ()
    if any(y.requires_grad for y in found):
        grads = torch.autograd.grad([y.sum() for y in found], learned(leaves))
    return [(tuple(t.shape), t.dtype) for t in (*found, *grads)]


WITHOUT = [pytest.param(case, id=name) for name, case in SHAPES.items()]


@pytest.mark.traced
@pytest.mark.parametrize("where", ["meta", "fake", "fake, outside of its mode"])
@pytest.mark.parametrize("case", [*ALWAYS, *WITHOUT, *SLOW])
def test_shapes_without_numbers(case: OpCase, where: str, path: str) -> None:
    if where == "fake, outside of its mode" and (
        case.result is not None
        or (case is SHAPES["append_attention"] and path == "reference")
        or (case is SHAPES["attention"] and CUDA)
    ):
        pytest.skip("what a loss compares with, positions or a mask are real there")
    inputs = case.make()
    expected = described(case, inputs)
    mode = FakeTensorMode()

    def emptied(x: Tensor) -> Tensor:
        return x.to("meta") if where == "meta" else mode.from_tensor(x)

    inputs = tree_map_only(Tensor, emptied, inputs)
    with mode if where == "fake" else contextlib.nullcontext():
        assert described(case, inputs) == expected


@pytest.mark.skipif(CUDA, reason="a machine without a GPU")
@pytest.mark.parametrize("case", [*ALWAYS, *WITHOUT, *SLOW])
def test_fake_gpu_tensors_without_a_gpu(case: OpCase) -> None:
    names = case.make().keys()
    if case.result is not None or {"experts", "v"} & names or {"x", "a"} <= names:
        pytest.skip("with indices torch itself asks for a GPU")
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        assert all(y.device.type == "cuda" for y in case.run(case.make()))


@pytest.mark.gpu
@kinds_and_fp8
def test_graph_replay_is_eager(case: OpCase, kernels_only: None) -> None:
    inputs = case.make(None, torch.bfloat16)
    ups = random_like(case.run(inputs))

    def step() -> list[Tensor]:
        found = case.run(inputs)
        return found + gradients(found, inputs, ups)

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in learned(inputs):
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(map(torch.equal, captured, step()))
