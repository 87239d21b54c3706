"""safetensors headers, and the index of a checkpoint in shards."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz.harness import Case, Files, Link, Target
from tests.fuzz.junk import INTEGERS, altered, damaged, dump, texts, values
from tigon.weights import Checkpoint, Repository
from tigon.weights.header import DTYPES, write_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors")
TENSORS = [
    ("model.embed_tokens.weight", (7, 4), torch.float32),
    ("model.layers.0.mlp.down_proj.weight", (4, 3), torch.bfloat16),
    ("scalar", (), torch.float16),
    ("none", (0, 5), torch.int64),
]
TAGS = [*DTYPES, "F8_E4M3", "F4", "f32", "", "F32\x1b[2J"]


def write(path: Path, tensors: Any) -> None:
    header = write_header(tensors, {"format": "pt"})
    size = sum(torch.empty(shape, dtype=dtype).nbytes for _, shape, dtype in tensors)
    path.write_bytes(header + bytes(range(256)) * (size // 256) + bytes(size % 256))


def load(folder: Path) -> None:
    """Read every tensor that the headers list."""
    checkpoint = Checkpoint.open(Repository(folder))
    for name, info in checkpoint.tensors.items():
        assert info.offset + info.nbytes <= info.path.stat().st_size, name
        checkpoint.read_into(name, torch.empty(info.shape, dtype=info.dtype))


def single(folder: Path) -> None:
    write(folder / SINGLE, TENSORS)


def sharded(folder: Path) -> None:
    weight_map = {}
    for shard, tensors in zip(SHARDS, (TENSORS[:2], TENSORS[2:]), strict=True):
        write(folder / shard, tensors)
        weight_map |= {name: shard for name, _, _ in tensors}
    index = {"metadata": {"total_size": 142}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


def parse(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def pack(text: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


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
    changed, data = parse(content)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.one_of(st.sampled_from(sorted(changed) or ["a"]), names))
        what = draw(CHANGES)
        if what == "drop":
            changed.pop(name, None)
        elif what == "value":
            changed[name] = draw(values)
        elif what == "copy":
            changed[draw(names)] = changed.get(name)
        elif what == "part" and isinstance(changed.get(name), dict):
            changed[name] = {**changed[name], **draw(entries)}
        else:
            changed[name] = draw(entries)
    text = dump(changed)
    if draw(st.integers(0, 4)) == 0:  # a name twice
        text = text[:-1] + b',"scalar":{},"scalar":{}}'
    if draw(st.integers(0, 3)) == 0:
        text = draw(damaged(text))
    length = None
    if draw(st.integers(0, 5)) == 0:
        length = draw(st.sampled_from([0, 1, 2, 8, len(text) - 1, len(text) + 1, 10**8, 2**64 - 1]))
        length = max(0, length)
    rest = draw(st.sampled_from([data, data, data[:-1], data + b"\0", b""]))
    return pack(text, rest, length)


def single_cases(files: Files) -> st.SearchStrategy[Case]:
    valid = files[SINGLE]
    contents = st.one_of(header(valid), header(valid), damaged(valid))
    return contents.map(lambda content: {SINGLE: content})


SHARD_NAMES = (*SHARDS, "../secret.safetensors", "/etc/hostname.safetensors", "x/../a.safetensors")
SHARD_NAMES += ("no.safetensors", "./" + SHARDS[0], "a\x00.safetensors", "a.bin", "..", "")
SHARD_NAMES += ("a\x1b[2J.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors", "\\a")


@st.composite
def index(draw: Any, files: Files) -> Case:
    content = json.loads(files[INDEX])
    case: dict[str, Any] = {}
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.one_of(st.sampled_from([t[0] for t in TENSORS]), names))
        content["weight_map"][name] = draw(st.one_of(st.sampled_from(SHARD_NAMES), values))
    if draw(st.integers(0, 3)) == 0:
        content = draw(altered(content, ["weight_map", "metadata", "weight_map.scalar"]))
    case[INDEX] = dump(content)
    if draw(st.integers(0, 3)) == 0:
        case[INDEX] = draw(damaged(case[INDEX]))
    if draw(st.integers(0, 2)) == 0:
        shard = draw(st.sampled_from(SHARDS))
        link = st.sampled_from(
            ["../secret.safetensors", "/etc/hostname", "none", shard, SHARDS[0], "/dev/zero", "."]
        )
        case[shard] = draw(
            st.one_of(st.none(), link.map(Link), header(files[shard]), damaged(files[shard]))
        )
    return case


TARGETS = [
    Target("header", 8, single, single_cases, load),
    Target("index", 2, sharded, index, load),
]
