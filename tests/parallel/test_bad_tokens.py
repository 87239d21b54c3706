"""Tokens that no vocabulary has, given to ranks that share a model: all of them raise."""

import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.test_tensor import SIZES, random_model
from tests.train.ranks import Ranks
from tigon.parallel import shard_model, share_context


def errors(directory: str) -> None:
    """Each rank writes what it raised."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
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
    Path(directory, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_all_ranks_raise(tmp_path):
    Ranks(2, errors, str(tmp_path)).finish(60)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["embedding of 211"] == first["embedding of -1"] == "IndexError"
    for token in (211, -1):
        assert f"label {token} at [0, 0] is neither -100 nor in [0, 211)" in first[f"label {token}"]
