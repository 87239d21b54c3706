"""Bytes and operations that benchmarks divide by are those counted by hand."""

from dataclasses import replace

import pytest
import torch

import tigon
from bench import generate_cases, generate_families, kernels, train_cases
from bench.attention_cases import CASES as ATTENTION_CASES
from bench.generate_cases import LLAMA_8B, OURS, Size
from bench.harness import Record
from tests.bench.small import RAGGED_ATTENTION, SMALL_LLAMA


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    kernel_bytes = {case.name: tuple(case.bytes.values()) for case in kernels.CASES}
    expected = {
        # 67,108,864 elements: x, y; then x, dy, dx
        "rms_norm 16384x4096": (268_435_456, 671_088_640),
        # 234,881,024 elements: gate, up, y; then gate, up, dy, dgate, dup
        "gated_act silu 16384x14336": (1_409_286_144, 3_758_096_384),
        # 16384 tokens x 40 heads x 128, and 6 + 6 bytes there and back; dv in and out again is
        # 4 bytes of 16,777,216
        "qk_norm_rope B2 T8192 32/8x128": (335_544_320, 905_969_664),
        "cross_entropy 8192x128256": (4_202_692_608,),
    }
    assert expected.items() <= kernel_bytes.items()
    # 1 GiB of logits, dX of 64 MiB, dW of 1002 MiB, and that in fp32
    memory = {case.name: case.memory for case in kernels.CASES}
    assert memory["linear_cross_entropy dense 8192, 4096, 128256"] == 1024 + 64 + 3 * 1002
    # 5 tokens see 1 + 2 + 3 + 3 + 3, 3 see 1 + 2 + 3, 1 sees 1, 7 see 1 + 2 + 5 * 3
    assert RAGGED_ATTENTION.flops == 4 * (12 + 6 + 1 + 18) * 4 * 16
    full = next(case for case in ATTENTION_CASES if case.name == "rows 2 x 8192")
    assert full.flops == 4 * 2 * (8192 * 8193 // 2) * 32 * 128
    size, (_, many, _) = Size(LLAMA_8B), generate_cases.CASES
    # 32 layers x 8 heads x (key, value) of 128 elements
    assert size.cached() == 131_072 and size.step(many, OURS)["cache"] == 64 * 1151.5 * 131_072
    # 8192 tokens: 32768 for the stream, 10240 queries and keys, 43008 for the gate; embedding, head
    layers = 32 * 8192 * (32768 + 10240 + 43008)
    assert size.passes(8192) == 2 * (layers + 8192 * 8192 + 128256 * 4096)


@pytest.mark.parametrize("more", [{}, SMALL_LLAMA, SMALL_LLAMA | {"tie_word_embeddings": True}])
def test_generation_bytes_are_those_of_the_model(more: Record) -> None:
    config = LLAMA_8B | more
    model = tigon.Llama.from_config(config | {"model_type": "llama"}, device="meta")
    assert Size(config).parameters == sum(p.numel() for p in model.parameters())
    products = [p.shape for n, p in model.named_parameters() if "layers.0" in n and p.dim() == 2]
    assert sorted(Size(config).products) == sorted(map(tuple, products))


def test_bytes_of_a_step_of_experts_and_of_recurrent_states() -> None:
    shape = train_cases.MODELS["Qwen3.5-35B-A3B"][2]
    shape = shape | {k: v for k, v in generate_families.SMALL.items() if k in shape}
    model = tigon.Qwen3_5Moe.from_config(shape, dtype=torch.bfloat16, device="meta")
    case = replace(generate_families.decoding(3, tiny=True), context=100)
    bytes_read = generate_families.moved(model, case)
    # 4 layers of 8 experts, of which 3 rows choose 2 each: all but 0.75^3 of them
    experts = 4 * 8 * 3 * 64 * 32
    others = sum(p.nbytes for p in model.parameters()) - 2 * experts - 2 * 512 * 64  # embedding
    assert bytes_read["parameters"] == pytest.approx(others + 2 * experts * (1 - 0.75**3))
    # 1 layer of keys and values of 102 or 103 tokens; 3 of a state in fp32 of 32 heads of 128 by
    # 128, and 3 tokens of convolutions of 2 * 16 + 32 heads, there and back
    keys = 3 * round(case.held(OURS)) * 2 * 16 * 2
    state = 3 * 3 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)
    assert bytes_read["cache"] == pytest.approx(keys + 2 * state, rel=1e-3)
