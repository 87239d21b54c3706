"""Tiny models of transformers that expose mistakes.

A new family adds its row to `dense_cases.py` or `sparse_cases.py`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

from tests.models.dense_cases import DENSE, SIZES, Overrides
from tests.models.sparse_cases import SPARSE
from tests.support.numbers import float64
from tigon.models import MODELS, CausalLM, from_pretrained
from tigon.models.config import ModelConfig

CASES = DENSE | SPARSE
# What is chosen by a hair's breadth in fp32 is another in bf16: there all experts are taken
IN_BF16: dict[str, Overrides] = {
    **{m: {"num_local_experts": 6, "num_experts_per_tok": 6} for m in ("mixtral", "gpt_oss")},
    "gemma4_text": {"num_experts": 6, "top_k_experts": 6},
    **{
        name: {"num_experts": 6, "num_experts_per_tok": 6}
        for name in (
            *("lfm2_moe", "olmoe"),
            *("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next"),
        )
    },
    "llama4_text": {"num_local_experts": 5, "num_experts_per_tok": 5},
    **{
        name: {"n_routed_experts": 6, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
        for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mistral4")
    },
}
# Families with scores that are not scaled: with queries of norm 1 attention would see one token
UNSCALED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
EVERY = [(model_type, case) for model_type, cases in CASES.items() for case in cases]
FIRST = [(model_type, next(iter(cases))) for model_type, cases in CASES.items()]

# Families of which transformers has no text class: the multimodal type, and a small rest of it
WRAPPED: dict[str, tuple[str, Overrides]] = {
    "muse_glimmer_text": (
        "muse_glimmer",
        {
            "projector_hidden_size": 24,
            "out_hidden_size": 64,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
            },
        },
    )
}


class MuseGlimmerText(MuseGlimmerForConditionalGeneration):
    """transformers' class without its vision tower, which texts do not use."""

    def __init__(self, config: Any):
        super().__init__(config)
        for name in ("vision_tower", "vision_adapter", "vision_projection"):
            delattr(self.model, name)


MuseGlimmerText.__name__ = MuseGlimmerForConditionalGeneration.__name__  # what it saves

AutoModelForCausalLM.register(MuseGlimmerConfig, MuseGlimmerText, exist_ok=True)
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def their_config(model_type: str, **values: Any) -> Any:
    """transformers' config of these values, or the multimodal one around it."""
    if model_type not in WRAPPED:
        return AutoConfig.for_model(model_type, **values)
    outer, rest = WRAPPED[model_type]
    shared = {key: values[key] for key in ("dtype", "tie_word_embeddings") if key in values}
    text = {"model_type": model_type, **values}
    return AutoConfig.for_model(outer, text_config=text, **rest, **shared)


def reference(
    model_type: str,
    overrides: Overrides,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    **save: Any,
) -> Any:
    """transformers' model in evaluation mode, saved to the directory.

    Its norms, biases and saved buffers are random, and its matrices large enough that no error
    hides.
    """
    torch.manual_seed(0)
    config = their_config(model_type, **SIZES | overrides, dtype=dtype)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-5, 1)  # some heads remember
            elif p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p.copy_(torch.randn_like(p) * 0.08)  # 4 times transformers' own, the pad row too
            if model_type in UNSCALED and name.endswith("q_norm.weight"):
                p.mul_(0.2)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.to(dtype).eval().save_pretrained(directory, **save)
    return model


def load_case(model_type: str, case: str, directory: Path) -> CausalLM:
    """Our model of a case, loaded from transformers' checkpoint of it."""
    reference(model_type, CASES[model_type][case], directory)
    return from_pretrained(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def on_meta(config: ModelConfig) -> CausalLM:
    """The model of a config, without weights."""
    return MODELS[config.model_type].from_config(config, dtype=torch.float32, device="meta")


def windows(config: ModelConfig) -> list[int | None]:
    """Of the attention of each layer; None where it has none, or chunks."""
    mixers = [layer.mixer for layer in on_meta(config).model.layers]
    return [None if getattr(m, "chunked", False) else getattr(m, "window", None) for m in mixers]


def load_reference(directory: Path, attention: str = "eager", dtype: Any = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=attention, dtype=dtype
    ).eval()


def random_ids(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, 211, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def exact(model: Any) -> Any:
    """transformers' model again in float64, RoPE's frequencies too; to be called in `float64()`."""
    weights = model.state_dict()
    with float64():
        twin = AutoModelForCausalLM.from_config(
            model.config,
            attn_implementation="eager",
            experts_implementation="eager",  # the grouped product takes no float64
            dtype=torch.float64,
        ).double()  # what transformers keeps in fp32, too
    twin.load_state_dict(weights)
    state = (*twin.parameters(), *twin.buffers())
    assert all(t.dtype == torch.float64 for t in state if t.is_floating_point())
    return twin.eval()
