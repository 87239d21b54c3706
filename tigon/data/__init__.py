"""Files to batches: sources -> examples -> rows -> micro-batches."""

from tigon.data.examples import Example, Examples, chat_examples, collect, text_examples
from tigon.data.loader import Loader, MicroBatch
from tigon.data.packing import Rows, split, whole
from tigon.data.sources import find_files

__all__ = [
    "Example",
    "Examples",
    "Loader",
    "MicroBatch",
    "Rows",
    "chat_examples",
    "collect",
    "find_files",
    "split",
    "text_examples",
    "whole",
]
