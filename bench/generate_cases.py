"""What the generation benchmark measures: the shape, the bytes that it has to move, the calls.

# B batch, T tokens of a prompt, H query heads, K kv heads, D head dim, C model dim, V vocab
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from bench.attention_cases import Case, Ways
from bench.compare_side import config
from bench.measure import Run
from bench.peers import random_model

LLAMA_8B = config("llama", 128256, 4096, 14336, 32, 32, 8, 128, tie_word_embeddings=False)
LLAMA_8B |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "bos_token_id": None}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
LLAMA_8B["rope_parameters"] = SCALING
OURS, INT8, EAGER = "tigon", "tigon, int8 cache", "tigon, no CUDA graph"
DYNAMIC, THEIRS = "tigon, dynamic cache", "transformers"
STATIC = f"{THEIRS}, static cache"  # whose steps it compiles, with CUDA graphs
FLASH = f"{THEIRS}, flash-attn-4"  # in place of SDPA
CACHES = {OURS: None, INT8: "quantized", EAGER: None, DYNAMIC: "dynamic"}  # cache_implementation
DOUBT = 0.5  # of the logits' standard deviation; rounding to bf16 moves them by a hundredth


@dataclass(frozen=True)
class Decode:
    """Time of a token: of a long generation less a short one, so that the prompt's falls out."""

    name: str
    batch: int
    context: int
    ours: tuple[int, int]  # new tokens of the short and of the long generation
    slow: tuple[int, int]  # the same where every launch is waited for
    rounds: int

    def lengths(self, provider: str) -> tuple[int, int]:
        return self.ours if provider in (OURS, INT8, STATIC) else self.slow

    def held(self, provider: str) -> float:
        """Tokens per row in the cache, as a mean over the steps that are timed."""
        short, long = self.lengths(provider)
        return self.context + (short + long - 1) / 2


@dataclass(frozen=True)
class Prefill:
    name: str
    context: int


CASES: tuple[Decode | Prefill, ...] = (
    Decode("decode 1 x 1024", 1, 1024, (32, 224), (4, 24), 3),
    Decode("decode 64 x 1024", 64, 1024, (32, 224), (4, 24), 2),
    Prefill("prefill 8192", 8192),
)


@dataclass(frozen=True)
class Size:
    """What a Llama of a config is made of, in elements."""

    config: dict[str, Any]

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a layer's matrices as they are multiplied."""
        c, i, d = (self.config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
        h, k = (self.config[f"num_{n}_heads"] for n in ("attention", "key_value"))
        return ((h + 2 * k) * d, c), (c, h * d), (2 * i, c), (c, i)

    @property
    def embedding(self) -> int:
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def parameters(self) -> int:
        c, layers = self.config["hidden_size"], self.config["num_hidden_layers"]
        heads = 1 if self.config["tie_word_embeddings"] else 2
        return layers * (sum(a * b for a, b in self.products) + 2 * c) + c + heads * self.embedding

    def cached(self, quantized: bool = False) -> int:
        """Bytes of one token in the cache: bf16, or int8 with an fp32 scale per vector."""
        d = self.config["head_dim"]
        vectors = 2 * self.config["num_hidden_layers"] * self.config["num_key_value_heads"]
        return int(vectors * (d + 4 if quantized else 2 * d))

    def step(self, case: Decode, provider: str) -> dict[str, float]:
        """Bytes of a step: all parameters, those that it reads (of the input embedding only a
        row per token), and the cache.
        """
        cache = case.batch * case.held(provider) * self.cached(provider == INT8)
        looked_up = 0 if self.config["tie_word_embeddings"] else self.embedding
        parameters = 2 * self.parameters
        return {"parameters": parameters, "read": parameters - 2 * looked_up, "cache": cache}

    def passes(self, tokens: int) -> int:
        """Bytes of a prefill outside of products and attention, in bf16.

        Of a layer: twice stream and branch in and out, queries and keys in and out, the gate's
        two in and one out. Once: the embedding in and out, and the head's matrix.
        """
        h, k = (self.config[f"num_{n}_heads"] for n in ("attention", "key_value"))
        c, i, d = (self.config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
        layer = tokens * (2 * 4 * c + 2 * (h + k) * d + 3 * i)
        ends = tokens * 2 * c + self.embedding
        return 2 * int(self.config["num_hidden_layers"] * layer + ends)


def ours(config: dict[str, Any], device: str = "cuda") -> Any:
    torch.manual_seed(0)
    return tigon.Llama.from_config(config, dtype=torch.bfloat16, device=device).eval()


def theirs(config: dict[str, Any], device: str = "cuda") -> Any:
    torch.manual_seed(0)
    return random_model("Llama", config, device).eval()


@contextmanager
def eager() -> Iterator[None]:
    """No step of a generation is captured in a CUDA graph."""
    graph = importlib.import_module("tigon.generation.steps")
    kept = graph.WARM_UP
    graph.WARM_UP = sys.maxsize
    try:
        yield
    finally:
        graph.WARM_UP = kept


def generating(model: Any, provider: str, ids: Tensor, **more: Any) -> Callable[[int], Tensor]:
    """Greedy generation of so many tokens."""
    options: dict[str, Any] = {"do_sample": False, **more}
    if provider.startswith(THEIRS):
        options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "use_cache": True}
        if provider == STATIC:
            options |= {"cache_implementation": "static"}
    else:
        options |= {"eos_token_id": []}
        if CACHES[provider] is not None:
            options |= {"cache_implementation": CACHES[provider]}

    def run(new: int) -> Tensor:
        with eager() if provider == EAGER else nullcontext():
            out: Tensor = model.generate(ids, max_new_tokens=new, **options)
        if out.shape != (len(ids), ids.shape[1] + new):
            raise RuntimeError(f"{new} tokens asked of {tuple(ids.shape)}, not {tuple(out.shape)}")
        return out

    return run


@torch.inference_mode()
def choice_gaps(model: Any, tokens: Tensor, new: int, rows: int = 4) -> Tensor:
    """How far each generated token's logit is below the best, in the logits' deviations.

    The logits are those of a forward pass without a cache.
    """
    tokens = tokens[:rows]
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=new).logits.float()
    chosen = logits.gather(2, tokens[:, -new:, None]).squeeze(2)
    return (logits.amax(2) - chosen) / logits.std(2)


def forward(model: Any, ids: Tensor) -> Run:
    @torch.inference_mode()
    def run() -> Any:
        return model(ids, use_cache=True, logits_to_keep=1)

    return run


def products(size: Size, tokens: int) -> Iterator[tuple[str, Run]]:
    """The matrix products of a layer, each alone."""
    for outputs, inputs in size.products:
        x, w = (
            torch.empty(n, inputs, dtype=torch.bfloat16, device="cuda") for n in (tokens, outputs)
        )
        x.normal_(), w.normal_(std=0.02)
        yield f"{tokens}x{outputs}x{inputs}", partial(F.linear, x, w)


def attentions(size: Size, tokens: int) -> Iterator[tuple[str, Run]]:
    """Causal attention of a layer by every kernel that is there."""
    h, k = (size.config[f"num_{n}_heads"] for n in ("attention", "key_value"))
    with torch.device("cuda"):
        ways = Ways(Case("prefill", (tokens,), tokens, (h, k), size.config["head_dim"]))
    ways.parts = tuple(x.detach() for x in ways.parts)
    with suppress(ImportError):
        yield "flash-attn-4", ways.fa4()
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        yield f"SDPA {name}", ways.sdpa(name)
