"""Runs whose ranks share experts (gloo, FSDP2) against one process; runs that go on from them."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.numbers import relative_error
from tests.small import EXPERTS, LLAMA, write_model
from tests.train import preferences
from tests.train.layouts import assert_same_tensors, logged_rows, near, train_once
from tigon.models import MODELS
from tigon.parallel import check_experts
from tigon.train import main
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
WAYS: dict[str, tuple[int, dict[str, int]]] = {  # ranks, and what they share
    "two": (2, {"expert": 2}),
    "four": (4, {"expert": 2}),
    "all": (4, {"expert": 4}),
    "replicas": (4, {"replicate": 2, "expert": 2}),
    "context": (4, {"context": 2, "expert": 2}),
    "tensor": (4, {"tensor": 2, "expert": 4}),
    # Dense layers without FSDP, and experts that two ranks have
    "tensor alone": (4, {"tensor": 4, "expert": 2}),
}
CASES = [("two", "qwen3_moe"), ("two", "mixtral"), ("two", "qwen2_moe"), ("two", "8bit")]
CASES += [("two", "dpo"), ("replicas", "recomputed"), ("tensor alone", "qwen2_moe")]
CASES += [(way, "qwen3_moe") for way in ("four", "all", "replicas", "context")]
CASES += [("tensor", n) for n in (*FAMILIES, "dpo", "recomputed", "muon", "in_backward")]


@pytest.fixture(scope="module")
def make(workspace) -> Any:
    """Trains a run in one of WAYS, or on one rank; returns its name."""
    models = {
        name: write_model(workspace.root / name, **changes) for name, changes in FAMILIES.items()
    }
    pairs = preferences.write(workspace.root / "pairs.jsonl", preferences.pairs(9, 5))
    kinds: dict[str, dict[str, Any]] = {
        "8bit": {"optimizer": "adamw_8bit"},
        "muon": {"optimizer": "muon"},
        # A row on each of two ranks, or both on one: their micro-batches are not balanced alike
        "in_backward": {
            "optimizer_in_backward": "true", "max_grad_norm": 0, "router_aux_loss_coef": 0,
            "batch_size": 2,
        },
        # Rows with padding on some ranks, and none on others
        "recomputed": {"activation_checkpointing": "true", "packing": "false", "truncate": "true"},
        "dpo": {"task": "dpo", "data": pairs, "reference": models["qwen2_moe"]},
        "qwen2_moe": {"eval_data": workspace.held_out, "sample_prompts": "[a model]"},
    }  # fmt: skip

    def run(way: str, kind: str, source: str | None = None, name: str = "") -> str:
        ranks, parallel = WAYS.get(way, (1, {}))
        changes: dict[str, Any] = {"model": models.get(kind, models["qwen3_moe"])}
        changes["parallel"] = json.dumps(parallel) if parallel else "null"
        if kind == "in_backward" and ranks == 1:
            changes["micro_batch_size"] = 2
        if source is not None:
            changes["resume"] = workspace.root / source / "checkpoints/step-00000002"
        name = name or f"{kind}-{way}"
        return train_once(ranks, workspace.settings(name, **SAME | kinds.get(kind, {}) | changes))

    return run


def assert_same(workspace, one: str, other: str, first: int = 0) -> None:
    """Everything that is logged of the steps from `first` on, and both exports."""
    expected, found = logged_rows(workspace, one)[first:], logged_rows(workspace, other)
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


@pytest.mark.slow(first=1)
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("way", "kind"), CASES)
def test_ranks_match_one_process(workspace, make, way, kind):
    assert_same(workspace, make("one", kind), make(way, kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("qwen3_moe", "tensor", "one"),
        ("qwen3_moe", "one", "two"),
        ("qwen3_moe", "four", "tensor"),
        ("8bit", "two", "one"),
    ],
)
def test_other_layouts_resume(workspace, make, kind, before, after):
    resumed = make(after, kind, make(before, kind), f"{kind}-{before}-{after}")
    assert_same(workspace, make("one", kind), resumed, 2)


@pytest.mark.slow
def test_checkpoint_of_shared_experts_is_exported(workspace, make):
    run = workspace.root / make("tensor", "mixtral")
    convert_checkpoint(run / "checkpoints/step-00000003", str(workspace.root / "converted"))
    assert_same_tensors(run / "hf", workspace.root / "converted")


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
