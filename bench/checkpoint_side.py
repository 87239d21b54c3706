"""One side of bench/checkpoint.py, in a process of its own: prints its figures as JSON.

It loads once, says how long that took and what memory it took at the most, and adds up the bits of
all weights, which must be the same on every side and brings in pages that are still in the file.
`exports` instead loads on both sides, saves each once beside MODEL, and writes as many raw bytes.

python -m bench.checkpoint_side tigon|tigon-mmap|transformers|tigon-ranks|exports MODEL DTYPE DEVICE
"""

import gc
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WRITE = 16 << 20  # bytes that a thread writes at a time
PINNED = 1 << 26  # bytes of a copy when its rate is measured


def status(key: str) -> int:
    """Bytes of this process as the system counts them: VmHWM, VmRSS, RssAnon."""
    found = re.findall(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[0])


class Memory:
    """The most that is resident within, beyond what was there at the beginning.

    `rss` counts the pages of mapped files, `anon` those that no file backs; these have no
    high-water mark of their own, so a thread looks every 5 ms.
    """

    def __enter__(self) -> "Memory":
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
        self._rss, self._anon = status("VmRSS"), status("RssAnon")
        self._most, self._ended = self._anon, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, status("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.rss = status("VmHWM") - self._rss
        self.anon = max(self._most, status("RssAnon")) - self._anon


def tigon(model: str, dtype: torch.dtype, device: str, **options: Any) -> nn.Module:
    from tigon.models import from_pretrained

    return from_pretrained(model, dtype=dtype, device=device, **options)


def tigon_mmap(model: str, dtype: torch.dtype, device: str) -> nn.Module:
    return tigon(model, dtype, device, mmap=True)


def tigon_ranks(model: str, dtype: torch.dtype, device: str) -> nn.Module:
    """This rank's rows of a model that all ranks share."""
    from torch.distributed.fsdp import fully_shard

    from tigon.models import MODELS, build, load_weights, materialize
    from tigon.weights import Repository

    built, checkpoint = build(Repository(model), MODELS, dtype=dtype)
    fully_shard(built)
    materialize(built, torch.device(device))
    load_weights(built, checkpoint)
    return built


def transformers(model: str, dtype: torch.dtype, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map=device)


def prepare(side: str, device: str) -> None:
    """Imports and starts the device, which a process does once whatever it loads."""
    if side == "transformers":
        import transformers
        from transformers.models.llama import modeling_llama  # noqa: F401
        from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
    else:
        import tigon.models  # noqa: F401
    if device == "cuda":
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize()
    gc.collect()


def bits(tensor: Tensor) -> int:
    """All elements' bits as integers of their size, added up: whatever their order.

    As many as fit into 8 bytes are added at once, where rows hold a multiple of them.
    """
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if not local.numel():
        return 0
    size = 8 if local.dim() and local.shape[-1] * local.itemsize % 8 == 0 else local.itemsize
    return int(local.reshape(-1).view(INTEGERS[size]).sum(dtype=torch.int64))


def pinned_seconds(nbytes: int) -> float:
    """The time of copying as many bytes to the device from pinned memory."""
    host = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(PINNED, dtype=torch.uint8, device="cuda")
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(32):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 32 / PINNED * nbytes


def counted_reads() -> list[int]:
    """What `os.preadv` has read, from now on."""
    preadv, counted = os.preadv, []

    def counting(*arguments: Any) -> int:
        counted.append(preadv(*arguments))
        return counted[-1]

    os.preadv = counting
    return counted


def measured(load: Callable[[], nn.Module], device: str) -> dict[str, Any]:
    watch = os.environ.get("WATCH_MEMORY") == "1"
    with Memory() if watch else nullcontext() as memory:
        before, began = time.process_time(), time.perf_counter()
        model = load()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - before
    began = time.perf_counter()
    checksum = sum(map(bits, model.parameters())) % 2**64
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "sum_seconds": time.perf_counter() - began,
        "bits": checksum,
        "bytes": sum(p.numel() * p.itemsize for p in model.parameters()),
    }
    if device == "cuda":
        found["pinned"] = pinned_seconds(found["bytes"])
    return found | ({"peak_rss": memory.rss, "peak_anon": memory.anon} if memory else {})


def ranks(load: Callable[[], nn.Module], device: str) -> dict[str, Any]:
    """The figures of all ranks as those of one: the slowest's time, and sums."""
    import torch.distributed as dist

    number = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(number)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    dist.barrier()
    counted = counted_reads()
    found = measured(load, device) | {"bytes_read": sum(counted)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    dist.destroy_process_group()
    if number:
        sys.exit()
    summed = {
        key: sum(rank[key] for rank in everyone)
        for key in ("bits", "bytes_read", "peak_rss", "peak_anon")
        if key in found
    }
    summed["bits"] %= 2**64
    slowest = {k: max(rank[k] for rank in everyone) for k in ("seconds", "sum_seconds")}
    if "pinned" in found:  # each rank copies its part over a link of its own
        slowest["pinned"] = max(rank["pinned"] for rank in everyone) / len(everyone)
    return found | summed | slowest


SIDES = {
    "tigon": tigon,
    "tigon-mmap": tigon_mmap,
    "tigon-ranks": tigon_ranks,
    "transformers": transformers,
}


def raw(target: Path, like: Path) -> None:
    """Files of the sizes of another export, each by several threads, as fast as the disk allows."""
    target.mkdir()
    buffer = torch.randint(256, (WRITE,), dtype=torch.uint8).numpy().data
    sizes = {p.name: p.stat().st_size for p in like.iterdir() if p.suffix == ".safetensors"}
    files = {name: os.open(target / name, os.O_WRONLY | os.O_CREAT) for name in sizes}

    def write(job: tuple[str, int]) -> None:
        name, begin = job
        os.pwrite(files[name], buffer[: sizes[name] - begin], begin)

    jobs = [(name, i) for name, size in sizes.items() for i in range(0, size, WRITE)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(write, sorted(jobs, key=lambda job: job[1])))
        list(pool.map(os.fsync, files.values()))
    for descriptor in files.values():
        os.close(descriptor)


def seconds(save: Callable[[Path], object], target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    save(target)
    return time.perf_counter() - began


def exports(model: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Seconds of saving by side, and the bytes of weights that each has written."""
    prepare("tigon", device)
    prepare("transformers", device)
    source, target = Path(model), Path(model).with_name("target")
    ours, theirs = tigon(model, dtype, device), transformers(model, dtype, device)
    sides = {
        "tigon": lambda: seconds(ours.save_pretrained, target),
        "transformers": lambda: seconds(theirs.save_pretrained, target),
        "raw": lambda: seconds(lambda target: raw(target, source), target),
    }
    found: dict[str, Any] = {}
    for name, save in sides.items():
        taken = save()
        weights = sum(path.stat().st_size for path in target.glob("*.safetensors"))
        found[name] = {"seconds": taken, "bytes": weights}
        shutil.rmtree(target)
    return found


def main(side: str, model: str, dtype: str, device: str) -> dict[str, Any]:
    if side == "exports":
        return exports(model, getattr(torch, dtype), device)
    prepare(side, device)
    run = ranks if side == "tigon-ranks" else measured
    return run(lambda: SIDES[side](model, getattr(torch, dtype), device), device)


if __name__ == "__main__":
    print(json.dumps({"kind": "side", **main(*sys.argv[1:])}))
