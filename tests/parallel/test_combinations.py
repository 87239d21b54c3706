"""Layouts of four ranks together with settings that change how gradients are kept and
summed, against one rank: losses, norms of gradients, weights and their averages."""

from typing import Any

import pytest

from tests.parallel.test_products import assert_four_are_as_one, one_and_four, run_all
from tests.parallel.test_tensor import BALANCED, MOE, WINDOW
from tests.train.conftest import workspace
from tests.train.ranks import Ranks

__all__ = ["workspace"]
# Updates in backward need one micro-batch a step on each rank. One rank has two of that size, as
# experts are balanced within a micro-batch
IN_BACKWARD = {"batch_size": 4, "micro_batch_size": 2, "max_grad_norm": 0, "lr": 0.1}
IN_BACKWARD |= {"packing": "false", "truncate": "true"}
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-2}
# The model type and its config, the layout, settings of both runs, and of that on four ranks
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "context, tensor and expert": (
        "qwen3_moe",
        MOE | {"num_experts": 8, "mlp_only_layers": [0]},
        {"context": 2, "tensor": 2, "expert": 4},
        {"ema_decay": 0.5, "activation_offload": "true"},
        {},
    ),
    "fsdp, tensor and expert": (
        "mixtral",
        BALANCED | {"num_local_experts": 8},
        {"tensor": 2, "expert": 2},
        {"ema_decay": 0.5, **IN_BACKWARD},
        {"optimizer_in_backward": "true"},
    ),
    "replicate and tensor": (
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"replicate": 2, "tensor": 2},
        {"ema_decay": 0.5, "loss_reduction": "sequence", "logits_to_keep": 6, **IN_BACKWARD},
        {"optimizer_in_backward": "true"},
    ),
    "context and tensor, windows": (
        "gemma3_text",
        {"num_key_value_heads": 1, **WINDOW},
        {"context": 2, "tensor": 2},
        {"ema_decay": 0.5, "activation_offload": "true"},
        {},
    ),
    "four ranks of tensor, windows": (
        "gemma2",
        WINDOW,
        {"tensor": 4},
        {"ema_decay": 0.5, "activation_checkpointing": "true", **IN_BACKWARD},
        {"optimizer_in_backward": "true", "micro_batch_size": 4},
    ),
}


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_combinations_are_as_one_rank(workspace: Any, name: str) -> None:
    kind, changes, parallel, own, of_four = CASES[name]
    one, four = one_and_four(workspace, name, kind, changes, parallel, **LOSS, **own)
    Ranks(1, run_all, {}, [one]).finish()
    changed = [f"{key}={value}" for key, value in of_four.items()]
    Ranks(4, run_all, parallel, [[*four, *changed]]).finish()
    assert_four_are_as_one(workspace, name, ("hf", "hf-ema"))
