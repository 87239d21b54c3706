import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tigon.weights.header import read_header, write_header

Header = dict[str, Any]


def build(header: Header | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any, shape: Any, *offsets: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


A, B = entry("F32", [2], 0, 8), entry("F32", [1], 8, 12)
OK = {"a": A, "b": B}

BAD = {
    "empty": (b"", "first 8 bytes announce a header of 0 bytes and the file has 0"),
    "not safetensors": (b"\x80\x02}q\x00X\x05\x00\x00\x00", "is no safetensors file"),
    "length past the end": (struct.pack("<Q", 1 << 40) + b"{}", f"a header of {1 << 40} bytes"),
    "header cut off": (build(OK, bytes(12))[:40], "is no safetensors file"),
    "no JSON": (build(b'{"a": ', b""), "header is not valid JSON"),
    "no entry": (build({"a": 3}, b""), "tensor 'a' is described by 3"),
    "no dtype": (build({"a": {"shape": [], "data_offsets": [0, 4]}}, bytes(4)), "not by a dtype"),
    "dtype unknown": (build({"a": entry("F33", [2], 0, 8)}, bytes(8)), "unsupported dtype 'F33'"),
    "quantized": (build({"a": entry("F8_E8M0", [8], 0, 8)}, bytes(8)), "of a quantized checkpoint"),
    "negative size": (build({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "shape of sizes"),
    "one offset": (build({"a": entry("F32", [2], 8)}, bytes(8)), r"data_offsets \[begin, end"),
    "offsets reversed": (build({"a": entry("F32", [2], 8, 0)}, bytes(8)), r"\[8, 0\] hold -8"),
    "shape and offsets": (
        build({"a": entry("F32", [3], 0, 8)}, bytes(8)),
        r"tensor 'a' is F32 \[3\], 12 bytes, but its data_offsets \[0, 8\] hold 8",
    ),
    "overlap": (build({"a": A, "b": entry("F32", [1], 4, 8)}, bytes(8)), "'b' overlaps 'a'"),
    "hole": (build({"a": A, "b": entry("F32", [1], 12, 16)}, bytes(16)), "hole of 4 bytes after"),
    "truncated": (build(OK, bytes(11)), "is truncated: its tensors take 12 bytes and 11 are there"),
    "metadata of numbers": (build({"__metadata__": {"a": 1}}, b""), "is {'a': 1}, no"),
    "size of 64 bits": (build({"a": entry("F32", [2**63], 0, 8)}, bytes(8)), "a shape of sizes"),
    "product": (build({"a": entry("F32", [2**62, 4, 0], 0, 0)}, b""), "no tensor is so large"),
    "tail": (build(OK, bytes(15)), "has 3 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)
    if case != "quantized":
        with pytest.raises(SafetensorError):
            load_file(path)


# The reference implementation takes minutes or gigabytes for some of these
SIZED = {
    "a product of many": (
        b'{"a":{"dtype":"F32","shape":[%s1],"data_offsets":[0,4]}}',
        b"9,",
        10**6,
    ),
    "dimensions": (b'{"a":{"dtype":"F32","shape":[%s1],"data_offsets":[0,4]}}', b"1,", 64),
    "lists": (b'{"a":[%s1]}', b"[],", 10**7),
    "names": (b'{%s"a":1}', b'"a":1,', 10**5),
    "a long name": (b'{"a%s":{}}', b"a", 10**7),
}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", SIZED)
def test_large_headers_are_refused_soon(tmp_path: Path, case: str) -> None:
    header, item, count = SIZED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(build(header % (item * count), bytes(4)))
    begin = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"bad\.safetensors") as error:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < 20  # 1.5 s on a quiet core
    assert len(str(error.value)) < 1000


def test_a_header_of_many_tensors_is_read_soon(tmp_path: Path) -> None:
    count = 20_000
    names = [
        f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.up_proj.weight" for i in range(count)
    ]
    path = tmp_path / "many.safetensors"
    path.write_bytes(
        write_header([(n, (1, 2), torch.bfloat16) for n in names], {}) + bytes(4 * count)
    )
    begin = time.process_time()
    assert list(read_header(path)) == names
    assert time.process_time() - begin < 3  # 0.4 on a quiet machine


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = build(OK, bytes(12))
    path = tmp_path / "cut.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut.safetensors is (truncated|no safetensors)"):
            read_header(path)
