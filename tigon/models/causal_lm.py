"""CausalLM: what families derive from; the forward contract, generation, loading and saving."""

import os
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from tigon.generation import generate
from tigon.kernels.attention.backends import Backend
from tigon.models import resize
from tigon.models.adapters import adapters, peft_files, weighted
from tigon.models.base import LanguageModel
from tigon.models.config import ConfigError, ModelConfig
from tigon.models.init import init_weights
from tigon.models.pretrained import gguf_export, load, save
from tigon.models.pretrained.names import layout
from tigon.weights import Layout

# Attributes that Trainer, PEFT and pipelines read first, and what a native model raises for them.
# Trainer asks hasattr, and would go on after an AttributeError
REFUSED: dict[str, type[Exception]] = {
    "accepts_loss_kwargs": TypeError,
    "prepare_inputs_for_generation": AttributeError,
    "can_generate": AttributeError,
}


class CausalLM(LanguageModel):
    """A language model with all that users call; a family names its config and block classes.

    It adds to `LanguageModel` (decoder, head and forward pass) `generate`, loading and saving,
    random weights from a config, `resize_token_embeddings`, and methods that add, load, save,
    choose, merge and delete adapters.
    """

    generate = generate
    save_pretrained = save.save_pretrained
    save_gguf = gguf_export.save_gguf
    push_to_hub = save.push_to_hub
    resize_token_embeddings = resize.resize_token_embeddings
    add_adapter = adapters.add_adapter
    load_adapter = peft_files.load_adapter
    save_adapter = peft_files.save_adapter
    add_weighted_adapter = weighted.add_weighted_adapter
    set_adapter = adapters.set_adapter
    adapters_disabled = adapters.adapters_disabled
    merge_adapter = adapters.merge_adapter
    delete_adapter = adapters.delete_adapter

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """As nn.Module's; for names in REFUSED the error says how to wrap the model."""
        if name in REFUSED:
            raise REFUSED[name](
                f"{type(self).__name__} is a native model; wrap it for Trainer, PEFT and others: "
                "tigon.integrations.transformers.as_transformers(model)"
            )
        return super().__getattr__(name)

    @property
    def adapter_names(self) -> list[str]:
        """The names of the LoRA adapters; `active_adapter` is the one in use."""
        return list(self.adapters)

    def layout(self, *, stacked_experts: bool = False) -> Layout:
        """Maps each parameter to the checkpoint tensors that hold its rows; `stacked_experts`:
        those of a checkpoint with one tensor for all experts of a layer."""
        return layout(self, self.checkpoint_names, stacked_experts)

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | os.PathLike[str], **options: Unpack[load.LoadOptions]
    ) -> Self:
        """Loads a Hugging Face checkpoint of this class; see `tigon.from_pretrained`."""
        return load.from_pretrained(path_or_repo, {cls.config_class.model_type: cls}, **options)

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any] | ModelConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        attention: Backend = "auto",
    ) -> Self:
        """Makes a model of a config, or of config.json's content, with random weights: matrices are
        drawn from Normal(0, initializer_range), biases and the padding row are zeros, norms are
        ones. On "meta" it has no memory."""
        if not isinstance(config, ModelConfig):
            config = load.parse_config(cls, config)
        if not isinstance(config, cls.config_class):
            raise ConfigError(f"{cls.__name__} is not for model_type {config.model_type!r}")
        model = load.build_on_meta(cls, config, dtype or torch.get_default_dtype())
        if torch.device(device).type != "meta":
            load.materialize(model, torch.device(device))
            init_weights(model)
        return model.use_attention(attention)
