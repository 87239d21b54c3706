"""Supervised fine-tuning on chats: the model learns what the assistant says."""

from tigon.data import ChatEncoder, Encoder
from tigon.tokenizer import Tokenizer
from tigon.train.objectives.cross_entropy import CrossEntropyObjective


class SFT(CrossEntropyObjective):
    learns = "chats, learning what the assistant says"

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        skip = self.config.bad_rows == "skip"
        encoder = ChatEncoder(
            tokenizer,
            train_on=self.config.train_on,
            train_on_empty_thinking=self.config.train_on_empty_thinking,
            skip_bad_rows=skip,
        )
        encoder.ends = self.ends
        return encoder
