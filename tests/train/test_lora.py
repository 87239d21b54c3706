"""Runs that train an adapter: their settings, their base, and commands that need it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon
from tests.models.fp8_checkpoints import DYNAMIC, to_fp8
from tests.support.small import write_model
from tests.train.checkpoints import assert_close, changed_metadata
from tests.train.layouts import ADAPTER, assert_same_tensors, load_weights
from tests.train.ranks import Ranks, train_on
from tigon.cli import main as command
from tigon.layers import QuantizedWeight
from tigon.models.pretrained.quantization import quantize_model, quantized_layers
from tigon.train import checkpoint, load, main, model
from tigon.train.build import read_inputs
from tigon.train.distributed import start
from tigon.train.dry_run import estimate_run
from tigon.train.export import load_checkpoint
from tigon.train.model import build_model


@pytest.fixture(scope="module")
def settings(workspace):
    def make(run: str, **changes: Any) -> list[str]:
        given = {"eval_data": workspace.held_out} | ADAPTER | {"lora.merge": "false"} | changes
        return workspace.settings(run, **given)

    main(make("one", **{"lora.merge": "true"}))
    return make


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_base_of_16_bits(ranks, workspace, settings):
    """The base in the computation's dtype, and the adapter in param_dtype."""
    run = f"half-{ranks}"
    train_on(ranks, settings(run, dtype="bfloat16", steps=3))
    assert {t.dtype for t in workspace.tensors(run, 2).values()} == {torch.float32}
    expected = workspace.metrics("one", "loss")[:3]
    assert workspace.metrics(run, "loss") == pytest.approx(expected, rel=0.02)


def test_merging_in_16_bits_rounds_once(workspace, settings, tmp_path):
    tigon.from_pretrained(workspace.model).bfloat16().save_pretrained(
        tmp_path / "half", tokenizer=tigon.Tokenizer.from_pretrained(workspace.model)
    )
    more = {"model": tmp_path / "half", "dtype": "bfloat16", "steps": 2, "lora.merge": "true"}
    main(settings("merged-half", **more))
    run = workspace.root / "merged-half"
    assert command(["export", str(run), str(run / "again"), "--merge"]) == 0
    assert {t.dtype for t in load_weights(run / "hf").values()} == {torch.bfloat16}
    assert_same_tensors(run / "hf", run / "again")
    assert command(["export", str(run / "adapter"), str(run / "alone"), "--merge"]) == 0
    assert_same_tensors(run / "hf", run / "alone")


def test_an_adapter_s_directory_merged(workspace, settings, tmp_path, capsys):
    """Over the base that it names, as the run's own export."""
    run, copy = workspace.root / "one", tmp_path / "its copy"
    assert command(["export", str(run / "adapter"), str(tmp_path / "merged")]) == 1
    hint = f"`tigon export {run}/adapter DIRECTORY --merge`"
    assert hint in capsys.readouterr().err
    assert command(["export", str(run / "adapter"), "x", "--base", "y"]) == 1
    assert "--base y needs --merge, which writes adapter and base" in capsys.readouterr().err
    assert command(["export", str(run / "adapter"), str(tmp_path / "merged"), "--merge"]) == 0
    named = f"named by {run}/adapter/adapter_config.json"
    assert capsys.readouterr().err == f"base: {workspace.model}, {named}\n"
    files = {path.name: path.read_bytes() for path in (run / "hf").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "merged").iterdir()} == files
    shutil.copytree(run / "adapter", copy)
    for path in copy.iterdir():  # PEFT saves no tokenizer: it is the base's
        if not path.name.startswith("adapter_"):
            path.unlink()
    with pytest.raises(SystemExit, match=f"tigon export '{copy}' DIRECTORY --merge"):
        main(workspace.settings("from-adapter", model=copy))
    half = tmp_path / "half"
    assert command(["export", str(copy), str(half), "--merge", "--dtype", "bfloat16"]) == 0
    whole = {name: values.bfloat16() for name, values in load_weights(run / "hf").items()}
    assert_close(load_weights(half), whole, rtol=0.02, atol=0.002)
    assert (tmp_path / "half" / "tokenizer.json").read_bytes() == files["tokenizer.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": None}, "names no base: write the base's folder or its name"),
        ({"base": "./gone"}, "no directory ./gone .* if it is elsewhere, write .* with --base"),
        ({"base": "/dev/null"}, "/dev/null is a file.* if it is elsewhere, write"),
        ({"base": "~nobody-here/base"}, "no directory ~nobody-here/base"),
        ({"base": "a\nb\x1b[31m"}, r"'a\\nb\\x1b\[31m' .* write the base's folder"),
        ({"base": "x" * 9999}, "'x{101}\\.\\.\\. .* write the base's folder"),
        ({"base": "a/b", "revision": "../.."}, r"revision '../..' is outside"),
        ({"base": "{quantized}"}, "bitsandbytes.* if it is elsewhere, write"),
        ({"task_type": "SEQ_CLS"}, "is of a model that scores sequences"),
    ],
)
def test_an_adapter_s_directory_without_its_base(
    changes, message, workspace, settings, tmp_path, capsys
):
    copy = shutil.copytree(workspace.root / "one" / "adapter", tmp_path / "adapter")
    values = json.loads((copy / "adapter_config.json").read_text())
    values |= {"base_model_name_or_path" if k == "base" else k: v for k, v in changes.items()}
    if values["base_model_name_or_path"] == "{quantized}":
        values["base_model_name_or_path"] = str(shutil.copytree(workspace.model, tmp_path / "base"))
        config = json.loads((tmp_path / "base" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (copy / "adapter_config.json").write_text(json.dumps(values))
    assert command(["export", str(copy), str(tmp_path / "merged"), "--merge"]) == 1
    error = capsys.readouterr().err
    assert len(error) < 1000 and error[:-1].isprintable()
    assert re.search(f"adapter_config.json.*{message}", error), error
    assert not (tmp_path / "merged").exists()
    if "gone" in message:
        base = ["--base", str(workspace.model)]
        assert command(["export", str(copy), str(tmp_path / "merged"), "--merge", *base]) == 0
        assert f"base: {workspace.model}, named by --base\n" in capsys.readouterr().err
        assert_same_tensors(workspace.root / "one/hf", tmp_path / "merged")


def test_groups_and_gradient_accumulation(workspace, settings):
    """B learns faster (LoRA+), A of the first layer not at all."""
    groups = "[{match: '*.layers.0.*lora_A*', freeze: true}, {match: '*.lora_B.*', lr: 0.04}]"
    main(settings("groups", parameter_groups=groups, micro_batch_size=2, steps=2))
    first, last = (workspace.tensors(run, 2) for run in ("groups", "one"))
    assert not any(torch.equal(first[name], last[name]) for name in first)
    states = workspace.tensors("groups", 2, "optimizer")
    assert not any(".layers.0." in name and "lora_A" in name for name in states)
    assert any(".layers.0." in name and "lora_B" in name for name in states)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.targets": "query_proj"}, "targets='query_proj' matches no projection of Llama"),
        ({"lora.rank_pattern": "{x_proj: 2}"}, "rank_pattern='x_proj' matches none"),
        ({"lora.dropout": 1}, r"dropout=1 is not in \[0, 1\)"),
        ({"lora.alpha": 1e300}, "alpha is a positive float32 number"),
        (
            {"parameter_groups": "[{match: '*layernorm.weight', lr: 0.1}]"},
            r"parameter_groups\[0\]: .*layernorm.weight'\] matches the base alone, which is frozen",
        ),
    ],
)
def test_wrong_settings(changes, message, workspace, settings):
    with pytest.raises(SystemExit, match=message):
        main(settings("wrong", **changes))
    assert not (workspace.root / "wrong" / "metrics.jsonl").exists()


def test_resume_needs_the_same_adapter_and_base(workspace, settings, tmp_path):
    source = workspace.checkpoint("one", 2)
    other = write_model(tmp_path / "other", hidden_size=32)
    same = settings("other", resume=source)
    for name, changed in (
        ("lora", [*same, "lora.rank=2"]),
        ("model", [*same, f"model={other}"]),
        ("lora", [text for text in same if not text.startswith("lora")]),
        ("lora.quantize", [*same, "lora.quantize=nf4"]),
    ):
        with pytest.raises(SystemExit, match=f"another adapter or model: {name}"):
            main(changed)


def test_other_weights_under_the_base_s_name(workspace, settings, tmp_path, capsys):
    """They are refused by whoever adds the adapter to them."""
    base = shutil.copytree(workspace.model, tmp_path / "base")
    main(settings("renewed", model=base, steps=2))
    source = workspace.checkpoint("renewed", 2)
    load_checkpoint(source)
    whole = load_weights(base)
    norms = {n: x * 1.5 if n.endswith("layernorm.weight") else x for n, x in whole.items()}
    save_file(norms, base / "model.safetensors", {"format": "pt"})
    message = "is an adapter of other weights than .*base has now"
    with pytest.raises(SystemExit, match=message):
        main(settings("renewed", model=base, steps=3, resume="auto"))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(source)
    assert command(["export", str(source), str(tmp_path / "merged"), "--merge"]) == 1
    assert "other weights" in capsys.readouterr().err and not (tmp_path / "merged").exists()
    assert command(["export", str(source), str(tmp_path / "adapter")]) == 0
    save_file(whole, base / "model.safetensors", {"format": "pt"})
    load_checkpoint(source)


def test_a_base_that_its_seed_draws_otherwise(workspace, settings, monkeypatch):
    drawn = {"init": workspace.model / "config.json", "tokenizer": workspace.model, "model": ""}
    main(settings("drawn", **drawn, steps=1))
    again = settings("drawn", **drawn, steps=2, resume="auto")
    monkeypatch.setattr(model, "DRAWS", 0)
    with pytest.raises(SystemExit, match=r"config.json has now: put the file back .* that drew"):
        main(again)
    monkeypatch.undo()
    main(again)


@pytest.fixture
def moved(workspace, settings, tmp_path):
    """A run that was moved here: its base is at the place that run.json names, or elsewhere."""
    base = Path(shutil.copytree(workspace.model, tmp_path / "base"))
    main(settings("travels", model=base, steps=1, run_dir=tmp_path / "made"))
    return Path(shutil.move(tmp_path / "made", tmp_path / "run")), base


def without_digest(run: Path, **config: Any) -> None:
    """The run's checkpoint as somebody else has written it."""
    with changed_metadata(checkpoint.latest(run / "checkpoints")) as metadata:
        assert metadata.pop("base")
        metadata["config"] |= config


def commands(run: Path, data: Path, out: Path) -> list[list[str]]:
    """All that add the run's adapter to its base."""
    return [
        ["export", str(run), str(out), "--merge"],
        ["generate", str(run), "a", "--max-new-tokens", "1", "--device", "cpu"],
        ["eval", "perplexity", str(run), str(data), "--device", "cpu"],
        ["eval", "parity", str(run), "--new-tokens", "1", "--device", "cpu"],
    ]


def test_a_moved_run_names_its_base(moved, workspace, tmp_path, capsys):
    run, base = moved
    where = run / "checkpoints/step-00000001/run.json"
    for words in commands(run, workspace.held_out, tmp_path / "hf"):
        capsys.readouterr()
        assert command(words) == 0
        assert f"base: {base}, named by {where}\n" in capsys.readouterr().err
    shutil.move(base, tmp_path / "elsewhere")
    assert command(["export", str(run), str(tmp_path / "2"), "--merge"]) == 1
    assert "if the base is elsewhere, name it with --base" in capsys.readouterr().err
    for i, words in enumerate(commands(run, workspace.held_out, tmp_path / "3")):
        assert command([*words, "--base", str(tmp_path / "elsewhere")]) == 0, i
        assert f"base: {tmp_path}/elsewhere, named by --base\n" in capsys.readouterr().err
    assert_same_tensors(tmp_path / "3", tmp_path / "hf")
    other = write_model(tmp_path / "other", initializer_range=0.3)
    words = ["export", str(run), str(tmp_path / "4"), "--merge", "--base", str(other)]
    assert command(words) == 1
    assert f"adapter of other weights than {other} has" in capsys.readouterr().err
    assert not (tmp_path / "4").exists()


def test_base_without_digest_needs_the_option(moved, workspace, tmp_path, capsys):
    """Somebody may have named any directory of this machine there."""
    run, base = moved
    private = write_model(tmp_path / "private", initializer_range=0.3)
    without_digest(run, model=str(private))
    for words in commands(run, workspace.held_out, tmp_path / "hf"):
        capsys.readouterr()
        assert command(words) == 1
        error = capsys.readouterr().err
        assert re.search(f"run.json names the base '{private}', .* name it with --base\n", error)
        assert error.count("\n") == 1
    assert not (tmp_path / "hf").exists()
    given = ["--base", str(base)]
    assert command(["export", str(run), str(tmp_path / "hf"), "--merge", *given]) == 0
    name = "model.norm.weight"
    assert torch.equal(load_weights(tmp_path / "hf")[name], load_weights(base)[name])
    assert command(["export", str(run), str(tmp_path / "adapter")]) == 0  # reads no base


def test_a_run_of_random_weights_names_a_config(workspace, settings, tmp_path, capsys):
    config = Path(shutil.copy(workspace.model / "config.json", tmp_path / "config.json"))
    init = {"model": "", "init": config, "tokenizer": workspace.model, "steps": 1}
    main(settings("random", **init, run_dir=tmp_path / "run"))
    export = ["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--merge"]
    assert command(export) == 0
    assert f"base: {config}, named by" in capsys.readouterr().err
    without_digest(tmp_path / "run")
    export[2] = str(tmp_path / "again")
    assert command(export) == 1
    assert command([*export, "--base", str(config)]) == 0
    assert_same_tensors(tmp_path / "again", tmp_path / "hf")


def test_base_of_what_has_none(workspace, settings, tmp_path, capsys):
    main(workspace.settings("no-adapter", steps=1))
    run, model, base = workspace.root / "no-adapter", str(workspace.model), ["--base", "x/y"]
    for words, message in (
        (["export", str(run), str(tmp_path / "x")], "only --merge needs the base"),
        (["export", str(run), str(tmp_path / "x"), "--merge"], "is no checkpoint of an adapter"),
        (["export", model, str(tmp_path / "x"), "--merge"], "has adapter_config.json"),
        (["export", model, str(tmp_path / "x")], "is no adapter, and needs no base"),
        (["generate", str(run), "a"], "is no checkpoint of an adapter"),
        (["generate", model, "a"], "is no adapter, and needs no base"),
        (["eval", "parity", model], "is no adapter, and needs no base"),
    ):
        assert command([*words, *base]) == 1
        assert message in capsys.readouterr().err


def test_a_row_of_zeros_on_one_rank(workspace):
    """It is said at once, while the others still add up lengths."""
    base = write_model(workspace.root / "zeros")
    zeroed = load_weights(base)
    zeroed["model.layers.0.self_attn.k_proj.weight"][20] = 0  # the fifth of the second rank's
    save_file(zeroed, base / "model.safetensors", {"format": "pt"})
    more = {"model": base, "lora.dora": "true", "parallel.tensor": 2}
    running = Ranks(2, main, workspace.settings("zeros-run", **ADAPTER | more))
    for process in running.processes:
        process.join(200)
    errors = running.errors
    running.kill()
    assert running.codes == [1, 1] and "timed out" not in errors, errors
    assert "self_attn.qkv_proj: a row of k_proj is all zeros" in errors


# Runs whose frozen base is in 4 bits.


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
        main(settings("four-bits", model=base, **{"lora.quantize": "nf4"}))


def test_a_base_that_is_drawn(workspace, settings):
    """4 bits of the same weights as without them."""
    drawn = {"init": workspace.model / "config.json", "tokenizer": workspace.model, "model": ""}
    few, whole = (
        load(None, settings("drawn-nf4", **drawn | {"lora.quantize": quantize}))
        for quantize in ("nf4", "null")
    )
    with start("cpu") as world:
        found, expected = build_model(few, world), build_model(whole, world)
    quantize_model(expected, "nf4")
    pairs = list(zip(quantized_layers(found), quantized_layers(expected), strict=True))
    assert len(pairs) == 2 * 4  # qkv and o, gate and up, down
    for (name, _, one), (_, _, other) in pairs:
        assert torch.equal(one.dequantize(), other.dequantize()), name
    with pytest.raises(ValueError, match=r"lora.quantize=keep .* init=.*config.json: init has no"):
        load(None, settings("kept", **drawn | {"lora.quantize": "keep"}))


def test_the_estimate_knows(workspace, settings):
    """On every rank all of the base, in 4 bits; a run on a CPU is planned for GPUs here."""
    found = {}
    for quantize in ("null", "nf4"):
        own = {"device": "auto", "dtype": "bfloat16", "lora.quantize": quantize}
        config = load(None, settings(f"plan-{quantize}", **own))
        with start("cpu") as world:
            inputs = read_inputs(config, world, check_machine=False)
            for gpus in (1, 2):
                kinds = estimate_run(inputs.config, inputs, gpus).kinds
                found[quantize, gpus] = kinds["parameters"]
            inputs.data.close()
    sizes = json.loads((workspace.model / "config.json").read_text())
    assert sizes["num_hidden_layers"] == 2
    model = tigon.from_pretrained(workspace.model, quantize="nf4", dtype=torch.bfloat16)
    few = [m for m in model.modules() if isinstance(m, QuantizedWeight)]
    saved = sum(2 * m.shape.numel() - m.nbytes for m in few)
    assert saved > 0
    assert found["null", 1] - found["nf4", 1] == pytest.approx(saved, abs=512 * 20)
    assert found["nf4", 2] > sum(m.nbytes for m in few)
