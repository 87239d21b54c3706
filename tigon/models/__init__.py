"""The zoo: one file per family, and the registry of model types."""

import os
from typing import TYPE_CHECKING, Unpack

from tigon.models import families
from tigon.models.causal_lm import CausalLM
from tigon.models.families import *  # noqa: F403
from tigon.models.inputs import Batch
from tigon.models.outputs import CausalLMOutput
from tigon.models.pretrained import load
from tigon.models.pretrained.load import build, load_weights, materialize
from tigon.models.targets import Targets
from tigon.settings.lora import LoraConfig

MODELS: dict[str, type[CausalLM]] = {
    family.config_class.model_type: family
    for family in vars(families).values()
    if isinstance(family, type) and issubclass(family, CausalLM)
}


def from_pretrained(
    path_or_repo: str | os.PathLike[str], **options: Unpack[load.LoadOptions]
) -> CausalLM:
    """Loads a Hugging Face checkpoint, with the class that its config.json names.

    `path_or_repo` is a directory, a hub repository, or a .gguf file. Keywords: dtype ("auto" is
    the checkpoint's), device, attention (a backend's name; "auto" takes the fastest that can),
    gguf_file (the name of a GGUF file there, docs/formats.md), labels (make a sequence classifier
    with this number of scores), mmap (on the CPU, leave weights in the file until they are used),
    quantize ("nf4": frozen weights in 4 bits; "keep": an fp8
    checkpoint's as they are), staging_bytes (of the host's memory for buffers), revision,
    subfolder, token, cache_dir, local_files_only. Raises when a tensor is missing, unexpected or of
    another shape, and on any config that it would not follow exactly.
    """
    return load.from_pretrained(path_or_repo, MODELS, **options)


__all__ = [
    "MODELS", "Batch", "CausalLM", "CausalLMOutput", "LoraConfig", "Targets", "build",
    "from_pretrained", "load_weights", "materialize",
]  # fmt: skip
if not TYPE_CHECKING:  # type checkers read the import of families instead
    __all__ += [family.__name__ for family in MODELS.values()]
