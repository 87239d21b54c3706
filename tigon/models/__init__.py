"""The zoo: one file per family, and the registry of model types."""

import os
from typing import TYPE_CHECKING, Unpack

from tigon.models import families
from tigon.models.adapters.adapters import adapter_layers, adapter_parameters, init_adapter
from tigon.models.adapters.lora import LoraConfig, savable_modules
from tigon.models.adapters.peft_files import (
    prepare_adapter,
    read_base,
    read_vocabulary_size,
    write_adapter,
)
from tigon.models.arguments import check_keywords
from tigon.models.causal_lm import CausalLM
from tigon.models.config import torch_dtype
from tigon.models.families import *  # noqa: F403
from tigon.models.init import init_sharded_weights
from tigon.models.inputs import Batch
from tigon.models.loss import Targets
from tigon.models.moe import aux_loss_coef
from tigon.models.outputs import CausalLMOutput
from tigon.models.pretrained import load
from tigon.models.pretrained.load import (
    LoadOptions,
    as_sequence_classifier,
    build,
    load_weights,
    materialize,
    open_model,
    parse_gguf_path,
    read_config,
)
from tigon.models.pretrained.match import find_misfits
from tigon.models.pretrained.quantization import (
    Quantize,
    count_parameters,
    quantize_model,
    quantized_bytes,
)
from tigon.models.pretrained.save import (
    convert_pretrained,
    prepare_save,
    write_converted,
    write_description,
    write_model,
)

MODELS: dict[str, type[CausalLM]] = {
    family.config_class.model_type: family
    for family in vars(families).values()
    if isinstance(family, type) and issubclass(family, CausalLM)
}


def from_pretrained(
    path_or_repo: str | os.PathLike[str], **options: Unpack[LoadOptions]
) -> CausalLM:
    """Load a Hugging Face checkpoint, with the class that its config.json names.

    `path_or_repo` is a directory, a hub repository, or a .gguf file. Keywords: dtype ("auto" is
    the checkpoint's), device, attention (a backend's name; "auto" takes the fastest that can),
    gguf_file (the name of a GGUF file there, docs/formats.md), mmap (on the CPU, leave weights in
    the file until they are used), quantize ("nf4": frozen weights in 4 bits; "keep": an fp8
    checkpoint's as they are), staging_bytes (of the host's memory for buffers), revision,
    subfolder, token, cache_dir, local_files_only. Raises when a tensor is missing, unexpected or of
    another shape, and on any config that it would not follow exactly.
    """
    return load.from_pretrained(path_or_repo, MODELS, **options)


__all__ = [
    "MODELS",
    "Batch",
    "CausalLM",
    "CausalLMOutput",
    "LoraConfig",
    "Quantize",
    "Targets",
    "adapter_layers",
    "adapter_parameters",
    "as_sequence_classifier",
    "aux_loss_coef",
    "build",
    "check_keywords",
    "convert_pretrained",
    "count_parameters",
    "find_misfits",
    "from_pretrained",
    "init_adapter",
    "init_sharded_weights",
    "load_weights",
    "materialize",
    "open_model",
    "parse_gguf_path",
    "prepare_adapter",
    "prepare_save",
    "quantize_model",
    "quantized_bytes",
    "read_base",
    "read_config",
    "read_vocabulary_size",
    "savable_modules",
    "torch_dtype",
    "write_adapter",
    "write_converted",
    "write_description",
    "write_model",
]
if not TYPE_CHECKING:  # type checkers read the import of families instead
    __all__ += [family.__name__ for family in MODELS.values()]
