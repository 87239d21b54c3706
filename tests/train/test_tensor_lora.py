"""Runs that train an adapter on ranks that share each layer, against one process."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.numbers import relative_error
from tests.small import write_model
from tests.train.ranks import Ranks, train_on
from tigon.train import main
from tigon.train.export import convert_checkpoint

SETTINGS: dict[str, Any] = {
    "steps": 4,
    "save_every": 2,
    "keep_last": 0,
    "lr": 1e-2,
    "micro_batch_size": 1,
    "batch_size": 2,
    "max_grad_norm": 0.1,
    "lora.rank": 4,
    "lora.dropout": 0.2,
    "lora.merge": "true",
    "export": "true",
}


@pytest.fixture(scope="module")
def whole(workspace) -> None:
    main(workspace.settings("one", **SETTINGS))


def assert_same(workspace, run: str, one: str = "one") -> None:
    for key in ("loss", "grad_norm"):
        expected, found = (workspace.metrics(name, key) for name in (one, run))
        assert found == pytest.approx(expected[-len(found) :], rel=1e-5)
    for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        expected, found = (load_file(workspace.root / name / file) for name in (one, run))
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            assert relative_error(found[name], values) < 1e-4, name


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"fsdp": 2, "tensor": 2}])
def test_a_run_with_dropout(workspace, whole, parallel):
    """It goes on from a checkpoint of one process, and one process from its own."""
    count = 2 * parallel.get("fsdp", 1)
    run, more = f"ranks-{count}", {f"parallel.{name}": n for name, n in parallel.items()}
    train_on(count, workspace.settings(run, **SETTINGS, **more), OMP_NUM_THREADS="1")
    assert_same(workspace, run)
    for name, source, settings, ranks in (("fewer", run, {}, 1), ("more", "one", more, count)):
        step = workspace.root / source / "checkpoints/step-00000002"
        again = workspace.settings(f"{run}-{name}", **SETTINGS, **settings, resume=step)
        train_on(ranks, again, OMP_NUM_THREADS="1")
        assert_same(workspace, f"{run}-{name}")
    last = workspace.root / run / "checkpoints/step-00000004"
    convert_checkpoint(last, str(workspace.root / f"{run}-converted"), merge=True)
    ours = load_file(workspace.root / run / "hf/model.safetensors")
    theirs = load_file(workspace.root / f"{run}-converted/model.safetensors")
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-6, msg=name)


def test_lengths_that_are_learned(workspace, whole):
    """DoRA's, over ranks that divide weights in both ways, and of one process that goes on."""
    dora = SETTINGS | {"lora.dora": "true"}
    main(workspace.settings("lengths", **dora))
    more = {"parallel.fsdp": 2, "parallel.tensor": 2, "activation_checkpointing": "true"}
    train_on(4, workspace.settings("lengths-4", **dora, **more), OMP_NUM_THREADS="1")
    assert_same(workspace, "lengths-4", "lengths")
    steps = workspace.root / "lengths-4/checkpoints"
    main(workspace.settings("lengths-1", **dora, resume=steps / "step-00000002"))
    assert_same(workspace, "lengths-1", "lengths")
    converted = workspace.root / "lengths-converted"
    convert_checkpoint(steps / "step-00000004", str(converted), merge=True)
    one, plain, found = (
        load_file(path / "model.safetensors")
        for path in (workspace.root / "lengths/hf", workspace.root / "one/hf", converted)
    )
    for name, weight in one.items():
        assert relative_error(found[name], weight) < 1e-4, name
        if "proj" in name:
            assert relative_error(found[name], plain[name]) > 1e-3, name


ENDS: dict[str, dict[str, Any]] = {
    "of low rank": {"lora.targets": "[embed_tokens, lm_head, v_proj]", "lora.dora": "true"},
    "whole": {"lora.targets": "[q_proj]", "lora.modules_to_save": "[embed_tokens, lm_head]"},
}


@pytest.mark.parametrize("kind", ENDS)
def test_embedding_and_head(workspace, kind):
    """Whose tokens ranks divide, and FSDP the rows of that; one process and ranks go on."""
    apart = write_model(workspace.root / f"{kind} apart", tie_word_embeddings=False)
    ends = SETTINGS | {"lora.dropout": 0, "model": apart} | ENDS[kind]
    one, run, step = f"{kind}-one", f"{kind}-4", "checkpoints/step-00000002"
    main(workspace.settings(one, **ends))
    more = {"parallel.fsdp": 2, "parallel.tensor": 2}
    train_on(4, workspace.settings(run, **ends, **more), OMP_NUM_THREADS="1")
    assert_same(workspace, run, one)
    source = workspace.root / run / step
    main(workspace.settings(f"{kind}-1", **ends, resume=source))
    source, two = workspace.root / one / step, {"parallel.tensor": 2}
    train_on(2, workspace.settings(f"{kind}-2", **ends, **two, resume=source))
    for again in ("1", "2"):
        assert_same(workspace, f"{kind}-{again}", one)


def test_a_row_of_zeros_on_one_rank(workspace):
    """It is said at once, while the others still add up lengths, as the whole weight counts it."""
    base = write_model(workspace.root / "zeros")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][20] = 0  # the fifth of the second rank's
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    more = {"model": base, "lora.dropout": 0, "lora.dora": "true", "parallel.tensor": 2}
    running = Ranks(2, main, workspace.settings("zeros-run", **SETTINGS | more))
    for process in running.processes:
        process.join(60)
    errors = running.errors
    running.kill()
    assert running.codes == [1, 1] and "timed out" not in errors, errors
    assert "self_attn.qkv_proj: row 20 of k_proj is all zeros" in errors
