"""Supervised fine-tuning on chats: the model learns what the assistant says."""

from collections.abc import Sequence
from pathlib import Path

from tigon.data import Examples, chat_examples
from tigon.tokenizer import Tokenizer
from tigon.train.objectives.cross_entropy import CrossEntropyObjective


class SFT(CrossEntropyObjective):
    def examples(self, files: Sequence[Path], tokenizer: Tokenizer) -> Examples:
        return chat_examples(files, tokenizer)
