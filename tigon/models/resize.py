"""Changes the number of tokens that a model's embedding and head have rows for."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.layers import Embedding, LMHead
from tigon.models.base import LanguageModel
from tigon.models.config import vocabulary_keys
from tigon.utils.json import quote
from tigon.utils.memory import check_memory


@torch.no_grad()
def resize_token_embeddings(
    model: LanguageModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> Embedding:
    """Resizes embedding and head to `new_num_tokens` rows, and returns the embedding.

    None keeps the number of rows. `pad_to_multiple_of` rounds the number up. Config and tied
    weights follow, and so does a second embedding with a row for each token.

    New rows, also of a bias, are the mean of the old ones, where transformers draws from a narrow
    normal distribution around it; so they are the same in every process. Without `mean_resizing`
    they are drawn as in a new model.

    Call it before adapters are added, the model is sharded or an optimizer is made, since these
    refer to the old parameters. Raises ValueError if the model has adapters or is sharded, and for
    more rows than the device's memory has room for.
    """
    size = model.config.vocab_size if new_num_tokens is None else new_num_tokens
    multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    for name, value in (("new_num_tokens", size), ("pad_to_multiple_of", multiple)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={quote(value)} is not a positive integer")
    size = -(-size // multiple) * multiple
    embedding, head = model.model.embed_tokens, model.lm_head
    if size == len(embedding.weight):
        return embedding
    if model.adapters:
        raise ValueError("the model has adapters: resize its embeddings before adding them")
    if model.shard_specs or isinstance(embedding.weight, DTensor):
        raise ValueError("the model is sharded: resize its embeddings before sharding it")
    sizes: dict[str, Any] = dict.fromkeys(vocabulary_keys(model.config), size)
    config = replace(model.config, **sizes)  # raises before anything changes
    tables = model.model.embeddings[: len(sizes)]
    heads = [] if model.ties_head or config.labels else [head]
    layers: list[Embedding | LMHead] = [*tables, *heads]
    weights = [layer.weight for layer in layers if not layer.weight.is_meta]
    needed = sum(size * weight[:1].nbytes for weight in weights)
    check_memory(needed, model.device, f"embedding and head of {size} rows take")
    std = None if mean_resizing else config.initializer_range
    for table in tables:
        table.weight = _resize_rows(table.weight, size, std)
        table.num_embeddings = size
    if model.ties_head:
        head.weight = cast(nn.Parameter, embedding.weight)
    for layer in heads:
        layer.weight = _resize_rows(layer.weight, size, std)
    if head.bias is not None and not config.labels:
        head.bias = _resize_rows(head.bias, size, None if mean_resizing else 0.0)
    model.config = config
    return embedding


def _resize_rows(old: Tensor, size: int, std: float | None) -> nn.Parameter:
    """Makes a parameter of the first `size` rows of `old`; rows that it lacks are drawn from
    Normal(0, std), or with std=None are the mean of all its rows."""
    mean = old.mean(0, dtype=torch.float32).to(old.dtype)
    new = mean.expand(max(0, size - len(old)), *old.shape[1:])
    if std is not None:
        new = torch.empty_like(new, memory_format=torch.contiguous_format).normal_(std=std)
    return nn.Parameter(torch.cat([old[:size], new]), old.requires_grad)
