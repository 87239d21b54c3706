"""Eight ranks (gloo) in products of dimensions, against one process."""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.numbers import relative_error
from tests.small import write_model
from tests.train.ranks import train_on
from tigon.train import main

# Eight ranks have a query head each, and four of them the same kv head
MODEL: dict[str, Any] = {"num_attention_heads": 8, "hidden_size": 48, "head_dim": 6}
SETTINGS: dict[str, Any] = {"steps": 3, "seq_len": 64, "max_grad_norm": 0.1, "export": "true"}


@pytest.fixture(scope="module")
def settings(workspace) -> Any:
    model = write_model(workspace.root / "eight-heads", **MODEL)

    def make(run: str, **changes: Any) -> list[str]:
        return workspace.settings(run, model=model, **SETTINGS | changes)

    main(make("one"))
    return make


@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 8}, {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2}],
    ids=["tensor", "fsdp and tensor", "all"],
)
def test_eight_ranks_are_as_one(workspace, settings, parallel):
    run = "-".join(parallel)
    changes = {f"parallel.{name}": size for name, size in parallel.items()}
    train_on(8, settings(run, **changes), OMP_NUM_THREADS="1")
    for key in ("loss", "grad_norm"):
        expected, found = (workspace.metrics(name, key) for name in ("one", run))
        assert len(found) == 3 and found == pytest.approx(expected, rel=1e-5), key
    files = (workspace.root / name / "hf/model.safetensors" for name in ("one", run))
    expected, found = map(load_file, files)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert relative_error(found[name], weight) < 1e-5, name
