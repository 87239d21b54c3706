"""The files of bench/end_to_end.py: a tokenizer, chats of ragged lengths, and a random checkpoint.

They are drawn from fixed seeds, so that every side and every call has the same ones; what is there
already is not written again.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

import tigon
from bench.compare_side import TINY
from bench.train_cases import MODELS, fill_ours
from tests.support import small
from tigon.tokenizer import Tokenizer

WORDS, VOCABULARY = 20_000, 16_384
ONSETS = [*"bcdfghjklmnprstvwz", "br", "ch", "fl", "pl", "qu", "sh", "sl", "st", "th", "tr"]
RHYMES = [*"aeiouy", "an", "ar", "ea", "el", "en", "er", "in", "ing", "on", "or", "ou", "um"]
# The markers of what an assistant says are those of transformers, for TRL; Tigon finds it itself
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MEAN, SPREAD, LEAST, MOST = 500, 0.9, 8, 5600  # words of a chat; a word has 1.1 tokens
DONE = "complete"  # a file beside what is whole


@dataclass(frozen=True)
class Request:
    """The files that are wanted."""

    root: str
    model: str  # of bench/train_cases.py's MODELS
    chats: int
    held_out: int
    tiny: bool = False


@cache
def vocabulary() -> list[str]:
    """The words of all texts, the frequent ones first and short."""
    draw, words = np.random.default_rng(0), dict[str, None]()
    while len(words) < WORDS:
        count = 1 + int(draw.integers(0, 2 + len(words) // 8000))
        pairs = [(draw.integers(len(ONSETS)), draw.integers(len(RHYMES))) for _ in range(count)]
        words.setdefault("".join(ONSETS[onset] + RHYMES[rhyme] for onset, rhyme in pairs))
    return list(words)


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE, trained on text of these words."""
    words = np.array(vocabulary(), dtype=object)
    text = " ".join(words[ranks(np.random.default_rng(1), 100_000)])
    small.write_tokenizer(directory, text, VOCABULARY)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def ranks(draw: np.random.Generator, count: int) -> np.ndarray:
    """Numbers of words, whose frequency falls with their rank as in natural text."""
    return (WORDS ** draw.random(count)).astype(np.int64) - 1


def chats(count: int, seed: int, most: int = MOST, mean: float = MEAN) -> Iterator[str]:
    """Lines of JSON: one to four turns of a user, each with an answer that is longer."""
    words, draw = np.array(vocabulary(), dtype=object), np.random.default_rng(seed)
    lengths = draw.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count).clip(LEAST, most)
    for length in lengths.astype(int):
        messages = []
        turns = int(draw.integers(1, 5)) if length > 60 else 1
        for _ in range(turns):
            asked = max(2, int(length / turns * draw.uniform(0.1, 0.5)))
            for role, size in (("user", asked), ("assistant", max(2, length // turns - asked))):
                content = " ".join(words[ranks(draw, size)])
                messages.append({"role": role, "content": content})
        yield json.dumps({"messages": messages}) + "\n"


def write_model(directory: Path, request: Request) -> None:
    """A checkpoint with random weights in bf16, sharded as on the hub, and the tokenizer."""
    family, _, shape = MODELS[request.model]
    sizes = {key: value for key, value in TINY.items() if request.tiny and key in shape}
    sizes |= {"vocab_size": VOCABULARY} if request.tiny else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # transformers reads it from config.json too, where the tokenizer has none
    shape = shape | sizes | {"eos_token_id": 2, "dtype": "bfloat16"}
    model = getattr(tigon, family).from_config(shape, dtype=torch.bfloat16, device=device)
    fill_ours(model)
    tokenizer = Tokenizer.from_pretrained(directory.parent / "tokenizer")
    model.save_pretrained(directory, tokenizer=tokenizer)


def write(request: Request) -> None:
    """Write what is missing; a directory without DONE was cut off, and is written anew."""
    root = Path(request.root)
    parts = {
        "tokenizer": write_tokenizer,
        f"chats-{request.chats}": lambda at: write_chats(at, request),
        request.model: lambda at: write_model(at, request),
    }
    for name, make in parts.items():
        directory = root / name
        if not (root / f"{name}.{DONE}").exists():
            shutil.rmtree(directory, ignore_errors=True)
            make(directory)
            (root / f"{name}.{DONE}").touch()
            continue
        for path in directory.iterdir():  # into the page cache, where what is new is
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def write_chats(directory: Path, request: Request) -> None:
    directory.mkdir(parents=True)
    sizes = {"most": 150, "mean": 40} if request.tiny else {}
    for name, count, seed in (("train", request.chats, 2), ("eval", request.held_out, 3)):
        with (directory / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(chats(count, seed, **sizes))
