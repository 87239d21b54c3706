"""Language models of fused layers: Hugging Face checkpoint in, Hugging Face checkpoint out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tigon.version import __version__ as __version__

if TYPE_CHECKING:
    from tigon.models import Batch as Batch
    from tigon.models import CausalLM as CausalLM
    from tigon.models import CausalLMOutput as CausalLMOutput
    from tigon.models import LoraConfig as LoraConfig
    from tigon.models import Targets as Targets
    from tigon.models.families import *  # noqa: F403
    from tigon.parallel import from_pretrained as from_pretrained
    from tigon.tokenizer import Tokenizer as Tokenizer

# Beside the families, and where they are
EXPORTS = {
    "Batch": "models",
    "CausalLM": "models",
    "CausalLMOutput": "models",
    "LoraConfig": "models",
    "Targets": "models",
    "Tokenizer": "tokenizer",
    "from_pretrained": "parallel",
}
PACKAGES = (
    "data",
    "distributed",
    "eval",
    "generation",
    "hub",
    "integrations",
    "kernels",
    "layers",
    "models",
    "parallel",
    "plan",
    "report",
    "serve",
    "settings",
    "tokenizer",
    "train",
    "weights",
)


def __getattr__(name: str) -> Any:
    """Imports what is first asked for: torch takes seconds, and `tigon --help` needs none of it."""
    if name in PACKAGES:
        return import_module(f"tigon.{name}")
    if name in EXPORTS:
        return getattr(import_module(f"tigon.{EXPORTS[name]}"), name)
    if name == "__all__" or not name.startswith("_"):
        families = {f.__name__: f for f in import_module("tigon.models").MODELS.values()}
        if name == "__all__":
            return sorted([*EXPORTS, *families])
        if name in families:
            return families[name]
    raise AttributeError(f"module 'tigon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__"), *PACKAGES]
