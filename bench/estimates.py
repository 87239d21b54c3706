"""Memory estimates beside what training takes, for six shapes, on one GPU and on two.

Each case is a fresh process for each GPU: a model of published sizes with random weights, a few
steps of the trainer on rows of words, and torch.cuda.max_memory_allocated of the rank that has
most, beside the estimate that `tigon train --dry-run` makes without a GPU.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.compare_side import GEMMA3_1B, LLAMA_1B
from bench.compare_side import config as sizes
from bench.harness import ROOT, Bench, Job, Record, figure, markdown, progress, report
from bench.processes import run_ranks
from bench.train_cases import QWEN3_4B
from bench.train_curves import SMOLLM2
from tests.support.small import EXPERTS, LLAMA, WORDS, write_tokenizer

WITHIN = 0.10  # of what training takes
STEPS = 4
MODELS = {
    "SmolLM2-135M": SMOLLM2,
    "Llama-3.2-1B": LLAMA_1B,
    "Gemma-3-1B": GEMMA3_1B,
    "Qwen3-4B": QWEN3_4B,
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
    return report(record, markdown(head, rows), end)


def run(job: Job) -> None:
    tiny = job.options.tiny
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


BENCH = Bench(run, show, list(CASES), "docs/memory.md", tiny=True)
