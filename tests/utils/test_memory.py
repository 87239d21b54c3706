"""Sizes that no machine has memory for are refused before any is asked for."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small import LLAMA, write_chats, write_model
from tigon.train import main
from tigon.utils import memory

CPU = torch.device("cpu")
SIZES: list[dict[str, Any]] = [
    {"vocab_size": 2**31 - 1},
    {"intermediate_size": 2**31 - 1},
    {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 16},
]


def test_the_memory_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = memory.total_memory(CPU)
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_memory(CPU) == machine
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.total_memory(CPU) == 1000


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
