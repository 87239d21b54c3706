"""Sizes that no machine has memory for are refused before any is asked for."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small import LLAMA, write_chats, write_model
from tigon.models import MODELS
from tigon.train import main
from tigon.utils import memory

CPU = torch.device("cpu")
SIZES: list[dict[str, Any]] = [
    {"vocab_size": 2**31 - 1},
    {"intermediate_size": 2**31 - 1},
    {"hidden_size": 2**31 - 1, "vocab_size": 2**31 - 1, "head_dim": 16},
    {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 16},
]


def test_the_memory_of_the_host(tmp_path: Path) -> None:
    machine = memory.total_memory(CPU, tmp_path)
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_memory(CPU, tmp_path) == machine
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.total_memory(CPU, tmp_path) == 1000


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_model_of_random_weights(sizes: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(LLAMA | sizes))
    settings = [f"run_dir={tmp_path}/run", f"init={path}", f"tokenizer={model}", "device=cpu"]
    settings += [f"data={write_chats(tmp_path / 'd.jsonl', 3)}", "seq_len=64", "steps=1"]
    with pytest.raises(SystemExit, match=r"huge\.json: (the weights take|no model can)") as error:
        main([*settings, "batch_size=1"])
    assert "\n" not in str(error.value)


def test_what_the_weights_need(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(p.nbytes for p in MODELS["llama"].from_config(LLAMA, device="meta").parameters())
    monkeypatch.setattr(memory, "total_memory", lambda device: needed)
    MODELS["llama"].from_config(LLAMA)
    monkeypatch.setattr(memory, "total_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"the weights take 0\.0 GiB, and cpu has 0\.0 GiB"):
        MODELS["llama"].from_config(LLAMA)
