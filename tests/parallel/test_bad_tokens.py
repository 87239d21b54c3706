"""Tokens that no vocabulary has, given to ranks that share a model: all of them raise."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.ranks import run_on_ranks
from tests.parallel.test_tensor import SIZES, random_model
from tigon.parallel import shard_model, share_context


def errors() -> dict[str, str]:
    """What this rank raised."""
    mesh = init_device_mesh("cpu", (2,))
    cut = random_model("llama", {})
    shared = copy.deepcopy(cut)
    shard_model(cut, mesh)
    share_context(shared, mesh)
    found: dict[str, str] = {}
    for token in (SIZES["vocab_size"], -1):
        ids = torch.tensor([[5, token, 9, 7, 6, 8]])
        try:
            cut.model.embed_tokens(ids)  # behind the check of tokens on the host
        except IndexError:
            found[f"embedding of {token}"] = "IndexError"
        try:  # the second rank has no bad label
            shared(ids.clamp(5, 9), labels=ids)
        except ValueError as error:
            found[f"label {token}"] = str(error)
        dist.barrier()
    return found


def test_all_ranks_raise():
    first, second = run_on_ranks(2, errors)
    assert first == second
    assert first["embedding of 211"] == first["embedding of -1"] == "IndexError"
    for token in (211, -1):
        assert f"label {token} at [0, 0] is neither -100 nor in [0, 211)" in first[f"label {token}"]
