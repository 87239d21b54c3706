"""Rotary embeddings: position ids to the cosines and sines of every RoPE type.

# B batch, T tokens, D rotated head dims

Source: the formulas of transformers' modeling_rope_utils; YaRN is Peng et al. (arXiv 2309.00071),
LongRoPE Ding et al. (arXiv 2402.13753).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def _powers(dim: int, theta: float) -> Tensor:
    """Returns theta^(2i / dim) [dim / 2]: 1 / `inv_freq` of the default type."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def rotated_dims(head_dim: int, p: Mapping[str, Any]) -> int:
    """Returns how many dims of a head a RoPE rotates, all for a proportional one."""
    partial = 1.0 if p.get("rope_type") == "proportional" else p.get("partial_rotary_factor", 1.0)
    return int(head_dim * partial)


def _proportional(dim: int, p: Mapping[str, Any]) -> Tensor:
    """Returns Gemma 4's `inv_freq`: the first partial_rotary_factor of a head's, then zeros."""
    inv_freq = 1 / _powers(dim, p["rope_theta"]) / p.get("factor", 1.0)
    rotated = int(p.get("partial_rotary_factor", 1.0) * dim // 2)
    return torch.where(torch.arange(dim // 2, device="cpu") < rotated, inv_freq, 0.0)


def scale_llama3(inv_freq: Tensor, p: Mapping[str, Any]) -> Tensor:
    """Returns `inv_freq` scaled as in Llama 3.1: by 1 / factor where wavelengths are long."""
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (p["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inv_freq / p["factor"] + smooth * inv_freq


def _yarn(dim: int, p: Mapping[str, Any]) -> Tensor:
    """Returns the `inv_freq` [dim / 2] of YaRN (arXiv 2309.00071)."""
    theta, original = p["rope_theta"], p["original_max_position_embeddings"]

    def turns_at(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(p.get("beta_fast") or 32), turns_at(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (
        high - low if high != low else 0.001
    )
    ramp_inverse = 1 - ramp.clamp(0, 1)
    powers = _powers(dim, theta)
    return 1 / (p["factor"] * powers) * (1 - ramp_inverse) + 1 / powers * ramp_inverse


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Returns what YaRN multiplies attention's inputs by for texts `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_scaling(p: Mapping[str, Any]) -> float:
    """Returns the factor by which YaRN multiplies cos and sin."""
    factor, mscale, mscale_all = p["factor"], p.get("mscale"), p.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return yarn_magnitude(factor)


def _longrope_scaling(p: Mapping[str, Any]) -> float:
    """Returns the factor by which LongRoPE multiplies cos and sin."""
    if p["factor"] <= 1:
        return 1.0
    return math.sqrt(1 + math.log(p["factor"]) / math.log(p["original_max_position_embeddings"]))


# Types that also scale cos and sin, and the factor when the config does not give one.
SCALED = {"yarn": _yarn_scaling, "longrope": _longrope_scaling}


class Rotation(NamedTuple):
    """The angles by which queries and keys are rotated."""

    cos: Tensor  # [B or 1, T, D / 2]
    sin: Tensor  # [B or 1, T, D / 2]
    query_scale: Tensor | None = None  # [B or 1, T, 1, 1], of rotated queries


class RotaryEmbedding(nn.Module):
    """position_ids [B or 1, T] -> their rotation, in the given dtype.

    `rope_parameters` is a config's, with all values that its type needs. With
    `llama_4_scaling_beta`, queries grow with the logarithm of how many times their position exceeds
    `original_max_position_embeddings`.
    """

    inv_freq: Tensor  # [D / 2], or [2, D / 2] short and long for longrope; always fp32
    # With dynamic RoPE and longrope, a longer text has other frequencies, at all its positions. The
    # length is that of the longest row of the batch, padding included
    original_length: float = math.inf

    def __init__(self, dim: int, rope_parameters: Mapping[str, Any], max_position_embeddings: int):
        super().__init__()
        self.dim, self.rope_parameters = dim, dict(rope_parameters)
        self.rope_type = rope_parameters["rope_type"]
        if self.rope_type == "dynamic" and dim < 4:
            raise ValueError(f"rope_type 'dynamic' needs 4 dims of a head to rotate, not {dim}")
        if self.rope_type == "dynamic" and not rope_parameters.get("alpha"):
            self.original_length = max_position_embeddings
        elif self.rope_type == "longrope":
            self.original_length = rope_parameters["original_max_position_embeddings"]
        self.scaling = 1.0
        if self.rope_type in SCALED:
            factor = rope_parameters.get("attention_factor")
            default = SCALED[self.rope_type]
            self.scaling = default(rope_parameters) if factor is None else float(factor)
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        """Returns `inv_freq` of the config's RoPE type, fp32 on the CPU: the angles per position,
        which `_at` adapts to the length of a batch."""
        p = self.rope_parameters
        theta = p["rope_theta"]
        if self.rope_type == "dynamic" and p.get("alpha"):  # stretches texts of all lengths alike
            theta *= p["alpha"] ** (self.dim / (self.dim - 2))
        powers = _powers(self.dim, theta)
        if self.rope_type == "linear":
            return 1 / powers / p["factor"]
        if self.rope_type == "proportional":
            return _proportional(self.dim, p)
        if self.rope_type == "llama3":
            return scale_llama3(1 / powers, p)
        if self.rope_type == "yarn":
            return _yarn(self.dim, p)
        if self.rope_type == "longrope":
            factors = [p["short_factor"], p["long_factor"]]
            if {len(f) for f in factors} != {len(powers)}:
                raise ValueError(
                    f"short_factor and long_factor have {len(factors[0])} and {len(factors[1])} "
                    f"values, but the head has {len(powers)} frequencies"
                )
            return 1 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)
        return 1 / powers

    def _apply(self, fn, recurse=True):
        """Moves the module, and computes `inv_freq` again in fp32, whatever the dtype."""
        # model.to(bfloat16) would round the frequencies (relative error 4e-3); meta has none
        super()._apply(fn, recurse)
        if self.inv_freq.device.type != "meta":
            self.inv_freq = self._frequencies().to(self.inv_freq.device)
        return self

    def _at(self, position_ids: Tensor) -> Tensor:
        """Returns the angles per position [D / 2] for a batch, without waiting for the device."""
        if self.original_length == math.inf:
            return self.inv_freq
        length, original = position_ids.max() + 1, self.original_length
        if self.rope_type == "longrope":
            return torch.where(length > original, self.inv_freq[1], self.inv_freq[0])
        # theta grows with the longest position beyond the trained length
        factor, length = self.rope_parameters["factor"], length.clamp(min=original).float()
        growth = (factor * length / original - (factor - 1)) ** (self.dim / (self.dim - 2))
        exponent = torch.arange(0, self.dim, 2, device=position_ids.device).float() / self.dim
        return 1.0 / (self.rope_parameters["rope_theta"] * growth) ** exponent

    @torch.no_grad()
    def forward(
        self, position_ids: Tensor, dtype: torch.dtype, row_positions: Tensor | None = None
    ) -> Rotation:
        """Returns the rotation of `position_ids` in `dtype`; `row_positions`: those of whole rows,
        if `position_ids` are one context-parallel rank's."""
        inv_freq = self._at(position_ids if row_positions is None else row_positions)
        angles = position_ids[..., None].float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        cos, sin = cos.to(dtype), sin.to(dtype)
        beta = self.rope_parameters.get("llama_4_scaling_beta")
        if beta is None:
            return Rotation(cos, sin)
        passed = position_ids // self.rope_parameters["original_max_position_embeddings"]
        scale = 1 + beta * torch.log(1 + passed.float())
        return Rotation(cos, sin, scale.to(dtype)[..., None, None])

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.rope_parameters}"


class NoRotary(nn.Module):
    """Angles of 0 for heads that are not rotated: every fourth layer of SmolLM3.

    With `attn_scale`, queries grow with the logarithm of how many times their position exceeds
    `floor_scale`, as in Llama 4.
    """

    def __init__(self, dim: int, attn_scale: float | None = None, floor_scale: int = 1):
        super().__init__()
        self.dim, self.attn_scale, self.floor_scale = dim, attn_scale, floor_scale

    def forward(
        self, position_ids: Tensor, dtype: torch.dtype, row_positions: Tensor | None = None
    ) -> Rotation:
        shape = *position_ids.shape, self.dim // 2
        cos = torch.ones(shape, dtype=dtype, device=position_ids.device)
        if self.attn_scale is None:
            return Rotation(cos, torch.zeros_like(cos))
        passed = (position_ids + 1) // self.floor_scale
        scale = 1 + self.attn_scale * torch.log1p(passed.float())
        return Rotation(cos, torch.zeros_like(cos), scale.to(dtype)[..., None, None])


def make_rotary(dim: int, rope: Mapping[str, Any], length: int) -> nn.Module:
    """Makes the module for RoPE parameters; without a rope_type, one that rotates nothing."""
    return RotaryEmbedding(dim, rope, length) if "rope_type" in rope else NoRotary(dim, **rope)
