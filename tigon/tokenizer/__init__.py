"""Text to token ids and back, and conversations to the text a model was trained on."""

from tigon.tokenizer.assistant_mask import Span, TrainOn, learned_turns
from tigon.tokenizer.chat_template import REASONING
from tigon.tokenizer.decode_stream import DecodeStream
from tigon.tokenizer.tokenizer import EncodedChat, Tokenizer
from tigon.tokenizer.turns import THINKING, common_prefix_length, skip_empty_thinking

__all__ = [
    "REASONING", "THINKING", "DecodeStream", "EncodedChat", "Span", "Tokenizer", "TrainOn",
    "common_prefix_length", "learned_turns", "skip_empty_thinking",
]  # fmt: skip
