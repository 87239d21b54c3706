"""Files to batches: sources -> examples -> windows -> rows -> micro-batches."""

from tigon.data.cache import cache_root, tokenised
from tigon.data.collate import MicroBatch
from tigon.data.examples import Encoder, Example, Examples
from tigon.data.loader import Loader
from tigon.data.mixture import Mixture, Window
from tigon.data.packing import Rows, split, whole
from tigon.data.sources import Block, Entry, Source
from tigon.data.stream import Stream

__all__ = [
    "Block",
    "Encoder",
    "Entry",
    "Example",
    "Examples",
    "Loader",
    "MicroBatch",
    "Mixture",
    "Rows",
    "Source",
    "Stream",
    "Window",
    "cache_root",
    "split",
    "tokenised",
    "whole",
]
