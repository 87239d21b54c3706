"""The tables of every RoPE type against transformers, at the sizes of real models."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.models.dense_cases import LLAMA3
from tests.models.dense_cases import YARN as TINY_YARN
from tigon.layers import RotaryEmbedding
from tigon.models.rope_config import read_rope

D = 128
LLAMA31 = LLAMA3 | {"original_max_position_embeddings": 8192}
YARN = TINY_YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 32768}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
YARN_4K = YARN | {"original_max_position_embeddings": 4096}
REAL: dict[str, tuple[dict[str, Any], int]] = {  # parameters, max_position_embeddings
    "Llama-2": ({"rope_theta": 1e4}, 4096),
    "Llama-3.1": (LLAMA31, 131072),
    "Llama-3.2": (LLAMA31 | {"factor": 32.0}, 131072),
    "LongChat": ({"type": "linear", "rope_theta": 1e4, "factor": 8.0}, 2048),
    "dynamic": ({"type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 4096),
    "Qwen2.5-1M": (YARN, 131072),
    "yarn whose ramp ends past the head": (YARN | {"rope_theta": 50.0}, 131072),
    "DeepSeek": (
        YARN_4K
        | BETAS
        | {"rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        163840,
    ),
    "gpt-oss": (YARN_4K | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False}, 131072),
    "Phi-3-128k": (
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1 + i / 64 for i in range(D // 2)],
            "long_factor": [1 + i for i in range(D // 2)],
            "original_max_position_embeddings": 4096,
        },
        131072,
    ),
}


def both(parameters: dict[str, Any], longest: int, dim: int = D) -> tuple[RotaryEmbedding, Any]:
    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )
    rope = read_rope({"rope_parameters": parameters}, 1e4, longest)
    return RotaryEmbedding(dim, rope, longest), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REAL)
def test_tables_of_real_models(name: str, dtype: torch.dtype) -> None:
    parameters, longest = REAL[name]
    for last in (100, 5000, longest - 1, longest + 3000):
        ours, theirs = both(parameters, longest)
        positions = torch.tensor([[0, 1, last // 3, last], [2, 3, 5, last // 2]])
        cos, sin, _ = ours(positions, dtype)
        expected = theirs(torch.empty(0, dtype=dtype), positions)
        assert cos.dtype == sin.dtype == dtype
        for table, reference in zip((cos, sin), expected, strict=True):
            assert torch.equal(table, reference[..., : D // 2])
            assert torch.equal(table, reference[..., D // 2 :])


def test_dynamic_remembers_nothing() -> None:
    parameters, longest = REAL["dynamic"]
    ours, theirs = both(parameters, longest)
    short = torch.arange(longest)[None]
    before = ours(short, torch.float32)[0]
    grown = ours(torch.tensor([[1, 3 * longest - 1]]), torch.float32)[0][0, 0]
    theta = 1e4 * (4 * 3 - 3) ** (D / (D - 2))
    expected = (theta ** -(torch.arange(64, dtype=torch.float64) / 64)).cos()
    assert (grown - expected).abs().max() < 1e-6
    assert torch.equal(ours(short, torch.float32)[0], before)
    assert torch.equal(before, theirs(torch.empty(0), short)[0][..., :64])


def test_frequencies_stay_fp32() -> None:
    """Rounded to bf16 they would turn position 1000 by up to 4 radians."""
    ours, _ = both(LLAMA31, 131072)
    exact = ours.inv_freq.clone()
    for changed in (ours.to(torch.bfloat16), ours.half(), ours.to("meta").to_empty(device="cpu")):
        assert torch.equal(changed.inv_freq, exact)
    assert not ours.state_dict()
