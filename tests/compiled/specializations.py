"""python -m tests.compiled.specializations MODEL...: counts how often shapes compile kernels again.

Triton specializes a kernel: it compiles it for each value of a constant, and once more for numbers
that are 1 or multiples of 16. Here tiny models train, score, write and serve with batches of random
shapes, and kernels that do nothing. Prints as JSON, of each model, the number of specializations of
each kernel with the values of arguments that differ, and how many of them a server lacks when it
says that it is ready.

# N rows, C columns
"""

import collections
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import tigon
from tests.compiled import compiling
from tests.compiled.compiling import zeros
from tigon.eval.likelihood import log_likelihoods
from tigon.kernels import runtime, use
from tigon.kernels.linear.dropout import Dropout, apply_dropout
from tigon.kernels.linear.fp8_casts import cast_both, cast_columns, cast_rows_and_maxima
from tigon.kernels.linear.fp8_mlp import cast_gated_gradients, cast_gated_rows
from tigon.kernels.linear.low_rank import low_rank_gradients, low_rank_product
from tigon.kernels.mlp.slot_order import sort_slots
from tigon.models import CausalLM
from tigon.serve.batch import DecodeBatch

ROUNDS, SERVED_ROWS = 24, 21
# Of each kernel and model at most so many, and 2 of others: shapes decide on few things alone
MOST = {
    "_append_attention_kernel": 20,  # queries, splits, room for the next kernel; with rotation
    "combine_kernel": 6,  # splits
    "conv_forward_kernel": 20,  # few or many chunks; packed, with a state, in a step
    "conv_backward_kernel": 5,
    "_gemv_kernel": 6,  # a layer each
    "norm_forward_kernel": 16,  # of each width
    "norm_backward_kernel": 8,
    "rms_norm_kernels._sum_kernel": 5,  # of each width
    "delta_gates._forward_kernel": 3,  # the step of one row's columns is their number
    "_rope_kernel": 12,  # forward and back, packed or not, of one token or more
    "_step_kernel": 4,  # of one token or more
    "_scan_kernel": 4,  # few or many programs, with or without a state before
    "softmax_topk._forward_kernel": 3,  # rows that fill tiles, and one, spare the masks
    "softmax_topk._backward_kernel": 3,
    "_place_kernel": 3,  # few, more, and many slots
    "_rows_kernel": 4,
    "_gated_act_kernel": 4,
}
DEFAULT_MOST = 2

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CLAMPED = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 128,  # a quarter of it is rotated
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, tuple[type[CausalLM], dict[str, Any]]] = {
    "llama": (tigon.Llama, {}),
    "qwen3": (tigon.Qwen3, {}),
    "gemma3": (tigon.Gemma3, {"sliding_window": 24}),
    "qwen3_moe": (tigon.Qwen3Moe, EXPERTS),
    "gpt_oss": (tigon.GptOss, CLAMPED),
    "qwen3_5": (tigon.Qwen3_5, DELTA),
    "lfm2": (tigon.Lfm2, {"layer_types": ["conv", "full_attention"]}),
    "deepseek_v3": (tigon.DeepseekV3, LATENTS),
}
OPERATORS = "operators"  # in place of a model: those that no model here calls

Values = dict[str, str]  # what a kernel is compiled for, by argument
specializations: dict[str, list[Values]] = collections.defaultdict(list)


def watch() -> None:
    """From now on launches are noted in place of running, as on a H200."""
    compiling.pretend()
    JITFunction.__getitem__ = _note
    _replace(runtime.num_sms, lambda x: 132)
    # Small launches may begin early; of models this small, some have to be large
    _replace(runtime.pdl_options, lambda x: {"PDL": x.numel() <= 1 << 14})
    fill_memory()


def fill_memory() -> None:
    """From now on memory is full of zeros, as what no kernel has written is read."""
    for owner, name in (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"):
        setattr(owner, name, _zeroing(getattr(owner, name)))


def _replace(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Puts another function in the place of one, wherever it was imported."""
    for module in list(sys.modules.values()):
        if vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, other)


def _zeroing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        x = make(*args, **options)
        return x if x.is_meta else x.zero_()

    return made


def _note(kernel: JITFunction, grid: Any) -> Any:
    name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"

    def launch(*args: Any, **options: Any) -> None:
        *_, bind = kernel.device_caches[0]
        arguments, values, rest = bind(*args, **options)
        each = dict(zip(arguments, map(str, values), strict=True))
        each |= {key: str(value) for key, value in rest.items()}
        if each not in specializations[name]:
            specializations[name].append(each)

    return launch


def lengths(draw: random.Random) -> list[int]:
    """Of the sequences of a batch; often one, or of one token, or of a multiple of 16."""
    count = draw.choice([1, 1, 2, 3, 8, 16, SERVED_ROWS])
    return [draw.choice([1, 16, *(draw.randint(1, 90) for _ in "ab")]) for _ in range(count)]


def ids(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(SIZES["vocab_size"]), k=count)


def train(model: CausalLM, draw: random.Random) -> None:
    """A step on packed sequences, or on rows of one length, with few or many labels."""
    sizes, options = lengths(draw), {}
    if draw.random() < 0.3:
        tokens = torch.tensor([ids(draw, sizes[0]) for _ in sizes])
    else:
        tokens = torch.tensor([ids(draw, sum(sizes))])
        options = {"cu_seq_lens": torch.tensor([0, *sizes]).cumsum(0)}
    labels = torch.where(torch.rand(tokens.shape) < draw.random(), tokens, -100)
    model(tokens, labels=labels, **options).loss.backward()


def score(model: CausalLM, draw: random.Random) -> None:
    """Questions with some answers each, as lm-eval asks them."""
    requests = []
    for length in lengths(draw):
        context = ids(draw, length)
        answers = draw.choice([1, 1, 2, 4])
        requests += [(context, ids(draw, draw.randint(1, 40))) for _ in range(answers)]
    log_likelihoods(model, requests, tokens_per_batch=draw.choice([100, 400, 2000]))


def write(model: CausalLM, draw: random.Random) -> None:
    """Some tokens after padded prompts."""
    sizes = lengths(draw)
    rows = [[0] * (max(sizes) - n) + ids(draw, n) for n in sizes]
    mask = [[0] * (max(sizes) - n) + [1] * n for n in sizes]
    options = {"attention_mask": torch.tensor(mask), "max_new_tokens": draw.randint(1, 4)}
    model.generate(torch.tensor(rows), **options)


def serve(batch: DecodeBatch, draw: random.Random) -> None:
    """Prompts that a server reads at once, and a step."""
    sizes = lengths(draw)
    start = draw.randint(0, SERVED_ROWS - len(sizes))
    batch.begin(start, [ids(draw, n) for n in sizes]).read(batch.model)
    batch.step(draw.randint(1, SERVED_ROWS), False)


def launch_operators(draw: random.Random) -> None:
    """Launches what trains adapters, experts and in 8 bits, on as many rows as a pack has."""
    N, C = sum(lengths(draw)), 128
    sort_slots(zeros(N * 2, dtype=torch.int64), 8, False, fused=True)
    u, factors = zeros(N, 16), [zeros(C, 16)]
    low_rank_product(u, factors, [0], [1.0], C, None, False)
    low_rank_gradients(zeros(N, C), u, factors, [0], [1.0], True)
    x = zeros(N, C)
    apply_dropout(x, Dropout(zeros(N, dtype=torch.int64), draw.randint(0, 99), 99))
    cast_rows_and_maxima(x)
    cast_both(x)
    cast_columns(x)
    cast_gated_rows(zeros(N, 2 * C), "silu")
    cast_gated_gradients(x, zeros(N, 2 * C), "silu")


def run_model(model: CausalLM, draw: random.Random) -> dict[str, int]:
    """Runs a model on random shapes; returns how many specializations a ready server lacked."""
    with torch.inference_mode():
        batch = DecodeBatch(model.eval(), SERVED_ROWS, 160)
        batch.warm_up(None)
        ready = {kernel: len(each) for kernel, each in specializations.items()}
        for _ in range(2 * ROUNDS):
            serve(batch, draw)
    late = {kernel: len(each) - ready.get(kernel, 0) for kernel, each in specializations.items()}
    for _ in range(ROUNDS):
        for work in train, score, write:
            model.train(work is train)
            work(model, draw)
    return {kernel: count for kernel, count in late.items() if count}


def count(name: str) -> dict[str, Any]:
    """The specializations of each kernel, with what differs between them, and those that come
    late."""
    specializations.clear()
    draw, late = random.Random(0), dict[str, int]()
    with use("triton"):
        if name == OPERATORS:
            for _ in range(ROUNDS):
                launch_operators(draw)
        else:
            kind, sizes = MODELS[name]
            # In bfloat16 caches are plain torch's on a CPU
            late = run_model(kind.from_config(SIZES | sizes, dtype=torch.float16), draw)
    kernels = {kernel: [len(each), _differences(each)] for kernel, each in specializations.items()}
    return {"kernels": kernels, "late": late}


def _differences(each: list[Values]) -> dict[str, list[str]]:
    values = {key: sorted({one.get(key, "") for one in each}) for key in each[0]}
    return {key: found for key, found in values.items() if len(found) > 1}


if __name__ == "__main__":
    watch()
    json.dump({name: count(name) for name in sys.argv[1:]}, sys.stdout, indent=1)
