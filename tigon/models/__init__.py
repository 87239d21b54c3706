"""The zoo: one file per family, and the registry of model types."""

import os
from typing import Unpack

from tigon.models import _load
from tigon.models._load import LoadOptions, build, load_weights, materialize
from tigon.models._model import CausalLMOutput
from tigon.models._moe import MoEConfig
from tigon.models.causal_lm import CausalLM
from tigon.models.gemma import Gemma
from tigon.models.gemma2 import Gemma2
from tigon.models.gemma3 import Gemma3
from tigon.models.glm4 import Glm4
from tigon.models.granite import Granite
from tigon.models.llama import Llama
from tigon.models.ministral3 import Ministral3
from tigon.models.mistral import Ministral, Mistral
from tigon.models.mixtral import Mixtral
from tigon.models.olmo2 import Olmo2
from tigon.models.olmo3 import Olmo3
from tigon.models.phi3 import Phi3
from tigon.models.qwen2 import Qwen2
from tigon.models.qwen2_moe import Qwen2Moe
from tigon.models.qwen3 import Qwen3
from tigon.models.qwen3_moe import Qwen3Moe
from tigon.models.seed_oss import SeedOss
from tigon.models.smollm3 import SmolLM3

MODELS: dict[str, type[CausalLM]] = {
    family.config_class.model_type: family
    for family in (
        Gemma,
        Gemma2,
        Gemma3,
        Glm4,
        Granite,
        Llama,
        Ministral,
        Ministral3,
        Mistral,
        Mixtral,
        Olmo2,
        Olmo3,
        Phi3,
        Qwen2,
        Qwen2Moe,
        Qwen3,
        Qwen3Moe,
        SeedOss,
        SmolLM3,
    )
}

__all__ = [
    "MODELS",
    "CausalLM",
    "CausalLMOutput",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Glm4",
    "Granite",
    "Llama",
    "Ministral",
    "Ministral3",
    "Mistral",
    "Mixtral",
    "MoEConfig",
    "Olmo2",
    "Olmo3",
    "Phi3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "SeedOss",
    "SmolLM3",
    "build",
    "from_pretrained",
    "load_weights",
    "materialize",
]


def from_pretrained(
    path_or_repo: str | os.PathLike[str], **options: Unpack[LoadOptions]
) -> CausalLM:
    """Load a Hugging Face checkpoint, with the class that its config.json names.

    `path_or_repo` is a directory or a hub repository. Keywords: dtype ("auto" is the
    checkpoint's), device, attention (a backend's name; "auto" takes the fastest that can),
    revision, subfolder, token, cache_dir, local_files_only. Raises when
    a tensor is missing, unexpected or of another shape, and on any config that it would not
    follow exactly.
    """
    return _load.from_pretrained(path_or_repo, MODELS, **options)
