"""Writes safetensors files for torch.distributed.checkpoint, which its HuggingFaceStorageReader
reads.

Its own HuggingFaceStorageWriter makes a second copy of all that a rank saves before it writes the
first byte, keeps only the last of several slices of one tensor, syncs a file before its buffer is
written, and knows no checksums.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tigon.train.checkpoint.tensors import EMA, OPTIMIZER
from tigon.weights import as_bytes, named_if_full, require_space, write_header

BLOCK = 16 << 20  # bytes that are hashed and written at a time


class Written(NamedTuple):
    file: str
    sha256: str


class Writer(StorageWriter):
    """Every rank writes weights-RANK, optimizer-RANK and ema-RANK.safetensors; then rank 0 calls
    `commit`."""

    def __init__(self, directory: Path, commit: Callable[[Mapping[str, str]], None]) -> None:
        """`commit` gets the checksum of every file."""
        self.directory, self.commit = directory, commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # for one checkpoint only

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0."""
        require_space(
            self.directory.parent, sum(_nbytes(item) for plan in plans for item in plan.items)
        )
        return [dataclasses.replace(p, storage_data=rank) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for name, items in _files(plan.items, plan.storage_data).items():
            path = self.directory / name
            with named_if_full(path, sum(map(_nbytes, items))):
                written = Written(name, _write(path, items, planner))
            results += [WriteResult(item.index, _nbytes(item), written) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after all have written."""
        self.commit(dict(result.storage_data for rank in results for result in rank))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _files(items: Sequence[WriteItem], rank: int) -> dict[str, list[WriteItem]]:
    """By name; a file has one slice of a tensor, so further ones of this rank go to further files.

    Large elements first, so that all are aligned.
    """
    found: dict[str, list[WriteItem]] = {}
    seen: dict[str, int] = {}
    for item in items:
        name = item.index.fqn
        count = seen[name] = seen.get(name, -1) + 1
        kind = "weights"
        if name.startswith((OPTIMIZER, EMA)):
            kind = name.partition(".")[0]
        again = f"-{count}" if count else ""
        found.setdefault(f"{kind}-{rank:05d}{again}.safetensors", []).append(item)
    for group in found.values():
        group.sort(key=lambda item: (-_data(item).properties.dtype.itemsize, item.index.fqn))
    return found


def _write(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> str:
    """Tensor by tensor; the file's checksum."""
    offsets = {i.index.fqn: {SAVED_OFFSETS_KEY: list(_data(i).chunk.offsets)} for i in items}
    header = write_header(
        [(i.index.fqn, _data(i).chunk.sizes, _data(i).properties.dtype) for i in items],
        {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)},
    )
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        digest.update(header)
        file.write(header)
        for item in items:
            content = as_bytes(planner.resolve_data(item))  # type: ignore[arg-type]
            for start in range(0, len(content), BLOCK):
                digest.update(content[start : start + BLOCK])
                file.write(content[start : start + BLOCK])
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _data(item: WriteItem) -> Any:
    return item.tensor_data


def _nbytes(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize
