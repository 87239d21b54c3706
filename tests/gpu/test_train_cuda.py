"""Training on the GPU: the same curve as on the CPU, and the same on two GPUs as on one."""

import pytest
import torch

from tests.gpu.support import no_waiting
from tests.support.small import EXPERTS, write_model
from tests.train.conftest import workspace
from tests.train.ranks import train_on_gpus
from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.mlp import grouped_product
from tigon.train import checkpoint, load, main, prepare, start
from tigon.train.checkpoint.format import full_state, state_blocks

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu

STEPS = {"steps": 8, "warmup_steps": 2, "eval_every": 4, "batch_size": 8, "weight_decay": 0.1}


def assert_same_curve(workspace, run: str, other: str, tolerance: float) -> None:
    for key in ("loss", "grad_norm", "eval_loss"):
        curve = workspace.metrics(run, key)
        assert len(curve) == (3 if key == "eval_loss" else 8)
        assert curve == pytest.approx(workspace.metrics(other, key), rel=tolerance), key


def test_float32_curve_equals_that_of_the_cpu(workspace):
    same = {**STEPS, "dtype": "float32", "eval_data": workspace.held_out}
    for device in ("cpu", "cuda"):
        main(workspace.settings(f"gpu-{device}", **{**same, "device": device}))
    assert_same_curve(workspace, "gpu-cuda", "gpu-cpu", 1e-4)


def test_bfloat16_over_float32_weights(workspace):
    """The default on a GPU: FSDP2 on one rank, then on two, with accumulation and a resume."""
    same = {**STEPS, "device": "cuda", "eval_data": workspace.held_out, "save_every": 4}
    main(workspace.settings("gpu-one", export="true", **same))
    main(workspace.settings("gpu-exact", dtype="float32", **same))
    assert_same_curve(workspace, "gpu-one", "gpu-exact", 3e-2)  # a gradient norm: 2.02e-2
    source = workspace.root / "gpu-one/checkpoints/step-00000004"
    main(workspace.settings("gpu-resumed", resume=source, **same))
    expected = workspace.metrics("gpu-one", "loss")[4:]
    assert workspace.metrics("gpu-resumed", "loss") == pytest.approx(expected, rel=1e-6)
    train_on_gpus(workspace.settings("gpu-two", export="true", **same))
    assert_same_curve(workspace, "gpu-two", "gpu-one", 5e-3)
    train_on_gpus(workspace.settings("gpu-two-exact", dtype="float32", **same))
    assert_same_curve(workspace, "gpu-two-exact", "gpu-exact", 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_whole_weights_have_the_curve_of_fsdp2(workspace, dtype):
    """Of float32 weights, on one GPU and on two, with accumulation and a checkpoint of the other's
    to go on from. GPUs add up an embedding's gradient in any order, so that bits may differ."""
    same = {**STEPS, "device": "cuda", "dtype": dtype, "eval_data": workspace.held_out}
    for ranks in (1, 2):
        runs = {way: f"gpu-{way}-{dtype}-{ranks}" for way in ("full", "gradients")}
        for way, run in runs.items():
            settings = workspace.settings(run, sharding=way, save_every=4, **same)
            main(settings) if ranks == 1 else train_on_gpus(settings)
        tolerance = 1e-5 if dtype == "float32" else 5e-3
        assert_same_curve(workspace, runs["gradients"], runs["full"], tolerance)
        source = workspace.root / runs["full"] / "checkpoints/step-00000004"
        settings = workspace.settings(
            f"{runs['full']}-on", sharding="gradients", resume=source, **same
        )
        main(settings) if ranks == 1 else train_on_gpus(settings)
        expected = workspace.metrics(runs["full"], "loss")[4:]
        found = workspace.metrics(f"{runs['full']}-on", "loss")
        assert found == pytest.approx(expected, rel=tolerance)


def test_padding_behind_packed_rows_costs_no_wait(workspace, tmp_path, monkeypatch):
    """A mask tells the routers what is padding; attention goes by the bounds of sequences."""
    model = write_model(tmp_path / "experts", **EXPERTS)
    changes = {"model": model, "batch_size": 64, "micro_batch_size": 64, "dtype": "bfloat16"}
    balance = []
    with start("cuda") as world:
        for packing in (True, False):
            settings = workspace.settings("x", **changes, device="cuda", packing=packing)
            run = prepare(load(None, settings), world)
            (rows,) = run.data.micro_batches(0)
            assert rows.attention_mask is not None
            rows = rows.to(world.device)

            def loss(run=run, rows=rows):
                inputs = run.task.resolve(run.model, rows)
                sums = run.task.sums(run.model, inputs)
                return run.task.loss(run.model, inputs, sums).metrics["aux_loss"]

            balance.append(loss().item())  # compiles, and looks for backends
            with monkeypatch.context() as patch:
                # Experts themselves may ask the device how many tokens each has
                patch.setattr(grouped_product, "must_not_sync", lambda *_: True)
                patch.setattr(AttentionMask, "_build", None)
                patch.setattr(AttentionMask, "_build_blocks", None)
                with no_waiting():
                    loss()
    assert balance[0] == pytest.approx(balance[1], rel=2e-2)


def test_host_copy_has_the_bits_of_its_moment(workspace, tmp_path):
    """Saved in the background while training changes weights and states, then read again."""
    with start("cuda") as world:
        settings = workspace.settings("gpu-copy", steps=4, device="cuda", dtype="bfloat16")
        run = prepare(load(None, settings), world)
        saved = run.model, run.optimizer, run.tokenizer
        with run.saver as saver:
            for step in (1, 2):  # the second copy goes into the first one's memory
                for p in run.model.parameters():
                    p.grad = torch.randn_like(p)
                run.optimizer.step()
                expected = tensors(run)
                target = saver.save(step, *saved, {"config": {}})
                with torch.no_grad():
                    for p in run.model.parameters():
                        p.add_(1.0)
            expected = tensors(run)
            target = saver.save(3, *saved, {"config": {}}, copy=False)  # as they are
            torch.randn(4096, 4096, device="cuda").square().sum().item()
        # Counts of steps are on the host already
        copies = [b for b in saver._stager.buffers.values() if b.numel() > 1]
        assert all(b.is_pinned() for b in copies)
        checkpoint.verify(target)
        checkpoint.load(target, run.model, run.optimizer)
        found = tensors(run)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], t) for name, t in expected.items())
        checkpoint.check_finite(run.model, run.optimizer, target=target)
        for value in (float("nan"), float("inf")):
            state = run.optimizer.state[run.model.lm_head.weight]["exp_avg_sq"]
            state[-1, -1] = value
            with pytest.raises(FloatingPointError, match=r"exp_avg_sq of model\.embed_tokens"):
                checkpoint.check_finite(run.model, run.optimizer, target=target)


def tensors(run) -> dict[str, torch.Tensor]:
    state = full_state(run.model, run.optimizer, None)
    return {block.name: block.rows.clone() for block in state_blocks(state)}
