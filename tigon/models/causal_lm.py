"""CausalLM: what families derive from; the forward contract, generation, loading and saving."""

import os
from typing import Any, Self, Unpack

import torch

from tigon.generation import generate
from tigon.kernels.attention import Backend
from tigon.models import _adapter_files, _adapters, _load, _push, _resize, _save
from tigon.models._config import Config
from tigon.models._layout import layout
from tigon.models._model import LanguageModel
from tigon.weights import Layout


class CausalLM(LanguageModel):
    """A decoder with a language-model head. Families give their config and block classes."""

    generate = generate
    save_pretrained = _save.save_pretrained
    push_to_hub = _push.push_to_hub
    resize_token_embeddings = _resize.resize_token_embeddings
    add_adapter = _adapters.add_adapter
    load_adapter = _adapter_files.load_adapter
    save_adapter = _adapter_files.save_adapter
    set_adapter = _adapters.set_adapter
    adapters_disabled = _adapters.adapters_disabled
    merge_adapter = _adapters.merge_adapter
    delete_adapter = _adapters.delete_adapter

    @property
    def adapter_names(self) -> list[str]:
        """Of the low-rank adapters; `active_adapter` is the one that is added."""
        return list(self.adapters)

    def layout(self, *, stacked_experts: bool = False) -> Layout:
        """Every parameter, and the checkpoint tensors that its rows are made of."""
        return layout(self, self.checkpoint_names, stacked_experts)

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | os.PathLike[str], **options: Unpack[_load.LoadOptions]
    ) -> Self:
        """Load a Hugging Face checkpoint of this class; see `tigon.from_pretrained`."""
        return _load.from_pretrained(path_or_repo, {cls.config_class.model_type: cls}, **options)

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any] | Config,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        attention: Backend = "auto",
    ) -> Self:
        """Random weights as transformers initialises them; on "meta", no weights at all."""
        model = _load.from_config(cls, config, dtype=dtype, device=torch.device(device))
        return model.use_attention(attention)
