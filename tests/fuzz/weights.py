"""safetensors headers."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.harness import Case, Files, Target
from tests.fuzz.junk import INTEGERS, damaged, dump, texts, values
from tigon.weights import Checkpoint, Repository
from tigon.weights.header import DTYPES, write_header

FILE = "model.safetensors"
TENSORS = [
    ("model.embed_tokens.weight", (7, 4), torch.float32),
    ("model.layers.0.mlp.down_proj.weight", (4, 3), torch.bfloat16),
    ("scalar", (), torch.float16),
    ("none", (0, 5), torch.int64),
]
TAGS = [*DTYPES, "F8_E4M3", "F4", "f32", "", "F32\x1b[2J"]


def write(folder: Path) -> None:
    size = sum(torch.empty(shape, dtype=dtype).nbytes for _, shape, dtype in TENSORS)
    (folder / FILE).write_bytes(write_header(TENSORS, {"format": "pt"}) + bytes(range(size)))


def load(folder: Path) -> None:
    """Read every tensor that the headers list."""
    checkpoint = Checkpoint.open(Repository(folder))
    for name, info in checkpoint.tensors.items():
        assert info.offset + info.nbytes <= info.path.stat().st_size, name
        checkpoint.read_into(name, torch.empty(info.shape, dtype=info.dtype))


sizes = st.one_of(st.sampled_from(INTEGERS), st.integers(0, 30), values)
shapes = st.one_of(
    st.lists(sizes, max_size=5), st.just([2] * 10**4), st.just([1] * 65), st.just([0, 2**40, 2**40])
)
spans = st.one_of(st.lists(sizes, max_size=3), st.tuples(st.integers(0, 150), st.integers(0, 150)))
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(TAGS), values),
        "shape": st.one_of(shapes, values),
        "data_offsets": st.one_of(spans, values),
        "more": values,
    },
)
names = st.one_of(texts(8), st.sampled_from(["__metadata__", "\x1b[31mx", "n" * 10**5]))
CHANGES = st.sampled_from(["entry", "part", "drop", "value", "copy"])


@st.composite
def header(draw: Any, content: bytes) -> bytes:
    """Damage a header in its JSON, in its length, or in both."""
    length = struct.unpack("<Q", content[:8])[0]
    changed, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.one_of(st.sampled_from(sorted(changed) or ["a"]), names))
        change = draw(CHANGES)
        if change == "drop":
            changed.pop(name, None)
        elif change == "value":
            changed[name] = draw(values)
        elif change == "copy":
            changed[draw(names)] = changed.get(name)
        elif change == "part" and isinstance(changed.get(name), dict):
            changed[name] = {**changed[name], **draw(entries)}
        else:
            changed[name] = draw(entries)
    text = dump(changed)
    if draw(st.integers(0, 4)) == 0:  # a name twice
        text = text[:-1] + b',"scalar":{},"scalar":{}}'
    if draw(st.integers(0, 3)) == 0:
        text = draw(damaged(text))
    length = len(text)
    if draw(st.integers(0, 5)) == 0:
        length = draw(
            st.sampled_from([0, 1, 2, 8, max(0, length - 1), length + 1, 10**8, 2**64 - 1])
        )
    rest = draw(st.sampled_from([data, data, data[:-1], data + b"\0", b""]))
    return struct.pack("<Q", length) + text + rest


def cases(files: Files) -> st.SearchStrategy[Case]:
    contents = st.one_of(header(files[FILE]), header(files[FILE]), damaged(files[FILE]))
    return contents.map(lambda content: {FILE: content})


TARGETS = [Target("header", 8, write, cases, load)]
