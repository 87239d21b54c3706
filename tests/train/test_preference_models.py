"""Preference objectives with other models and ways to divide them, and the memory of logits.

# T tokens, V vocab
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.small import EXPERTS, LLAMA, write_model
from tests.train import preferences
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import train_on
from tigon.train import load, main, prepare, start
from tigon.train.trainer import forward_backward, open_task

V = LLAMA["vocab_size"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path) -> dict[str, Any]:
    pairs = preferences.write(tmp_path / "pairs.jsonl", preferences.pairs(21, 5))
    kto = preferences.write(tmp_path / "kto.jsonl", preferences.labelled(21, 5))
    grpo = preferences.write(tmp_path / "grpo.jsonl", preferences.rewarded(9))
    return {"kto": kto, "grpo": grpo} | dict.fromkeys(("dpo", "orpo", "reward"), pairs)


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["dpo", "kto", "reward", "grpo"])
def test_experts_are_balanced_and_ranks_agree(workspace, data, tmp_path, task):
    experts = {**EXPERTS, "output_router_logits": True}
    model = write_model(tmp_path / "experts", **experts, router_aux_loss_coef=2.0)
    same = {"task": task, "data": data[task], "steps": 2, "model": model, "max_grad_norm": 0}
    main(workspace.settings(f"experts-{task}", **same))
    train_on(2, workspace.settings(f"experts-{task}-two", **same))
    off = write_model(tmp_path / "off", **experts, router_aux_loss_coef=0.0)
    main(workspace.settings(f"experts-{task}-off", **{**same, "model": off, "steps": 1}))
    curve, two, without = (
        workspace.metrics(f"experts-{task}{name}", "grad_norm") for name in ("", "-two", "-off")
    )
    assert two == pytest.approx(curve, rel=1e-3)
    balanced = abs(curve[0] - without[0]) > 1e-3 * curve[0]
    assert balanced == (task != "reward")  # as in transformers, whose scores have no such loss


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["dpo", "kto", "reward", "stream"])
def test_a_second_model_on_ranks_that_divide_gradients(workspace, data, tmp_path, case):
    """Or that each read a stream and ask the reference about its rows."""
    task = "dpo" if case == "stream" else case
    same = {"task": task, "data": data[task], "steps": 2, "max_grad_norm": 0}
    if case != "reward":
        same["reference"] = write_model(tmp_path / "other", num_hidden_layers=1)
    same |= {"streaming": "true", "shuffle_window": 64} if case == "stream" else {}
    main(workspace.settings(f"one-{case}", **same))
    train_on(2, workspace.settings(f"two-{case}", **same, sharding="gradients"))
    assert_same_metrics(workspace, f"one-{case}", f"two-{case}", rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"lora.quantize": "nf4"}, {"task": "reward"}])
def test_adapters_packed_and_padded(workspace, data, more):
    """All rows in each step; under an adapter, over four bits, and with a new head."""
    same = {"task": "dpo", "data": data["dpo"], "steps": 4, "max_grad_norm": 0, "batch_size": 64}
    same |= {"lora.rank": 4, "lora.alpha": 8, "lr": 1e-2, **more}
    name = "-".join(map(str, more.values()))
    main(workspace.settings(f"packed{name}", **same))
    main(workspace.settings(f"padded{name}", **same, packing="false", micro_batch_size=4))
    assert_same_metrics(workspace, f"packed{name}", f"padded{name}", rel=2e-4)
    first, *_, last = workspace.metrics(f"packed{name}", "loss")
    assert abs(first - last) > 0.05


def test_base_path_is_the_same_reference(workspace, data):
    same = {"task": "dpo", "data": data["dpo"], "steps": 2, "lora.rank": 4, "lr": 1e-2}
    main(workspace.settings("adapter", **same))
    main(workspace.settings("apart", **same, reference=workspace.model))
    assert workspace.metrics("adapter", "loss")[0] == pytest.approx(0.6931471806, abs=1e-6)
    for key in ("loss", "grad_norm", "rewards/chosen", "rewards/margins"):
        expected = pytest.approx(workspace.metrics("adapter", key), rel=1e-4, abs=1e-6)
        assert workspace.metrics("apart", key) == expected


class Largest(TorchDispatchMode):
    """The most rows of logits that any operation returns."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == V:
                self.rows = max(self.rows, x.numel() // V)
        return out


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("task", ["dpo", "orpo", "kto", "grpo", "distill"])
def test_no_logits_of_all_tokens_exist(workspace, data, tmp_path, task):
    own: dict[str, Any] = {"task": task, "data": data.get(task, workspace.data)}
    if task == "distill":
        own["teacher"] = write_model(tmp_path / "teacher", num_hidden_layers=1)
    own |= {"logits_bytes": 16 * V * 4, "batch_size": 4, "steps": 1}
    with start("cpu") as world:
        run = prepare(load(None, workspace.settings(f"memory-{task}", **own)), world)
        open_task(run)
        run.task.begin(run.model)
        with run.prefetcher, Largest() as largest:
            forward_backward(run, 0)
    assert 0 < largest.rows <= 64  # the weight itself, [V, C], has C columns
