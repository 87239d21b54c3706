"""A tokenizer of 160 words and a chat template, and rows of the forms that TRL's trainers take."""

import random
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<user>", "<assistant>")
WORDS = [f"w{i}" for i in range(150)]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> "
    "{% generation %}{{ message.content }} </s>{% endgeneration %} {% else %}"
    "<user> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Each word is a token."""
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **names, chat_template=TEMPLATE, model_max_length=64
    )


def _texts(count: int, least: int, most: int, seed: int) -> list[str]:
    """Texts of between `least` and `most` random words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(least, most))) for _ in range(count)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def text_rows(count: int = 12) -> list[dict[str, Any]]:
    """Language modeling: `text`."""
    return [{"text": text} for text in _texts(count, 4, 12, 0)]


def chat_rows(count: int = 12) -> list[dict[str, Any]]:
    """Chats: `messages` of a question and an answer."""
    pairs = zip(_texts(count, 2, 5, 1), _texts(count, 3, 7, 2), strict=True)
    return [{"messages": [_message("user", q), _message("assistant", a)]} for q, a in pairs]


def preference_rows() -> list[dict[str, Any]]:
    """Preferences: `prompt`, and answers `chosen` and `rejected`."""
    texts = [_texts(12, 2, 6, seed) for seed in (3, 4, 5)]
    return [
        {"prompt": p, "chosen": f" {c}", "rejected": f" {r}"}
        for p, c, r in zip(*texts, strict=True)
    ]


def prompt_rows() -> list[dict[str, Any]]:
    """Prompts alone, for trainers that sample the answers."""
    return [{"prompt": text} for text in _texts(12, 2, 5, 6)]
