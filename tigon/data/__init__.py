"""Files to batches: sources -> examples -> rows -> micro-batches."""

from tigon.data.blocks import Block, Source
from tigon.data.encoders import ChatEncoder, TextEncoder, read_texts
from tigon.data.examples import Encoder, Example, Examples, Report, collect, join, read
from tigon.data.formats import Format
from tigon.data.loader import Loader, MicroBatch
from tigon.data.packing import Rows, split, whole
from tigon.data.sources import Entry, find_sources

__all__ = [
    "Block",
    "ChatEncoder",
    "Encoder",
    "Entry",
    "Example",
    "Examples",
    "Format",
    "Loader",
    "MicroBatch",
    "Report",
    "Rows",
    "Source",
    "TextEncoder",
    "collect",
    "find_sources",
    "join",
    "read",
    "read_texts",
    "split",
    "whole",
]
