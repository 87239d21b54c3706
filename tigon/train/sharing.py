"""Decides whether a prompt is computed once for all answers that share a row.

Then a row is [prompt, chosen] and [the prompt's last token, rejected], and the latter goes on from
the prompt; or the prompt and any number of answers. Log-probabilities and gradients are those of
answers behind copies of the prompt. Which rows a step has depends on it, so a run that is resumed
does as it began.
"""

from pathlib import Path

import torch

from tigon.models.moe import aux_loss_coef
from tigon.train import checkpoint
from tigon.train.config import Config
from tigon.train.model import meta_model, meta_model_from_path
from tigon.train.resume import REMEDY
from tigon.train.tasks import Task


def set_share_prompts(task: Task, source: Path | None) -> str | None:
    """Sets `task.share_prompts`; returns why prompts are not shared where they could be.

    ValueError for a checkpoint `source` whose run shared them, where they cannot be now.
    """
    if not task.one_prompt:
        return None
    reason = _find_obstacle(task.config, source)
    if source is not None:
        saved = checkpoint.read_metadata(source)
        task.distinct = saved.get("distinct", False)
        if not saved.get("share_prompts", False):
            reason = reason or f"{source} is of a run that did not"
        elif reason is not None:
            raise ValueError(
                f"{source} is of a run that computed each prompt once, which now cannot be "
                f"({reason}); {REMEDY}"
            )
    task.share_prompts = reason is None
    return reason


def _find_obstacle(config: Config, source: Path | None) -> str | None:
    """Returns why prompts cannot be shared, if they cannot."""
    if not config.packing:
        return "packing=false"
    if config.lora is not None and config.lora.dropout:
        return f"lora.dropout={config.lora.dropout} is drawn for each answer's own prompt"
    for name, value in (("cuda_graphs", True), ("attention", "cudnn")):
        if getattr(config, name) == value:
            return f"{name}={str(value).lower()} needs sequences with keys of their own"
    models = [meta_model(config, torch.float32, source)]
    if aux_loss_coef(models[0].config) and config.task != "reward":
        return "the balance of experts, which is part of the loss, counts each answer's own prompt"
    if config.reference:
        try:
            models.append(meta_model_from_path(config.reference))
        except OSError:
            if source is None:  # a run that goes on has its log-probabilities in the cache
                raise
    for model in models:
        if not model.model.shares_prefixes or not model.causal:
            return f"not all layers of {type(model).__name__} are causal attention"
    return None
