"""Text to token ids and back, and conversations to the text a model was trained on."""

from tigon.tokenizer._tokenizer import EncodedChat, Tokenizer
from tigon.tokenizer.chat import REASONING
from tigon.tokenizer.mask import Span, TrainOn, learned_turns
from tigon.tokenizer.stream import DecodeStream
from tigon.tokenizer.turns import THINKING, behind_empty_thinking, common_length

__all__ = [
    "REASONING",
    "THINKING",
    "DecodeStream",
    "EncodedChat",
    "Span",
    "Tokenizer",
    "TrainOn",
    "behind_empty_thinking",
    "common_length",
    "learned_turns",
]
