"""Runs that train an adapter on ranks that share each layer, against one process."""

from typing import Any

import pytest
from safetensors.torch import save_file

from tests.numbers import relative_error
from tests.small import write_model
from tests.train import adapters
from tests.train.adapters import assert_close, assert_near_run, step, weights
from tests.train.ranks import Ranks, train_on
from tigon.train import main
from tigon.train.export import convert_checkpoint

SETTINGS: dict[str, Any] = adapters.SETTINGS | {
    "micro_batch_size": 1, "batch_size": 2, "max_grad_norm": 0.1, "lora.dropout": 0.2,
}  # fmt: skip
FOUR = {"parallel.fsdp": 2, "parallel.tensor": 2}


@pytest.fixture(scope="module")
def whole(workspace) -> None:
    main(workspace.settings("one", **SETTINGS))


def train(workspace, run: str, **changes: Any) -> None:
    count = changes.get("parallel.tensor", 1) * changes.get("parallel.fsdp", 1)
    train_on(count, workspace.settings(run, **SETTINGS | changes), OMP_NUM_THREADS="1")


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("ranks", [{"parallel.tensor": 2}, FOUR], ids=("2", "4"))
def test_a_run_with_dropout(workspace, whole, ranks):
    """It goes on from a checkpoint of one process."""
    run = f"ranks-{len(ranks)}"
    train(workspace, run, **ranks)
    assert_near_run(workspace, run, "one")
    train(workspace, f"{run}-more", **ranks, resume=step(workspace, "one", 2))
    assert_near_run(workspace, f"{run}-more", "one")
    main(workspace.settings(f"{run}-fewer", **SETTINGS, resume=step(workspace, run, 2)))
    assert_near_run(workspace, f"{run}-fewer", "one")
    converted = workspace.root / f"{run}-converted"
    convert_checkpoint(step(workspace, run, 4), str(converted), merge=True)
    assert_close(weights(converted), weights(workspace.root / run / "hf"), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_lengths_that_are_learned(workspace, whole):
    """DoRA's, over ranks that divide weights in both ways, and of one process that goes on."""
    dora = {"lora.dora": "true"}
    main(workspace.settings("lengths", **SETTINGS | dora))
    train(workspace, "lengths-4", **dora, **FOUR, activation_checkpointing="true")
    source = step(workspace, "lengths-4", 2)
    main(workspace.settings("lengths-1", **SETTINGS | dora, resume=source))
    for run in ("lengths-4", "lengths-1"):
        assert_near_run(workspace, run, "lengths")
    converted = workspace.root / "lengths-converted"
    convert_checkpoint(step(workspace, "lengths-4", 4), str(converted), merge=True)
    hf = workspace.root / "lengths/hf", workspace.root / "one/hf", converted
    one, plain, found = map(weights, hf)
    for name, weight in one.items():
        assert relative_error(found[name], weight) < 1e-4, name
        if "proj" in name:
            assert relative_error(found[name], plain[name]) > 1e-3, name


ENDS: dict[str, dict[str, Any]] = {
    "of low rank": {"lora.targets": "[embed_tokens, lm_head, v_proj]", "lora.dora": "true"},
    "whole": {"lora.targets": "[q_proj]", "lora.modules_to_save": "[embed_tokens, lm_head]"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_embedding_and_head(workspace, kind):
    """Whose tokens ranks divide, and FSDP the rows of that; one process and ranks go on."""
    model = write_model(workspace.root / f"{kind} untied", tie_word_embeddings=False)
    ends = {"lora.dropout": 0, "model": model} | ENDS[kind]
    main(workspace.settings(f"{kind}-one", **SETTINGS | ends))
    train(workspace, f"{kind}-4", **ends, **FOUR)
    train(workspace, f"{kind}-1", **ends, resume=step(workspace, f"{kind}-4", 2))
    source = step(workspace, f"{kind}-one", 2)
    train(workspace, f"{kind}-2", **ends, **{"parallel.tensor": 2}, resume=source)
    for ranks in (4, 1, 2):
        assert_near_run(workspace, f"{kind}-{ranks}", f"{kind}-one")


def test_a_row_of_zeros_on_one_rank(workspace):
    """It is said at once, while the others still add up lengths, as the whole weight counts it."""
    base = write_model(workspace.root / "zeros")
    zeroed = weights(base)
    zeroed["model.layers.0.self_attn.k_proj.weight"][20] = 0  # the fifth of the second rank's
    save_file(zeroed, base / "model.safetensors", {"format": "pt"})
    more = {"model": base, "lora.dropout": 0, "lora.dora": "true", "parallel.tensor": 2}
    running = Ranks(2, main, workspace.settings("zeros-run", **SETTINGS | more))
    for process in running.processes:
        process.join(60)
    errors = running.errors
    running.kill()
    assert running.codes == [1, 1] and "timed out" not in errors, errors
    assert "self_attn.qkv_proj: row 20 of k_proj is all zeros" in errors
