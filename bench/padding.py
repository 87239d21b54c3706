"""A training step over padded rows, beside transformers, in one run.

Forward and backward of Llama-3.2-1B's shape with random weights in bf16, over 16 rows of log-normal
lengths that are padded on the right to the longest: as Tigon does it, which leaves padding out of
the blocks; as it would if it did not; and transformers with SDPA. --write-docs puts the figures
into docs/attention.md.
"""

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

import tigon
from bench import harness
from bench.attention_cases import lognormal
from bench.compare_side import LLAMA_1B
from bench.harness import Bench, Record, Run, heading, installed, named, provider_table
from bench.measure import ONCE, Effort, training_step
from bench.peers import imported
from bench.timing import relative_l2

ROWS, MEAN = 16, 700
WITHOUT, WITH, THEIRS = "tigon", "tigon, padding computed", "transformers"
EFFORT = Effort(rounds=1, total=2000.0, least=5, most=20)


def batch(vocab: int, rows: int, mean: int) -> dict[str, Tensor]:
    """Rows [B, T] of as many tokens as are drawn, padding on the right."""
    lengths = torch.tensor(lognormal(rows * 4 * mean, mean)[:rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(vocab, mask.shape, generator=torch.Generator().manual_seed(0))
    labels = ids.where(mask, -100)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels}


def ours(directory: str, device: str, *, leave_out: bool) -> Any:
    model: Any = tigon.from_pretrained(directory, dtype=torch.bfloat16, device=device)
    if not leave_out:
        model.drop_padding = False
    return model


def theirs(directory: str, device: str) -> Any:
    auto: Any = imported("transformers:AutoModelForCausalLM")
    model = auto.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to(device)


def measured(config: Record, inputs: dict[str, Tensor], effort: Effort) -> Record:
    device = str(inputs["input_ids"].device)
    found: dict[str, Record] = {}
    truth: Tensor | None = None
    with tempfile.TemporaryDirectory() as directory:
        model = tigon.Llama.from_config(config, dtype=torch.bfloat16, device=device)
        model.save_pretrained(directory)
        del model
        for name, load in {
            WITH: partial(ours, leave_out=False),
            WITHOUT: partial(ours, leave_out=True),
            THEIRS: theirs,
        }.items():
            row, gradient = training_step(name, partial(load, directory, device), inputs, effort)
            if gradient is not None:
                truth = gradient if truth is None else truth
                row["gradient_off"] = relative_l2(gradient, truth)
            found[row.pop("name")] = row
    mask = inputs["attention_mask"]
    return {"shape": tuple(mask.shape), "real": int(mask.sum()), "providers": found}


def show(record: Record) -> str:
    """The record as Markdown."""
    (b, t), real = record["shape"], record["real"]
    peer = record["providers"][THEIRS].get("ms")

    def cells(row: Record) -> Iterator[str]:
        ms = row["ms"][1]
        yield from (f"{ms:.4g}", f"{1e3 * real / ms:,.0f}", f"{peer[1] / ms:.2f}" if peer else "")
        yield from (f"{row['peak_mib'] / 1024:.1f}", f"{row['loss']:.4f}")

    head = "provider", "ms", "real tokens/s", "times transformers", "extra GiB", "loss"
    return (
        f"{heading(record, {'transformers': record['transformers']})}. "
        f"Forward and backward of Llama-3.2-1B's shape over {b} rows of up to {t} tokens, "
        f"{real / (b * t):.0%} of them real:\n\n"
        f"{provider_table(head, named(record['providers']), cells)}"
    )


def run(run: Run) -> str:
    run.record["transformers"] = installed("transformers")
    inputs = {name: x.cuda() for name, x in batch(LLAMA_1B["vocab_size"], ROWS, MEAN).items()}
    run.add(**measured(LLAMA_1B, inputs, ONCE if run.quick else EFFORT))
    return show(run.record)


BENCH = Bench("padding", __doc__, run, show, ["padding"], "docs/attention.md")

if __name__ == "__main__":
    harness.main(BENCH)
