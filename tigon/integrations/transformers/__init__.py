"""Tigon's models as transformers' `PreTrainedModel`s, for its Trainer, TRL, PEFT and pipelines."""

from tigon.integrations.transformers.loading import (
    as_transformers,
    from_pretrained,
    register,
    unregister,
)

__all__ = ["as_transformers", "from_pretrained", "register", "unregister"]
