"""Checkpoints of earlier versions: torch.distributed.checkpoint's own files and pickled .metadata.

Nothing in them may run code: the metadata is read through an allow-list of types, the tensors as
torch.load(weights_only=True) reads them, and anything but a tensor is refused.
"""

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
TYPES = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    _StorageInfo,
)


def is_legacy(checkpoint: Path) -> bool:
    return (checkpoint / METADATA).is_file()


def load(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of {"model": ..., "optimizer": ...}, by parameter name."""
    try:
        read_metadata(checkpoint)  # torch 2.11 does not say why it cannot
    except pickle.UnpicklingError as error:
        raise ValueError(f"{checkpoint / METADATA} is damaged: {error}") from error
    dcp.load(
        state,
        storage_reader=_Reader(checkpoint),
        planner=_TensorsOnly(),
        no_dist=not torch.distributed.is_initialized(),
    )


def faults(checkpoint: Path) -> list[str]:
    """Files that are shorter than the metadata says; these checkpoints have no checksums."""
    try:
        stored = read_metadata(checkpoint).storage_data
    except Exception as error:
        return [f"{checkpoint / METADATA} is damaged: {error}"]
    ends: dict[str, int] = {}
    for info in stored.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    found = []
    for name, end in sorted(ends.items()):
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else 0
        if size < end:
            found.append(f"{path} is damaged: it has {size} bytes of {end}")
    return found


def read_metadata(checkpoint: Path) -> Metadata:
    """Raises pickle.UnpicklingError on any type that such a file does not need."""
    path = checkpoint / METADATA
    with open(path, "rb") as file:
        found = _Unpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{path} holds a {type(found).__name__}, not Metadata")
    for info in found.storage_data.values():
        if (
            not isinstance(info, _StorageInfo)
            or Path(info.relative_path).name != info.relative_path
        ):
            raise pickle.UnpicklingError(f"{path} names a file outside the checkpoint: {info!r}")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = {(t.__module__, t.__qualname__): t for t in TYPES}
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        safe: dict[tuple[str, str], Any] = {
            ("torch", "Size"): torch.Size,
            ("torch.serialization", "_get_layout"): _layout,
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _memory_format,
            ("builtins", "getattr"): _member,  # how Python 3.11 pickles a member of an enum
            ("pathlib", "PosixPath"): pathlib.PurePosixPath,
            ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
        }
        if (module, name) in safe:
            return safe[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the tensor layout {name!r} is not allowed")
    return torch.strided


def _memory_format(value: int) -> Any:
    return metadata._MEM_FORMAT_ENCODING(value)


def _member(owner: Any, name: str) -> Any:
    if owner is not _memory_format:
        raise pickle.UnpicklingError(f"the attribute {name!r} of {owner!r} is not allowed")
    return metadata._MEM_FORMAT_ENCODING[name]


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = read_metadata(Path(self.path))
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class _TensorsOnly(DefaultLoadPlanner):
    """The planner it is made from unpickles whatever is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise pickle.UnpicklingError(
            f"{read_item.storage_index.fqn} is a pickled object, not a tensor: it is not read"
        )
