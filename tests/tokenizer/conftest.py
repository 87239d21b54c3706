"""Two small tokenizers of the kinds that language models use, as directories."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from tests.support.hub_server import hub
from tigon.tokenizer import Tokenizer

__all__ = ["hub"]

SPECIAL = [
    *("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
    *("<start_of_turn>", "<end_of_turn>"),
]
TEXT = """
The quick brown fox jumps over the lazy dog while the assistant answers what the user asked for.
def answer(question: str) -> str:
    return {"role": "assistant", "content": question.strip()}  # the user's question

Two and two is four, and the model thinks about the weather today in the capital of the country.
""".splitlines(keepends=True)
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "model_max_length": 512,
}


def _train(tokenizer: tokenizers.Tokenizer, size: int, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)


def _template() -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )


def _save(tokenizer: tokenizers.Tokenizer, directory: Path) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """Byte-level BPE, as in Llama 3 and Qwen; its post-processor trims offsets, as GPT-2's."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, 400, pre_tokenizers.ByteLevel.alphabet())
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(add_prefix_space=False, trim_offsets=True), _template()]
    )
    return _save(tokenizer, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory):
    """BPE over characters that falls back to byte tokens, as sentencepiece's in Llama 2."""
    tokenizer = tokenizers.Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _train(tokenizer, 300, [])
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{b:02X}>": len(model["vocab"]) + b for b in range(256)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer.model = BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    parts = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *parts])
    tokenizer.post_processor = _template()
    return _save(tokenizer, tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture
def tokenizer(byte_level):
    return Tokenizer.from_pretrained(byte_level)


@pytest.fixture(params=["byte_level", "byte_fallback"])
def directory(request):
    return request.getfixturevalue(request.param)
