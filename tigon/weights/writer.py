"""Writes safetensors checkpoints tensor by tensor, in directories that appear whole or not."""

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from tigon.weights.header import TAGS, write_header

# name, shape, dtype, and what returns the tensor when its turn comes
Entry = tuple[str, Sequence[int], torch.dtype, Callable[[], Tensor]]


def write_checkpoint(
    directory: str | os.PathLike[str] | None,
    tensors: Iterable[Entry],
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> None:
    """Writes model.safetensors, or shards and their index, split and named as transformers does.

    In a process group all ranks call it with the same entries, one of them with the directory and
    the others with None; each `get` then runs on every rank in the same order.
    """
    shards = _shards(tensors, max_shard_size)
    in_order = _fetch(entry for shard in shards.values() for entry in shard)
    if directory is None:
        deque(in_order, maxlen=0)
        return
    root = Path(directory)
    created: list[Path] = []
    try:
        if dist.is_initialized() and dist.get_world_size() > 1:
            try:
                for file, shard in shards.items():
                    _write_shard(root / file, shard, in_order, metadata, created)
            finally:
                deque(in_order, maxlen=0)  # after a failure the other ranks still wait in these
        else:
            with ThreadPoolExecutor(4) as pool:
                writes = [
                    pool.submit(_write_shard, root / file, shard, _fetch(shard), metadata, created)
                    for file, shard in shards.items()
                ]
                for write in writes:
                    write.result()
        if len(shards) > 1:
            _write_index(root / "model.safetensors.index.json", shards, created)
    except BaseException:
        for path in created:
            path.unlink()
        raise


@contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary sibling to write into, renamed to `path` at the end or removed on an error."""
    target = Path(path).expanduser().resolve()
    _check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.tmp-{os.getpid()}"
    if temporary.exists():  # left by a killed process that had our pid
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
        for item in [*temporary.rglob("*"), temporary]:
            fsync(item)
        _check_free(target)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync(target.parent)


def _check_free(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        if target.is_mount():
            raise FileExistsError(f"{target} is a mount point: name a directory inside it")
    elif target.exists():
        what = "a directory with files in it" if target.is_dir() else "a file"
        raise FileExistsError(f"{target} exists and is {what}: remove it or choose another path")


def _shards(tensors: Iterable[Entry], max_shard_size: int | str) -> dict[str, list[Entry]]:
    """File name -> its entries in the order the safetensors library gives them in a file."""
    entries: dict[str, Entry] = {}
    for entry in tensors:
        name, _, dtype, _ = entry
        if name in entries:
            raise ValueError(f"tensor {name!r} is given twice")
        if dtype not in TAGS:
            raise ValueError(f"tensor {name!r} is {dtype}, which safetensors files cannot hold")
        entries[name] = entry
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=_nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return {
        file: sorted((entries[name] for name in names), key=_place)
        for file, names in split.filename_to_tensors.items()
    }


def _place(entry: Entry) -> tuple[int, str]:
    return -list(TAGS).index(entry[2]), entry[0]


def _nbytes(entry: Entry) -> int:
    return math.prod(entry[1]) * entry[2].itemsize


def _fetch(entries: Iterable[Entry]) -> Iterator[Tensor]:
    return (get() for _, _, _, get in entries)


def _write_shard(
    path: Path,
    entries: list[Entry],
    tensors: Iterator[Tensor],
    metadata: Mapping[str, str],
    created: list[Path],
) -> None:
    with open(path, "xb") as file:
        created.append(path)
        file.write(write_header([entry[:3] for entry in entries], metadata))
        for entry in entries:
            file.write(_bytes_of(next(tensors), entry))
    fsync(path)


def _bytes_of(tensor: Tensor, entry: Entry) -> memoryview:
    name, shape, dtype, _ = entry
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"tensor {name!r} was announced as {dtype} {list(shape)} "
            f"and came as {tensor.dtype} {list(tensor.shape)}"
        )
    return as_bytes(tensor)


def as_bytes(tensor: Tensor) -> memoryview:
    """Row-major, little-endian, on the host."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _write_index(path: Path, shards: dict[str, list[Entry]], created: list[Path]) -> None:
    entries = [entry for shard in shards.values() for entry in shard]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape, _, _ in entries),
            "total_size": sum(map(_nbytes, entries)),
        },
        "weight_map": {entry[0]: file for file, shard in shards.items() for entry in shard},
    }
    with open(path, "x") as file:
        created.append(path)
        file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
    fsync(path)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
