"""What a model, its tokenizer and its data have to agree on."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from tigon.models import CausalLM
from tigon.parallel import MeshSizes, take_part
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.train.model import context_of, outline
from tigon.train.optim import check_part


def check_context(config: Config, source: Path | None = None) -> None:
    """ValueError for sequences that are longer than what the model can read. Before they are made:
    that may take long, and a cache for such a run would be of no use.
    """
    check_longest(config, context_of(config, source), "the model")


def check_longest(config: Config, context: int, whose: str) -> None:
    """ValueError for sequences of more than `context` tokens, which a model reads at most."""
    name = "seq_len" if config.max_length is None else "max_length"
    if (longest := min(config.seq_len, config.max_length or config.seq_len)) > context:
        raise ValueError(
            f"{name}={longest} is more than {whose}'s context of {context} tokens "
            f"(max_position_embeddings): set {name}={context} or less"
        )


def check_sizes(config: Config, sizes: MeshSizes, source: Path | None = None) -> None:
    """ValueError for a model that so many ranks cannot share; also before data are made."""
    if sizes.tensor * sizes.context * sizes.expert > 1:
        model = outline(config, getattr(torch, config.param_dtype), source)
        take_part(model, sizes)
        check_part(model, config)


def stop_at(model: CausalLM, tokenizer: Tokenizer, ends: Collection[int]) -> None:
    """Generation by the trained model stops at these tokens, with which it learns to end a turn.

    They join what config.json and generation_config.json say. The one that a model did not stop at
    before becomes the tokenizer's eos, which other programs read.
    """
    generation = dict(model.generation_config)
    said = generation.get("eos_token_id", model.config.eos_token_id)
    new = sorted(set(ends) - set(_tokens(said)))
    if not new:
        return
    model.config = replace(model.config, eos_token_id=_joined(model.config.eos_token_id, new))
    if generation:
        model.generation_config = generation | {"eos_token_id": _joined(said, new)}
    if len(new) == len(ends) == 1 and not tokenizer.template_reads("eos_token"):
        tokenizer.use_eos(new[0])


def _tokens(ids: int | list[int] | None) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids or ())


def _joined(ids: int | list[int] | None, new: list[int]) -> int | list[int]:
    all_ids = list(dict.fromkeys([*_tokens(ids), *new]))
    return all_ids if len(all_ids) > 1 else all_ids[0]
