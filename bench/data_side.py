"""One side of bench/data.py, in a process of its own: prints its figures as JSON.

python -m bench.data_side tigon|datasets CORPUS TOKENIZER WORKERS
python -m bench.data_side rank CORPUS TOKENIZER WORKERS RANK STEPS
"""

import json
import os
import re
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tigon.data import Loader, Mixture, TextEncoder, find_sources, pack_documents, tokenize
from tigon.tokenizer import Tokenizer


def peak() -> float:
    """GiB that were resident in this process at the most, pages of files among them.

    Not ru_maxrss, which begins with what the parent had.
    """
    return int(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**20


def tigon(corpus: str, tokenizer: str, workers: int) -> dict[str, Any]:
    encoder = TextEncoder(Tokenizer.from_pretrained(tokenizer))
    began = time.perf_counter()
    parts = tokenize(find_sources(corpus), encoder, workers=workers)
    tokens = sum(len(part.tokens) for part in parts)
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "peak_gib": peak()}


def mapped(tokenizer: Tokenizer, rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    eos = [tokenizer.eos_token_id or 0]
    return {"input_ids": [[*ids, *eos] for ids in tokenizer.encode_batch(rows["text"])]}


def datasets(corpus: str, tokenizer: str, workers: int) -> dict[str, Any]:
    import datasets

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process, as on the other side
    function = partial(mapped, Tokenizer.from_pretrained(tokenizer))
    began = time.perf_counter()
    data = datasets.load_dataset("json", data_files=corpus, split="train")
    loaded = time.perf_counter()
    options = {"batched": True, "num_proc": workers, "remove_columns": ["text"]}
    data = data.map(function, **options)
    ended = time.perf_counter()
    tokens = sum(len(ids) for batch in data.iter(1000) for ids in batch["input_ids"])
    times = {"seconds": ended - began, "map_seconds": ended - loaded}
    return times | {"tokens": tokens, "peak_gib": peak()}


def rank(corpus: str, tokenizer: str, workers: int, number: int, most: int) -> dict[str, Any]:
    """As a rank of two that trains on the corpus, without a model; `most` steps of an epoch."""
    encoder = TextEncoder(Tokenizer.from_pretrained(tokenizer))
    start, began = peak(), time.perf_counter()
    parts = tokenize(find_sources(corpus), encoder, workers=workers)
    made, made_seconds = peak(), time.perf_counter() - began
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    rows = partial(pack_documents, seq_len=2048)
    shape = {"batch_size": 64, "micro_batch_size": 4, "seed": 0, "rank": number, "world": 2}
    data = Loader(Mixture([parts], size=65536), rows, **shape)
    began = time.perf_counter()
    epoch = data.steps_per_epoch or 0
    packed_seconds = time.perf_counter() - began
    steps = range(0, epoch, -(-epoch // most))
    began = time.perf_counter()
    for step in steps:
        data.micro_batches(step)
    step_ms = (time.perf_counter() - began) / len(steps) * 1e3
    sizes = {"start_gib": start, "made_gib": made, "peak_gib": peak(), "worker_gib": worker}
    times = {"made_seconds": made_seconds, "packed_seconds": packed_seconds, "step_ms": step_ms}
    return sizes | times | {"steps": len(steps), "steps_per_epoch": epoch}


if __name__ == "__main__":
    what, corpus, tokenizer, workers, *rest = sys.argv[1:]
    side = {"tigon": tigon, "datasets": datasets, "rank": rank}[what]
    print(json.dumps(side(corpus, tokenizer, int(workers), *map(int, rest))))
