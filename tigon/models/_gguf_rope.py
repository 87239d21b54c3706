"""RoPE as GGUF files describe it, in config.json's terms."""

import math
from typing import Any

import torch
from torch import Tensor

from tigon.json_file import shown
from tigon.strict import ConfigError
from tigon.weights import GGUF, GGMLTensor
from tigon.weights.gguf import TORCH_DTYPES
from tigon.weights.reading import Reader

FREQS = "rope_freqs.weight"
# What all of Llama 3.1 to 3.3 have; the file has only what follows from it
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROUNDING = 1e-6  # relative, of an fp32 number after a power and some products


def read_gguf_rope(file: GGUF, keys: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling of config.json; takes their keys from `keys`."""
    theta = keys.pop("rope.freq_base", 10000.0)
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ConfigError(f"rope.freq_base={shown(theta)} is not a positive number")
    scaling = _scaling(keys)
    if FREQS in file.tensors:
        if scaling is not None:
            raise ConfigError(
                f"the file has both rope.scaling and {FREQS}, which exclude each other"
            )
        scaling = _of_divisors(_divisors(file, config["head_dim"]), theta, config)
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _scaling(keys: dict[str, Any]) -> dict[str, Any] | None:
    linear = keys.pop("rope.scale_linear", None)  # of the first files
    kind = keys.pop("rope.scaling.type", "none" if linear is None else "linear")
    factor = keys.pop("rope.scaling.factor", linear)
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):  # 0: not given
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope.scaling.type={shown(kind)} is not none, linear or yarn")
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for key, name in (
            ("original_context_length", "original_max_position_embeddings"),
            ("attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if f"rope.scaling.{key}" in keys:
                found[name] = keys.pop(f"rope.scaling.{key}")
    return found


def _divisors(file: GGUF, head_dim: int) -> Tensor:
    """What the frequencies are divided by, [head_dim / 2]."""
    stored = file.tensors[FREQS]
    if stored.kind not in TORCH_DTYPES or stored.shape != (head_dim // 2,):
        raise ConfigError(
            f"tensor {FREQS!r} is {list(stored.shape)}, not a plain one of {head_dim // 2} numbers"
        )
    size = TORCH_DTYPES[stored.kind].itemsize
    tensor = GGMLTensor(FREQS, stored.shape, file.path, stored.offset, stored.kind, size)
    with Reader() as reader:
        divisors = tensor.rows(reader, 0, head_dim // 2)
    if not (divisors.isfinite() & (divisors > 0)).all():
        raise ConfigError(f"tensor {FREQS!r} has numbers that are not positive")
    return divisors


def _of_divisors(divisors: Tensor, theta: float, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling if it gives these divisors, or one that has them as they are."""
    factor = round(divisors.max().item(), 4)
    expected = _llama3_divisors(factor, theta, config["head_dim"])
    if torch.allclose(divisors, expected, rtol=ROUNDING, atol=0):
        return LLAMA3 | {"factor": factor}
    numbers = [float(str(number)) for number in divisors.numpy()]  # the shortest in fp32
    return {
        "rope_type": "longrope",
        "short_factor": numbers,
        "long_factor": numbers,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_divisors(factor: float, theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    waves = 2 * math.pi * theta**exponents  # tokens in a turn
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / waves
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()
