"""new_tokens: what they add to tokenizer and model, in runs of all parameters and of an adapter."""

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tigon
from tests.models.adapters import randomise, trained
from tests.support.small import WORDS, write_model
from tests.train.checkpoints import assert_close
from tests.train.conftest import Workspace
from tests.train.layouts import assert_same_tensors, load_weights
from tests.train.ranks import train_on
from tigon.cli import main as command
from tigon.train import main
from tigon.train.export import load_checkpoint, load_with_adapter

FEW = ["<tool>", "</tool>"]  # the model has 321 rows, the tokenizer 300 tokens
MANY = [*FEW, *(f"<extra_{i}>" for i in range(23))]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def settings(workspace: Workspace):
    rows = [
        {"prompt": f"{a} {b}", "completion": f"<tool>{b}<extra_22></tool> {a}"}
        for a in WORDS
        for b in WORDS[:3]
    ]
    data = workspace.root / "tools.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")

    def make(run: str, tokens: list[str] = MANY, **changes: Any) -> list[str]:
        listed = json.dumps(tokens)
        given = {"steps": 4, "save_every": 2, "export": "true", "keep_last": 0, "data": data}
        return workspace.settings(run, **given | {"new_tokens": listed} | changes)

    return make


LORA = {"lora.rank": 4, "lora.alpha": 8, "lr": 1e-2, "lora.merge": "true"}


@pytest.mark.parametrize(("tokens", "size"), [(FEW, 321), (MANY, 325)])
def test_rows_begin_as_the_mean(workspace, settings, tokens, size, capsys):
    run = f"begin-{size}"
    main(settings(run, tokens, lr=0.0, steps=1))
    out = capsys.readouterr().out
    assert "'<tool>' 300, '</tool>' 301" in out
    assert ("resized from 321 to 325 rows" in out) == (size == 325)
    assert f"{min(len(tokens), 21)} of the model's 321 rows that no token had" in out
    old, new = (
        load_weights(at)[EMBEDDING] for at in (workspace.model, workspace.root / run / "hf")
    )
    assert len(new) == size
    first, last = 300, 300 + len(tokens)
    torch.testing.assert_close(new[first:last], old.mean(0).expand(last - first, -1))
    assert torch.equal(new[:first], old[:first])
    assert torch.equal(new[last:321], old[last:321])


def test_all_parameters(workspace, settings):
    main(settings("full"))
    assert workspace.metrics("full", "loss")[-1] < workspace.metrics("full", "loss")[0]
    hf = workspace.root / "full/hf"
    ours, theirs = tigon.Tokenizer.from_pretrained(hf), AutoTokenizer.from_pretrained(hf)
    expected = AutoTokenizer.from_pretrained(workspace.model)
    expected.add_tokens(MANY, special_tokens=True)
    for text in ("the<tool> model</tool>", "<extra_22><extra_0> words"):
        assert ours.encode(text) == theirs.encode(text) == expected.encode(text)
    model, ids = AutoModelForCausalLM.from_pretrained(hf), torch.tensor([[300, 301, 324, 5]])
    assert model.config.vocab_size == 325
    torch.testing.assert_close(
        tigon.from_pretrained(hf)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5
    )
    main(settings("again", resume=workspace.checkpoint("full", 2)))
    assert_same_tensors(workspace.root / "full/hf", workspace.root / "again/hf")
    with pytest.raises(SystemExit, match="new_tokens"):
        main(settings("other", FEW, resume=workspace.checkpoint("full", 2)))


@pytest.mark.slow(first=1)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("tied", [True, False])
def test_adapter(workspace, settings, tied, tmp_path):
    """It loads in PEFT on a base of as many rows; the merged model is of the new size, too."""
    base = write_model(tmp_path / "base", tie_word_embeddings=tied)
    run = tmp_path / "run"
    main(settings("adapter", model=base, run_dir=run, **LORA))
    ids = torch.tensor([[300, 7, 301, 324, 5, 20]])
    merged = AutoModelForCausalLM.from_pretrained(run / "hf").eval()
    assert merged.config.vocab_size == 325
    expected = merged(ids).logits
    theirs = AutoModelForCausalLM.from_pretrained(base)
    theirs.resize_token_embeddings(len(AutoTokenizer.from_pretrained(run / "adapter")))
    theirs = PeftModel.from_pretrained(theirs, str(run / "adapter")).eval()
    close: Any = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(theirs(ids).logits, expected, **close)
    # The rows are trained
    embedding = theirs.get_input_embeddings().weight
    old = load_file(base / "model.safetensors")[EMBEDDING]
    assert (embedding[[300, 301, 324]] - old.mean(0)).abs().max(1).values.min() > 1e-3
    for place in ("", "adapter"):
        out = tmp_path / f"merged-{place}"
        assert command(["export", str(run / place), str(out), "--merge"]) == 0
        torch.testing.assert_close(tigon.from_pretrained(out)(ids).logits, expected, **close)
        assert len(tigon.Tokenizer.from_pretrained(out)) == 325
    checkpoint = run / "checkpoints/step-00000002"
    main(settings("adapter", model=base, run_dir=tmp_path / "again", resume=checkpoint, **LORA))
    saved = "adapter/adapter_model.safetensors"
    assert_same_tensors(run / saved, tmp_path / "again" / saved)
    loaded, _ = load_checkpoint(checkpoint)
    assert loaded(ids).logits.shape[-1] == 325
    ours = tigon.from_pretrained(base)
    with pytest.raises(ValueError, match=r"call model.resize_token_embeddings\(325\) first"):
        ours.load_adapter(run / "adapter")
    ours.resize_token_embeddings(325)
    ours.load_adapter(run / "adapter")
    torch.testing.assert_close(ours(ids).logits, expected, **close)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("changes", [LORA, {}, {"sharding": "gradients"}, {"parallel.tensor": 2}])
def test_two_ranks(workspace, settings, changes, tmp_path):
    same = {n: value for n, value in changes.items() if n not in ("sharding", "parallel.tensor")}
    main(settings("ranks", run_dir=tmp_path / "1", **same))
    train_on(2, settings("ranks", run_dir=tmp_path / "2", **changes))
    assert_close(*(load_weights(tmp_path / run / "hf") for run in "21"), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["quantized", "random"])
def test_rows_of_other_bases(workspace, settings, tmp_path, kind):
    more: dict[str, Any] = LORA | {"lora.quantize": "nf4"}
    if kind == "random":
        config = workspace.model / "config.json"
        more = {"init": config, "tokenizer": workspace.model, "model": ""}
    main(settings(kind, run_dir=tmp_path / "run", steps=1, **more))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
    assert model.config.vocab_size == 325


@pytest.fixture(scope="module")
def larger_tokenizer(workspace):
    """A tokenizer that transformers added tokens to, without the model."""
    tokenizer = AutoTokenizer.from_pretrained(workspace.model)
    tokenizer.add_tokens(MANY, special_tokens=True)
    tokenizer.save_pretrained(workspace.root / "larger-tokenizer")
    return workspace.root / "larger-tokenizer"


def test_tokens_that_are_there(larger_tokenizer, settings, tmp_path, capsys):
    stream = {"tokenizer": larger_tokenizer, "streaming": "true"}
    with pytest.raises(SystemExit, match=r"name them in new_tokens.*resize_token_embeddings"):
        main(settings("there", [], run_dir=tmp_path / "a", **stream))
    some = {"tokenizer": larger_tokenizer, "steps": 1}
    main(settings("there", ["<tool>", "<|im_end|>"], run_dir=tmp_path / "a", **some))
    out = capsys.readouterr().out
    assert "'<tool>' is in the tokenizer already, as 300" in out
    assert "resized from 321 to 325 rows" in out
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a/hf")) == 325


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers")
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_a_resized_base(tied, tmp_path):
    """PEFT saves the resized embedding and head, and names them nowhere."""
    base = write_model(tmp_path / "base", tie_word_embeddings=tied)
    theirs = AutoModelForCausalLM.from_pretrained(base)
    theirs.resize_token_embeddings(330)
    options = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    theirs = get_peft_model(theirs, LoraConfig(**options)).eval()
    randomise(trained(theirs))
    theirs.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[3, 325, 329, 9]])
    model, _ = load_with_adapter(str(tmp_path / "adapter"))
    close: Any = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, **close)
    assert command(["export", str(tmp_path / "adapter"), str(tmp_path / "out"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, **close)
    assert merged.config.tie_word_embeddings == tied


def test_rows_of_another_width_resize_nothing(tmp_path):
    """A header of no bytes can name any number of rows."""
    base = write_model(tmp_path / "base")
    model = tigon.from_pretrained(base)
    model.add_adapter()
    model.save_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    name = f"base_model.model.{EMBEDDING}"
    save_file(load_file(path) | {name: torch.empty(10**9, 0)}, path)
    with pytest.raises(ValueError, match="embed_tokens"):
        load_with_adapter(str(tmp_path / "adapter"))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("lora", [LORA, {}])
def test_a_tokenizer_larger_than_the_model(larger_tokenizer, settings, lora, tmp_path, capsys):
    """Whoever has added tokens to the tokenizer alone need not name them."""
    same = {"tokenizer": larger_tokenizer, **lora}
    main(settings("", [], run_dir=tmp_path / "larger", **same))
    assert "resized from 321 to 325 rows" in capsys.readouterr().out
    half = tmp_path / "larger/checkpoints/step-00000002"
    main(settings("", [], run_dir=tmp_path / "resumed", resume=half, **same))
    main(settings("", ["<extra_22>"], run_dir=tmp_path / "named", **same))
    assert len(load_weights(tmp_path / "larger/hf")[EMBEDDING]) == 325
    for run in ("resumed", "named"):
        assert_same_tensors(tmp_path / "larger/hf", tmp_path / run / "hf")
