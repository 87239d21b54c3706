"""Runs that adapt a mixture whose experts ranks share (gloo, FSDP2), against one process."""

import json
from typing import Any

import pytest

from tests.small import EXPERTS, write_model
from tests.train.adapters import assert_close, assert_near_run, step, weights
from tests.train.layouts import train_all
from tests.train.ranks import Ranks
from tests.train.test_layouts import SHARED
from tigon.train import main
from tigon.train.export import convert_checkpoint

pytestmark = pytest.mark.slow  # experts, adapters and ranks have fast tests of their own

SAME: dict[str, Any] = {"steps": 4, "save_every": 2, "keep_last": 0, "lr": 1e-2, "seq_len": 67}
SAME |= {"lora.rank": 3, "max_grad_norm": 0.1, "export": "true", "lora.merge": "true"}
SAME |= {"router_aux_loss_coef": 0.5}
KEYS = ("loss", "grad_norm", "aux_loss")
KINDS: dict[str, dict[str, Any]] = {
    "experts": {
        "lora.targets": "[experts.gate_up_proj, experts.down_proj, o_proj, shared_expert_gate]",
        "lora.rank_pattern": "{down_proj: 2}",
    },
    "dropout": {"lora.dropout": 0.2, "activation_checkpointing": "true"},  # all that is dense
    "dora": {"lora.dora": "true", "lora.targets": "[q_proj]", "lora.modules_to_save": "[lm_head]"},
    "nf4": {"lora.quantize": "nf4", "lora.targets": "[experts.down_proj, v_proj]"},
}
WAYS: dict[str, tuple[int, dict[str, int], list[str]]] = {
    "two": (2, {"expert": 2}, [*KINDS]),
    "tensor": (4, {"tensor": 2, "expert": 2}, ["experts", "dropout"]),
    "tensor alone": (4, {"tensor": 4, "expert": 2}, ["experts"]),
}


@pytest.fixture(scope="module")
def runs(workspace) -> None:
    sizes: dict[str, Any] = EXPERTS | SHARED | {"num_experts": 8, "tie_word_embeddings": False}
    model = write_model(workspace.root / "mixture", **sizes)

    def settings(way: str, kind: str, run: str = "", **changes: Any) -> list[str]:
        parallel = json.dumps(WAYS[way][1]) if way in WAYS else "null"
        own = {"model": model, "parallel": parallel} | changes
        return workspace.settings(run or f"{kind}-{way}", **SAME | KINDS[kind] | own)

    for kind in KINDS:
        main(settings("one", kind))
    for way, (count, _, kinds) in WAYS.items():
        every = [settings(way, kind) for kind in kinds]
        if way == "tensor":  # from another layout
            source = step(workspace, "experts-two", 2)
            every.append(settings(way, "experts", "experts-from-two", resume=source))
        Ranks(count, train_all, every).finish(400)
    source = step(workspace, "experts-tensor", 2)
    main(settings("one", "experts", "experts-from-tensor", resume=source))


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("way", "kind"), [(w, k) for w, (*_, some) in WAYS.items() for k in some])
def test_ranks_that_share_experts(workspace, runs, way, kind):
    assert_near_run(workspace, f"{kind}-{way}", f"{kind}-one", KEYS)


def test_other_layouts_go_on(workspace, runs):
    for run in ("experts-from-two", "experts-from-tensor"):
        assert len(workspace.metrics(run, "loss")) == 2
        assert_near_run(workspace, run, "experts-one", KEYS)


def test_a_checkpoint_is_exported(workspace, runs):
    converted = workspace.root / "converted"
    convert_checkpoint(step(workspace, "experts-tensor", 4), str(converted), merge=True)
    exported = workspace.root / "experts-tensor/hf"
    assert_close(weights(converted), weights(exported), rtol=0, atol=1e-6)
