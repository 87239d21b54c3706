"""Tigon's models as transformers' `PreTrainedModel`s, for its Trainer, TRL, PEFT and pipelines."""

from importlib.metadata import PackageNotFoundError, version

try:
    installed = version("transformers")
except PackageNotFoundError:
    installed = "none"
# From 5.24 on caches and outputs have the names that are used here
if installed == "none" or tuple(map(int, installed.split(".")[:2])) < (5, 24):
    raise ImportError(
        "tigon.integrations.transformers needs transformers 5.24 or newer, and "
        f"{installed} is installed: pip install 'tigon[transformers]'"
    )

from tigon.integrations.transformers.loading import (
    as_transformers,
    from_pretrained,
    register,
    unregister,
)

__all__ = ["as_transformers", "from_pretrained", "register", "unregister"]
