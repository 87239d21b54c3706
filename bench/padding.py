"""A training step over padded rows, beside transformers, in one run.

Forward and backward of Llama-3.2-1B's shape with random weights in bf16, over 16 rows of log-normal
lengths that are padded on the right to the longest: as Tigon does it, which drops padding before
the blocks; with `drop_padding=False`; and transformers with SDPA and with flash-attn-4, which drops
padding around attention. --write-docs puts the figures into docs/attention.md.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tigon
from bench.attention_cases import lognormal
from bench.compare_side import LLAMA_1B
from bench.harness import Bench, Job, Record, heading, installed, named, provider_table
from bench.measure import ONCE, Effort, training_steps
from bench.peers import imported

ROWS, MEAN = 16, 700
WITHOUT, WITH, THEIRS = "tigon", "tigon, padding computed", "transformers"
FLASH = f"{THEIRS}, flash-attn-4"
LABELS = {WITH: "tigon, drop_padding=False"}
EFFORT = Effort(rounds=1, total=2000.0, least=5, most=20)


def batch(vocab: int, rows: int, mean: int) -> dict[str, Tensor]:
    """Rows [B, T] of as many tokens as are drawn, padding on the right."""
    lengths = torch.tensor(lognormal(rows * 4 * mean, mean)[:rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(vocab, mask.shape, generator=torch.Generator().manual_seed(0))
    labels = ids.where(mask, -100)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels}


def ours(directory: str, device: str, drop_padding: bool | None) -> Any:
    model: Any = tigon.from_pretrained(directory, dtype=torch.bfloat16, device=device)
    model.drop_padding = drop_padding
    return model


def theirs(directory: str, device: str, attention: str) -> Any:
    auto: Any = imported("transformers:AutoModelForCausalLM")
    model = auto.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation=attention)
    return model.to(device)


def measured(config: Record, inputs: dict[str, Tensor], effort: Effort) -> Record:
    device = str(inputs["input_ids"].device)
    with tempfile.TemporaryDirectory() as directory:
        model = tigon.Llama.from_config(config, dtype=torch.bfloat16, device=device)
        model.save_pretrained(directory)
        del model
        makers = {
            WITH: partial(ours, directory, device, drop_padding=False),
            WITHOUT: partial(ours, directory, device, drop_padding=None),
            THEIRS: partial(theirs, directory, device, "sdpa"),
            FLASH: partial(theirs, directory, device, "flash_attention_4"),
        }
        found = training_steps(makers, inputs, effort)
    mask = inputs["attention_mask"]
    return {"shape": tuple(mask.shape), "real": int(mask.sum()), "providers": found}


def show(record: Record) -> str:
    """The record as Markdown."""
    (b, t), real = record["shape"], record["real"]
    known = [record["providers"].get(side, {}).get("ms") for side in (THEIRS, FLASH)]
    peer = min(filter(None, known), key=lambda ms: ms[1], default=None)

    rows = [
        row | {"name": LABELS.get(row["name"], row["name"])} for row in named(record["providers"])
    ]

    def cells(row: Record) -> Iterator[str]:
        ms = row["ms"][1]
        yield from (f"{ms:.4g}", f"{1e3 * real / ms:,.0f}", f"{peer[1] / ms:.2f}" if peer else "")
        yield from (f"{row['peak_mib'] / 1024:.1f}", f"{row['loss']:.4f}")

    head = "provider", "ms", "real tokens/s", "speed over transformers", "extra GiB", "loss"
    return (
        f"{heading(record, {'transformers': record['transformers']})}. "
        f"Forward and backward of Llama-3.2-1B's shape over {b} rows of up to {t} tokens, "
        f"{real / (b * t):.0%} of them real:\n\n"
        f"{provider_table(head, rows, cells)}"
    )


def run(job: Job) -> None:
    job.record["transformers"] = installed("transformers")
    inputs = {name: x.cuda() for name, x in batch(LLAMA_1B["vocab_size"], ROWS, MEAN).items()}
    job.add(**measured(LLAMA_1B, inputs, ONCE if job.quick else EFFORT))


BENCH = Bench(run, show, ["padding"], "docs/attention.md")
