"""MXFP4 tensors with scales: the values by definition, and ways in which scales can be wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.mxfp4_checkpoints import draw, meant
from tests.weights.saved import save
from tigon.weights import mxfp4 as implementation
from tigon.weights.read import Reader

X = "x.gate_up_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("experts", "outputs", "inputs"), [(3, 10, 64), (1, 7, 32), (2, 1, 96)])
def test_values(
    experts: int, outputs: int, inputs: int, dtype: torch.dtype, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(implementation, "CHUNK", 4)
    tensors = draw(X, experts, outputs, inputs) | {"other": torch.ones(2)}
    found = save(tmp_path, tensors)
    assert found.tensors.keys() == {X, "other"}
    assert found.tensors[X].shape == (experts, inputs, outputs)
    out = torch.empty(experts, inputs, outputs, dtype=dtype)
    found.read_into(X, out)
    assert torch.equal(out, meant(X, tensors).to(dtype))


def test_every_code_with_every_scale(tmp_path: Path) -> None:
    """From numbers below the normal ones to those near the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    tensors = {f"{X}_blocks": codes.contiguous(), f"{X}_scales": scales.contiguous()}
    out = torch.empty(1, 512, 255)
    save(tmp_path, tensors).read_into(X, out)
    assert torch.equal(out, meant(X, tensors).float())
    assert out.abs().max() == torch.inf and out[out != 0].abs().min() == 2.0**-128


def test_any_range_of_experts(tmp_path: Path) -> None:
    tensors = draw(X, 4, 6, 64)
    info = save(tmp_path, tensors).tensors[X]
    expected = meant(X, tensors).bfloat16()
    with Reader() as reader:
        for first in range(4):
            for end in range(first, 5):
                assert torch.equal(info.rows(reader, first, end - first), expected[first:end])


GOOD = draw(X, 2, 6, 64)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "experts that are there twice": (
        {X: torch.zeros(2, 64, 6)},
        "'x.gate_up_proj_blocks' beside 'x.gate_up_proj': these experts are there twice",
    ),
    "no scales": ({f"{X}_scales": None}, "but the checkpoint has no 'x.gate_up_proj_scales'"),
    "scales of another shape": (
        {f"{X}_scales": torch.zeros(2, 6, 3, dtype=torch.uint8)},
        r"\[2, 6, 2, 16\] with scales \[2, 6, 3\] is not",
    ),
    "blocks of another size": (
        {f"{X}_blocks": torch.zeros(2, 6, 2, 8, dtype=torch.uint8)},
        r"\[2, 6, 2, 8\] with scales \[2, 6, 2\] is not",
    ),
    "a matrix": ({f"{X}_blocks": torch.zeros(2, 16, dtype=torch.uint8)}, r"\[2, 16\] with scales"),
    "floats": ({f"{X}_scales": torch.zeros(2, 6, 2)}, "its scales are torch.float32, not torch.ui"),
    "signed": ({f"{X}_blocks": torch.zeros(2, 6, 2, 16, dtype=torch.int8)}, "torch.int8, not torc"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = WRONG[case]
    tensors = {name: x for name, x in (GOOD | changes).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        save(tmp_path, tensors)


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    tensors = {name: x.clone() for name, x in GOOD.items()}
    tensors[f"{X}_scales"][1, 5, 1] = 255
    found = save(tmp_path, tensors)
    found.read_into(X, torch.empty(1, 64, 6))
    with pytest.raises(ValueError, match="_scales of expert 1 has 255, which is no number"):
        found.read_into(X, torch.empty(2, 64, 6))
