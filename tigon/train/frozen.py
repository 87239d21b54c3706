"""Models that a run reads and does not train: references and teachers."""

import torch

from tigon.models import MODELS, CausalLM, build, load_weights, materialize, read_config
from tigon.parallel import cut_model, share_context, share_experts
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.train.model import compute_dtype, has_experts
from tigon.train.parallel import World, meshes_of, shard
from tigon.weights import Repository


def load_frozen(config: Config, world: World, path: str, tokenizer: Tokenizer | None) -> CausalLM:
    """Of a directory or a hub repository, in the dtype of the computation, on the run's device.

    Divided over the ranks if there are several. Every rank calls this. ValueError if its tokens are
    not those of the run's tokenizer.
    """
    if tokenizer is not None:
        check_vocabulary(path, tokenizer)
    compute = compute_dtype(config, world.device)
    model, weights = build(Repository(path), MODELS, dtype=compute)
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
    model.use_attention(config.attention)
    model.requires_grad_(False)
    return model.eval()


def outline_of(path: str) -> CausalLM:
    """Such a model on the meta device, from its config.json alone."""
    config = read_config(Repository(path), MODELS)[1]
    return MODELS[config.model_type].from_config(config, dtype=torch.float32, device="meta")


def check_vocabulary(path: str, tokenizer: Tokenizer) -> None:
    """ValueError if a model's tokens are not those of the tokenizer."""
    theirs = Tokenizer.from_pretrained(path).backend.get_vocab()
    ours = tokenizer.backend.get_vocab()
    if theirs == ours:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: item[1])[0]
    raise ValueError(
        f"{path} has another vocabulary: token {token!r} is {theirs.get(token)} there and "
        f"{ours.get(token)} here"
    )
