"""How transformers with Liger's kernels is set up for bench/train_step.py: its settings to choose
from, and the model with each."""

import importlib
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bench.harness import Record
from bench.moe import tune_briefly
from bench.peers import imported
from bench.train_cases import ADAM, MODELS, PACKED, PADDED, Case, fill, shape_of
from bench.varlen import VARLEN, register_varlen

NO_SDPA = ("gpt_oss",)  # of transformers, which has FlexAttention there
FLEX = (*NO_SDPA, "gemma4_text")  # where flash-attn-4 or SDPA may not fit heads or masks
LIGER = "Liger"
# What Liger's head is asked for: so many times as many logits at a time as hidden states have
# numbers, at most 1.25 GB, where Tigon has 1.07. By itself it has as many, with gpt-oss 8 times
CHUNKS, WIDER, OWN = "chunk_mem_const", 32, {"gpt_oss": 8}
LEAST_CHUNK = 256  # rows: with fewer, it mostly reads its weight and adds to the weight's gradient


@dataclass(frozen=True)
class Options:
    """How transformers is set up; the fastest that works is what Tigon is measured beside."""

    attention: str
    experts: str = ""  # LIGER for its experts, else the implementation of transformers
    compiled: bool = False  # by torch.compile with CUDA graphs
    rows: str = ""  # of ragged chats: PACKED, or PADDED, one for each chat
    chunks: int = 0  # CHUNKS of Liger's head; 0: as it comes

    @property
    def name(self) -> str:
        parts = self.attention, self.experts and f"{self.experts} experts"
        parts += self.rows and f"{self.rows} rows", self.chunks and f"{CHUNKS}={self.chunks}"
        return ", ".join(filter(None, (*parts, "compiled" * self.compiled)))


def options_of(case: Case, device: str) -> list[Options]:
    name = MODELS[case.model][1]
    ways = ["sdpa"]
    if name in FLEX:
        ways = ["flex_attention", "eager" if name in NO_SDPA else "sdpa"]
    if device == "cpu":
        return [Options(ways[-1], rows=rows_of(case, ways[-1]))]
    if case.ragged and name == "llama":
        ways = [VARLEN]
    experts = ["grouped_mm", LIGER] if case.experts else [""]
    return [
        Options(way, kind, rows=rows_of(case, way))
        for kind in experts
        for way in ("flash_attention_4", *ways)
    ]


def head_chunks(kind: str, shape: Record, tokens: int) -> int:
    """What to ask Liger's head for where its own chunks of so many tokens are short, else 0; `kind`
    is what Liger calls the family."""
    pieces = shape["vocab_size"] / shape["hidden_size"]
    rows = tokens / math.ceil(pieces / OWN.get(kind, 1))
    return WIDER if 2 ** math.ceil(math.log2(rows)) < LEAST_CHUNK else 0


def case_head_chunks(case: Case) -> int:
    """What to ask Liger's head for with the tokens of a case."""
    return head_chunks(*MODELS[case.model][1:], case.rows * case.tokens)


def rows_of(case: Case, attention: str) -> str:
    """How the peer gets ragged chats: packed where it keeps them apart."""
    if not case.ragged:
        return ""
    name, apart = MODELS[case.model][1], True
    if name in NO_SDPA:
        apart = attention.startswith("flash")  # no other mask of it knows where chats begin
    elif name.startswith("qwen3_5"):
        apart = None not in map(find_spec, ("fla", "causal_conv1d"))
    return PACKED if apart else PADDED


def peer(case: Case, chosen: Options, device: str, tiny: bool, liger: bool) -> tuple[Any, Any]:
    """transformers' model and torch's fused AdamW."""
    model = peer_model(shape_of(case, tiny), MODELS[case.model][1], chosen, device, liger)
    if case.quantize:
        quantise_peer(model)
    if case.rank:
        model = with_adapters(model, case.rank)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if chosen.compiled:
        model.compile(mode="reduce-overhead")
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    sharded = [p for p in trained if isinstance(p, DTensor)]
    plain = [p for p in trained if not isinstance(p, DTensor)]
    # One launch takes no DTensors beside plain tensors
    groups = [{"params": some} for some in (sharded, plain) if some]
    return torch.optim.AdamW(groups, fused=True, **ADAM)


def quantise_peer(model: Any) -> None:
    """bitsandbytes' layers in place of the projections, as load_in_4bit of transformers has them,
    with double quantisation and products in bf16."""
    make: Any = imported("bitsandbytes.nn:Linear4bit")
    weight: Any = imported("bitsandbytes.nn:Params4bit")
    how = {"quant_type": "nf4", "compress_statistics": True}
    for module in list(model.model.layers.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear:
                sizes = layer.in_features, layer.out_features, layer.bias is not None
                with torch.device("meta"):
                    own = make(*sizes, compute_dtype=torch.bfloat16, **how)
                own.weight = weight(layer.weight.detach(), requires_grad=False, **how)
                own.bias = layer.bias
                setattr(module, name, own.to(layer.weight.device))  # which quantises
    model.is_loaded_in_4bit = True  # so PEFT knows
    model.requires_grad_(False)


def with_adapters(model: Any, rank: int) -> Any:
    """PEFT's, in the model's dtype as the other side's; its own choice of float32 is slower."""
    make: Any = imported("peft:LoraConfig")
    wrap: Any = imported("peft:get_peft_model")
    chosen = make(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = wrap(model, chosen, autocast_adapter_dtype=False)
    prefix = "base_model.model."
    own = wrapped.named_parameters()
    fill((name.removeprefix(prefix), p) for name, p in own if ".lora_" in name)
    return wrapped


def peer_model(shape: Record, kind: str, chosen: Options, device: str, liger: bool) -> Any:
    """The model that config.json `shape` describes, with the weights that its names draw; `kind`
    is what Liger calls the family."""
    register_varlen()
    auto: Any = imported("transformers:AutoConfig")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shape | {"use_cache": False}))
        read = auto.from_pretrained(directory)
    if chosen.experts and chosen.experts != LIGER:
        read._experts_implementation = chosen.experts
    make: Any = imported("transformers:AutoModelForCausalLM")
    with patched(kind, chosen, liger), torch.device(device):
        model = make.from_config(read, dtype=torch.bfloat16, attn_implementation=chosen.attention)
        fill(model.named_parameters())
    return model


@contextmanager
def patched(kind: str, chosen: Options, liger: bool) -> Iterator[None]:
    """Liger's kernels in transformers while a model is made, and after it; but not its experts,
    which the next model need not have."""
    if not liger:
        yield
        return
    name = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    apply = imported(f"liger_kernel.transformers:apply_liger_kernel_to_{kind}")
    if not chosen.experts:
        apply()
        yield
        return
    experts = next(name for name in vars(module) if name.endswith("MoeExperts"))
    kept = getattr(module, experts)
    apply(swiglu=chosen.experts == LIGER)
    tune_briefly()
    try:
        yield
    finally:
        setattr(module, experts, kept)
