"""Pretraining on text: every token is learned, and documents are joined and cut to rows."""

from collections.abc import Sequence
from pathlib import Path

from tigon.data import Examples, Rows, split, text_examples
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.train.objectives.cross_entropy import CrossEntropyObjective
from tigon.train.parallel import World


class Pretrain(CrossEntropyObjective):
    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        if config.chat_template:
            raise ValueError(f"chat_template={config.chat_template}: task=pretrain has no chats")

    def examples(self, files: Sequence[Path], tokenizer: Tokenizer) -> Examples:
        return text_examples(files, tokenizer, separator=self.config.separator)

    def rows(self, examples: Examples) -> Rows:
        return split(examples, self.config.seq_len, packing=self.config.packing)
