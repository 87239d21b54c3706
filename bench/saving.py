"""How long an export takes, and what the disk allows."""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

BLOCK = 16 << 20
AIM = 1 / 3  # of transformers' time, where the disk allows
Save = Callable[[Path], object]


def raw(target: Path, like: Path) -> None:
    """Files of the sizes of another export, each by several threads, as fast as the disk allows."""
    target.mkdir()
    buffer = torch.randint(256, (BLOCK,), dtype=torch.uint8).numpy().data
    sizes = {p.name: p.stat().st_size for p in like.iterdir() if p.suffix == ".safetensors"}
    files = {name: os.open(target / name, os.O_WRONLY | os.O_CREAT) for name in sizes}

    def write(job: tuple[str, int]) -> None:
        name, begin = job
        os.pwrite(files[name], buffer[: sizes[name] - begin], begin)

    jobs = [(name, i) for name, size in sizes.items() for i in range(0, size, BLOCK)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(write, sorted(jobs, key=lambda job: job[1])))
        list(pool.map(os.fsync, files.values()))
    for descriptor in files.values():
        os.close(descriptor)


def seconds(save: Save, target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    save(target)
    return time.perf_counter() - began
