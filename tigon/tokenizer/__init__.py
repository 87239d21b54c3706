"""Text to token ids and back, and conversations to the text a model was trained on."""

from tigon.tokenizer._tokenizer import Tokenizer
from tigon.tokenizer.chat import REASONING
from tigon.tokenizer.mask import Span, TrainOn
from tigon.tokenizer.stream import DecodeStream

__all__ = ["REASONING", "DecodeStream", "Span", "Tokenizer", "TrainOn"]
