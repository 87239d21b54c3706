"""Pretraining on text: every token is learned, and documents are joined and cut to rows."""

from typing import Any

from tigon.data import Encoder, PackedRows, TextEncoder, Window, pack_documents
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.train.distributed import World
from tigon.train.objectives.cross_entropy import CrossEntropyObjective


class Pretrain(CrossEntropyObjective):
    learns = "text"

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        for name in ("chat_template", "chat_template_kwargs"):
            if value := getattr(config, name):
                raise ValueError(f"{name}={value}: task=pretrain has no chats")
        if config.train_on != "assistant":
            raise ValueError(f"train_on={config.train_on}: task=pretrain learns every token")
        if config.train_on_empty_thinking:
            raise ValueError("train_on_empty_thinking=true: task=pretrain has no chats")

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return TextEncoder(tokenizer, skip_bad_rows=self.config.bad_rows == "skip")

    def rows(self, window: Window, **_: Any) -> PackedRows:
        return pack_documents(window, self.config.seq_len, packing=self.config.packing)
