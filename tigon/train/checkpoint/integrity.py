"""SHA256SUMS: the checksum of every file of a checkpoint, as `sha256sum --check` reads it."""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from tigon.hub import check_folder
from tigon.train.checkpoint import files, legacy
from tigon.utils.json import quote, read_bytes

SUMS = "SHA256SUMS"
BLOCK = 16 << 20
MOST_SUMS = 16 << 20  # bytes of the file


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_sums(directory: Path, known: Mapping[str, str]) -> None:
    """`known`: by name, those of files that were hashed while they were written."""
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    sums = {name: known.get(name) or checksum(directory / name) for name in names}
    (directory / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in names))


def verify(checkpoint: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Raises ValueError, naming the file, unless every file is as it was written.

    In a process group every rank calls this, of one file system: each reads a share of the files,
    and all raise alike, also if one sees another checkpoint of that name.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        faults = _faults(checkpoint, wanted, rank, size)
        own = faults, "" if faults else _identity(checkpoint)
    except (OSError, ValueError) as error:
        own = [str(error)], ""
    everywhere = [own]
    if dist.is_initialized():
        everywhere = [own] * size
        dist.all_gather_object(everywhere, own)
    faults = [fault for faults, _ in everywhere for fault in faults]
    first = everywhere[0][1]
    others = [number for number, (_, identity) in enumerate(everywhere) if identity != first]
    if others and not faults:
        faults = [f"rank {others[0]} has another {checkpoint} than rank 0: give all hosts the same"]
    if faults:
        raise ValueError("; ".join(dict.fromkeys(faults)))


def is_listed(checkpoint: Path) -> Callable[[str], bool]:
    """Whether a file is the checkpoint's, by its path inside it. Somebody may have put others
    there; where SHA256SUMS cannot be read, all count as the checkpoint's."""
    try:
        names = {SUMS, *_read_sums(checkpoint / SUMS)}
    except (OSError, ValueError):
        return lambda name: True
    return names.__contains__


def has_other_files(checkpoint: Path) -> bool:
    """Whether somebody has put files into the checkpoint, such as notes."""
    files, listed = (p for p in checkpoint.rglob("*") if not p.is_dir()), is_listed(checkpoint)
    return not all(listed(path.relative_to(checkpoint).as_posix()) for path in files)


def newest_whole(
    directory: Path, say: Callable[[str], None] = print, *, until: int | None = None
) -> Path | None:
    """The newest checkpoint that is not damaged; None if there is none at all.

    Every rank calls this. `say` hears of those that are passed over. With `until`, those of later
    steps are not of the run that asks: it went on from an earlier one.
    """
    listed = [files.every(directory, until)]
    if dist.is_initialized():  # all look at the same ones
        dist.broadcast_object_list(listed, src=0)
    faults = []
    for checkpoint in reversed(listed[0]):
        try:
            verify(checkpoint)
        except ValueError as error:
            faults.append(str(error))
            say(f"{error}: taking the checkpoint before it")
            continue
        return checkpoint
    if faults:
        raise ValueError(
            f"no checkpoint in {directory} is whole: {faults[0]}; "
            "restore one, or begin again in another run_dir"
        )
    return None


def _identity(checkpoint: Path) -> str:
    """What changes with any of its files; of earlier versions' checkpoints, what they say."""
    sums = checkpoint / SUMS
    return checksum(sums if sums.is_file() else checkpoint / files.RUN)


def _faults(checkpoint: Path, wanted: Callable[[str], bool], rank: int, size: int) -> list[str]:
    if checkpoint.is_dir():
        check_folder(checkpoint)
    if not (checkpoint / files.RUN).is_file():
        return [f"{checkpoint / files.RUN} is missing"]
    if legacy.is_legacy(checkpoint):
        return legacy.faults(checkpoint) if rank == 0 else []
    sums = _read_sums(checkpoint / SUMS)

    def fault(name: str) -> str | None:
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if checksum(path) != sums[name]:
            return f"{path} is damaged: its SHA-256 is not the one in {SUMS}"
        return None

    mine = sorted(name for name in sums if wanted(name))[rank::size]
    strange = [p for p in checkpoint.glob("*.safetensors") if p.name not in sums and rank == 0]
    if strange:  # it would be read too
        return [f"{path} is not in {SUMS}: it is no part of the checkpoint" for path in strange]
    with ThreadPoolExecutor(4) as pool:
        return [found for found in pool.map(fault, mine) if found]


def _read_sums(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    sums = {}
    for line in read_bytes(path, MOST_SUMS).decode(errors="replace").splitlines(keepends=True):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name.endswith("\n") or _is_outside(name):
            raise ValueError(f"{path} is damaged: it has the line {quote(line)}")
        sums[name.removesuffix("\n")] = digest
    if files.RUN not in sums:
        raise ValueError(f"{path} is damaged: it does not name {files.RUN}")
    return sums


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts
