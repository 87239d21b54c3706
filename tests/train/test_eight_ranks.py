"""Eight ranks (gloo) in products of dimensions, against one process."""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.numbers import relative_error
from tests.small import EXPERTS, write_model
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import train_on
from tigon.train import main

# Eight ranks have a query head each, and four of them the same kv head
MODEL: dict[str, Any] = {"num_attention_heads": 8, "hidden_size": 48, "head_dim": 6}
SETTINGS: dict[str, Any] = {"steps": 3, "seq_len": 64, "max_grad_norm": 0.1, "export": "true"}


WAYS: dict[str, tuple[str, dict[str, int]]] = {
    "all": ("dense", {"fsdp": 2, "context": 2, "tensor": 2}),
    "tensor": ("dense", {"tensor": 8}),
    "fsdp and tensor": ("dense", {"fsdp": 4, "tensor": 2}),
    "expert": ("experts", {"expert": 8}),
    "expert and tensor": ("experts", {"fsdp": 4, "tensor": 2, "expert": 4}),
    # Experts that two ranks of each replica have
    "every one": ("experts", {"replicate": 2, "context": 2, "tensor": 2, "expert": 2}),
}


@pytest.fixture(scope="module")
def settings(workspace) -> Any:
    kinds = {"dense": MODEL, "experts": EXPERTS | {"num_experts": 8}}
    models = {kind: write_model(workspace.root / kind, **sizes) for kind, sizes in kinds.items()}

    def make(run: str, kind: str, **changes: Any) -> list[str]:
        own = {"router_aux_loss_coef": 0.5, "batch_size": 8} if kind == "experts" else {}
        return workspace.settings(run, model=models[kind], **SETTINGS | own | changes)

    return make


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("way", WAYS)
def test_eight_ranks_are_as_one(workspace, settings, way):
    kind, parallel = WAYS[way]
    run, one = "-".join(parallel), f"one-{kind}"
    if not (workspace.root / one).exists():
        main(settings(one, kind))
    changes = {f"parallel.{name}": size for name, size in parallel.items()}
    train_on(8, settings(run, kind, **changes), OMP_NUM_THREADS="1")
    assert_same_metrics(workspace, one, run)
    if kind == "experts":
        assert_same_metrics(workspace, one, run, "aux_loss")
    files = (workspace.root / name / "hf/model.safetensors" for name in (one, run))
    expected, found = map(load_file, files)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert relative_error(found[name], weight) < 1e-5, name
