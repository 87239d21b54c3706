"""Phi-3, 3.5 and 4-mini: Llama's blocks, stored with qkv and gate_up fused as here.

Paper: arXiv 2404.14219; checked against transformers' modeling_phi3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.models.causal_lm import CausalLM
from tigon.models.config import WindowedConfig
from tigon.models.pretrained.names import CheckpointNames

RENAMED = {"su": "longrope", "yarn": "longrope"}  # of configs older than the name


@dataclass(frozen=True, kw_only=True)
class Phi3Config(WindowedConfig):
    """The config of Phi-3 to 4-mini: RoPE on part of each head, LongRoPE's original length."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    partial_rotary = True

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 32000
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 32000
    sliding_window: int | None = None

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """As ModelConfig's, with the types "su" and "yarn" read as "longrope", and an original
        length of 4096 unless the source has one."""
        source = {"original_max_position_embeddings": 4096, **source}
        for key in ("rope_scaling", "rope_parameters"):
            rope = source.get(key)
            if isinstance(rope, dict):
                types = {k: v for k, v in rope.items() if k.endswith("type")}
                source[key] = rope | {k: RENAMED.get(str(v), v) for k, v in types.items()}
        return super()._read_rope(source, longest)


class Phi3(CausalLM):
    """Phi-3 to 4-mini: Mistral's blocks; checkpoints store projections packed, as here."""

    config_class = Phi3Config
    checkpoint_names = CheckpointNames(packed={})  # stored packed, as here

    @property
    def cache_restart(self) -> int | None:
        """With LongRoPE, the first length beyond original_max_position_embeddings, from which all
        keys are rotated by the long factors; else None."""
        rope = self.model.dynamic_rope
        return (
            None if rope is None or rope.rope_type != "longrope" else int(rope.original_length) + 1
        )
