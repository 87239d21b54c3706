"""Language models of fused layers: Hugging Face checkpoint in, Hugging Face checkpoint out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tigon.models import (
        CausalLM,
        CausalLMOutput,
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
        from_pretrained,
    )
    from tigon.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
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
    "Olmo2",
    "Olmo3",
    "Phi3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "SeedOss",
    "SmolLM3",
    "Tokenizer",
    "from_pretrained",
]
PACKAGES = (
    "data",
    "eval",
    "generation",
    "kernels",
    "layers",
    "models",
    "tokenizer",
    "train",
    "weights",
)


def __getattr__(name: str) -> Any:
    """Imports what is first asked for: torch takes seconds, and `tigon --help` needs none of it."""
    if name in __all__:
        module = "tigon.tokenizer" if name == "Tokenizer" else "tigon.models"
        return getattr(import_module(module), name)
    if name in PACKAGES:
        return import_module(f"tigon.{name}")
    raise AttributeError(f"module 'tigon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__, *PACKAGES]
