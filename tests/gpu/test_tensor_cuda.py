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
from tests.support.small import EXPERTS, TEXT, write_model
from tests.train.conftest import workspace
from tests.train.ranks import Ranks, train_on_gpus
from tigon import cli
from tigon.train import main

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu


EIGHT: dict[str, Any] = EXPERTS | {"num_experts": 8}
TENSOR, WHOLE = {"parallel.tensor": 2}, {"parallel.tensor": 2, "parallel.expert": 2}
ADAPTERS = "[experts.gate_up_proj, experts.down_proj, q_proj]"
ACCUMULATED = {"micro_batch_size": 8}
# The model's sizes, if it is no Llama, other settings, and those of two ranks alone
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}, TENSOR),
    "experts": (EXPERTS, {}, TENSOR),
    "whole experts": (EIGHT, {}, WHOLE),
    "adapters of whole experts": (EIGHT, {"lora.rank": 4, "lora.targets": ADAPTERS}, WHOLE),
    "context": ({}, {}, {"parallel.context": 2}),
    "expert": (EIGHT, {}, {"parallel.expert": 2}),
    "replicate": ({}, {}, {"parallel.replicate": 2}),
    "in backward": (
        {}, ACCUMULATED | {"optimizer_in_backward": "true", "max_grad_norm": 0}, TENSOR,
    ),
    "zero": ({}, ACCUMULATED | {"sharding": "gradients"}, TENSOR),
    "muon": ({}, ACCUMULATED | {"optimizer": "muon", "adamw_lr": 1e-3}, TENSOR),
    "fp8": ({}, ACCUMULATED | {"fp8": "true"}, TENSOR),
}  # fmt: skip
# Of loss and gradient norm. Muon iterates in bfloat16; norms of fp8's rounded gradients are up to
# 0.06 from float32's here, on one GPU and on two
FLOAT32, BFLOAT16 = (1e-4, 1e-4), (3e-2, 3e-2)
TOLERANCES = {"muon": BFLOAT16, "fp8": (1e-2, 0.12)}
ONE_DTYPE = {name: "float32" for name in ("in backward", "zero", "muon")} | {"fp8": "bfloat16"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in CASES for d in ("float32", "bfloat16") if ONE_DTYPE.get(n, d) == d],
)
def test_curves_of_two_ranks_are_one_s(workspace, name, dtype):
    sizes, settings, shared = CASES[name]
    same = {"steps": 8, "warmup_steps": 2, "batch_size": 8, "device": "cuda", "dtype": dtype}
    same |= settings
    if sizes:
        same["model"] = write_model(workspace.root / f"{name}-{dtype}", **sizes)
    runs = [f"{name}-{dtype}-{ways}" for ways in ("one", "two")]
    main(workspace.settings(runs[0], **same))
    train_on_gpus(workspace.settings(runs[1], **same | shared))
    tolerances = TOLERANCES.get(name, FLOAT32 if dtype == "float32" else BFLOAT16)
    for key, tolerance in zip(("loss", "grad_norm"), tolerances, strict=True):
        one, two = (workspace.metrics(run, key) for run in runs)
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
