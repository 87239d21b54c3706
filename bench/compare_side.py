"""One side of bench/compare.py: measures the tree that `import tigon` finds, prints JSON lines.

It uses only what both trees have (`from_config`, `model(ids, labels=...)`, `generate`, the list of
blocks) and imports nothing of bench/, which would belong to one of them.
"""

import gc
import json
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]
Step = Callable[[], Tensor]

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim")


def config(model_type: str, *sizes: int, **more: Any) -> Record:
    """What config.json says of a model; nobody stops early."""
    base = {"model_type": model_type, "eos_token_id": None, "max_position_embeddings": 32768}
    return base | dict(zip(SIZES, sizes, strict=True)) | more


LLAMA_1B = config("llama", 128256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True)
LLAMA_1B |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
GEMMA3_1B = config("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256, tie_word_embeddings=True)
GEMMA3_1B |= {"query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6}
GEMMA3_1B |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
QWEN3_MOE = config("qwen3_moe", 151936, 2048, 6144, 4, 32, 4, 128, tie_word_embeddings=False)
QWEN3_MOE |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_MOE |= {"norm_topk_prob": True, "max_position_embeddings": 40960}
MODELS = {"Llama": LLAMA_1B, "Gemma3": GEMMA3_1B, "Qwen3Moe": QWEN3_MOE}
TINY = dict(zip(SIZES, (512, 64, 96, 2, 4, 1, 16), strict=True))
TINY |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
TINY |= {"num_local_experts": 8}
TINY |= {"sliding_window": 8, "sliding_window_pattern": 2}
NEW_TOKENS = (32, 160)  # of the short and of the long generation


# Kind, a key of MEASURE; a class of Tigon; batch; tokens
CASES: dict[str, tuple[str, str, int, int]] = {
    "Llama-3.2-1B 2 x 8192": ("step", "Llama", 2, 8192),
    "Gemma3-1B 2 x 8192": ("step", "Gemma3", 2, 8192),
    "Qwen3-30B-A3B, 4 layers, 1 x 8192": ("step", "Qwen3Moe", 1, 8192),
    "decode 1 x 1024": ("decode", "Llama", 1, 1024),
    "decode 64 x 1024": ("decode", "Llama", 64, 1024),
    "host time 1 x 512": ("host", "Llama", 1, 512),
    "compile blocks": ("compile_blocks", "Llama", 2, 8192),
    "compile whole": ("compile_whole", "Llama", 2, 8192),
}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def build(name: str, device: str, tiny: bool) -> Any:
    """A model whose matrices are drawn by their names, so that the order of creation is free."""
    import tigon

    sizes = TINY if tiny else {}
    shape = {key: sizes.get(key, value) for key, value in MODELS[name].items()}
    model = getattr(tigon, name).from_config(shape, dtype=torch.bfloat16, device=device)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            seed = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            weight.normal_(std=0.02, generator=seed)
    return model


def stepping(model: Any, ids: Tensor) -> Step:
    """Forward and backward; no optimizer."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return step


def laps(step: Step, count: int) -> list[float]:
    """Milliseconds of each of `count` steps in a row, by the device's clock if it has one."""
    wait()
    if not torch.cuda.is_available():
        times = [time.perf_counter()]
        for _ in range(count):
            step()
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    wait()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def time_step(model: Any, ids: Tensor, tiny: bool) -> Record:
    """Milliseconds of forward and backward, and what they give."""
    step = stepping(model.train(), ids)
    loss = float(step())
    laps(step, 2)  # warms up
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    found = {"loss": loss, "gradient_norm": float(torch.stack(norms).norm())}
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    found["ms"] = median(laps(step, 2 if tiny else 12))
    if ids.is_cuda:
        found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def time_decoding(model: Any, ids: Tensor, tiny: bool) -> Record:
    """Milliseconds of a step of the batch: a long generation less a short one."""
    model.eval()
    tokens: list[Tensor] = []

    def generate(new: int) -> float:
        wait()
        start = time.perf_counter()
        out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=[])
        wait()
        tokens[:] = [out]
        return time.perf_counter() - start

    short, long = (2, 6) if tiny else NEW_TOKENS
    generate(long)
    pairs = [(generate(short), generate(long)) for _ in range(1 if tiny else 4)]
    return {
        "ms": median(1e3 * (b - a) / (long - short) for a, b in pairs),
        "tokens_crc": f"{zlib.crc32(tokens[0].cpu().numpy().tobytes()):08x}",
    }


def time_host(model: Any, ids: Tensor, tiny: bool) -> Record:
    """Milliseconds until the host returns from forward and backward; the device is not awaited.

    The least of many: what else runs on the machine can only add to it.
    """
    step = stepping(model.train(), ids)
    loss = float(step())
    laps(step, 4)  # warms up
    times = []
    gc.collect()
    gc.disable()
    for _ in range(3 if tiny else 60):
        wait()
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    gc.enable()
    return {"loss": loss, "ms": min(times)}


def time_compiling(model: Any, ids: Tensor, tiny: bool, whole: bool) -> Record:
    """Seconds of the first compiled step, its number of graphs, milliseconds before and after."""
    from torch._dynamo.utils import counters

    count = 2 if tiny else 8
    step = stepping(model.train(), ids)
    step()  # compiles Tigon's own kernels, which are not counted here
    found: Record = {"eager_loss": float(step()), "eager_ms": median(laps(step, count))}
    counters.clear()
    if whole:
        step = stepping(torch.compile(model, fullgraph=True), ids)
    else:
        for block in model.model.layers:
            block.compile()
    start = time.perf_counter()
    found["loss"] = float(step())
    wait()
    found["compile_s"] = time.perf_counter() - start
    found["graphs"] = counters["stats"]["unique_graphs"]
    step()
    return found | {"ms": median(laps(step, count))}


MEASURE: dict[str, Callable[[Any, Tensor, bool], Record]] = {
    "step": time_step,
    "decode": time_decoding,
    "host": time_host,
    "compile_blocks": partial(time_compiling, whole=False),
    "compile_whole": partial(time_compiling, whole=True),
}


def measure(name: str, tiny: bool) -> Record:
    kind, family, *shape = CASES[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(family, device, tiny)
    shape = [min(shape[0], 2), 24] if tiny else shape
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, shape, generator=seed).to(device)
    return MEASURE[kind](model, ids, tiny)


def main(names: list[str], tiny: bool) -> None:
    import tigon

    tree = str(Path(tigon.__file__).resolve().parents[1])
    print(json.dumps({"kind": "tree", "tree": tree, "version": tigon.__version__}), flush=True)
    for name in (name for name in CASES if name in names):
        try:
            found = measure(name, tiny)
        except Exception as error:  # the other cases go on
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"kind": "case", "case": name, **found}), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1] == "tiny")
