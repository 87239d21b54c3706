"""Runs of every family over four ranks in two dimensions, and layouts together with settings that
change how gradients are kept and summed, against one rank: losses, norms of gradients, weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tigon
from tests.numbers import relative_error
from tests.parallel.ranks import selected_cases
from tests.parallel.test_tensor import BALANCED, MOE, SIZES, TWO, WINDOW
from tests.small import write_model
from tests.train.conftest import workspace
from tests.train.ranks import Ranks
from tigon.train import load, prepare, start, train
from tigon.train.config import Parallel

__all__ = ["workspace"]
LAYOUTS = {"tensor and context": {"tensor": 2, "context": 2}, "fsdp and tensor": {"tensor": 2}}
# Every other family has each layout, and every other one of these packed rows
CASES = {
    name: (kind, changes, list(LAYOUTS)[i % 2], i % 4 < 2)
    for i, (name, (kind, changes)) in enumerate(TWO.items())
}


def run_all(parallel: dict[str, int], runs: list[list[str]]) -> None:
    torch.set_num_threads(1)
    with start("cpu", parallel=Parallel(**parallel)) as world:
        for settings in runs:
            assert train(prepare(load(None, settings), world)) == 0


def perturbed(directory: Path, **values: Any) -> Path:
    """A model whose norms and biases are random, and whose matrices hide no error."""
    write_model(directory, **values)
    model = tigon.from_pretrained(directory)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.03))
    tokenizer = tigon.Tokenizer.from_pretrained(directory)
    model.save_pretrained(directory, tokenizer=tokenizer, replace=True)
    return directory


def one_and_four(
    workspace: Any,
    name: str,
    kind: str,
    changes: dict[str, Any],
    parallel: dict[str, int],
    **own: Any,
) -> list[list[str]]:
    """Settings of a run on one rank, and of the same run on four."""
    values = SIZES | changes | {"model_type": kind, "vocab_size": 321, "pad_token_id": 0}
    values["max_position_embeddings"] = 128
    path = perturbed(workspace.root / name.replace(" ", "-"), **values)
    same = {"seq_len": 67, "steps": 5, "lr": 0.3, "optimizer": "sgd", "max_grad_norm": 0.5}
    same |= {"weight_decay": 0.01, "export": "true", "log_every": 1, "model": path}
    same |= {"micro_batch_size": 2} | own  # one or two of a step
    ways = {"one": {}, "four": {"parallel": json.dumps(parallel)}}
    return [workspace.settings(f"{name}-{way}", **same | its) for way, its in ways.items()]


def assert_four_are_as_one(workspace: Any, name: str, exports: tuple[str, ...] = ("hf",)) -> None:
    for key in ("loss", "grad_norm"):
        one, four = (workspace.metrics(f"{name}-{ways}", key) for ways in ("one", "four"))
        assert len(one) == 5 and four == pytest.approx(one, rel=1e-5), key
    before = load_file(workspace.root / name.replace(" ", "-") / "model.safetensors")
    for export in exports:
        one, four = (
            load_file(workspace.root / f"{name}-{ways}" / export / "model.safetensors")
            for ways in ("one", "four")
        )
        assert one.keys() == four.keys()
        for key, weight in one.items():
            assert relative_error(four[key], weight) < 1e-5, (export, key)
        assert any(not torch.equal(before[key], weight) for key, weight in one.items())


@pytest.fixture(scope="module")
def runs(workspace: Any, request: pytest.FixtureRequest) -> Any:
    """All of them, in three starts of processes."""
    alone: list[list[str]] = []
    shared: dict[str, list[list[str]]] = {layout: [] for layout in LAYOUTS}
    for name in [name for name in selected_cases(request, "name") if name in CASES]:
        kind, changes, layout, packed = CASES[name]
        own = {"packing": str(packed).lower()}
        one, four = one_and_four(workspace, name, kind, changes, LAYOUTS[layout], **own)
        alone.append(one)
        shared[layout].append(four)
    Ranks(1, run_all, {}, alone).finish()
    for layout, settings in shared.items():
        if settings:
            Ranks(4, run_all, LAYOUTS[layout], settings).finish()
    return workspace


@pytest.mark.slow(first=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_learn_what_one_does(runs: Any, name: str) -> None:
    assert_four_are_as_one(runs, name)


# Updates in backward need one micro-batch a step on each rank. One rank has two of that size, as
# experts are balanced within a micro-batch
IN_BACKWARD = {"batch_size": 4, "micro_batch_size": 2, "max_grad_norm": 0, "lr": 0.1}
IN_BACKWARD |= {"packing": "false", "truncate": "true"}
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-2}
# The model type and its config, the layout, settings of both runs, and of that on four ranks
COMBINATIONS: dict[
    str, tuple[str, dict[str, Any], dict[str, int], dict[str, Any], dict[str, Any]]
] = {
    "context, tensor and expert": (
        "qwen3_moe",
        MOE | {"num_experts": 8, "mlp_only_layers": [0]},
        {"context": 2, "tensor": 2, "expert": 4},
        {"ema_decay": 0.5, "activation_offload": "true"},
        {},
    ),
    "fsdp, tensor and expert": (
        "mixtral",
        BALANCED | {"num_local_experts": 8},
        {"tensor": 2, "expert": 2},
        {"ema_decay": 0.5, **IN_BACKWARD},
        {"optimizer_in_backward": "true"},
    ),
    "replicate and tensor": (
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"replicate": 2, "tensor": 2},
        {"ema_decay": 0.5, "loss_reduction": "sequence", "logits_to_keep": 6, **IN_BACKWARD},
        {"optimizer_in_backward": "true"},
    ),
    "context and tensor, windows": (
        "gemma3_text",
        {"num_key_value_heads": 1, **WINDOW},
        {"context": 2, "tensor": 2},
        {"ema_decay": 0.5, "activation_offload": "true"},
        {},
    ),
    "four ranks of tensor, windows": (
        "gemma2",
        WINDOW,
        {"tensor": 4},
        {"ema_decay": 0.5, "activation_checkpointing": "true", **IN_BACKWARD},
        {"optimizer_in_backward": "true", "micro_batch_size": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_are_as_one_rank(workspace: Any, name: str) -> None:
    kind, changes, parallel, own, of_four = COMBINATIONS[name]
    one, four = one_and_four(workspace, name, kind, changes, parallel, **LOSS, **own)
    Ranks(1, run_all, {}, [one]).finish()
    changed = [f"{key}={value}" for key, value in of_four.items()]
    Ranks(4, run_all, parallel, [[*four, *changed]]).finish()
    assert_four_are_as_one(workspace, name, ("hf", "hf-ema"))
