"""TRL's trainers with Tigon's models: every logged value is that of transformers' own model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, disable_progress_bars

from tests.integrations.transformers.peers import pair, score_pair
from tests.integrations.transformers.words import (
    chat_rows,
    make_tokenizer,
    preference_rows,
    prompt_rows,
    text_rows,
)

disable_progress_bars()
STEPS: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
}
TIMES = ("runtime", "per_second", "step_time", "sampling_logp", "clock")
LOSSES = ("loss", "eval_loss", "train_loss")


def logged(
    kind: str, model: Any, directory: Path, rows: list[dict[str, Any]], **settings: Any
) -> list[dict[str, float]]:
    """What a trainer of this kind logs while it trains the model."""
    own = {
        k: settings.pop(k) for k in ("eval_dataset", "ref_model", "reward_funcs") & settings.keys()
    }
    if "eval_dataset" in own:
        own["eval_dataset"] = Dataset.from_list(own["eval_dataset"])
    args = getattr(trl, f"{kind}Config")(output_dir=str(directory), **STEPS | settings)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
        **own,
    )
    trainer.train()
    return trainer.state.log_history


def assert_same_logs(theirs: list[dict[str, float]], ours: list[dict[str, float]]) -> None:
    """The same keys at each step, losses within 1e-4 and other values within 2e-3."""
    assert len(ours) == len(theirs) > 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            if any(part in key for part in TIMES):
                continue
            most = 1e-4 if key in LOSSES else 2e-3
            assert math.isclose(mine[key], value, rel_tol=0, abs_tol=most), key


def compare(
    kind: str, models: Any, directory: Path, rows: Any, references: Any = None, **settings: Any
) -> list[dict[str, float]]:
    """Trains transformers' model and Tigon's; what is logged of both."""
    logs = []
    for i, model in enumerate(models):
        given = {} if references is None else {"ref_model": references[i]}
        logs.append(logged(kind, model, directory / str(i), rows, **settings, **given))
    assert_same_logs(*logs)
    return logs[1]


SFT: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "plain": ("llama", text_rows, {}),
    "mixture": ("qwen3_moe", text_rows, {"gradient_accumulation_steps": 2}),
    "packing": ("qwen3", text_rows, {"packing": True, "max_length": 24}),
    "assistant_only_loss": ("gemma3_text", chat_rows, {"assistant_only_loss": True}),
    "mixture, packing": ("qwen3_moe", text_rows, {"packing": True, "max_length": 24}),
    "padding_free": ("llama", text_rows, {"padding_free": True, "max_length": None}),
    "smoothing": ("llama", text_rows, {"label_smoothing_factor": 0.1}),
    "dft": ("llama", text_rows, {"loss_type": "dft"}),
    "checkpointing": ("llama", text_rows, {"activation_checkpointing": True}),
    "evaluation": (
        *("llama", text_rows),
        {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": text_rows(5)},
    ),
}


@pytest.mark.parametrize("variant", SFT)
def test_sft(variant: str, tmp_path: Path) -> None:
    model_type, rows, settings = SFT[variant]
    models = pair(model_type)
    for model in models:
        model.config.output_router_logits = model_type == "qwen3_moe"
    ours = compare("SFT", models, tmp_path, rows(), **settings)
    assert ("aux_loss" in ours[0]) == (model_type == "qwen3_moe")


@pytest.mark.parametrize(
    "settings", [{}, {"padding_free": True}, {"precompute_ref_log_probs": True}], ids=str
)
def test_dpo(settings: dict[str, Any], tmp_path: Path) -> None:
    references = None if "precompute_ref_log_probs" in settings else pair("llama")
    ours = compare("DPO", pair("llama"), tmp_path, preference_rows(), references, **settings)
    assert any(abs(row.get("rewards/margins", 0)) > 0.1 for row in ours)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_reward(model_type: str, tmp_path: Path) -> None:
    ours = compare("Reward", score_pair(model_type), tmp_path, preference_rows())
    assert any(abs(row.get("margin", 0)) > 0.05 for row in ours)


def reward(completions: list[str], **others: Any) -> list[float]:
    """Short answers with many different words are good."""
    return [len(set(text.split())) - 0.1 * len(text.split()) for text in completions]


SAMPLING: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 8,
    "reward_funcs": reward,
    "per_device_train_batch_size": 4,
}


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("GRPO", {}),
        ("GRPO", {"beta": 0.1, "num_iterations": 2}),
        ("GRPO", {"cast_lm_head_to_fp32": True}),  # which replaces the head's forward
        ("RLOO", {}),
    ],
)
def test_sampled_answers(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    ours = compare(kind, pair("llama"), tmp_path, prompt_rows(), **SAMPLING, **settings)
    assert any(row.get("reward_std", 0) > 0.1 for row in ours)


def test_kto(tmp_path: Path) -> None:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0}
        for i, row in enumerate(preference_rows())
    ]
    compare("KTO", pair("llama"), tmp_path, rows, pair("llama"), per_device_train_batch_size=4)
