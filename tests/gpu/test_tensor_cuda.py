"""Two ranks that share layers, rows or experts (NCCL) against one: curves, and tokens from CUDA
graphs. Where there is one GPU both are on it."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import tigon
from tests.parallel.test_shared_generation import answers, on_ranks
from tests.small import EXPERTS, TEXT, write_model
from tests.train.conftest import workspace
from tests.train.ranks import Ranks, train_on_gpus
from tigon import cli
from tigon.train import main

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu


EIGHT: dict[str, Any] = EXPERTS | {"num_experts": 8}
# The model's sizes, if it is no Llama, other settings, and those of two ranks alone
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}, {}),
    "experts": (EXPERTS, {}, {}),
    "whole experts": (EIGHT, {}, {"parallel.expert": 2}),
    "adapters of whole experts": (
        EIGHT,
        {"lora.rank": 4, "lora.targets": "[experts.gate_up_proj, experts.down_proj, q_proj]"},
        {"parallel.expert": 2},
    ),
}


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_curves(workspace, family, dtype, tolerance):
    same = {"steps": 8, "warmup_steps": 2, "batch_size": 8, "device": "cuda", "dtype": dtype}
    sizes, settings, shared = CASES[family]
    same |= settings
    if sizes:
        same["model"] = write_model(workspace.root / f"{family}-{dtype}", **sizes)
    runs = [f"{family}-{dtype}-{ways}" for ways in ("one", "two")]
    main(workspace.settings(runs[0], **same))
    train_on_gpus(workspace.settings(runs[1], **same | {"parallel.tensor": 2} | shared))
    for key in ("loss", "grad_norm"):
        one, two = (workspace.metrics(run, key) for run in runs)
        assert len(one) == 8
        assert two == pytest.approx(one, rel=tolerance), key


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("way", ["context", "expert", "replicate"])
def test_other_dimensions(workspace, way, dtype, tolerance):
    same = {"steps": 8, "warmup_steps": 2, "batch_size": 8, "device": "cuda", "dtype": dtype}
    if way == "expert":
        same["model"] = write_model(workspace.root / f"{way}-{dtype}", **EIGHT)
    runs = [f"{way}-{dtype}-{ways}" for ways in ("one", "two")]
    main(workspace.settings(runs[0], **same))
    train_on_gpus(workspace.settings(runs[1], **same | {f"parallel.{way}": 2}))
    for key in ("loss", "grad_norm"):
        one, two = (workspace.metrics(run, key) for run in runs)
        assert len(one) == 8
        assert two == pytest.approx(one, rel=tolerance), key


@pytest.mark.parametrize(
    ("run", "changes", "tolerances"),
    [
        ("backward", {"optimizer_in_backward": "true", "max_grad_norm": 0}, (1e-4, 1e-4)),
        ("zero", {"sharding": "gradients"}, (1e-4, 1e-4)),
        # It iterates in bfloat16
        ("muon", {"optimizer": "muon", "adamw_lr": 1e-3}, (3e-2, 3e-2)),
        # Norms, of rounded gradients, are up to 0.06 from float32's here, on one GPU and on two
        ("fp8", {"fp8": "true", "dtype": "bfloat16"}, (1e-2, 0.12)),
    ],
)
def test_optimizers_and_products(workspace, run, changes, tolerances):
    same = {"steps": 8, "warmup_steps": 2, "batch_size": 8, "micro_batch_size": 8}
    same |= {"device": "cuda", "dtype": "float32", **changes}
    main(workspace.settings(f"{run}-one", **same))
    train_on_gpus(workspace.settings(f"{run}-two", **same | {"parallel.tensor": 2}))
    for key, tolerance in zip(("loss", "grad_norm"), tolerances, strict=True):
        one, two = (workspace.metrics(f"{run}-{ways}", key) for ways in ("one", "two"))
        assert len(one) == 8
        assert two == pytest.approx(one, rel=tolerance), key


@pytest.mark.parametrize("whole_experts", [False, True])
def test_tokens(tmp_path, whole_experts):
    models = {"whole": EIGHT} if whole_experts else {"llama": {}, "experts": EXPERTS}
    for name, sizes in models.items():
        write_model(tmp_path / name, **sizes)
    given = str(tmp_path), list(models), "cuda", whole_experts
    Ranks(2, on_ranks, *given, on_gpus=True).finish()
    for name in models:
        expected = answers(tigon.from_pretrained(tmp_path / name, device="cuda"))
        for rank in range(2):
            found = json.loads((tmp_path / f"{rank}.json").read_text())[name]
            assert {call: found[call] for call in expected} == expected


def on_the_first_input(path: str, command: list[str]) -> None:
    """A command of `tigon` on a rank; the first one reads the file."""
    with open(path if os.environ["RANK"] == "0" else os.devnull) as sys.stdin:
        sys.exit(cli.main([*command, "--tp", "2"]))


@pytest.mark.parametrize("name", ["generate", "chat", "perplexity"])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_commands(tmp_path, monkeypatch, capsys, name, whole_experts):
    sizes = EIGHT if whole_experts else {}
    model = write_model(tmp_path / "model", eos_token_id=None, **sizes)
    text, typed = Path(tmp_path, "text.txt"), Path(tmp_path, "typed")
    text.write_text(f"{TEXT} " * 20)
    typed.write_text("hello\nand again\n")
    new = ["--max-new-tokens", "12"]
    command = {
        "generate": ["generate", str(model), "hello", *new],
        "chat": ["chat", str(model), *new],
        "perplexity": ["eval", "perplexity", str(model), str(text)],
    }[name]
    command += ["--device", "cuda", "--dtype", "float32"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed.read_text()))
    assert cli.main(command) == 0
    alone = capsys.readouterr().out
    more = ["--expert-parallel"] if whole_experts else []
    found = Ranks(2, on_the_first_input, str(typed), [*command, *more], on_gpus=True).finish()
    if name == "perplexity":
        ours, expected = (said.split()[1::2] for said in (found, alone))
        assert [*map(float, ours)] == pytest.approx([*map(float, expected)], rel=1e-4)
    else:
        assert found == alone and len(alone) > 10
