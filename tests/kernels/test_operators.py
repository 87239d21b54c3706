"""What holds of every operator in `cases.CASES`, on both paths."""

import contextlib
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from tests.kernels import definitions
from tests.kernels.cases import (
    CASES,
    FP8,
    GEMMA,
    HALF,
    KINDS,
    MORE_KINDS,
    SHAPES,
    B,
    Call,
    D,
    H,
    Inputs,
    K,
    OpCase,
    learned,
)
from tests.kernels.conftest import CUDA
from tigon.kernels import gated_act

SLOW = [pytest.param(CASES[name], id=name, marks=pytest.mark.slow) for name in MORE_KINDS]
ALWAYS = [pytest.param(CASES[name], id=name) for name in KINDS]
OTHERS = [pytest.param(case, id=name) for name, case in FP8.items()]
kinds = pytest.mark.parametrize("case", [*ALWAYS, *SLOW])
kinds_and_fp8 = pytest.mark.parametrize("case", [*ALWAYS, *OTHERS, *SLOW])
SIZES = {f"{name}, {size}": (case, size) for name, case in CASES.items() for size in case.sizes}
EMPTY = {
    f"{name}, {size}": (case, size)
    for name, case in {**CASES, **FP8}.items()
    for size in case.empty
}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter so few programs that each has several tokens, and sums in steps."""
    if not CUDA:
        module = importlib.import_module("tigon.kernels.rope.qk_norm_rope")
        monkeypatch.setattr(module, "RESIDENT", 2)
        module = importlib.import_module("tigon.kernels.norm.rms_norm_kernels")
        monkeypatch.setattr(module, "SUM_ROWS", 1)
        module = importlib.import_module("tigon.kernels.delta.causal_conv")
        monkeypatch.setattr(module, "CHUNKS", (8, 4))


def random_like(found: list[Tensor]) -> list[Tensor]:
    return [torch.randn(y.shape) for y in found]


def gradients(found: list[Tensor], inputs: Inputs, ups: list[Tensor], **how: Any) -> list[Tensor]:
    ups = [up.to(y.dtype) for y, up in zip(found, ups, strict=True) if y.requires_grad]
    found = [y for y in found if y.requires_grad]
    return list(torch.autograd.grad(found, learned(inputs), ups, **how))


def assert_exact(case: OpCase, inputs: Inputs, ups: list[Tensor] | None = None) -> None:
    """Outputs and gradients in float32 are those of the definition; nothing is written to."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    before = [(x.detach().clone(), x._version) for x in tensors]
    found, expected = case.run(inputs), case.run(inputs, case.definition)
    for y, wanted in zip(found, expected, strict=True):
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    ups = random_like(found) if ups is None else ups
    kept = [up.clone() for up in ups]
    pairs = zip(gradients(found, inputs, ups), gradients(expected, inputs, ups), strict=True)
    for grad, wanted in pairs:
        atol = 2e-5 * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
        torch.testing.assert_close(grad, wanted, rtol=case.rtol, atol=atol)
    assert all(torch.equal(up, k) and up._version == 0 for up, k in zip(ups, kept, strict=True))
    for x, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(x, value) and x._version == version


@pytest.mark.parametrize(("case", "size"), SIZES.values(), ids=SIZES)
def test_forward_and_gradients(case: OpCase, size: Any) -> None:
    assert_exact(case, case.make(size))


@pytest.mark.parametrize(("case", "size"), EMPTY.values(), ids=EMPTY)
def test_empty_inputs_have_empty_gradients(case: OpCase, size: Any) -> None:
    inputs = case.make(size)
    found = case.run(inputs)
    assert [y.shape for y in found] == [y.shape for y in case.run(inputs, case.definition)]
    grads = torch.autograd.grad([y.sum() for y in found], learned(inputs))
    for grad, x in zip(grads, learned(inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()


def transposed(x: Tensor) -> Tensor:
    """The same values, the last dimension outermost."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": transposed,
    "every other": lambda x: torch.stack((x, x), -1)[..., 0],
    "part": lambda x: torch.cat((x[..., :1], x, x[..., :1]), -1)[..., 1 : 1 + x.shape[-1]],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_upstreams(case: OpCase, layout: str) -> None:
    inputs, change = case.make(), LAYOUTS[layout]
    for name, x in inputs.items():
        # One number for all of a weight, or one row for all, is another input
        if isinstance(x, Tensor) and (layout != "expanded" or x.dim() > 2):
            inputs[name] = change(x.detach()).requires_grad_(x.requires_grad)
    ups = [torch.ones(()).expand(y.shape) for y in case.run(inputs)]
    if layout != "expanded":
        ups = [change(torch.randn(y.shape)) if y.dim() else y.detach() for y in ups]
    assert_exact(case, inputs, ups)


def assert_as_good_as_eager(
    case: OpCase, size: Any, dtype: torch.dtype, factor: float = 2.0
) -> None:
    """Hardly farther from the definition than plain torch in the same dtype."""
    assert case.eager is not None
    inputs = case.make(size, dtype)
    exact = {
        name: x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in inputs.items()
    }
    truth = case.run(exact, case.definition)
    ups = random_like(truth)
    # As a loss scaler does: float16 rounds gradients below 6e-5 to fewer digits
    scale = 1024.0 if dtype == torch.float16 and case.result else 1.0
    ups = [up.to(case.result or dtype) * scale for up in ups]
    best = [*truth, *gradients(truth, exact, ups)]
    found, plain = case.run(inputs), case.run(inputs, case.eager)
    assert all(y.dtype == (case.result or dtype) for y in found)
    ours, theirs = (y + gradients(y, inputs, ups) for y in (found, plain))
    for x, grad in zip(learned(inputs), ours[len(found) :], strict=True):
        assert grad.dtype == x.dtype
    for a, b, right in zip(ours, theirs, best, strict=True):
        error, bound = ((y.double() - right.double()).norm() for y in (a, b))
        assert error <= factor * bound + 2e-6 * right.norm(), f"{error:.3g}, eager {bound:.3g}"


JUDGED = {name: case for name, case in CASES.items() if case.eager is not None}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", JUDGED.values(), ids=JUDGED)
def test_half_precision_is_as_good_as_eager(
    case: OpCase, dtype: torch.dtype, kernels_only: None
) -> None:
    if dtype not in case.halves:
        pytest.skip("the interpreter is no GPU there")
    assert_as_good_as_eager(case, None, dtype)


def rounds(
    name: str,
    rounded: Call,
    size: Any,
    most: float,
    *wide: str,
    but: Call | None = None,
    **how: Any,
) -> Any:
    """A case, its rounded definition, and one that is rounded elsewhere; `wide` stays float32."""
    case = CASES[name]
    case = replace(case, options=case.options | how, whole=(*case.whole, *wide))
    if name.startswith("gated_act"):  # 1 + erf cancels where it is far below 0
        case = replace(case, inputs=lambda *shape: {"gate_up": torch.randn(shape)})
    named = ", ".join((name, *(f"{key}={value}" for key, value in how.items()), *wide))
    return pytest.param(case, rounded, but, size, most, id=named)


def other_order(function: Call) -> Call:
    orders = {"before_weight": "after_weight", "after_weight": "before_weight"}

    def call(cast: str = "before_weight", **given: Any) -> Any:
        return function(cast=orders[cast], **given)

    return call


NORMED, SANDWICHED = definitions.rounded_rms_norm, definitions.rounded_sandwich_norm
ADDED = definitions.rounded_rms_norm_add
TURNED, MIXED = definitions.rounded_qk_norm_rope, definitions.rounded_grouped_mlp


def convolved_once(**given: Any) -> Tensor:
    return definitions.causal_conv(**given).to(given["x"].dtype)


def rounded_weights(weights: Tensor, **given: Any) -> Tensor:
    return MIXED(weights=weights.to(given["x"].dtype), **given)


def rounded_once(**given: Any) -> Tensor:
    return definitions.gated_act(**given).to(given["gate_up"].dtype)


def gated_once(**given: Any) -> Tensor:
    return definitions.sigmoid_gate(**given).to(given["x"].dtype)


LARGE, HEADS = ((64, 256),), (2, 3, 6, 3, 14, 14, 1)
GATED, MOE = "rms_norm, gate, residual", "grouped_mlp, silu"
ROUNDED = [
    *(
        rounds("rms_norm, residual", NORMED, LARGE, 2e-3, *wide, but=other_order(NORMED), **how)
        for wide in ((), ("weight",))
        for how in ({}, {"offset": 1.0}, {"cast": "after_weight"})
        if not (wide and "offset" in how)
    ),
    *(rounds(GATED, NORMED, LARGE, 2e-3, *wide) for wide in ((), ("weight",))),
    rounds("sandwich_norm", SANDWICHED, LARGE, 4e-3, but=other_order(SANDWICHED), **GEMMA),
    rounds("sandwich_norm", SANDWICHED, LARGE, 4e-3, offset=0.0, cast="before_weight"),
    rounds("rms_norm_add", ADDED, LARGE, 2e-3, but=other_order(ADDED)),
    *(
        rounds("qk_norm_rope", TURNED, HEADS, 1e-2, *wide, but=other_order(TURNED), **how)
        for wide in ((), ("q_weight", "k_weight"))
        for how in ({"cast": "before_weight"}, GEMMA, {"offset": 1.0, "cast": "before_weight"})
    ),
    *(rounds("rope", definitions.rounded_rope, HEADS, 1e-2, *w) for w in ((), ("cos", "sin"))),
    *(
        rounds(
            f"gated_act, {act}", definitions.rounded_gated_act, (64, 200), 1e-2, but=rounded_once
        )
        for act in ("silu", "gelu", "gelu_tanh")
    ),
    rounds("sigmoid_gate", definitions.rounded_sigmoid_gate, LARGE, 1e-2, but=gated_once),
    rounds("causal_conv, packed", definitions.rounded_causal_conv, (3, 9, 60, 3), 1e-2),
    rounds(
        "causal_conv, silu",
        definitions.rounded_causal_conv,
        (3, 9, 60, 4),
        1e-2,
        but=convolved_once,
    ),
    rounds("causal_conv_qkv", definitions.rounded_causal_conv_qkv, (3, 9, 2, 8, 60, 4), 2e-2),
    rounds(MOE, MIXED, (24, 24, 40, 7, 3), 0.05),  # products may be a rounding apart
    rounds(MOE, MIXED, (24, 24, 40, 7, 3), 0.05, "weights", but=rounded_weights),
]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("case", "rounded", "other", "size", "most"), ROUNDED)
def test_rounds_where_the_definition_does(
    case: OpCase, rounded: Call, other: Call | None, size: Any, most: float, dtype: torch.dtype
) -> None:
    """All but a few numbers, which a sum in another order moves; roundings elsewhere move many."""
    if dtype not in case.halves:
        pytest.skip("the interpreter is no GPU there")
    inputs = case.make(size, dtype)
    with torch.no_grad():
        found, expected = case.run(inputs), case.run(inputs, rounded)
        for y, wanted in zip(found, expected, strict=True):
            assert y.dtype == dtype and (y.double() != wanted).float().mean() < most
        if other is not None:
            assert (case.run(inputs, other)[0] != expected[0]).float().mean() > 0.1


REAL = {f"{name}, {size}": (JUDGED[name], size) for name in JUDGED for size in JUDGED[name].real}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("case", "size"), REAL.values(), ids=REAL)
def test_real_sizes_are_as_good_as_eager(case: OpCase, size: Any, dtype: torch.dtype) -> None:
    assert_as_good_as_eager(case, size, dtype, case.factor)


@pytest.mark.parametrize("name", ["linear_kl, 0.3, sum", "linear_kl, 0.3, none"])
def test_float16_gradients_of_flat_distributions(name: str) -> None:
    """Those of logits are about 1 / V, and may not be rounded as subnormal numbers."""
    assert_as_good_as_eager(CASES[name], (40, 48, 32, 32003), torch.float16)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_large_values(act: str) -> None:
    far = torch.tensor([-1e4, -80.0, -20.0, 20.0, 80.0, 1e4])
    x = torch.stack((far, torch.ones(6)), 1).requires_grad_()
    y = gated_act(x, act)
    torch.testing.assert_close(y.flatten(), far.clamp(min=0), rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad[:, 0], (far > 0).float(), rtol=1e-6, atol=1e-6)


# Sizes of more than 2**31 elements; how many rows at the end, in which dimension, of what
FAR: dict[str, tuple[Any, int, int, tuple[str, ...]]] = {
    "gated_act, silu": ((40_000, 2 * 28_672), 2, 0, ("gate_up",)),
    "cross_entropy, plain": ((9000, 262144), 60, 0, ("logits", "targets", "token_weights")),
    "rope": ((1, 140_000, 128, 1, 128, 128, 1), 2, 1, ("q", "k", "cos", "sin")),
    "qk_norm_rope": ((1, 140_000, 96, 16, 128, 128, 1), 2, 1, ("qkv", "cos", "sin")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAR)
def test_more_than_2_to_the_31_elements(name: str, kernels_only: None) -> None:
    size, rows, dim, names = FAR[name]
    assert_last_rows_are_those_alone(CASES[name], size, rows, dim, names)


def assert_last_rows_are_those_alone(
    case: OpCase, size: Any, rows: int, dim: int, names: tuple[str, ...]
) -> None:
    inputs = case.make(size, torch.bfloat16)

    def last(x: Tensor) -> Tensor:
        return x.narrow(dim, x.shape[dim] - rows, rows)

    tail = {n: last(inputs[n].detach()).clone() for n in names}
    tail = {n: x.requires_grad_(inputs[n].requires_grad) for n, x in tail.items()}
    results = []
    for given in (inputs, inputs | tail):
        found = case.run(given)
        (grad,) = torch.autograd.grad([y.sum() for y in found], given[names[0]])
        results.append([last(x.detach()) for x in (*found, grad)])
    assert all(map(torch.equal, *results))


def test_last_rows_of_small_inputs(kernels_only: None) -> None:
    assert_last_rows_are_those_alone(CASES["gated_act, silu"], (9, 20), 2, 0, ("gate_up",))


@kinds_and_fp8
def test_second_backward_has_the_same_bits(case: OpCase, kernels_only: None) -> None:
    """Also where the first gradients were written to."""
    inputs = case.make()
    found = case.run(inputs)
    ups = random_like(found)
    copied = [up.clone() for up in ups]  # a sum returns it as a gradient
    first = gradients(found, inputs, copied, retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.zero_()
    assert all(map(torch.equal, kept, gradients(found, inputs, ups)))


@kinds_and_fp8
def test_second_derivative_is_right_or_refused(case: OpCase, path: str) -> None:
    inputs = case.make()
    total = sum(y.square().sum() for y in case.run(inputs))
    try:
        first = torch.autograd.grad(total, learned(inputs), create_graph=True)
    except RuntimeError as error:
        assert re.search(f"{case.second}.* second derivative", str(error))
        return
    assert path == "reference"  # where it is plain torch
    assert all(grad.requires_grad for grad in first)


AUTOCAST = {name: CASES[name] for name in KINDS + MORE_KINDS if CASES[name].autocast}


@pytest.mark.parametrize("case", AUTOCAST.values(), ids=AUTOCAST)
def test_autocast_multiplies_in_its_dtype(case: OpCase) -> None:
    inputs = case.make()
    narrow = inputs | {name: inputs[name].bfloat16() for name in case.autocast}
    device = learned(inputs)[0].device.type
    with torch.autocast(device, torch.bfloat16):
        found = case.run(inputs)
    expected = case.run(narrow)
    torch.testing.assert_close(found, expected)
    ups = random_like(found)
    ours, theirs = (gradients(y, inputs, ups) for y in (found, expected))
    for grad, wanted in zip(ours, theirs, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, wanted)


@kinds_and_fp8
def test_each_input_may_be_frozen(case: OpCase) -> None:
    """What learns has the same gradient, alone and beside others; without any there is no graph."""
    inputs = case.make()
    found = case.run(inputs)
    ups = random_like(found)
    names = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
    expected = dict(zip(names, gradients(found, inputs, ups), strict=True))
    for wanted in [*([name] for name in names), names[1:]]:
        if wanted:
            some = inputs | {n: inputs[n].detach() for n in names if n not in wanted}
            for name, grad in zip(wanted, gradients(case.run(some), some, ups), strict=True):
                torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5)
    frozen = inputs | {name: inputs[name].detach() for name in names}
    assert not any(y.requires_grad for y in case.run(frozen))
    with torch.no_grad():
        assert all(y.grad_fn is None for y in case.run(inputs))


@kinds_and_fp8
def test_recomputed_operator_has_the_same_bits(case: OpCase) -> None:
    """Non-reentrant checkpointing raises where backward reads what is saved twice."""
    inputs = case.make()
    found = checkpoint(lambda: case.run(inputs), use_reentrant=False)
    expected = case.run(inputs)
    ups = random_like(found)
    ours, theirs = (gradients(y, inputs, ups) for y in (found, expected))
    assert all(map(torch.equal, ours, theirs))


@kinds
def test_one_of_several_outputs_is_used(case: OpCase) -> None:
    inputs = case.make()
    if len(found := case.run(inputs)) == 1:
        pytest.skip("there is one")
    for y, wanted in zip(found, case.run(inputs, case.definition), strict=True):
        up = torch.randn(y.shape)
        ours, theirs = (
            torch.autograd.grad(
                out, learned(inputs), up.to(out.dtype), retain_graph=True, allow_unused=True
            )
            for out in (y, wanted)
        )
        for a, b, x in zip(ours, theirs, learned(inputs), strict=True):
            a, b = (torch.zeros_like(x) if g is None else g for g in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


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
