"""Supervised fine-tuning on chats: the model learns what the assistant says."""

from tigon.data import Encoder
from tigon.tokenizer import Tokenizer
from tigon.train.objectives.cross_entropy import CrossEntropyObjective


class SFT(CrossEntropyObjective):
    learns = "chats, learning what the assistant says"

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return self.chat_encoder(tokenizer)
