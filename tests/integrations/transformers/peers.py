"""A model of transformers and Tigon's of the same weights, and runs of trainers that are alike."""

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES, FIRST, WRAPPED, load_reference, reference, their_config
from tigon.integrations.transformers import from_pretrained
from tigon.integrations.transformers.model import TigonPreTrainedModel

MODELS = {
    "llama": "mlp_bias",
    "qwen3": "tied",
    "gemma3_text": "two ropes",
    "qwen3_moe": "normed, biases",
}
OWN = {"callbacks", "compute_metrics", "eval_dataset", "preprocess_logits_for_metrics"}
FAMILIES = [(m, case) for m, case in FIRST if m not in WRAPPED]
B, T = 2, 11
# Rows of several lengths, each with a prompt that is not learned
LENGTHS = (11, 7, 9, 12, 5, 8, 10, 6)


@functools.cache
def checkpoint(model_type: str, case: str = "") -> Path:
    """The directory of transformers' checkpoint of a case, written once."""
    directory = Path(tempfile.mkdtemp(prefix="tigon-peers-"))
    reference(model_type, CASES[model_type][case or MODELS[model_type]], directory)
    return directory


def pair(
    model_type: str, case: str = "", **options: Any
) -> tuple[PreTrainedModel, TigonPreTrainedModel]:
    """transformers' model and Tigon's of the same checkpoint, in fp32."""
    directory = checkpoint(model_type, case)
    return load_reference(directory), from_pretrained(directory, **options)


@functools.cache
def score_checkpoint(model_type: str, labels: int) -> Path:
    """The directory of transformers' checkpoint of a sequence classifier, written once."""
    directory = Path(tempfile.mkdtemp(prefix="tigon-peers-"))
    values = SIZES | CASES[model_type][MODELS[model_type]]
    config = their_config(model_type, **values, num_labels=labels, pad_token_id=3)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(directory)
    return directory


def score_pair(model_type: str, labels: int = 1) -> tuple[PreTrainedModel, TigonPreTrainedModel]:
    """transformers' sequence classifier and Tigon's of the same checkpoint, in fp32."""
    directory = score_checkpoint(model_type, labels)
    load = AutoModelForSequenceClassification.from_pretrained
    return load(directory, attn_implementation="eager").eval(), from_pretrained(directory)


def inputs(ignored: int = 3) -> dict[str, Tensor]:
    """Random ids, and labels of which the first are ignored."""
    ids = torch.randint(4, 200, (B, T))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def assert_near(actual: Any, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def make_rows(lengths: Sequence[int] = LENGTHS) -> list[dict[str, list[int]]]:
    """Random rows of ids, and labels with -100 on the first three."""
    torch.manual_seed(1)
    ids = [torch.randint(4, 200, (n,)).tolist() for n in lengths]
    return [{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in ids]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, fill: int) -> Tensor:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[int(i < len(row["input_ids"])) for i in range(longest)] for row in rows])
    return {"input_ids": pad("input_ids", 3), "labels": pad("labels", -100), "attention_mask": mask}


def train(
    model: Any, directory: Path, *, trainer: Callable[..., Any] = Trainer, **settings: Any
) -> Any:
    """A trainer that has made its steps with transformers' Trainer; `settings` are those of
    TrainingArguments, or of the trainer itself."""
    own = {k: settings.pop(k) for k in OWN & {*settings}}
    resume = settings.pop("resume", None)
    defaults: dict[str, Any] = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "weight_decay": 0.1,
    }
    args = TrainingArguments(output_dir=str(directory), **defaults | settings)
    made = trainer(model=model, args=args, train_dataset=make_rows(), data_collator=collate, **own)
    made.train(resume_from_checkpoint=resume)
    return made


def losses(trainer: Any) -> list[float]:
    """The loss that was logged at each step."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def exported(model: Any, directory: Path) -> dict[str, Tensor]:
    """The tensors of the model's checkpoint."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")
