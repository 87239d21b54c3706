import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tigon
from tests.support.small import WORDS, add_bos, write_chats, write_model
from tigon.eval import Perplexity, find_windows, perplexity
from tigon.eval.perplexity import _batches

Measure = Callable[..., Perplexity]
TEXTS = [" ".join(WORDS[i:] * n) for i, n in enumerate((1, 3, 1, 2))] + ["the " * 9, "t", ""]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("perplexity")
    model = tigon.from_pretrained(str(write_model(root / "random")))
    with torch.no_grad():  # so that it often predicts the token that it sees, and is often right
        for block in model.model.layers:
            block.self_attn.o_proj.weight.mul_(0.1)
            block.mlp.down_proj.weight.mul_(0.1)
    tokenizer = tigon.Tokenizer.from_pretrained(root / "random")
    model.save_pretrained(root / "model", tokenizer=tokenizer)
    return root / "model"


@pytest.fixture(scope="module")
def model(directory: Path) -> tigon.CausalLM:
    return tigon.from_pretrained(str(directory))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> tigon.Tokenizer:
    return tigon.Tokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def measure(model: tigon.CausalLM, tokenizer: tigon.Tokenizer) -> Measure:
    return partial(perplexity, model, tokenizer)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """The documents, in files of both kinds."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:])
    )
    (tmp_path / "b.txt").write_text(TEXTS[0])
    return [str(tmp_path / "b.txt"), str(tmp_path / "*.jsonl")]


def reference(
    theirs: Any, documents: list[tuple[Tensor, Tensor]], context: int, stride: int
) -> Perplexity:
    """transformers' logits, a window at a time, summed in fp64: its guide on perplexity.

    (https://huggingface.co/docs/transformers/perplexity)
    """
    nll, right, count = 0.0, 0, 0
    for ids, assistant in documents:
        previous_end = 0
        for begin in range(0, len(ids), stride):
            end = min(begin + context, len(ids))
            new = end - previous_end  # may be different from stride on last loop
            labels = torch.where(assistant, ids, -100)[begin:end].clone()
            labels[:-new] = -100
            with torch.no_grad():
                logits = theirs(ids[None, begin:end]).logits[0, :-1].double()
            targets = labels[1:]
            nll += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            right += int((logits.argmax(-1) == targets).sum())
            count += int((targets != -100).sum())
            previous_end = end
            if end == len(ids):
                break
    return Perplexity(math.exp(nll / count), nll / count, right / count, count)


@pytest.mark.parametrize(("context", "stride"), [(512, 256), (16, 1), (16, 15), (17, 5), (3, 2)])
def test_texts_as_in_transformers(directory, theirs, measure, texts, context, stride):
    encode: Any = AutoTokenizer.from_pretrained(directory)
    rows = [torch.tensor(encode(text).input_ids) for text in filter(None, TEXTS)]
    documents = [(ids, torch.ones_like(ids, dtype=torch.bool)) for ids in rows]
    expected = reference(theirs, documents, context, stride)
    result = measure(texts, context=context, stride=stride)
    assert result.tokens == expected.tokens == sum(len(ids) - 1 for ids, _ in documents)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected.loss), rel=1e-5)
    assert result.accuracy == expected.accuracy > 0


@pytest.mark.parametrize(("context", "stride"), [(512, 256), (20, 6)])
def test_only_what_the_assistant_says(theirs, measure, tokenizer, tmp_path, context, stride):
    file = write_chats(tmp_path / "chats.jsonl", 9)
    documents, size = [], 0
    for line in file.read_text().splitlines():
        ids, assistant = list[int](), list[bool]()
        for message in json.loads(line)["messages"]:
            role = message["role"]
            for text, scored in (
                (f"<|im_start|>{role}\n", False),
                (f"{message['content']}<|im_end|>\n", role == "assistant"),
            ):
                piece = tokenizer.encode(text)
                ids += piece
                assistant += [scored] * len(piece)
            size += scored * len(f"{message['content']}\n".encode())
        documents.append((torch.tensor(ids), torch.tensor(assistant)))
    expected = reference(theirs, documents, context, stride)
    result = measure(str(file), context=context, stride=stride)
    assert (result.tokens, result.bytes) == (expected.tokens, size)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.accuracy == expected.accuracy


@pytest.mark.parametrize("batch_tokens", [1, 70, 100_000])
def test_any_batching(measure: Measure, texts: list[str], batch_tokens: int) -> None:
    one = measure(texts, context=40)
    other = measure(texts, context=40, batch_tokens=batch_tokens)
    assert (other.tokens, other.accuracy) == (one.tokens, one.accuracy)
    assert other.loss == pytest.approx(one.loss, rel=1e-6)


@pytest.mark.parametrize("bos", [True, False])
def test_bits_per_byte_are_those_of_lm_eval(directory, theirs, tmp_path, bos):
    """Which reads bos or eos before a text; without it nothing predicts the first token."""
    if bos:
        directory = add_bos(directory, tmp_path / "model")
    tokenizer = tigon.Tokenizer.from_pretrained(directory)
    texts = [*TEXTS[:4], "Grüße, 東京 🙂 and so on", "  the\n\n"]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    result = perplexity(tigon.from_pretrained(str(directory)), tokenizer, str(file))
    nll, size = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            nll += theirs(ids, labels=ids).loss.double().item() * (ids.shape[1] - 1)
        unread = b"" if bos else tokenizer.decode(ids[0, :1]).encode()
        size += len(text.encode()) - len(unread)
    assert result.bytes == size
    assert result.bits_per_byte == pytest.approx(nll / size / math.log(2), rel=1e-6)
    if bos:  # lm-eval counts all bytes, and the token before a text is that of the tokenizer
        lm = HFLM(str(directory), dtype="float32", device="cpu", add_bos_token=False)
        asked = [Instance("", {}, (text,), i) for i, text in enumerate(texts)]
        total = -sum(lm.loglikelihood_rolling(asked, disable_tqdm=True))
        lm_eval = total / sum(len(text.encode()) for text in texts) / math.log(2)
        assert result.bits_per_byte == pytest.approx(lm_eval, rel=1e-6)


def test_domains(measure, texts, tmp_path):
    """Of each what it is by itself, and of all what they are as one."""
    names = {"prose": texts[0], "rows": texts[1:]}
    result = measure(names, context=40)
    assert result.domains == {name: measure(files, context=40) for name, files in names.items()}
    whole = measure(texts, context=40)
    for name in ("perplexity", "loss", "accuracy", "tokens", "bytes", "bits_per_byte"):
        assert getattr(result, name) == pytest.approx(getattr(whole, name), rel=1e-6)


def test_padding_is_not_seen(model, tokenizer, texts):
    windows = find_windows(model, tokenizer, texts, context=40)
    ((ids, labels),) = _batches(windows, 100_000)
    lengths = [len(d) for d, _ in windows.documents]
    padding = labels == -100
    padding[:, :21] = False  # the first token of a window, and what an earlier one scored
    assert padding.any(1).sum() == 5, lengths
    poisoned = torch.where(padding, 319 - ids, ids)
    assert not torch.equal(poisoned, ids)
    with torch.no_grad():
        a, b = (model(i, labels=labels, loss_reduction="none").loss for i in (ids, poisoned))
    assert torch.equal(a, b)


def test_default_context_is_at_most_the_models(measure, tokenizer, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text(" ".join(WORDS * 80))
    assert len(tokenizer.encode(file.read_text())) > 1024
    assert measure(str(file)) == measure(str(file), context=512, stride=256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 513}, r"context=513 is not in \[2, 512\]"),
        ({"context": 16, "stride": 16}, r"stride=16 is not in \[1, 15\].*windows of 16 must"),
    ],
)
def test_sizes_of_windows(measure, texts, options, message):
    with pytest.raises(ValueError, match=message):
        measure(texts, **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("one.txt", "t", "one.txt holds no token to score"),
        ("a.jsonl", '{"text": "a"}\n{"messages": []}\n', "a.jsonl:2: needs a text .text., as its"),
        ("b.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', "b.jsonl:1: "),
        ("d.jsonl", "", "d.jsonl is empty"),
    ],
)
def test_files_without_a_score(measure, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        measure(str(tmp_path / name))


def test_weights_out_of_range(directory, tokenizer, texts):
    model = tigon.from_pretrained(str(directory))
    with torch.no_grad():
        model.model.norm.weight.mul_(1e5)
    large = perplexity(model, tokenizer, texts)
    assert large.loss > 709 and large.perplexity == math.inf
    for value in (math.nan, math.inf):
        with torch.no_grad():
            model.model.norm.weight[0] = value
        with pytest.raises(ValueError, match=r"the loss of \d+ of the windows is nan: look"):
            perplexity(model, tokenizer, texts)
