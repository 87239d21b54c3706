"""Mixtures whose layers ranks share, each with whole experts, against whole ones: losses,
gradients, balance, logits, generation; with adapters, their files and what they are merged to."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel import test_tensor
from tests.parallel.ranks import run_on_ranks
from tests.parallel.test_tensor import (
    BALANCED,
    CHUNKED,
    CONV_MOE,
    DELTA,
    LATENTS,
    MOE,
    SHARED,
    differences,
    random_model,
)
from tests.parallel.test_tensor_adapters import Case, adapted, check_files, keyed, save_all
from tigon.distributed.expert_dispatch import ExpertShard
from tigon.models import CausalLM
from tigon.parallel import shard_experts, shard_model

EIGHT: dict[str, Any] = MOE | {"num_experts": 8}
QWEN2 = ("qwen2_moe", EIGHT | {"shared_expert_intermediate_size": 28})
MODELS = {
    "mixtral": ("mixtral", {"num_local_experts": 8, **BALANCED}),
    "llama4": ("llama4_text", CHUNKED | {"num_experts_per_tok": 1}),
    "olmoe": ("olmoe", {"num_experts": 8, **BALANCED}),
    "qwen2_moe": QWEN2,
    "qwen3_moe": ("qwen3_moe", EIGHT | {"mlp_only_layers": [0]}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8, "swiglu_limit": 0.5, **BALANCED}),
    "deepseek_v3": ("deepseek_v3", LATENTS | {"n_routed_experts": 8, "n_group": 4}),
    "lfm2_moe": ("lfm2_moe", CONV_MOE | {"num_experts": 8}),
    "qwen3_next": ("qwen3_next", DELTA | SHARED | EIGHT),
}
ALL = ("experts.gate_up_proj", "experts.down_proj", "shared_expert_gate", "q_proj", "o_proj")
ADAPTERS: dict[str, Case] = {
    "experts": (QWEN2, {"targets": ALL, "rank_pattern": {"down_proj": 2}}),
    "transposed experts": (MODELS["gpt_oss"], {"targets": (*ALL[:2], "q_proj")}),
    "dense": (QWEN2, {"targets": "all-linear"}),
    "dropout": (QWEN2, {"targets": ("v_proj", "up_proj", "shared_expert_gate"), "dropout": 0.3}),
}
COUNT = 4
pytestmark = pytest.mark.slow
SHORT = 5  # tokens, of which the last rank gets none


def batches() -> list[dict[str, Tensor]]:
    """Padded, packed, and a row that some ranks have nothing of."""
    padded, packed, _ = keyed()
    short = {name: x[:1, :SHORT] for name, x in padded.items() if name != "attention_mask"}
    short["labels"] = short["input_ids"]
    return [padded, packed, short]


def cut_of(one: CausalLM) -> CausalLM:
    """In the same process group, whose ranks have different experts."""
    cut, mesh = copy.deepcopy(one), init_device_mesh("cpu", (dist.get_world_size(),))
    shard_experts(cut, mesh)
    shard_model(cut, mesh)
    return cut


def balances(one: CausalLM, cut: CausalLM) -> float:
    """The largest difference of what is counted of experts."""
    worst = 0.0
    for batch in batches():
        with torch.no_grad():
            a, b = (m(**batch, metrics=("aux_loss", "expert_load")).metrics for m in (one, cut))
        worst = max(worst, *(float((a[name] - b[name]).abs().max()) for name in a))
    return worst


def routed(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each batch, how many tokens all ranks together send to the experts of a layer."""
    found, route = [], ExpertShard.route

    def counted(self: ExpertShard, experts: Tensor) -> Any:
        found[-1] += len(experts)
        return route(self, experts)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(ExpertShard, "route", counted)
        for batch in batches():
            found.append(0)
            model(**batch)
    layers = sum(block.mlp.divided for block in model.model.layers if hasattr(block.mlp, "divided"))
    total = torch.tensor(found)
    dist.all_reduce(total)
    return (total // layers).tolist()


def same_tokens(one: CausalLM, cut: CausalLM) -> bool:
    ids = batches()[1]["input_ids"][:, :7].repeat(3, 1)
    ids[1] += 1
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    a, b = (m.eval().generate(ids, **how) for m in (one, cut))
    return torch.equal(a, b)


def compare(directory: str) -> dict[str, Any]:
    test_tensor.batches = batches  # of this process alone
    found: dict[str, Any] = {}
    for name in (*MODELS, *ADAPTERS):
        one = adapted(ADAPTERS[name]) if name in ADAPTERS else random_model(*MODELS[name])
        cut = cut_of(one)
        counts = {"sent": routed(cut, pytest.MonkeyPatch())} if name in MODELS else {}
        own = torch.tensor([*differences(one, cut), balances(one, cut)])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        same = torch.tensor(int(same_tokens(one, cut)))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        found[name] = counts | {"differences": own.tolist(), "generates": bool(same)}
        for way, model in (("one", one), ("cut", cut)):
            at = Path(directory, name, way)
            if name in MODELS:
                model.save_pretrained(at / "model")
                continue
            save_all(model, at)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("experts")
    return directory, run_on_ranks(COUNT, compare, str(directory))[0]


def test_whole_experts_on_ranks_that_share_layers(found):
    for name in (*MODELS, *ADAPTERS):
        loss, norm, logits, parameters, balance = found[1][name]["differences"]
        assert loss < 1e-5 and norm < 2e-5 and logits < 3e-5, (name, found[1])
        assert parameters < 1e-5 and balance < 1e-5, (name, found[1])
        assert found[1][name]["generates"], name


def test_each_token_is_sent_once(found):
    """Not from all ranks, and what fills up the last share not at all."""
    shapes = [batch["input_ids"].shape for batch in batches()]
    for name in MODELS:
        assert found[1][name]["sent"] == [rows * tokens for rows, tokens in shapes]


def test_files(found):
    """The whole model's, and PEFT's of whole adapters, as they are trained and as they begin."""
    whats = {name: ("model",) for name in MODELS}
    for name, files in (whats | dict.fromkeys(ADAPTERS, ("trained", "begun", "merged"))).items():
        for what in files:
            check_files(found[0] / name, what)
