"""Operations of a step against counts that are written out by hand, and published ones."""

import numpy as np
import pytest
import torch

import tigon
from tests.support.small import EXPERTS, LLAMA
from tigon.layers import FusedLinear, GatedDeltaNet, ShortConv
from tigon.train.throughput import PEAKS, Cost, named_peak, peak_flops, positions_seen

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip


def make(values):
    return tigon.models.MODELS[values["model_type"]].from_config(values, device="meta")


@pytest.mark.parametrize(
    ("values", "length", "giga"),
    [
        (LLAMA_8B, 2048, "46.64"),
        (LLAMA_8B, 4096, "48.25"),
        (LLAMA_8B, 8192, "51.47"),
        (LLAMA_70B, 4096, "433.1"),
        (LLAMA_70B, 8192, "449.2"),
    ],
)
def test_published_counts_of_a_token(values, length, giga):
    found = Cost.of(make(values))([length]) / length / 1e9
    digits = len(giga.partition(".")[2])
    assert f"{found:.{digits}f}" == giga


def test_windows_bound_what_a_token_sees():
    values = LLAMA | {"model_type": "gemma2", "sliding_window": 3, "head_dim": 16}
    values = values | {"query_pre_attn_scalar": 16}
    model = make(values)
    windows = [layer.self_attn.window for layer in model.model.layers]
    assert windows == [3, None]
    # Tokens of a sequence of 6 see 1, 2, 3, 3, 3 and 3 positions through the window
    layer = 64 * 64 + 64 * 64 + 64 * 64 + 3 * 64 * 96
    expected = 6 * (2 * layer + 321 * 64) * 6 + 12 * 4 * 16 * (15 + 21)
    assert Cost.of(model)([6]) == expected
    for length in range(1, 9):
        mask = torch.ones(length, length).tril()
        (full,), (windowed,) = (positions_seen(np.array([length]), w) for w in (None, 3))
        assert (full, windowed) == (mask.sum(), mask.triu(-2).sum())


def test_experts_count_where_tokens_are_routed_to():
    model = make(EXPERTS | {"head_dim": 16})
    attention = 64 * (64 + 64) + 64 * 64
    dense, sparse = 3 * 64 * 96, 64 * 5 + 2 * 3 * 64 * 40  # two of five experts, and the router
    expected = 6 * (2 * attention + dense + sparse + 321 * 64) * 4 + 2 * 12 * 4 * 16 * 10
    assert Cost.of(model)([4]) == pytest.approx(expected, rel=1e-12)
    shared = make(
        EXPERTS
        | {"model_type": "qwen2_moe", "mlp_only_layers": [0, 1]}
        | {"shared_expert_intermediate_size": 24}
    )
    with_shared = make(EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24})
    more = 64 * 5 + 2 * 3 * 64 * 40 + 3 * 64 * 24 + 64 - 3 * 64 * 96
    found = Cost.of(with_shared)([1]) - Cost.of(shared)([1])
    assert found == pytest.approx(6 * more, rel=1e-12)


def test_what_is_frozen_needs_fewer():
    model = make(LLAMA | {"tie_word_embeddings": False})
    whole = Cost.of(model)([4])
    first = model.model.layers[0]
    first.requires_grad_(False)
    layer = sum(p.numel() for p in first.parameters() if p.dim() == 2)
    assert whole - Cost.of(model)([4]) == 2 * layer * 4  # the embedding is below it
    model.model.embed_tokens.requires_grad_(False)
    # No gradient passes the first block, nor into the first product of the second
    norm = model.model.layers[1].input_layernorm
    assert norm.weight.requires_grad
    attention = 8 * 4 * 16 * 10
    assert whole - Cost.of(model)([4]) == 4 * layer * 4 + attention
    norm.requires_grad_(False)
    qkv = model.model.layers[1].self_attn.qkv_proj.weight.numel()
    assert whole - Cost.of(model)([4]) == 4 * layer * 4 + attention + 2 * qkv * 4


@pytest.mark.parametrize("family", sorted(tigon.models.MODELS))
def test_every_matrix_of_a_family_is_counted(family):
    """But for embeddings: a new kind of layer must not be forgotten."""
    sizes = {k: v for k, v in EXPERTS.items() if k != "mlp_only_layers"}
    known = tigon.models.MODELS[family].config_class.__dataclass_fields__
    values = {k: v for k, v in sizes.items() if k in known} | {"model_type": family}
    if "pad_token_id" in known:
        values["pad_token_id"] = 0  # of the small vocabulary
    if "num_local_experts" in known:
        values["num_local_experts"] = 5
    if "n_routed_experts" in known:
        values |= {"n_routed_experts": 5, "n_group": 1, "topk_group": 1}
    if "num_dense_layers" in known:
        values |= {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
    if "num_kv_shared_layers" in known:
        values["num_kv_shared_layers"] = 0
    if "kv_lora_rank" in known:  # keys of every head
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "num_experts_per_tok" in known:
        values["num_experts_per_tok"] = 5  # all, so that all count
    model = make(values)
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.dim() > 1}
    head = "model.embed_tokens.weight" if model.config.tie_word_embeddings else ""
    matrices = {n: x for n, x in matrices.items() if "embed_tokens" not in n or n == head}
    assert any(isinstance(m, FusedLinear) for m in model.modules())
    mixers = [layer.mixer for layer in model.model.layers]
    delta = [x for x in mixers if isinstance(x, GatedDeltaNet)]
    values = getattr(model.config, "v_head_dim", None)  # else those of keys
    softmax = [x for x in mixers if not isinstance(x, GatedDeltaNet | ShortConv)]
    attention = sum(6 * x.heads * (x.head_dim + (values or x.head_dim)) for x in softmax)
    recurrence = sum(18 * x.value_heads * x.key_dim * x.value_dim for x in delta)
    expected = 6 * sum(matrices.values()) + attention + recurrence
    assert Cost.of(model)([1]) == pytest.approx(expected, rel=1e-12)


def test_peaks_by_name():
    assert named_peak("NVIDIA H100 80GB HBM3") == 989.4e12
    assert named_peak("NVIDIA H100 PCIe") == 756.5e12
    assert named_peak("NVIDIA H200") == 989.4e12
    assert named_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert named_peak("NVIDIA L40S") == 362.1e12
    assert named_peak("NVIDIA A10G") == 70e12
    assert named_peak("NVIDIA RTX 6000 Ada Generation") == 364.2e12
    assert named_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert named_peak("Some GPU") is None
    for name, peak in PEAKS.items():
        assert named_peak(f"NVIDIA {name}") == peak * 1e12, name
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
