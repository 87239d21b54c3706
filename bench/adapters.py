"""Low-rank additions beside their formula, 4-bit weights beside a copy, and what adapters cost.

The linear layers of Llama-3.1-8B under an adapter of rank 16, forward and backward, of 8,192 rows:
ours, which adds in the memory of the base's product, and the formula of PEFT, which computes and
adds to each projection apart; the base's two products alone are the bound. Dropout is ours, which
keeps no mask. A 4-bit weight is made into 16 bits at the speed of a copy that moves as many bytes,
at best. Steps are forward, backward and AdamW of some layers, one row of 8,192 tokens. Each result
is compared with float64, or with the definition, before it is timed.

    python -m bench adapters                # minutes on a GPU
    python -m bench adapters --write-docs   # needs no GPU

# N rows, C columns of a layer's input, K_p of a part's output, r rank
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from bench import harness
from bench.compare_side import QWEN3_MOE
from bench.harness import (
    Bench,
    Job,
    Record,
    figure,
    installed,
    markdown,
    named,
    provider_table,
    report,
    row_of,
)
from bench.measure import (
    ONCE,
    Attempt,
    Effort,
    Problem,
    Provider,
    in_turn,
    leaf,
    measure,
    randn,
    training_steps,
    truth,
)
from bench.peers import imported
from bench.train_cases import ADAM, LLAMA_8B
from tigon import LoraConfig
from tigon.kernels import lora_linear
from tigon.kernels.linear import quantized
from tigon.kernels.linear.dropout import Dropout, apply_dropout_ref
from tigon.kernels.linear.lora import LoRATerm
from tigon.models.pretrained.quantization import quantize_model

OURS, FORMULA, BITSANDBYTES = "tigon", "formula of PEFT", "bitsandbytes"
ROWS, RANK, SCALE, P = 8192, 16, 2.0, 0.05
LINEARS: dict[str, tuple[int, tuple[int, ...]]] = {  # C, and K_p of each part
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
NF4, STEPS, DROPPED = "nf4", "steps", " with dropout"
CASES = [*LINEARS, *(name + DROPPED for name in LINEARS), NF4, STEPS]
PRODUCTS = Effort(rounds=2, total=60.0, least=5, most=40)
STREAMING = Effort(rounds=2, total=30.0, least=5, most=60)
COPY_BYTES = 2**33
LAYERS, TOKENS = 4, 8192
ALL = "all-linear"
EXPERTS = ("q_proj", "k_proj", "v_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")
MIXTURE = "mixture, LoRA"
OF_EXPERTS = f"{MIXTURE} of experts too"
LABELS = {MIXTURE: "MoE, LoRA on attention", OF_EXPERTS: "MoE, LoRA on attention and experts"}
# Of each step the model, the adapter, and whether the base has 4 bits
MODELS: dict[str, tuple[str, Record, LoraConfig, bool]] = {
    "LoRA": ("Llama", LLAMA_8B, LoraConfig(rank=RANK, targets=ALL), False),
    f"LoRA, dropout {P}": ("Llama", LLAMA_8B, LoraConfig(rank=RANK, targets=ALL, dropout=P), False),
    "DoRA": ("Llama", LLAMA_8B, LoraConfig(rank=RANK, targets=ALL, dora=True), False),
    "QLoRA": ("Llama", LLAMA_8B, LoraConfig(rank=RANK, targets=ALL), True),
    MIXTURE: ("Qwen3Moe", QWEN3_MOE, LoraConfig(rank=RANK, targets=ALL), False),
    OF_EXPERTS: (*("Qwen3Moe", QWEN3_MOE), LoraConfig(rank=RANK, targets=EXPERTS), False),
}


def linear(columns: int, parts: Sequence[int], rows: int, dropout: bool = False) -> Problem:
    """Forward and backward of one layer under an adapter; its own weight is frozen."""
    x, weight = leaf(rows, columns), randn(sum(parts), columns, scale=columns**-0.5)
    a = {f"a{i}": leaf(RANK, columns, scale=columns**-0.5) for i in range(len(parts))}
    b = {f"b{i}": leaf(size, RANK) for i, size in enumerate(parts)}
    upstream = tuple(randn(rows, size) for size in parts)
    outputs = tuple(f"y{i}" for i in range(len(parts)))
    keys = torch.randint(-(2**62), 2**62, (rows,))
    drop = Dropout(keys, 1, P) if dropout else None

    def formula(x: Tensor, keys: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        count, u, scale = len(parts), x, SCALE
        if drop is not None:
            u, scale = apply_dropout_ref(x, drop._replace(keys=keys)), SCALE / (1 - P)
        return tuple(
            F.linear(x, w.to(x.dtype)) + F.linear(F.linear(u, own_a), own_b) * scale
            for w, own_a, own_b in zip(
                weight.split(list(parts)), shared[:count], shared[count:], strict=True
            )
        )

    packed = nn.Parameter(torch.cat([v.detach() for v in a.values()]))
    places = [sum(parts[:i]) for i in range(len(parts))]
    additions = [LoRATerm(p, own, SCALE) for p, own in zip(places, b.values(), strict=True)]
    frozen = nn.Parameter(weight, requires_grad=False)

    def apart(found: dict[str, Tensor]) -> dict[str, Tensor]:
        ys, das = found["y0"].split(list(parts), 1), found["da"].split(RANK)
        named = {f"y{i}": y for i, y in enumerate(ys)} | {f"da{i}": d for i, d in enumerate(das)}
        return {k: v for k, v in found.items() if k not in ("y0", "da")} | named

    ours = Provider(
        OURS,
        lambda: partial(lora_linear, x, frozen, None, packed, additions, dropout=drop),
        leaves={"x": x, "a": packed} | b,
        upstream=(torch.cat(upstream, 1),),
        split=apart,
    )
    theirs = Provider(FORMULA, lambda: partial(formula, x, keys, *a.values(), *b.values()))
    together = ours.upstream

    def exact() -> dict[str, Tensor]:
        shared: dict[str, Tensor] = a | b
        return truth(formula, {"x": x, "keys": keys}, shared, outputs, upstream)

    def products() -> Tensor:
        assert together is not None
        F.linear(x.detach(), weight)
        return together[0] @ weight

    references = {"forward_ms": lambda: F.linear(x.detach(), weight), "both_ms": products}
    return Problem(
        {"x": x} | a | b,
        outputs,
        upstream,
        exact,
        # Of dropout the formula is one of ours, in plain torch: no figure of PEFT's
        [ours] if dropout else [ours, theirs],
        references,
    )


class Dequantise(Attempt):
    """A 4-bit weight made into bf16; results are compared bit for bit."""

    def __init__(self, name: str, make: Callable[[], Tensor], expected: Tensor, effort: Effort):
        super().__init__(name)
        self.make, self.expected, self.effort = make, expected, effort

    def check(self) -> None:
        """Those of the definition; bitsandbytes rounds a few scales otherwise."""
        found = self.make()
        share = (found != self.expected).float().mean().item()
        self.result["other_share"] = share
        near = torch.allclose(found.float(), self.expected.float(), rtol=2e-2, atol=1e-6)
        if share and (self.result["name"] == OURS or not near):
            raise ValueError(f"{share:.2e} of the numbers differ from the definition's")

    def time(self) -> None:
        self.sample("ms", self.effort.times(self.make))


def dequantising(shape: tuple[int, int], rate: float, effort: Effort) -> Record:
    """One matrix; its floor is the time of its bytes at `rate`."""
    matrix = randn(*shape, scale=0.02)
    tables = torch.cat([quantized.NF4_VALUES, quantized.SCALE_VALUES]).to(matrix.device)
    sizes = [matrix.numel()]
    weight = quantized.NF4Tensor(
        *quantized.quantize_nf4(matrix), quantized.group_offsets(sizes).to(matrix.device), tables
    )
    expected = quantized.dequantize_nf4_ref(weight, sizes, shape, torch.bfloat16)
    attempts = [
        Dequantise(
            OURS,
            lambda: quantized.dequantize_nf4(weight, sizes, shape, torch.bfloat16),
            expected,
            effort,
        )
    ]
    if installed("bitsandbytes") and matrix.is_cuda:
        functional: Any = imported("bitsandbytes:functional")
        how = {"quant_type": "nf4", "compress_statistics": True}
        codes, state = functional.quantize_4bit(matrix, **how)
        make = partial(functional.dequantize_4bit, codes, state)
        attempts.append(Dequantise(BITSANDBYTES, make, expected, effort))
    moved = sum(t.nbytes for t in weight[:4]) + expected.nbytes
    rows = in_turn(f"{NF4} {shape}", attempts, effort.rounds)
    floor = 1e3 * moved / rate
    return {"shape": list(shape), "bytes": moved, "floor_ms": floor, "providers": rows}


def model(name: str, layers: int = LAYERS, device: str = "cuda") -> Any:
    """Some layers under an adapter whose parameters are drawn."""
    kind, values, config, few = MODELS[name]
    values = values | {"num_hidden_layers": layers, "vocab_size": 32768}
    made = getattr(tigon, kind).from_config(values, dtype=torch.bfloat16, device=device)
    if few:
        quantize_model(made, "nf4")
    made.add_adapter(config, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for path, p in made.named_parameters():
            if ".lora_B" in path:
                p.normal_(std=1e-3)
    return made


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], fused=True, **ADAM)


def run(job: Job) -> None:
    torch.set_default_device("cuda")
    effort = ONCE if job.quick else PRODUCTS
    job.record["quick"] = job.quick
    for name in job.only:
        torch.manual_seed(0)
        if name == NF4:
            copy = STREAMING.bandwidth(COPY_BYTES)
            job.record |= {"copy": copy, NF4: []}
            small = replace(STREAMING, rounds=1) if job.quick else STREAMING
            for columns, parts in LINEARS.values():
                shape = sum(parts), columns
                job.append(NF4, dequantising(shape, copy["bytes_per_second"], small))
        elif name == STEPS:
            inputs = {"input_ids": torch.randint(0, 32768, (1, TOKENS))}
            inputs["labels"] = inputs["input_ids"]
            makers = {n: partial(model, n) for n in MODELS}
            job.add(steps=training_steps(makers, inputs, effort, adamw))
        else:
            sizes = LINEARS[name.removesuffix(DROPPED)]
            problem = linear(*sizes, ROWS, dropout=name.endswith(DROPPED))
            job.append("linears", {"name": name} | measure(name, problem, effort))
            del problem


def middle(row: Record, key: str) -> float | None:
    return row[key][1] if key in row else None


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def linears(record: Record) -> str:
    rows = []
    for case in record["linears"]:
        ours, theirs = row_of(case, OURS), row_of(case, FORMULA)
        if "error" in ours:
            rows.append([case["name"], harness.failure(ours)])
            continue
        own, bound = middle(ours, "both_ms"), middle(case["references"], "both_ms")
        other = middle(theirs, "both_ms")
        worst = harness.worst(ours["errors"].values())
        figures = (middle(ours, "forward_ms"), own, other, over(other, own), bound)
        peaks = ours["peak_mib"], theirs.get("peak_mib")
        cells = (*figures, over(own, bound), *peaks, worst)
        rows.append([case["name"], *(figure(cell) for cell in cells)])
    head = ["linear layer", "forward, ms", "forward + backward, ms", "PEFT's formula, ms"]
    head += ["PEFT's formula / tigon", "base's GEMMs alone, ms", "tigon / base's GEMMs"]
    head += ["peak, MiB", "PEFT's formula, peak MiB", "largest relative error"]
    return markdown(head, rows)


def nf4_table(record: Record) -> str:
    rows: list[Sequence[str]] = []
    for case in record[NF4]:
        for row in case["providers"]:
            start = [f"{case['shape'][0]} x {case['shape'][1]}", row["name"]]
            if "error" in row:
                rows.append([*start, harness.failure(row)])
                continue
            ms = row["ms"][1]
            speed = case["bytes"] / ms / 1e6
            cells = ms, speed, case["floor_ms"] / ms
            rows.append([*start, *(figure(cell, 4) for cell in cells)])
    rate = record["copy"]["bytes_per_second"] / 1e9
    head = ["NF4 weight to bf16", "provider", "ms", "GB/s"]
    return markdown([*head, f"share of a copy's {rate:,.0f} GB/s"], rows)


def steps_table(record: Record) -> str:
    rows = record[STEPS]

    def cells(row: Record) -> list[str]:
        base = rows[MIXTURE if row["name"].startswith("MoE") else "LoRA"]
        ms, ratio = middle(row, "ms"), over(middle(row, "ms"), middle(base, "ms"))
        return [figure(ms, 4), figure(ratio), figure(row["peak_mib"]), figure(row["loss"], 5)]

    head = f"training step, {LAYERS} layers, 1 x {TOKENS}", "ms", "time / LoRA's", "peak, MiB"
    shown = [row | {"name": LABELS.get(row["name"], row["name"])} for row in named(rows)]
    return provider_table((*head, "loss"), shown, cells)


def show(record: Record) -> str:
    tables = {"linears": linears, NF4: nf4_table, STEPS: steps_table}
    return report(record, *(make(record) for key, make in tables.items() if key in record))


LIBRARIES = {name: name for name in (BITSANDBYTES, "triton")}
BENCH = Bench(run, show, CASES, "docs/adapters.md", libraries=LIBRARIES)
