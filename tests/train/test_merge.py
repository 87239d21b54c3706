"""Commands that load the base of an adapter and the adapter on it; some of them are on the hub."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tigon
from tests.support.hub_server import HubServer, hub
from tests.support.small import write_chats, write_model
from tigon.cli import main as command

__all__ = ["hub"]
ADAPTER, BASE = "org/adapter", "org/base"


def bases(hub: HubServer, root: Path) -> list[Path]:
    """Two models, the first on main and the second on a branch."""
    found = [
        write_model(root / name, initializer_range=std) for name, std in (("a", 0.1), ("b", 1))
    ]
    for directory, revision in zip(found, ("main", "v2"), strict=True):
        hub.push(BASE, directory, revision)
    return found


def write_adapter(directory: Path, base: Path, seed: int, revision: str | None) -> Path:
    """An adapter of BASE, whose directory is `base`."""
    torch.manual_seed(seed)
    model = tigon.from_pretrained(base)
    model.add_adapter(tigon.LoraConfig(rank=2, base=BASE))
    for name, p in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(p)
    model.save_adapter(directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": revision}))
    return directory


@pytest.mark.parametrize(
    ("of_adapter", "of_base"), [("other", "v2"), ("other", None), (None, "v2")]
)
def test_revisions(of_adapter, of_base, hub, tmp_path):
    base = bases(hub, tmp_path)[of_base == "v2"]
    for seed, branch in enumerate(("main", "other")):
        hub.push(ADAPTER, write_adapter(tmp_path / branch, base, seed, of_base), branch)
    revision = ["--revision", of_adapter] if of_adapter else []
    assert command(["export", ADAPTER, str(tmp_path / "merged"), "--merge", *revision]) == 0
    check_merged(tmp_path, base, tmp_path / (of_adapter or "main"))
    written, own = (path / "tokenizer.json" for path in (tmp_path / "merged", base))
    assert written.read_bytes() == own.read_bytes()


@pytest.mark.parametrize("revision", [None, "v2"])
def test_saved_again(revision, hub, tmp_path):
    """An adapter keeps the revision of its base, and a new one has that of the model."""
    bases(hub, tmp_path)
    model = tigon.from_pretrained(BASE, revision=revision)
    model.add_adapter(tigon.LoraConfig(rank=2), "new")
    model.save_adapter(tmp_path / "new")
    other = tigon.from_pretrained(tmp_path / "a")
    with pytest.warns(UserWarning, match="'org/base', and the model is of"):
        other.load_adapter(tmp_path / "new")
    other.save_adapter(tmp_path / "again")
    for name in ("new", "again"):
        values = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert (values["base_model_name_or_path"], values["revision"]) == (BASE, revision), name


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("of_base", ["v2", None])
def test_commands_load_the_base_and_the_adapter(of_base, hub, tmp_path, capsys):
    """Each says of the adapter what it says of the merged model, from the hub and a directory."""
    base = bases(hub, tmp_path)[of_base == "v2"]
    adapter = write_adapter(tmp_path / "main", base, 0, of_base)
    hub.push(ADAPTER, write_adapter(tmp_path / "other", base, 1, of_base), "other")
    hub.push(ADAPTER, adapter)
    data = str(write_chats(tmp_path / "d.jsonl", 9))
    said = {"base": answers(capsys, str(base), data)}
    for name in ("main", "other"):
        revision = ["--revision", name] * (name != "main")
        merged = str(tmp_path / f"{name}-hf")
        assert command(["export", ADAPTER, merged, "--merge", *revision]) == 0
        said[name] = answers(capsys, merged, data)
        for place, at in ((ADAPTER, revision), (str(tmp_path / name), [])):
            text, loss = answers(capsys, place, data, at)
            assert (text, loss) == (said[name][0], pytest.approx(said[name][1], abs=1e-4))
    assert len({text for text, _ in said.values()}) == 3
    assert len({round(loss, 2) for _, loss in said.values()}) == 3


def answers(
    capsys: pytest.CaptureFixture[str], model: str, data: str, revision: Sequence[str] = ()
) -> tuple[str, float]:
    """What the model says, and the loss of its perplexity."""
    capsys.readouterr()
    rest = [*revision, "--device", "cpu"]
    assert command(["generate", model, "the model", "--max-new-tokens", "8", *rest]) == 0
    text = capsys.readouterr().out
    assert command(["eval", "perplexity", model, data, *rest]) == 0
    return text, float(capsys.readouterr().out.split()[3])


def test_ranks_do_not_share_it(hub, tmp_path, capsys, monkeypatch):
    """Said once, before any process starts."""
    adapter = write_adapter(tmp_path / "adapter", bases(hub, tmp_path)[0], 0, None)
    hub.push(ADAPTER, adapter)
    monkeypatch.setattr("tigon.cli.load.run_ranks", lambda *_, **__: 1 / 0)
    for place in (ADAPTER, str(adapter)):
        assert command(["generate", place, "a", "--tp", "2", "--device", "cpu"]) == 1
        assert capsys.readouterr().err == (
            f"tigon generate: {place} is an adapter, which ranks cannot share: `tigon export "
            f"{place} DIRECTORY --merge` writes it and its base as a model, which they can\n"
        )


def check_merged(root: Path, base: Path, adapter: Path) -> None:
    model = tigon.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the base is here under another name
        model.load_adapter(adapter)
    model.merge_adapter()
    model.save_pretrained(root / "expected")
    found, expected = (
        load_file(root / name / "model.safetensors") for name in ("merged", "expected")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_values_that_are_not_finite(tmp_path, capsys):
    """What overflows in float16 is not written."""
    base = write_model(tmp_path / "base")
    model = tigon.from_pretrained(base)
    model.add_adapter(tigon.LoraConfig(rank=2, targets=("o_proj",), base=str(base)))
    for name, p in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.constant_(p, 300)
    model.save_adapter(tmp_path / "adapter")
    export = ["export", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--merge", "--dtype"]
    assert command([*export, "float16"]) == 1
    error = capsys.readouterr().err
    assert "NaN or infinite values in torch.float16, in model.layers.0.self_attn.o_proj" in error
    assert not (tmp_path / "merged").exists()
    assert command([*export, "float32"]) == 0
    file = tmp_path / "merged.gguf"
    assert command([*export[:2], str(file), *export[3:], "float32"]) == 0
    found, expected = (
        tigon.from_pretrained(path).state_dict() for path in (file, tmp_path / "merged")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
