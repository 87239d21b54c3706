"""Every operator in half precision: as near as plain torch, rounded where the definition does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import definitions
from tests.kernels.cases import CASES, KINDS, MORE_KINDS
from tests.kernels.layer_cases import GEMMA
from tests.kernels.op_case import HALF, Call, OpCase, learned
from tests.kernels.operators import (
    JUDGED,
    assert_as_good_as_eager,
    gradients,
    random_like,
    small_steps,
)

__all__ = ["small_steps"]


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
