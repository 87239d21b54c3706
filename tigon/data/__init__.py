"""Files to batches: sources -> examples -> rows -> micro-batches."""

from tigon.data.examples import Examples, chat_examples, text_examples
from tigon.data.loader import Loader
from tigon.data.packing import Rows, split, whole
from tigon.data.sources import find_files

__all__ = [
    "Examples",
    "Loader",
    "Rows",
    "chat_examples",
    "find_files",
    "split",
    "text_examples",
    "whole",
]
