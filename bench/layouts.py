"""Training steps of Tigon divided over four GPUs in each way, to compare with `tigon plan`.

The trainer's own steps with bf16 weights, gradients and states: Llama-3.1-8B's shape, and
Qwen3-30B-A3B's with 8 layers.

    python -m bench.layouts                 # about 300 s; starts the processes itself
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress
from bench.processes import run_ranks
from bench.train_cases import MODELS
from bench.train_multi import SIDE, settings, write_inputs
from bench.train_multi import Side as Ranks
from bench.train_multi_side import TIGON
from tests.support.small import EXPERTS as SMALL_EXPERTS
from tests.support.small import LLAMA
from tigon.plan import Layout

LLAMA_8B, EXPERTS = "Llama-3.1-8B", "Qwen3-30B-A3B"
GPUS, TOKENS = 4, 8192


@dataclass(frozen=True)
class Way:
    model: str  # of MODELS
    layout: Layout
    tokens: int = TOKENS  # of a row


# Those that say most first: the time of a machine may end
WAYS = {
    "tensor 4": Way(LLAMA_8B, Layout(tensor=4)),
    "fsdp 2 x tensor 2": Way(LLAMA_8B, Layout(fsdp=2, tensor=2)),
    "fsdp 4": Way(LLAMA_8B, Layout(fsdp=4)),
    "experts, expert 4": Way(EXPERTS, Layout(fsdp=4, expert=4)),
    "context 4, a row of 16,384": Way(LLAMA_8B, Layout(context=4), 2 * TOKENS),
    "experts, fsdp 4": Way(EXPERTS, Layout(fsdp=4)),
    "sharding=gradients": Way(LLAMA_8B, Layout(fsdp=4, sharding="gradients")),
    "experts, expert 2": Way(EXPERTS, Layout(fsdp=4, expert=2)),
}


def measured(root: Path, way: Way, job: Job) -> Record:
    tiny = job.options.tiny
    small = SMALL_EXPERTS | {"num_experts": 4, "tie_word_embeddings": False}
    shape = {LLAMA_8B: LLAMA, EXPERTS: small}[way.model] if tiny else MODELS[way.model][2]
    (root / "config.json").write_text(json.dumps(shape))
    tokens = 32 * way.tokens // TOKENS if tiny else way.tokens
    more = [f"seq_len={tokens}", f"batch_size={way.layout.rows * way.layout.data}"]
    side = Ranks(TIGON, GPUS, (*more, *way.layout.settings.split()))
    return run_ranks(
        SIDE, GPUS, root, [TIGON, "sdpa", *settings(root, side, tiny)], job.options.limit
    )


def run(job: Job) -> str:
    tiny = job.options.tiny
    if not tiny and torch.cuda.device_count() < GPUS:
        raise SystemExit(f"needs {GPUS} GPUs, and there are {torch.cuda.device_count()}")
    job.record |= {"machine": f"{GPUS} x {job.record.get('gpu', 'CPU')}", "ways": {}}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_inputs(root, tiny)
        for name in job.only:
            progress(name)
            found = measured(root, WAYS[name], job)
            if "error" in found:
                progress(f"{name}: {found['error'][:300]}")
            job.add(ways=job.record["ways"] | {name: found})
    return show(job.record)


def show(record: Record) -> str:
    rows = []
    for name, found in record["ways"].items():
        size, took = found.get("allocated_gib"), found.get("ms")
        cells = [harness.failure(found)] if took is None else [figure(took, 4), figure(size)]
        rows.append([name, *cells])
    return f"{heading(record, {})}\n\n{markdown(('layout', 'ms', 'peak GiB'), rows)}"


OPTIONS = (
    ("--limit", {"type": float, "default": 120.0, "help": "seconds that a layout may take"}),
    ("--tiny", {"action": "store_true", "help": "tiny models on the CPU"}),
)
BENCH = Bench("layouts", __doc__, run, show, tuple(WAYS), options=OPTIONS)

if __name__ == "__main__":
    harness.main(BENCH)
