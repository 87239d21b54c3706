"""Runs whose frozen base is in 4 bits."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon
from tests.models.fp8_checkpoints import DYNAMIC, to_fp8
from tests.small import write_model
from tests.train.adapters import SETTINGS, step
from tigon.layers import QuantizedWeight
from tigon.models import quantize_model
from tigon.models.pretrained.quantization import quantized_layers
from tigon.train import load, main
from tigon.train.build import read_inputs
from tigon.train.distributed import start
from tigon.train.dry_run import estimate_run
from tigon.train.model import build_model


@pytest.fixture(scope="module")
def settings(workspace):
    def make(run: str, **changes: Any) -> list[str]:
        own = SETTINGS | {"lora.quantize": "nf4"}
        return workspace.settings(run, eval_data=workspace.held_out, **own | changes)

    return make


def test_a_broken_base_that_is_kept(workspace, settings):
    """Its files are said, not rows of the data."""
    base = write_model(workspace.root / "broken")
    to_fp8(base, (32, 32), DYNAMIC)
    weights = load_file(base / "model.safetensors")
    codes = weights["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)
    codes[3, 5] = 0x7F  # NaN
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=f"weights up to nan when .* look at the files of {base}"):
        main(settings("broken-run", **{"model": base, "lora.quantize": "keep"}))
    with pytest.raises(SystemExit, match=rf"{base}.*: model.*down_proj.weight has values that are"):
        main(settings("four-bits", model=base))


def test_resume_needs_the_same_base(workspace, settings):
    main(settings("one", steps=2))
    with pytest.raises(SystemExit, match="is of another adapter or model"):
        main(settings("other", **{"resume": step(workspace, "one", 2), "lora.quantize": "null"}))


def test_a_base_that_is_drawn(workspace, settings):
    """4 bits of the same weights as without them."""
    drawn = {"init": workspace.model / "config.json", "tokenizer": workspace.model, "model": ""}
    few, whole = (
        load(None, settings("drawn", **drawn | {"lora.quantize": quantize}))
        for quantize in ("nf4", "null")
    )
    with start("cpu") as world:
        found, expected = build_model(few, world), build_model(whole, world)
    quantize_model(expected, "nf4")
    pairs = list(zip(quantized_layers(found), quantized_layers(expected), strict=True))
    assert len(pairs) == 2 * 4  # qkv and o, gate and up, down
    for (name, _, one), (_, _, other) in pairs:
        assert torch.equal(one.dequantize(), other.dequantize()), name
    with pytest.raises(
        ValueError, match=r"lora.quantize=keep .* init=.*config.json: its weights are drawn"
    ):
        load(None, settings("kept", **drawn | {"lora.quantize": "keep"}))


def test_the_estimate_knows(workspace, settings):
    """On every rank all of the base, in 4 bits; a run on a CPU is planned for GPUs here."""
    found = {}
    for quantize in ("null", "nf4"):
        own = {"device": "auto", "dtype": "bfloat16", "lora.quantize": quantize}
        config = load(None, settings(f"plan-{quantize}", **own))
        with start("cpu") as world:
            inputs = read_inputs(config, world, here=False)
            for gpus in (1, 2):
                found[quantize, gpus] = estimate_run(config, inputs, gpus).kinds["parameters"]
            inputs.data.close()
    sizes = json.loads((workspace.model / "config.json").read_text())
    assert sizes["num_hidden_layers"] == 2
    model = tigon.from_pretrained(workspace.model, quantize="nf4", dtype=torch.bfloat16)
    few = [m for m in model.modules() if isinstance(m, QuantizedWeight)]
    saved = sum(2 * m.shape.numel() - m.nbytes for m in few)
    assert saved > 0
    assert found["null", 1] - found["nf4", 1] == pytest.approx(saved, abs=512 * 20)
    assert found["nf4", 2] > sum(m.nbytes for m in few)
