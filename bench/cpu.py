"""A training step and a decoded token on the CPU, beside transformers, interleaved in one run.

A ratio is the median over the repeats of (ours / theirs, one right after the other), so that other
load hits both alike: above 1, transformers is faster. --write-docs puts the figures into
docs/generation.md.
"""

import os
import platform
import runpy
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import tigon
from bench.harness import (
    ROOT,
    Bench,
    Job,
    Record,
    figure,
    heading,
    installed,
    markdown,
    report,
    verdict,
)
from bench.peers import imported

NEW_TOKENS = 64
NEVER = 49151  # an eos id that greedy decoding of this checkpoint does not produce
TIMES = ("ours_ms", "transformers_ms", "ratio")
DECODE = [(1, 30), (4, 30), (1, 1000)]  # batch, prompt


def decoded_token(model: Any, ids: Tensor, **options: Any) -> float:
    """Median seconds between two tokens of one `generate` call, the prompt's forward left out."""
    times: list[float] = []
    clock = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
    options |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": NEVER}
    out = model.generate(ids, streamer=clock, **options)
    assert out.shape[1] == ids.shape[1] + NEW_TOKENS
    return median(b - a for a, b in pairwise(times[1:]))  # the first is the prompt


def training_step(model: Any, ids: Tensor) -> float:
    """Seconds of forward and backward with the loss over all tokens."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(ids, labels=ids).loss.backward()
    return time.perf_counter() - start


def compare(ours: Callable[[], float], theirs: Callable[[], float], repeats: int) -> Record:
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    return {
        "ratio": round(median(a / b for a, b in pairs), 3),
        "ratio_of_minima": round(min(a for a, _ in pairs) / min(b for _, b in pairs), 3),
        "ours_ms": round(1e3 * median(a for a, _ in pairs), 2),
        "transformers_ms": round(1e3 * median(b for _, b in pairs), 2),
    }


def load(directory: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same checkpoint as ours and as transformers'."""
    theirs = imported("transformers:AutoModelForCausalLM").from_pretrained(directory, dtype=dtype)
    return tigon.from_pretrained(str(directory), dtype=dtype).eval(), theirs.eval()


def random_ids(model: Any, *shape: int) -> Tensor:
    seed = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, shape, generator=seed)


def decoding(ours: Any, theirs: Any, batch: int, prompt: int, repeats: int) -> Record:
    ids = random_ids(ours, batch, prompt)
    extra = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    runs = partial(decoded_token, ours, ids), partial(decoded_token, theirs, ids, **extra)
    return compare(*runs, repeats)


def measure(directory: Path, dtype: torch.dtype, repeats: int) -> Iterator[Record]:
    models = load(directory, dtype)
    for batch, prompt in DECODE:
        where = {"what": "decoded token", "batch": batch, "prompt": prompt}
        yield where | decoding(*models, batch, prompt, repeats)
    if dtype == torch.float32:
        ids = random_ids(models[0], 1, 512)
        runs = [partial(training_step, model.train(), ids) for model in models]
        yield {"what": "training step", "batch": 1, "tokens": 512} | compare(*runs, repeats)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def smollm2() -> Path:
    """The checkpoint that the examples fetch."""
    return Path(runpy.run_path(str(ROOT / "examples/assets/smollm2.py"))["build"]())


def where(row: Record) -> list[str]:
    """What was measured, and how."""
    tokens = row.get("prompt", row.get("tokens"))
    return [row["what"], row["dtype"], *(str(x) for x in (row["threads"], row["batch"], tokens))]


def show(record: Record) -> str:
    head = ["step", "dtype", "threads", "batch", "tokens", "tigon, ms", "transformers, ms"]
    rows = [[*where(row), *(figure(row[key]) for key in TIMES)] for row in record["results"]]
    judged = []
    for row in record["results"]:
        what = "{}, {}, {} threads, batch {}, {} tokens".format(*where(row))
        what = what.replace(" 1 threads", " 1 thread")
        judged.append(verdict(f"{what}: speed over transformers", 1 / row["ratio"], 1.0))
    said = heading(record, {"transformers": record["transformers"]})
    table = markdown([*head, "tigon / transformers"], rows)
    return report(record, table, judged, title=f"{said}.")


def run(job: Job) -> None:
    options = job.options
    imported("transformers.utils.logging:set_verbosity_error")()
    directory = options.model or smollm2()
    job.record |= {"model": directory.name, "machine": processor()}
    job.record |= {"repeats": options.repeats, "transformers": installed("transformers")}
    for dtype, threads in product(job.only, options.threads):
        torch.set_num_threads(threads)
        for found in measure(directory, getattr(torch, dtype), 1 if job.quick else options.repeats):
            row = found | {"dtype": dtype, "threads": threads}
            job.append("results", row, ", ".join(where(row)))


OPTIONS = (
    ("model", {"nargs": "?", "type": Path, "help": "default: SmolLM2-135M-Instruct"}),
    ("--repeats", {"type": int, "default": 7}),
    ("--threads", {"type": int, "nargs": "+", "default": sorted({1, os.cpu_count() or 1})}),
)
DTYPES = ("float32", "bfloat16")
MORE = {"document": "docs/generation.md", "options": OPTIONS, "needs_gpu": False}
BENCH = Bench(run, show, DTYPES, **MORE)
