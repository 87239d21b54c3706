"""What each task learns from, and its loss. One loop serves them all."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tigon.data import Examples, Rows, chat_examples, split, text_examples, whole
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config

Batch = dict[str, Tensor]


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


def loss(model: CausalLM, batch: Batch, config: Config, items: Tensor) -> Tensor:
    """This micro-batch's share of the step's loss: the shares of all ranks add up to it."""
    output = model(**batch, loss_reduction=config.loss_reduction, num_items_in_batch=items)
    return output.loss


def to(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
