"""What each task learns from, and its loss. One loop serves them all."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon.data import Examples, Rows, chat_examples, split, text_examples, whole
from tigon.models import CausalLM, MoEConfig
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config

Batch = dict[str, Any]  # keyword arguments of the model: tensors, and numbers for the host


def pretrain(config: Config, files: Sequence[Path], tokenizer: Tokenizer) -> tuple[Examples, Rows]:
    examples = text_examples(files, tokenizer, separator=config.separator)
    return examples, split(examples, config.seq_len, packing=config.packing)


def sft(config: Config, files: Sequence[Path], tokenizer: Tokenizer) -> tuple[Examples, Rows]:
    examples = chat_examples(files, tokenizer)
    rows = whole(examples, config.seq_len, packing=config.packing, truncate=config.truncate)
    return examples, rows


TASKS: dict[str, Callable[[Config, Sequence[Path], Tokenizer], tuple[Examples, Rows]]] = {
    "pretrain": pretrain,
    "sft": sft,
}


def num_items(model: CausalLM, batch: Batch, config: Config) -> Tensor:
    """This micro-batch's share of the step's denominator."""
    return model.num_items(**batch, loss_reduction=config.loss_reduction)


def loss(
    model: CausalLM, batch: Batch, config: Config, items: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss, and what to know about it.

    The shares of all ranks add up to the step's.
    """
    c = model.config
    routed = isinstance(c, MoEConfig) and any(map(c.sparse, range(c.num_hidden_layers)))
    output = model(
        **batch,
        loss_reduction=config.loss_reduction,
        num_items_in_batch=items,
        metrics=("aux_loss", "expert_load") if routed else (),
    )
    return output.loss, output.metrics


def evaluation(model: CausalLM, batch: Batch, config: Config, items: Tensor) -> Tensor:
    """This micro-batch's share of the loss of all held-out data, without the router's part."""
    reduction = config.loss_reduction
    output = model(**batch, loss_reduction=reduction, num_items_in_batch=items, metrics=())
    if output.aux_loss is None:
        return output.loss
    share = num_items(model, batch, config) / items.clamp(min=1)
    return output.loss - model.config.router_aux_loss_coef * share * output.aux_loss


def recorded(means: dict[str, Tensor]) -> dict[str, Tensor]:
    """What metrics.jsonl says of the means that a step's metrics have, as numbers."""
    means = dict(means)
    if "expert_load" in means:  # [layers, E]: the busiest expert of all, in multiples of the mean
        load = means.pop("expert_load")
        means["expert_imbalance"] = load.max() * load.shape[1]
    return means


def to(batch: dict[str, Tensor], device: torch.device) -> Batch:
    """The batch on the device, and what the host has to know of it to launch attention."""
    moved: Batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    return moved | {"max_length_q": int(batch["cu_seq_lens"].diff().max())}
