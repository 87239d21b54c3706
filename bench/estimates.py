"""Memory estimates beside what training takes, for six shapes, on one GPU and on two.

Each case is a fresh process for each GPU: a model of published sizes with random weights, a few
steps of the trainer on rows of words, and torch.cuda.max_memory_allocated of the rank that has
most, beside the estimate that `tigon train --dry-run` makes without a GPU.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import harness
from bench.harness import ROOT, Bench, Job, Record, figure, heading, markdown, progress
from tests.support.small import EXPERTS, LLAMA, WORDS, write_tokenizer

WITHIN = 0.10  # of what training takes
STEPS = 4
GRACE = 5.0  # seconds that ranks have to end after one has failed
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def sizes(
    kind: str, vocab: int, dim: int, mlp: int, layers: int, heads: int, kv: int, head_dim: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "max_position_embeddings": 32768,
        **more,
    }


TIED = {"tie_word_embeddings": True}
MODELS = {
    "SmolLM2-135M": sizes("llama", 49152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5, **TIED),
    "Llama-3.2-1B": sizes(
        "llama", 128256, 2048, 8192, 16, 32, 8, 64,
        rope_theta=5e5, rope_scaling=LLAMA3_ROPE, **TIED,
    ),
    "Gemma-3-1B": sizes(
        "gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256,
        sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256, **TIED,
    ),
    "Qwen3-4B": sizes("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, rope_theta=1e6, **TIED),
    "Mistral 3.8B": sizes(
        "mistral", 131072, 3072, 9216, 26, 32, 8, 128,
        rope_theta=1e6, sliding_window=None, tie_word_embeddings=False,
    ),
    "Qwen3-MoE 2.9B": sizes(
        "qwen3_moe", 151936, 1024, 3072, 24, 16, 4, 128,
        num_experts=64, num_experts_per_tok=8, moe_intermediate_size=512,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
LARGER = {  # of configs/, too large for a case
    "Llama-3.1-8B": sizes(
        "llama", 128256, 4096, 14336, 32, 32, 8, 128,
        rope_theta=5e5, rope_scaling=LLAMA3_ROPE | {"factor": 8.0},
    ),
    "Mistral-7B": sizes("mistral", 32768, 4096, 14336, 32, 32, 8, 128, sliding_window=None),
    "Qwen3-30B-A3B": sizes(
        "qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
}  # fmt: skip
# Rows of a micro-batch, tokens of a row, micro-batches of a step, dtype of the weights
SETTINGS = {
    "SmolLM2-135M": (8, 2048, 1, "float32"),
    "Llama-3.2-1B": (2, 4096, 2, "float32"),
    "Gemma-3-1B": (2, 4096, 1, "float32"),
    "Qwen3-4B": (1, 8192, 1, "bfloat16"),
    "Mistral 3.8B": (1, 4096, 1, "float32"),
    "Qwen3-MoE 2.9B": (2, 4096, 1, "float32"),
}
Settings = dict[str, Any]
WAYS: dict[str, Settings] = {"": {}, " recomputed": {"activation_checkpointing": "true"}}
MORE_WAYS: dict[str, Settings] = {  # for one model on one GPU
    " every second block recomputed": {"activation_checkpointing": 2},
    " offloaded": {"activation_offload": "true"},
    " recomputed and offloaded": WAYS[" recomputed"] | {"activation_offload": "true"},
}
LABELS = {  # for what records say
    " recomputed and offloaded": ", checkpointing and offloading",
    " every second block recomputed": ", every second block checkpointed",
    " recomputed": ", checkpointing",
    " offloaded": ", activation offloading",
    " on ": ", ",
}
CASES: dict[str, tuple[str, Settings, int]] = {
    f"{model}{way} on {gpus} GPU{'s' if gpus > 1 else ''}": (model, changes, gpus)
    for model in MODELS
    for way, changes in (WAYS | (MORE_WAYS if model == "Llama-3.2-1B" else {})).items()
    for gpus in (1, 2)
    if gpus == 1 or way not in MORE_WAYS
}


def write_text(path: Path, words: int) -> None:
    """Documents of 600 words, each of which is a token or a few."""
    document = json.dumps({"text": " ".join(WORDS[i % len(WORDS)] for i in range(600))})
    path.write_text("\n".join([document] * (1 + words // 600)) + "\n")


def settings(root: Path, case: str, tiny: bool) -> dict[str, Any]:
    model, changes, gpus = CASES[case]
    rows, seq_len, micro, dtype = (2, 64, 2, "float32") if tiny else SETTINGS[model]
    values = MODELS[model]
    if tiny:
        values = EXPERTS if values["model_type"] == "qwen3_moe" else LLAMA
    (root / "config.json").write_text(json.dumps(values))
    return {
        "run_dir": str(root / "run"),
        "task": "pretrain",
        "init": str(root / "config.json"),
        "tokenizer": str(root / "tokenizer"),
        "data": str(root / "text.jsonl"),
        "workers": 0,
        "steps": STEPS,
        "seq_len": seq_len,
        "batch_size": rows * micro * gpus,
        "micro_batch_size": rows,
        "param_dtype": dtype,
        "device": "cpu" if tiny else "cuda",
        "sharding": "full",
        "activation_checkpointing": "false",
        "cuda_graphs": "false",
        **changes,
    }


def measured(root: Path, case: str, tiny: bool) -> Record:
    """By as many processes as there are GPUs in the case; the first one writes what they found."""
    arguments = [f"{k}={v}" for k, v in settings(root, case, tiny).items()]
    side = ROOT / "bench/estimates_side.py"
    return {"name": case, **run_ranks(side, CASES[case][2], root, arguments, 240)}


def run_ranks(side: Path, gpus: int, root: Path, arguments: list[str], seconds: float) -> Record:
    """What the first of `gpus` processes of this script writes to its first argument; or an error,
    and the end of what the first one said that failed."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared: dict[str, object] = {"PYTHONPATH": harness.python_path()}
    if gpus > 1:
        shared |= {"WORLD_SIZE": gpus, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"LOCAL_WORLD_SIZE": gpus, "TIGON_CACHE": root / "cache"}
    out, ranks = root / "found.json", []
    out.unlink(missing_ok=True)
    for rank in range(gpus):
        own = shared | ({"RANK": rank, "LOCAL_RANK": rank} if gpus > 1 else {})
        env = os.environ | {k: str(v) for k, v in own.items()}
        command = [sys.executable, str(side), str(out), *arguments]
        with (root / f"rank-{rank}.txt").open("w") as log:
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    first = failed(ranks, seconds)
    if first is None and out.exists():
        return json.loads(out.read_text())
    text = (root / f"rank-{first or 0}.txt").read_text()
    lines = text.replace(f"{ROOT}/", "").splitlines()  # a record is not about where it was made
    said = (lines or ["nothing was said"])[-1]
    if first is not None and ranks[first].returncode == -signal.SIGKILL:
        said = f"not at its end after {seconds:.0f} s: {said}"
    return {"error": said, "log": lines[-25:]}


def failed(ranks: list[subprocess.Popen[bytes]], seconds: float) -> int | None:
    """Wait for all to end, at most so many seconds; the first that failed. The others, which would
    wait for it, are ended too."""
    first, until = None, time.monotonic() + seconds
    while None in (codes := [process.poll() for process in ranks]):
        if first is None and any(codes):
            first = next(rank for rank, code in enumerate(codes) if code)
            until = min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    for process in ranks:
        process.kill()
    ended = [process.wait() for process in ranks]
    return next((rank for rank, code in enumerate(ended) if code), None) if first is None else first


def label(name: str) -> str:
    """A case's name, in the words of the settings."""
    for way, said in LABELS.items():
        name = name.replace(way, said)
    return name


def ratio(case: Record) -> float:
    return sum(case["estimate"].values()) / case["measured"]


def show(record: Record) -> str:
    rows, missed = [], []
    for case in record["cases"]:
        if "error" in case:
            rows.append([label(case["name"]), harness.failure(case)])
            continue
        gib = [figure(n / 2**30) for n in (sum(case["estimate"].values()), case["measured"])]
        found = f"{ratio(case):.3f}" if case["measured"] else ""
        rows.append([label(case["name"]), *gib, found, figure(case["step_seconds"])])
        if case["measured"] and abs(ratio(case) - 1) > WITHIN:
            missed.append(label(case["name"]))
    head = "case", "estimated, GiB", "measured, GiB", "estimated / measured", "step, s"
    count = sum(bool(c.get("measured")) for c in record["cases"])
    end = f"{count - len(missed)} of {count} within {WITHIN:.0%}"
    end += f"; not {', '.join(missed)}" if missed else ""
    return "\n\n".join([f"{heading(record, {})}.", markdown(head, rows), end])


def run(job: Job) -> str:
    tiny = job.options.tiny
    job.record["machine"] = job.record.get("gpu", "CPU")
    gpus = 2 if tiny else torch.cuda.device_count()
    job.record["gpus"] = gpus
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_tokenizer(root / "tokenizer")
        write_text(root / "text.jsonl", 2_000 if tiny else 300_000)
        for case in job.only:
            if CASES[case][2] > gpus:
                continue
            found = measured(root, case, tiny)
            job.append("cases", found)
            if "error" in found:
                progress(f"{case}: {found['error']}")
            elif found["measured"]:
                progress(f"{case}: {ratio(found):.3f}")
    return show(job.record)


OPTIONS = (("--tiny", {"action": "store_true", "help": "tiny models on the CPU"}),)
BENCH = Bench("estimates", __doc__, run, show, list(CASES), "docs/memory.md", options=OPTIONS)

if __name__ == "__main__":
    harness.main(BENCH)
