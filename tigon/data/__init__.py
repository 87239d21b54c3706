"""Files to batches: sources -> examples -> windows -> rows -> micro-batches."""

from tigon.data.answers import LabelledEncoder, PairEncoder, RewardedEncoder
from tigon.data.cache import cache_root, clean_cache
from tigon.data.collate import MicroBatch
from tigon.data.distributions import TopEncoder
from tigon.data.encoders import ChatEncoder, TextEncoder, read_texts
from tigon.data.examples import Encoder, Example, Examples, Report, collect, join, read
from tigon.data.formats import Format
from tigon.data.loader import Loader
from tigon.data.mixture import Mixture, Window
from tigon.data.packing import Rows, split, whole
from tigon.data.sources import Block, Entry, Source, find_sources
from tigon.data.stream import Stream
from tigon.data.tokenized import tokenize

__all__ = [
    "Block",
    "ChatEncoder",
    "Encoder",
    "Entry",
    "Example",
    "Examples",
    "Format",
    "LabelledEncoder",
    "Loader",
    "MicroBatch",
    "Mixture",
    "PairEncoder",
    "Report",
    "RewardedEncoder",
    "Rows",
    "Source",
    "Stream",
    "TextEncoder",
    "TopEncoder",
    "Window",
    "cache_root",
    "clean_cache",
    "collect",
    "find_sources",
    "join",
    "read",
    "read_texts",
    "split",
    "tokenize",
    "whole",
]
