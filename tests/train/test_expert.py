"""Runs whose ranks share experts (gloo, FSDP2) against one process; runs that go on from them."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.numbers import relative_error
from tests.small import EXPERTS, LLAMA, write_model
from tests.train import preferences
from tests.train.ranks import Ranks
from tests.train.test_context import near, rows_of
from tigon.models import MODELS
from tigon.parallel import check_experts
from tigon.train import load, main, prepare, start, train
from tigon.train.config import Parallel
from tigon.train.export import convert_checkpoint

SAME = {"steps": 3, "seq_len": 67, "batch_size": 4, "max_grad_norm": 0.1, "export": "true"}
SAME |= {"router_aux_loss_coef": 0.5, "ema_decay": 0.5, "save_every": 2, "keep_last": 0}
QWEN = EXPERTS | {"num_experts": 8}
SHARED = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 40},
    "qwen2_moe": QWEN | SHARED,
    "qwen3_moe": QWEN,
}
# The ranks of each, what they share, and how many experts a rank has
WAYS: dict[str, tuple[int, dict[str, int]]] = {
    "two": (2, {"expert": 2}),
    "four": (4, {"expert": 2}),
    "all": (4, {"expert": 4}),
    "replicas": (4, {"replicate": 2, "expert": 2}),
    "context": (4, {"context": 2, "expert": 2}),
    "tensor": (4, {"tensor": 2, "expert": 4}),
    # Dense layers without FSDP, and experts that two ranks have
    "tensor alone": (4, {"tensor": 4, "expert": 2}),
}
CASES = [(way, name) for way in ("two", "tensor") for name in FAMILIES]
CASES += [(way, "qwen3_moe") for way in ("four", "all", "replicas", "context")]
CASES += [("two", "8bit"), ("two", "dpo"), ("replicas", "recomputed"), ("tensor", "dpo")]
CASES += [("tensor", "recomputed"), ("tensor alone", "qwen2_moe")]
CASES += [("tensor", "muon"), ("tensor", "in_backward")]


def run_all(parallel: dict[str, int], runs: list[list[str]]) -> None:
    torch.set_num_threads(1)
    with start("cpu", parallel=Parallel(**parallel)) as world:
        for settings in runs:
            assert train(prepare(load(None, settings), world)) == 0


@pytest.fixture(scope="module")
def settings(workspace) -> Any:
    models = {
        name: write_model(workspace.root / name, **changes) for name, changes in FAMILIES.items()
    }

    pairs = preferences.write(workspace.root / "pairs.jsonl", preferences.pairs(9, 5))
    same = {
        "8bit": {"optimizer": "adamw_8bit"},
        "muon": {"optimizer": "muon"},
        # A row on each of two ranks, or both on one: their micro-batches are not balanced alike
        "in_backward": {
            "optimizer_in_backward": "true",
            "max_grad_norm": 0,
            "router_aux_loss_coef": 0,
            "batch_size": 2,
        },
        # Rows with padding on some ranks, and none on others
        "recomputed": {"activation_checkpointing": "true", "packing": "false", "truncate": "true"},
        "dpo": {"task": "dpo", "data": pairs, "reference": models["qwen2_moe"]},
        "qwen2_moe": {"eval_data": workspace.held_out, "sample_prompts": "[a model]"},
    }

    def of(way: str, name: str, **changes: Any) -> list[str]:
        parallel = json.dumps(WAYS[way][1]) if way in WAYS else "null"
        own = {"model": models.get(name, models["qwen3_moe"]), "parallel": parallel}
        return workspace.settings(f"{name}-{way}", **SAME | same.get(name, {}) | own | changes)

    return of


@pytest.fixture(scope="module")
def runs(workspace, settings) -> None:
    for name in (*FAMILIES, "8bit", "dpo", "recomputed", "muon"):
        main(settings("one", name))
    main(settings("one", "in_backward", micro_batch_size=2))
    saved = "checkpoints/step-00000002"
    for way, (count, parallel) in WAYS.items():
        every = [settings(way, name) for w, name in CASES if w == way]
        if way in ("two", "tensor"):  # from one process, and from other layouts
            before = "qwen3_moe-one" if way == "two" else "qwen3_moe-four"
            source, back = (workspace.root / run for run in (before, f"back-{way}"))
            every.append(settings(way, "qwen3_moe", resume=source / saved, run_dir=back))
        Ranks(count, run_all, parallel, every).finish(400)
    source = workspace.root / "qwen3_moe-tensor" / saved
    main(settings("one", "qwen3_moe", resume=source, run_dir=workspace.root / "on-one"))
    source = workspace.root / "8bit-two" / saved
    main(settings("one", "8bit", resume=source, run_dir=workspace.root / "8bit-on-one"))


def assert_same(workspace, one: str, other: str, first: int = 0) -> None:
    """Everything that is logged of the steps from `first` on, and both exports."""
    expected, found = rows_of(workspace, one)[first:], rows_of(workspace, other)
    assert len(found) == len(expected) > 0
    for old, new in zip(expected, found, strict=True):
        assert "eval_loss" in new or {"loss", "grad_norm"} <= new.keys()
        assert {"aux_loss", "eval_aux_loss"} & new.keys() or "dpo" in one
        if "in_backward" in one:  # of other micro-batches
            old, new = ({n: row[n] for n in ("loss", "grad_norm")} for row in (old, new))
        assert new == near(old)
    # A state whose 8 bits are rounded the other way moves its weight a little. Where gradients are
    # nothing but rounding, adamw makes steps of them
    most = 1e-4 if "8bit" in one else 1e-5
    for export in ("hf", "hf-ema"):
        files = (workspace.root / run / export / "model.safetensors" for run in (one, other))
        old, new = map(load_file, files)
        assert old.keys() == new.keys()
        for name, weight in old.items():
            close = torch.allclose(new[name], weight, rtol=0, atol=most)
            assert close or relative_error(new[name], weight) < most, name


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("way", "name"), CASES)
def test_ranks_that_share_experts_are_as_one(workspace, runs, way, name):
    assert_same(workspace, f"{name}-one", f"{name}-{way}")


def test_other_layouts_go_on(workspace, runs):
    for run in ("on-one", "back-two", "back-tensor"):
        assert_same(workspace, "qwen3_moe-one", run, 2)
    assert_same(workspace, "8bit-one", "8bit-on-one", 2)


def test_a_checkpoint_of_shared_experts_is_exported(workspace, runs):
    run = workspace.root / "mixtral-tensor"
    convert_checkpoint(run / "checkpoints/step-00000003", str(workspace.root / "converted"))
    exported, converted = (
        load_file(directory / "model.safetensors")
        for directory in (run / "hf", workspace.root / "converted")
    )
    assert exported.keys() == converted.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)


def test_what_ranks_cannot_share_says_why():
    said = r"expert=3 must divide .* 4 \(fsdp 2 x context 1 x tensor 2\)"
    with pytest.raises(ValueError, match=said):
        Parallel(tensor=2, expert=3).sizes(4)
    odd = MODELS["qwen3_moe"].from_config(EXPERTS, device="meta")
    with pytest.raises(ValueError, match=r"2 ranks cannot share the 5 experts of a layer"):
        check_experts(odd, 2)
    dense = MODELS["llama"].from_config(LLAMA, device="meta")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no experts for 2 ranks"):
        check_experts(dense, 2)


@pytest.mark.parametrize("changes", [{"sharding": "gradients"}, {"cuda_graphs": "true"}])
def test_what_expert_parallelism_lacks_is_named(workspace, changes):
    (name, *_), both = changes, {"parallel.expert": 2, "device": "auto"}
    with pytest.raises(SystemExit, match=rf"{name}=.* does not work with parallel\.expert=2"):
        main(workspace.settings("none", **both | changes))
