"""A training step and a decoded token on the CPU, beside transformers, interleaved in one run.

python bench/cpu.py [MODEL_DIRECTORY] [--repeats 7] [--threads 2]

Prints ours / transformers and writes bench/results/cpu.json. A ratio is the median over the
repeats of (ours / theirs, one right after the other), so that other load hits both alike.
"""

import argparse
import json
import platform
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # a script: runs where nothing is installed, and bench/kernels.py does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # pass for the package of that name

import torch
import transformers
from torch import Tensor

import tigon
from bench._common import RESULTS, ROOT, save, stamp

NEW_TOKENS = 64
NEVER = 49151  # an eos id that greedy decoding of this checkpoint does not produce
DECODE = [(1, 30), (4, 30), (1, 1000)]  # batch, prompt


class Clock:
    """A streamer that notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def decoded_token(model: Any, ids: Tensor, **kwargs: Any) -> float:
    """Median seconds between two tokens of one `generate` call, the prompt's forward left out."""
    clock = Clock()
    out = model.generate(
        ids,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=NEVER,
        streamer=clock,
        **kwargs,
    )
    assert out.shape[1] == ids.shape[1] + NEW_TOKENS
    first, rest = clock.times[1], clock.times[2:]
    return median(b - a for a, b in zip([first, *rest], rest, strict=False))


def training_step(model: Any, ids: Tensor) -> float:
    """Seconds of forward and backward with the loss over all tokens."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(ids, labels=ids).loss.backward()
    return time.perf_counter() - start


def compare(ours: Callable[[], float], theirs: Callable[[], float], repeats: int) -> dict[str, Any]:
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    return {
        "ratio": round(median(a / b for a, b in pairs), 3),
        "ratio_of_minima": round(min(a for a, _ in pairs) / min(b for _, b in pairs), 3),
        "ours_ms": round(1e3 * median(a for a, _ in pairs), 2),
        "transformers_ms": round(1e3 * median(b for _, b in pairs), 2),
    }


def measure(directory: Path, dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    ours: Any = tigon.from_pretrained(str(directory), dtype=dtype)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    name = str(dtype).removeprefix("torch.")
    vocab = ours.config.vocab_size
    results = []

    def report(what: dict[str, Any], values: dict[str, Any]) -> None:
        results.append({**what, "dtype": name, **values})
        print(json.dumps(results[-1]), flush=True)

    for batch, prompt in DECODE:
        ids = torch.randint(vocab, (batch, prompt), generator=torch.Generator().manual_seed(0))
        extra = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        values = compare(
            partial(decoded_token, ours, ids), partial(decoded_token, theirs, ids, **extra), repeats
        )
        report({"what": "decoded token", "batch": batch, "prompt": prompt}, values)
    if dtype == torch.float32:
        ids = torch.randint(vocab, (1, 512), generator=torch.Generator().manual_seed(0))
        ours.train(), theirs.train()
        values = compare(
            partial(training_step, ours, ids), partial(training_step, theirs, ids), repeats
        )
        report({"what": "training step", "batch": 1, "tokens": 512}, values)
    return results


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    directory = arguments.model
    if directory is None:
        directory = runpy.run_path(str(ROOT / "examples/assets/smollm2.py"))["build"]()
    results = [
        result
        for dtype in (torch.float32, torch.bfloat16)
        for result in measure(directory, dtype, arguments.repeats)
    ]
    record = {
        "model": directory.name,
        **stamp("tigon", "bench/cpu.py"),
        "cpu": processor(),
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "transformers": transformers.__version__,
        "results": results,
    }
    save(RESULTS / "cpu.json", record)


if __name__ == "__main__":
    main()
