"""fp8 tensors with scales: the values by definition, and every way in which scales can be wrong."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.fp8_checkpoints import E4M3, Block, dequantized, quantize
from tests.weights.saved import save
from tigon.weights import BlockScales, Checkpoint
from tigon.weights.read import Reader

W, S = "x.weight", "x.weight_scale_inv"


def checkpoint(directory: Path, tensors: dict[str, Tensor], block: Block) -> Checkpoint:
    return save(directory, tensors, BlockScales(block))


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((256, 384), (128, 128)),
        ((300, 200), (128, 128)),  # neither divides
        ((5, 7), (128, 128)),  # smaller than a block
        ((40, 50), (8, 16)),
        ((3, 20, 30), (8, 16)),
        ((20, 30), None),
        ((3, 20, 30), None),
    ],
)
def test_values(
    tmp_path: Path, shape: tuple[int, ...], block: Block, dtype: torch.dtype, scale: torch.dtype
) -> None:
    torch.manual_seed(0)
    codes, scales = quantize(torch.randn(shape) * 3, block, scale)
    found = checkpoint(tmp_path, {W: codes, S: scales}, block)
    assert found.tensors.keys() == {W} and found.tensors[W].shape == shape
    out = torch.empty(shape, dtype=dtype)
    found.read_into(W, out)
    assert torch.equal(out, dequantized(codes, scales, block, dtype))


@pytest.mark.parametrize("shape", [(50, 40), (9, 20, 30)])
def test_any_range_of_rows(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    codes, scales = quantize(torch.randn(shape), (8, 16))
    info = checkpoint(tmp_path, {W: codes, S: scales}, (8, 16)).tensors[W]
    expected = dequantized(codes, scales, (8, 16), torch.float32)
    with Reader() as reader:
        for first in range(shape[0]):
            for end in range(first, shape[0] + 1):
                assert torch.equal(info.rows(reader, first, end - first), expected[first:end])


def test_every_code_of_both_forms(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for dtype in E4M3, torch.float8_e5m2:
        tensors = {W: codes.view(dtype), S: torch.ones(1, 1)}
        out = torch.empty(16, 16)
        checkpoint(tmp_path, tensors, (128, 128)).read_into(W, out)
        assert torch.equal(out.view(torch.int32), codes.view(dtype).float().view(torch.int32))


def changed(scales: Tensor, value: float) -> Tensor:
    scales = scales.clone()
    scales[1, 0] = value
    return scales


CODES, SCALES = quantize(torch.randn(16, 8), (8, 8))
BAD: dict[str, tuple[dict[str, Tensor], Block, str]] = {
    "no scales": ({W: CODES}, (8, 8), f"'{W}' is stored as .*, but the checkpoint has no '{S}'"),
    "of AutoFP8": ({W: CODES, f"{W}_scale": SCALES}, (8, 8), f"no '{S}'; it has '{W}_scale'"),
    "misshaped": (
        {W: CODES, S: SCALES[:1]},
        (8, 8),
        rf"'{S}' is \[1, 1\]; weights \[16, 8\] with blocks of \[8, 8\] .* need \[2, 1\]",
    ),
    "of other blocks": ({W: CODES, S: SCALES}, (128, 128), rf"'{S}' is \[2, 1\]; .* need \[1, 1\]"),
    "not one": ({W: CODES, S: SCALES}, None, rf"'{S}' is \[2, 1\]; .*one for the tensor"),
    "of integers": ({W: CODES, S: SCALES.int()}, (8, 8), f"'{S}' is torch.int32; scales are read"),
    "NaN": ({W: CODES, S: changed(SCALES, torch.nan)}, (8, 8), rf"{S} is nan for block \[1, 0\]"),
    "infinite": ({W: CODES, S: changed(SCALES, torch.inf)}, (8, 8), f"{S} is inf for block"),
    "negative": ({W: CODES, S: changed(SCALES, -1)}, (8, 8), rf"{S} is -1.0 for block \[1, 0\]"),
    "a vector": ({W: CODES[0], S: SCALES}, (8, 8), rf"'{W}' .*\[8\]: only matrices are"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_scales_are_refused(tmp_path: Path, case: str) -> None:
    tensors, block, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        checkpoint(tmp_path, tensors, block).read_into(W, torch.empty(16, 8))
    assert str(tmp_path) in str(error.value)


def test_fp8_that_the_config_does_not_explain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"tensor '{re.escape(W)}' is stored as .*a quantized ch"):
        save(tmp_path, {W: CODES, S: SCALES})


def test_a_scale_without_weights_is_a_tensor_like_any_other(tmp_path: Path) -> None:
    plain = {W: torch.ones(16, 8), S: SCALES}
    assert checkpoint(tmp_path, plain, (8, 8)).tensors.keys() == {W, S}
