"""Files to batches: sources -> examples -> windows -> rows -> micro-batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tigon.data.answers import LabelledEncoder, PairEncoder, RewardedEncoder
from tigon.data.blocks import Block, Source
from tigon.data.cache import cache_root, clean_cache, tokenised
from tigon.data.distributions import TopEncoder
from tigon.data.encoders import ChatEncoder, TextEncoder, read_texts
from tigon.data.examples import Encoder, Example, Examples, Report, collect, join, read
from tigon.data.formats import Format
from tigon.data.mixture import Mixture, Window
from tigon.data.packing import Rows, split, whole
from tigon.data.sources import Entry, find_sources
from tigon.data.stream import Stream

if TYPE_CHECKING:
    from tigon.data.collate import MicroBatch
    from tigon.data.loader import Loader

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
    "tokenised",
    "whole",
]

TENSORS = {"Loader": "loader", "MicroBatch": "collate"}


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is first asked for: worker processes that tokenise do not,
    and it takes seconds."""
    if name in TENSORS:
        return getattr(import_module(f"tigon.data.{TENSORS[name]}"), name)
    raise AttributeError(f"module 'tigon.data' has no attribute {name!r}")
