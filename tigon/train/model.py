"""The model of a run: built from a checkpoint or a config.json, sharded, on its device."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tigon.layers import SparseMoE
from tigon.models import MODELS, CausalLM, build, load_weights, materialize
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.train.parallel import World, shard
from tigon.weights import Repository


def build_model(config: Config, world: World, *, load: bool = True) -> CausalLM:
    """In param_dtype; sharded when there are ranks to share it, or dtype is another.

    Each rank reads only the rows that it keeps. `load=False` allocates a checkpoint's weights
    without reading them.
    """
    dtype = getattr(torch, config.param_dtype)
    compute = compute_dtype(config, world.device)
    sharded = world.size > 1 or compute != dtype
    if config.init:
        torch.manual_seed(config.seed)  # whole on every rank, so that all draw the same
        model = _from_config(Path(config.init), dtype)
        if sharded:
            shard(model, world, compute)
        model.to(world.device)
    else:
        repository = Repository(config.model, revision=config.revision)
        model, weights = build(repository, MODELS, dtype=dtype)
        if sharded:
            shard(model, world, compute)
        materialize(model, world.device)
        if load:
            load_weights(model, weights)
    if config.router_aux_loss_coef is not None:
        set_balance(model, config.router_aux_loss_coef)
    model.activation_checkpointing = config.activation_checkpointing
    model.use_attention(config.attention)
    return model.train()


def check_context(model: CausalLM, config: Config) -> None:
    """ValueError for rows that are longer than what the model can read."""
    context = model.config.max_position_embeddings
    if config.seq_len > context:
        raise ValueError(
            f"seq_len={config.seq_len} is more than the model's context of {context} tokens "
            f"(max_position_embeddings): set seq_len={context} or less"
        )


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


def has_experts(model: CausalLM) -> bool:
    """Whether any of its layers is a mixture of experts."""
    return any(isinstance(module, SparseMoE) for module in model.modules())


def set_balance(model: CausalLM, coef: float) -> None:
    """The weight of aux_loss in the loss; the exported config.json will say it too."""
    if not has_experts(model):
        raise ValueError(
            f"router_aux_loss_coef={coef}, but {model.config.architecture} has no experts"
        )
    settings: dict[str, Any] = {"output_router_logits": coef > 0, "router_aux_loss_coef": coef}
    model.config = replace(model.config, **settings)


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" else getattr(torch, config.param_dtype)


def _from_config(path: Path, dtype: torch.dtype) -> CausalLM:
    if not path.is_file():
        raise FileNotFoundError(f"init={path} is not a config.json file")
    values = json.loads(path.read_text())
    kind = values.get("model_type")
    if kind not in MODELS:
        raise ValueError(f"{path}: model_type {kind!r} is not one of {', '.join(MODELS)}")
    return MODELS[kind].from_config(values, dtype=dtype)
