"""What one more layer keeps for backward, and what it computes again."""

from typing import Any

import pytest
import torch

from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES
from tests.support.contract import Outputs
from tests.support.saved import saved_storages
from tigon.kernels import use
from tigon.models import MODELS, CausalLM
from tigon.models.config import FULL, SLIDING
from tigon.train.memory_tracker import Ledger, MemoryTracker, model_tensors

B, T = 2, 4096
C, I, H, K, D, P = 2048, 4096, 8, 4, 128, 256  # noqa: E741
BIG: dict[str, Any] = {"hidden_size": C, "intermediate_size": I, "vocab_size": 256, "head_dim": D}
BIG |= {"num_attention_heads": H, "num_key_value_heads": K, "max_position_embeddings": T}
DELTA = {"linear_num_key_heads": K, "linear_num_value_heads": H}
DELTA |= {"linear_key_head_dim": D, "linear_value_head_dim": D}
PER_LAYER = {"hidden_size_per_layer_input": P, "vocab_size_per_layer_input": 256}
# Gate and up, the packed projection, attention's output, and 1 / rms or the log-sum-exp of heads
COMMON = 2 * I + (H + 2 * K) * D + H * D
# Numbers of a token: sums of the stream, branches that are normed, and what else there is
KEPT: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 2 * C + COMMON),
    "qwen2": ({}, 2 * C + COMMON),
    "qwen3": ({}, 2 * C + COMMON),
    # Gate and up of three experts that have a quarter of an MLP's size
    "qwen3_moe": ({"moe_intermediate_size": I // 4}, 2 * C + COMMON - 2 * I + 3 * 2 * I // 4),
    "gemma3_text": ({"sliding_window": 64}, C + 2 * C + COMMON),
    # The convolution's input, the gate, and the delta rule's output
    "qwen3_5_text": (DELTA, 2 * C + 2 * I + (2 * K + H) * D + 2 * H * D),
    "olmo2": ({}, C + 2 * C + COMMON),
    # The branch of the layer's own input is computed again from its gated product; beside it are
    # the gate, its activation, the input, and the projection that this is a norm of
    "gemma4_text": (
        {"sliding_window": 64, "num_kv_shared_layers": 0, **PER_LAYER},
        C + 2 * C + 5 * P + COMMON,
    ),
    "gemma4_unified_text": (
        {"sliding_window": 64, "attention_k_eq_v": False, "num_global_key_value_heads": None},
        C + 2 * C + COMMON,
    ),
}


def make(model_type: str, layers: int, changes: dict[str, Any]) -> CausalLM:
    """On meta."""
    case = next(iter(CASES[model_type].values()))
    values = {"model_type": model_type} | SIZES | case | BIG | changes
    values |= {"num_hidden_layers": layers, "layer_types": None}
    if "sliding_window" in changes:
        values["layer_types"] = changes.get("layer_types", [*(layers - 1) * [SLIDING], FULL])
    model = MODELS[model_type].from_config(values, device="meta")
    return model.to("meta", torch.bfloat16).train()


def held(model: CausalLM) -> int:
    """Bytes that are alive after a forward."""
    ledger = Ledger()
    with use("triton"), MemoryTracker(ledger, model_tensors(model)):
        ids = torch.zeros(B, T, dtype=torch.int64, device="meta")
        loss = model(ids, labels=ids).loss
        total = ledger.total
    assert loss.requires_grad
    return total


# With the gates of attention, which are part of the packed projection
GATED = "qwen3_5_text", {"full_attention_interval": 1}, 2 * C + COMMON + H * D


@pytest.mark.parametrize(
    ("model_type", "changes", "numbers"),
    [*((kind, *kept) for kind, kept in KEPT.items()), GATED],
    ids=[*KEPT, "gates"],
)
def test_bytes_of_one_more_layer(model_type: str, changes: dict[str, Any], numbers: int) -> None:
    found = held(make(model_type, 3, changes)) - held(make(model_type, 2, changes))
    assert 0 <= found / (2 * B * T) - numbers < 0.01 * numbers


def test_the_second_embedding_is_not_kept() -> None:
    """It comes beside the first one, of which the first block's stream is."""
    model = make("gemma4_text", 2, KEPT["gemma4_text"][0])
    ids = torch.zeros(B, T, dtype=torch.int64, device="meta")
    with use("triton"), saved_storages() as kept:
        model(ids, labels=ids)
    numbers = {storage.nbytes() // (2 * B * T) for storage in kept.values()}
    assert C in numbers and C + 2 * P not in numbers


def test_readers_do_not_compute_shared_keys_again() -> None:
    more = {"global_head_dim": D, "num_kv_shared_layers": 2, "layer_types": 2 * [SLIDING, FULL]}
    model = make("gemma4_text", 4, KEPT["gemma4_text"][0] | more)
    ids = torch.zeros(B, T, dtype=torch.int64, device="meta")
    with use("triton"), Outputs() as seen:
        model(ids, labels=ids).loss.backward()
    # Two layers have keys of their own, and two read them: forward, and once more in backward
    assert seen.calls["tigon::qk_norm_rope"] == 2 + 2


def test_the_delta_rule_computes_its_inputs_again() -> None:
    """Once, for queries, keys and values together."""
    model = make("qwen3_5_text", 2, DELTA)
    ids = torch.zeros(B, T, dtype=torch.int64, device="meta")
    with use("triton"), Outputs() as seen:
        model(ids, labels=ids).loss.backward()
    assert seen.calls["tigon::causal_conv"] == 2 + 2
