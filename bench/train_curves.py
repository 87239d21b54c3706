"""Losses of the same steps by Tigon, by transformers + Liger, and by transformers in float32.

SmolLM2-135M from the quickstart's checkpoint on its questions and answers, where `make quickstart`
has built them; else random weights of that shape on the bytes of this project's documents. All
sides have the same weights and rows. In bf16 no two programs give the same losses. So the truth is
transformers in float32, and the noise is how far transformers + Liger is from it with bf16 weights
and activations: Tigon may be 1.5 times as far, in the mean over all steps. Both have AdamW on
float32 masters there, whose updates bf16 does not round away. A fourth curve is Tigon without
masters: its own optimizer, with bf16 states and stochastic rounding.

bench/fp8_curves.py has longer ones, in fp8.
"""

import gc
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import tigon
from bench.compare_side import TINY, config
from bench.harness import (
    ROOT,
    Bench,
    Job,
    Record,
    heading,
    installed,
    markdown,
    progress,
    report,
    verdict,
)
from bench.peers import imported
from bench.train_cases import PEER, fill_ours
from bench.train_peer import Options, peer_model
from bench.train_step import LIBRARIES
from examples.assets import conversations
from tigon.train import load
from tigon.train.optim import build_optimizer

SMOLLM2 = config("llama", 49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True)
SMOLLM2 |= {"rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192}
ASSETS = ROOT / ".assets"
TRUTH, OURS, ROUNDED = "transformers, float32", "tigon", "tigon, adamw_bf16"
STEPS, ROWS, TOKENS, LR = 100, 8, 1024, 1e-4
MOST, NEAR = 1.5, 0.005  # times the noise; share of the last losses' mean
LAST = 10  # steps whose mean loss is the end of a curve


@dataclass(frozen=True)
class Given:
    """What all sides have: a shape or a checkpoint of it, and tokens."""

    shape: Record
    checkpoint: Path | None
    tokens: Tensor  # [steps, B, T]
    device: str


def text_tokens() -> tuple[Path | None, Tensor, Tensor]:
    """The quickstart's checkpoint, its data and the conversations as tokens, or None and the bytes
    of documents for both."""
    checkpoint = next(ASSETS.glob("smollm2*"), None)
    chats = ASSETS / "gsm8k/train.jsonl"
    if checkpoint is None or not chats.exists():
        files = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
        read = torch.tensor(list(b"".join(path.read_bytes() for path in files)))
        return None, read, read
    tokenizer = tigon.Tokenizer.from_pretrained(str(checkpoint))
    asked = [said["content"] for row in chats.open() for said in json.loads(row)["messages"]]
    talks = conversations.build() / "train.jsonl"
    said = [json.loads(row)["text"] for row in talks.open(encoding="utf-8")]
    questions, talk = (torch.tensor(tokenizer.encode("\n".join(t))) for t in (asked, said))
    return checkpoint, questions, talk


def given(tiny: bool) -> Given:
    steps, rows, length = (4, 2, 24) if tiny else (STEPS, ROWS, TOKENS)
    checkpoint, text = (None, torch.arange(999) % 97) if tiny else text_tokens()[:2]
    shape = SMOLLM2 | ({key: TINY[key] for key in TINY if key in SMOLLM2} if tiny else {})
    if checkpoint is not None:
        shape = json.loads((checkpoint / "config.json").read_text())
    count, device = steps * rows * length, "cpu" if tiny else "cuda"
    tokens = text.repeat(-(-count // len(text)))[:count].view(steps, rows, length)
    return Given(shape, checkpoint, tokens.to(device), device)


class Masters:
    """AdamW on float32 copies, from which the weights that compute are rounded after each step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, LR, (0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        self.adamw.zero_grad()


def theirs(what: Given, dtype: torch.dtype) -> Any:
    liger = dtype == torch.bfloat16 and what.device == "cuda" and installed("liger-kernel")
    model = peer_model(what.shape, "llama", Options("sdpa"), what.device, bool(liger))
    if what.checkpoint is not None:
        auto: Any = imported("transformers:AutoModelForCausalLM")
        read = auto.from_pretrained(what.checkpoint, dtype=torch.bfloat16)
        model.load_state_dict(read.state_dict())
    return model.to(dtype)  # bf16 weights in either


def mine(what: Given) -> Any:
    if what.checkpoint is not None:
        return tigon.from_pretrained(str(what.checkpoint), dtype=torch.bfloat16, device=what.device)
    model = tigon.Llama.from_config(what.shape, dtype=torch.bfloat16, device=what.device)
    fill_ours(model)
    return model


def rounded(model: Any) -> Any:
    values = {"lr": LR, "optimizer": "adamw_bf16", "param_dtype": "bfloat16", "run_dir": "none"}
    values |= {"model": "none", "data": "none"}
    return build_optimizer(model, load(None, [f"{k}={v}" for k, v in values.items()]))


def masters(model: Any) -> Masters:
    return Masters(model.parameters())


Maker = Callable[[Given], Any]
SIDES: dict[str, tuple[Maker, Callable[[Any], Any]]] = {
    TRUTH: (partial(theirs, dtype=torch.float32), masters),
    PEER: (partial(theirs, dtype=torch.bfloat16), masters),
    OURS: (mine, masters),
    ROUNDED: (mine, rounded),
}


def curve(side: str, what: Given) -> list[float]:
    """The loss of each step."""
    make, optimize = SIDES[side]
    model = make(what).train()
    optimizer, losses = optimize(model), []
    for ids in what.tokens:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def distance(record: Record, side: str) -> float | None:
    """Of a curve from the truth, in the mean over the steps."""
    curves = record["curves"]
    if not {side, TRUTH} <= curves.keys():
        return None
    return fmean(abs(a - b) for a, b in zip(curves[side], curves[TRUTH], strict=True))


def end(record: Record, side: str) -> float:
    return fmean(record["curves"][side][-LAST:])


def verdicts(record: Record) -> list[str]:
    noise, own = distance(record, PEER), distance(record, OURS)
    ratio, off = own / noise if own is not None and noise else None, None
    if {ROUNDED, TRUTH} <= record["curves"].keys():
        off = 100 * abs(end(record, ROUNDED) / end(record, TRUTH) - 1)
    return [
        verdict(f"{OURS}: distance from {TRUTH} over that of {PEER}", ratio, MOST, most=True),
        verdict(
            f"{ROUNDED}: difference of the last losses from those of {TRUTH}, %",
            *(off, 100 * NEAR),
            most=True,
        ),
    ]


def show(record: Record) -> str:
    longest = max(map(len, record["curves"].values()), default=0)
    at = [n for n in (0, 9, 24, 49, 99) if n < longest]
    rows = []
    for side, losses in record["curves"].items():
        away = distance(record, side) if side in (PEER, OURS, ROUNDED) else None
        cells = [f"{losses[n]:.4f}" if n < len(losses) else "" for n in at]
        far = f"{away:.2e}" if away is not None else ""
        rows.append([side, *cells, f"{end(record, side):.4f}", far])
    head = ["loss of step", *(str(n + 1) for n in at), f"mean of the last {LAST}"]
    weights = "the quickstart's checkpoint" if record["checkpoint"] else "random weights"
    title = f"{heading(record)}. SmolLM2-135M's shape, {weights}."
    table = markdown([*head, "mean distance from float32"], rows)
    return report(record, table, verdicts(record), title=title)


def run(job: Job) -> None:
    tiny = job.options.tiny
    job.record |= {"curves": {}}
    what = given(tiny)
    job.record["checkpoint"] = what.checkpoint is not None
    for side in job.only:
        progress(side)
        job.add(curves=job.record["curves"] | {side: curve(side, what)})
        gc.collect()


DOCUMENT = "docs/performance.md"
BENCH = Bench(run, show, tuple(SIDES), DOCUMENT, libraries=LIBRARIES, needed=("Liger",), tiny=True)
