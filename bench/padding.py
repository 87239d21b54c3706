"""A training step over padded rows, beside transformers, in one run.

python bench/padding.py [--commit DESCRIBED]
python bench/padding.py --write-docs    # needs no GPU: the newest figures into docs/attention.md

Forward and backward of Llama-3.2-1B's shape with random weights in bf16, over 16 rows of log-normal
lengths that are padded on the right to the longest: as Tigon does it, which leaves padding out of
the blocks; as it would if it did not; and transformers with SDPA. Prints a table and writes
bench/results/padding-<gpu>.json.
"""

import argparse
import gc
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

import tigon
from bench._common import RESULTS, ROOT, save, stamp
from bench.attention_cases import lognormal
from bench.measure import progress
from bench.peers import imported
from bench.report import insert, markdown
from bench.timing import milliseconds, peak_mib, quantiles, relative_l2

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
ROWS, MEAN = 16, 700
WITHOUT, WITH, THEIRS = "tigon", "tigon, padding computed", "transformers"


def batch() -> dict[str, Tensor]:
    """Rows [B, T] of as many tokens as are drawn, padding on the right."""
    lengths = torch.tensor(lognormal(ROWS * 4 * MEAN, MEAN)[:ROWS])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(
        CONFIG["vocab_size"], mask.shape, generator=torch.Generator().manual_seed(0)
    )
    given = {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
    }
    return {name: x.cuda() for name, x in given.items()}


def ours(directory: str, *, leave_out: bool) -> Any:
    model: Any = tigon.from_pretrained(directory, dtype=torch.bfloat16, device="cuda")
    if not leave_out:
        model.drop_padding = False
    return model


def theirs(directory: str) -> Any:
    auto: Any = imported("transformers:AutoModelForCausalLM")
    model = auto.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.cuda()


def measure(directory: str) -> dict[str, Any]:
    tigon.Llama.from_config(CONFIG, dtype=torch.bfloat16, device="cuda").save_pretrained(directory)
    inputs = batch()
    providers: dict[str, Callable[[], Any]] = {
        WITH: lambda: ours(directory, leave_out=False),
        WITHOUT: lambda: ours(directory, leave_out=True),
        THEIRS: lambda: theirs(directory),
    }
    found: dict[str, dict[str, Any]] = {}
    truth: Tensor | None = None
    for name, load in providers.items():
        progress(name)
        model = load().train()

        def step(model: Any = model) -> Tensor:
            model.zero_grad(set_to_none=True)
            loss: Tensor = model(**inputs).loss
            loss.backward()
            return loss.detach()

        loss = float(step())
        gradient = model.lm_head.weight.grad.clone()
        truth = gradient if truth is None else truth
        found[name] = {
            "ms": quantiles(milliseconds(step, total=2000.0, least=5, most=20)),
            "peak_mib": peak_mib(step),
            "loss": loss,
            "gradient_off": relative_l2(gradient, truth),
        }
        del model, step, gradient
        gc.collect()
        torch.cuda.empty_cache()
    mask = inputs["attention_mask"]
    return {"shape": tuple(mask.shape), "real": int(mask.sum()), "providers": found}


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    (b, t), real = record["shape"], record["real"]
    changes = " with uncommitted changes" if record["uncommitted_changes"] else ""
    versions = f"torch {record['torch']}, transformers {record['transformers']}"
    head = "provider", "ms", "real tokens/s", "times transformers", "extra GiB", "loss"
    peer = record["providers"][THEIRS]["ms"][1]
    rows = []
    for name, row in record["providers"].items():
        ms = row["ms"][1]
        rate, memory = f"{1e3 * real / ms:,.0f}", f"{row['peak_mib'] / 1024:.1f}"
        rows.append([name, f"{ms:.4g}", rate, f"{peer / ms:.2f}", memory, f"{row['loss']:.4f}"])
    return (
        f"{record['gpu']}, {versions}; commit {record['commit']}{changes}, {record['date'][:10]}. "
        f"Forward and backward of Llama-3.2-1B's shape over {b} rows of up to {t} tokens, "
        f"{real / (b * t):.0%} of them real:\n\n{markdown(head, rows)}"
    )


def write_docs() -> None:
    """The newest record, between its markers."""
    records = [json.loads(path.read_text()) for path in RESULTS.glob("padding-*.json")]
    newest = max(records, key=lambda record: record["date"])
    insert(table(newest), ROOT / "docs/attention.md", "padding")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--commit", help="of a copy without git: git describe --always --dirty")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--write-docs", action="store_true", help="put the newest into docs")
    options = parser.parse_args()
    if options.write_docs:
        write_docs()
        return 0
    if not torch.cuda.is_available():
        parser.error("measuring needs a CUDA GPU; --write-docs needs none")
    gpu = torch.cuda.get_device_name()
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    record = {
        **stamp("tigon", "bench/*.py", described=options.commit),
        "gpu": gpu,
        "transformers": imported("transformers:__version__"),
    }
    with tempfile.TemporaryDirectory() as directory:
        record |= measure(directory)
    save(options.out or RESULTS / f"padding-{slug}.json", record)
    print(table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
