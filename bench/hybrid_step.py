"""Training steps of Qwen3.5's shapes beside transformers, with its optional kernels if installed.

A step is forward, backward and torch's fused AdamW, in bf16, of one row with random weights; both
sides are built and freed in turn. Prints a line for each side: milliseconds (median), tokens/s and
peak GiB; flash-linear-attention and causal-conv1d are what transformers takes at import.

    python bench/hybrid_step.py [0.8B 9B 35B-A3B] [--tokens 8192] [--packed] [--steps 10] [--ours]
"""

import argparse
import gc
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import tigon
from bench.peers import imported

COMMON: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_theta": 1e7,
    "eos_token_id": None,
}


def shape(model_type: str, hidden: int, layers: int, heads: tuple[int, ...], **more: Any) -> Any:
    """config.json of `heads` of queries, keys, and of keys and values of Gated DeltaNet."""
    names = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads")
    sizes = dict(zip((*names, "linear_num_value_heads"), heads, strict=True))
    sizes |= {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers}
    return COMMON | sizes | more


SHAPES = {
    "0.8B": shape(
        *("qwen3_5_text", 1024, 24, (8, 2, 16, 16)),
        intermediate_size=3584,
        tie_word_embeddings=True,
    ),
    "9B": shape("qwen3_5_text", 4096, 32, (16, 4, 16, 32), intermediate_size=12288),
    "35B-A3B": shape("qwen3_5_moe_text", 2048, 8, (16, 2, 16, 32)),  # 8 of 40 layers
}


def ours(config: dict[str, Any]) -> Any:
    return tigon.models.MODELS[config["model_type"]].from_config(
        config, dtype=torch.bfloat16, device="cuda"
    )


def theirs(config: dict[str, Any]) -> Any:
    make: Any = imported("transformers:AutoModelForCausalLM")
    read: Any = imported("transformers:AutoConfig")
    with torch.device("cuda"):
        model = make.from_config(
            read.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.config.use_cache = False
    return model


def measure(model: Any, tokens: int, steps: int, packed: bool) -> str:
    """Trains for `steps` after three that compile, and describes the median and the peak."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, 248000, (1, tokens), device="cuda")
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if packed:  # chats of 700 tokens
        bounds = [*range(0, tokens, 700), tokens]
        inputs |= {"cu_seq_lens": torch.tensor(bounds), "max_length_q": 700}
    times = []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    middle = sorted(times[3:])[steps // 2]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return f"{middle * 1e3:9.1f} ms {tokens / middle:10,.0f} tokens/s {peak:7.1f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--packed", action="store_true", help="chats of 700 tokens; ours alone")
    parser.add_argument("--ours", action="store_true", help="without transformers")
    options = parser.parse_args()
    if unknown := set(options.shapes) - SHAPES.keys():
        parser.error(f"unknown {', '.join(unknown)}: give some of {', '.join(SHAPES)}")
    found = {name: importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d")}
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {found}", flush=True)
    sides = {"tigon": ours} | ({} if options.ours or options.packed else {"transformers": theirs})
    for name in options.shapes or SHAPES:
        for side, build in sides.items():
            torch.cuda.reset_peak_memory_stats()
            try:
                model = build(SHAPES[name])
                text = measure(model, options.tokens, options.steps, options.packed)
            except torch.OutOfMemoryError:
                text = "out of memory"
            model = None
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{name:<8} {side:<13} {text}", flush=True)


if __name__ == "__main__":
    main()
