"""Every family trains with float32 weights that are computed in bfloat16, the default on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny
from tigon.models import MODELS
from tigon.train import load
from tigon.train.distributed import start
from tigon.train.model import build_model

NEW = ("gemma4_text", "qwen3_5_text", "gpt_oss", "qwen3_moe")  # with buffers, states and experts
FAMILIES = [*NEW, *(family for family in MODELS if family not in NEW)]


@pytest.mark.slow(first=len(NEW))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step(family: str, tmp_path: Path) -> None:
    sizes = next(iter(tiny.CASES[family].values()))
    values = tiny.their_config(family, **tiny.SIZES | sizes).get_text_config().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings: dict[str, Any] = dict.fromkeys(("tokenizer", "data", "run_dir"), tmp_path)
    settings |= {"init": tmp_path / "config.json", "steps": 1, "device": "cpu"}
    settings |= {"dtype": "bfloat16", "param_dtype": "float32", "sharding": "gradients"}
    with start("cpu") as world:
        config = load(None, [f"{key}={value}" for key, value in settings.items()])
        model = build_model(config, world)
        ids = torch.arange(16)[None]
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert loss.isfinite()
    assert model.zero2 is not None  # which casts
