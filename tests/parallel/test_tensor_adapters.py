"""Adapters of models that are cut over ranks against those of whole ones: losses, gradients, files,
merged weights; with and without dropout."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel import test_tensor
from tests.parallel.ranks import run_on_ranks, selected_cases
from tests.parallel.test_tensor import FOUR, LATENTS, TWO, batches, differences, random_model
from tigon.models import CausalLM, LoraConfig
from tigon.models.adapters.adapters import adapter_parameters, init_adapter
from tigon.parallel import shard_model

LLAMA, EXPERTS = TWO["llama"], TWO["qwen2_moe"]
OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj", "shared_expert_gate", "q_proj")
ENDS = ("embed_tokens", "lm_head", "q_proj")
DIVIDED = {"v_head_dim": 16}  # draws of dropout are not cut
PROJECTIONS = ("per_layer_model_projection", "altup_projections.0", "altup_unembed_projections.1")
Case = tuple[tuple[str, dict[str, Any]], dict[str, Any]]
CASES: dict[int, dict[str, Case]] = {
    2: {
        "all": (LLAMA, {"rank_pattern": {"k_proj": 2}}),
        "some": (LLAMA, {"targets": ("v_proj", "up_proj", "o_proj"), "rslora": True}),
        "dora": (LLAMA, {"dora": True, "rank_pattern": {"k_proj": 2}}),
        "dora, packed in files": (TWO["phi3"], {"dora": True}),
        "dora, shared expert": (EXPERTS, {"dora": True}),
        "dropout": (("llama", {"intermediate_size": 64}), {"dropout": 0.3}),
        "packed in files": (TWO["phi3"], {}),
        "norms over all heads": (TWO["olmo2"], {}),
        "experts": (EXPERTS, {"targets": OF_EXPERTS}),
        "transposed experts": (TWO["gpt_oss"], {"targets": (*OF_EXPERTS[:2], "q_proj")}),
        "shared expert": (EXPERTS, {}),
        "latents": (TWO["deepseek_v3"], {}),
        "dora, latents": (TWO["mistral4"], {"dora": True}),
        "dropout, latents": (
            ("deepseek_v3", LATENTS | DIVIDED),
            {"dropout": 0.3, "targets": ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")},
        ),
        "dropout, whole layers": (
            TWO["gemma3n"],
            {"dropout": 0.3, "targets": ("laurel.linear_left", *PROJECTIONS, "q_proj")},
        ),
        "embedding and head": (LLAMA, {"targets": ENDS}),
        "dora of embedding and head": (LLAMA, {"targets": ENDS, "dora": True}),
        "a scaled embedding": (
            ("gemma", {"tie_word_embeddings": False}),
            {"targets": ("embed_tokens", "o_proj"), "dora": True},
        ),
        "whole embedding and head": (LLAMA, {"modules_to_save": ("embed_tokens", "lm_head")}),
        "whole head beside an embedding's": (
            LLAMA,
            {"targets": ("embed_tokens", "v_proj"), "modules_to_save": ("lm_head",)},
        ),
    },
    4: {
        "kv heads on two ranks each": (FOUR["kv heads on two ranks each"], {}),
        "embedding and head of four": (LLAMA, {"targets": ENDS, "dora": True}),
        "whole embedding": (LLAMA, {"modules_to_save": ("embed_tokens",)}),
        "dora, kv heads on two ranks each": (FOUR["kv heads on two ranks each"], {"dora": True}),
    },
}


def adapted(case: Case) -> CausalLM:
    (model_type, changes), more = case
    model = random_model(model_type, changes)
    model.add_adapter(LoraConfig(**{"rank": 3, "alpha": 5.0} | more))
    with torch.no_grad():
        for p in adapter_parameters(model, "default").values():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def keyed() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    return [
        {"dropout_keys": torch.randint(-(2**63), 2**63 - 1, b["input_ids"].shape, generator=draw)}
        | b
        for b in batches()
    ]


def save_all(model: CausalLM, at: Path) -> None:
    """The adapter, the model it is merged into, and the adapter as it begins."""
    model.save_adapter(at / "trained")
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    merged.save_pretrained(at / "merged")
    init_adapter(model, generator=torch.Generator().manual_seed(4))
    model.save_adapter(at / "begun")


def compare(directory: str, count: int, names: list[str]) -> dict[str, list[float]]:
    test_tensor.batches = keyed  # of this process alone
    mesh, found = init_device_mesh("cpu", (count,)), {}
    for name in names:
        one = adapted(CASES[count][name])
        cut = copy.deepcopy(one)
        shard_model(cut, mesh)
        own = torch.tensor(differences(one, cut))
        dist.all_reduce(own, dist.ReduceOp.MAX)
        found[name] = own.tolist()
        for way, model in (("one", one), ("cut", cut)):
            save_all(model, Path(directory, name, way))
    return found


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, dict[str, list[float]]]:
    directory, results = tmp_path_factory.mktemp("adapters"), {}
    selected = selected_cases(request, "case")
    for count, cases in CASES.items():
        names = [name for name in cases if name in selected]
        if names:
            results |= run_on_ranks(count, compare, str(directory), count, names)[0]
    return directory, results


NAMES = [name for cases in CASES.values() for name in cases]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", NAMES)
def test_a_cut_adapter_is_as_a_whole_one(found, case):
    loss, norm, logits, parameters = found[1][case]
    assert loss < 1e-5 and norm < 2e-5 and logits < 3e-5 and parameters < 1e-5, found[1][case]


def check_files(directory: Path, what: str) -> None:
    """The files of the cut model or adapter are those of the whole one."""
    name = "adapter_model" if what in ("trained", "begun") else "model"
    files = (directory / way / what / f"{name}.safetensors" for way in ("one", "cut"))
    one, cut = map(load_file, files)
    assert one.keys() == cut.keys() and len(one) > 4
    for key, values in one.items():
        # DoRA's lengths begin as those of rows, which are sums over ranks
        near = 1e-5 if what != "begun" else 1e-6 if "magnitude" in key else 0.0
        torch.testing.assert_close(cut[key], values, rtol=0, atol=near, msg=f"{directory} {key}")


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", NAMES)
def test_files(found, case):
    """PEFT's of the whole adapter, as it is trained and as it begins, and the merged model's."""
    for what in ("trained", "begun", "merged"):
        check_files(found[0] / case, what)
    configs = [
        (found[0] / case / way / "trained/adapter_config.json").read_text()
        for way in ("one", "cut")
    ]
    assert configs[0] == configs[1]
