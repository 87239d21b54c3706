"""Models that a run reads and does not train: references and teachers."""

from dataclasses import replace

import torch

from tigon.models import MODELS, CausalLM, build, load_weights, materialize, read_config
from tigon.parallel import cut_model, share_context, share_experts
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.train.distributed import World, local, meshes_of, shard
from tigon.train.matching import check_longest
from tigon.train.model import compute_dtype, has_experts
from tigon.weights import Repository, all_finite


def load_frozen(
    config: Config, world: World, path: str, *, vocab_size: int | None = None
) -> CausalLM:
    """Of a directory or a hub repository, in the dtype of the computation, on the run's device.

    Divided over the ranks if there are several. Every rank calls this. `vocab_size`: with that many
    tokens, the first that it has.
    """
    compute = compute_dtype(config, world.device)
    model, weights = build(Repository(path), MODELS, dtype=compute, vocab_size=vocab_size)
    if world.size > 1:
        meshes = meshes_of(world)
        if meshes.expert is not None and has_experts(model):
            share_experts(model, meshes.expert)
        if meshes.tensor is not None:
            cut_model(model, meshes.tensor)
        if meshes.context is not None:
            share_context(model, meshes.context)
        if meshes.sizes.dividing > 1:
            shard(model, world, compute)
    materialize(model, world.device)
    load_weights(model, weights)
    _check_finite(model, path)
    model.use_attention(config.attention)
    model.requires_grad_(False)
    return model.eval()


def _check_finite(model: CausalLM, path: str) -> None:
    """ValueError for weights that would make every loss NaN, which would then name rows."""
    own = {name: local(p.detach()) for name, p in model.named_parameters()}
    own = {name: rows for name, rows in own.items() if rows.numel()}  # a rank may have none
    if all_finite(own.values(), model.device):
        return
    name = next(name for name, rows in own.items() if not all_finite([rows], rows.device))
    raise ValueError(f"{path} has values that are NaN or infinite in {name}, in {model.dtype}")


def outline_of(
    path: str, dtype: torch.dtype = torch.float32, *, vocab_size: int | None = None
) -> CausalLM:
    """Such a model on the meta device, from its config.json alone."""
    config = read_config(Repository(path), MODELS)[1]
    if vocab_size is not None:
        config = replace(config, vocab_size=vocab_size)
    return MODELS[config.model_type].from_config(config, dtype=dtype, device="meta")


def check_frozen(config: Config, path: str, tokenizer: Tokenizer) -> None:
    """ValueError if a model's tokens are not those of the tokenizer, or it cannot read the run's
    longest sequences. From its files alone, without weights."""
    context = read_config(Repository(path), MODELS)[1].max_position_embeddings
    check_longest(config, context, path)
    theirs = Tokenizer.from_pretrained(path).backend.get_vocab()
    ours = tokenizer.backend.get_vocab()
    if theirs == ours:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: item[1])[0]
    raise ValueError(
        f"{path} has another vocabulary: token {token!r} is {theirs.get(token)} there and "
        f"{ours.get(token)} here"
    )
