"""Files to batches: sources -> examples -> windows -> rows -> micro-batches."""

from tigon.data.cache import cache_root, clean_cache
from tigon.data.collate import MicroBatch
from tigon.data.encode import ChatEncoder, TextEncoder, TopEncoder, read_texts
from tigon.data.encode_answers import LabelledEncoder, PairEncoder, RewardedEncoder
from tigon.data.examples import Encoder, EncodingReport, Example, Examples, collect, read
from tigon.data.formats import Format
from tigon.data.loader import Loader
from tigon.data.mixture import Mixture, Window
from tigon.data.packing import PackedRows, pack_documents, pack_examples
from tigon.data.selection import find_sources
from tigon.data.sources import Block, Source
from tigon.data.stream import Stream
from tigon.data.tokenized import tokenize
from tigon.settings.data import Entry

__all__ = [
    "Block", "ChatEncoder", "Encoder", "EncodingReport", "Entry", "Example", "Examples", "Format",
    "LabelledEncoder", "Loader", "MicroBatch", "Mixture", "PackedRows", "PairEncoder",
    "RewardedEncoder", "Source", "Stream", "TextEncoder", "TopEncoder", "Window", "cache_root",
    "clean_cache", "collect", "find_sources", "pack_documents", "pack_examples", "read",
    "read_texts", "tokenize",
]  # fmt: skip
