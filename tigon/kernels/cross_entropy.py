"""Cross-entropy of logits that exist; `linear_cross_entropy` is the one that trains.

# N rows, V vocab
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
METRICS = ("accuracy", "predicted_tokens", "entropy", "max_logit", "nll", "z")


@dataclass(frozen=True)
class Options:
    """What turns raw logits into logits, and logits into a loss.

    `z_loss` adds `z_loss * logsumexp(logits)^2` (PaLM, arXiv 2204.02311).
    """

    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Options()


def scale_and_cap(logits: Tensor, options: Options) -> Tensor:
    """`softcap * tanh(scale * logits / softcap)`, in the dtype of `logits`."""
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits


def cross_entropy_ref(logits: Tensor, targets: Tensor, *, options: Options = PLAIN) -> Tensor:
    """Per-row cross-entropy of raw logits, fp32 inside; 0 where the target is ignored."""
    z = scale_and_cap(logits.float(), options)
    loss = F.cross_entropy(
        z,
        targets,
        ignore_index=IGNORE_INDEX,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )
    if options.z_loss:
        loss = loss + options.z_loss * z.logsumexp(-1).square() * (targets != IGNORE_INDEX)
    return loss


def cross_entropy(
    logits: Tensor,  # [N, V], before scale and softcap
    targets: Tensor,  # [N], -100 is ignored
    *,
    options: Options = PLAIN,
) -> Tensor:
    """Per-row losses [N] in fp32, differentiable with any upstream gradient.

    `logits` are never written to.
    """
    check_targets(targets, logits.shape[-1])
    return cross_entropy_ref(logits, targets, options=options)


@dataclass
class Rows:
    """What the softmax of every row leaves behind."""

    nll: Tensor  # [N], of targets that are valid
    lse: Tensor  # [N]
    mass: Tensor  # [N]: sum of exp(z - max)
    metrics: dict[str, Tensor]


def softmax_rows_(
    z: Tensor,  # [N, V] fp32, scaled and capped
    targets: Tensor,  # [N]
    metrics: Sequence[str] = (),
) -> Rows:
    """Overwrite z with `exp(z - max)`; metrics are 0 where ignored, predicted_tokens -100."""
    valid = targets != IGNORE_INDEX
    peak = z.amax(-1)
    predicted = z.argmax(-1) if "predicted_tokens" in metrics else None
    z.sub_(peak[:, None])
    target = z.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    shifted = z.clone() if "entropy" in metrics else None
    mass = z.exp_().sum(-1)
    log_mass = mass.log()
    nll, lse = log_mass - target, peak + log_mass
    values = {"nll": nll, "z": lse, "max_logit": peak}
    if shifted is not None:
        values["entropy"] = log_mass - shifted.mul_(z).sum(-1) / mass
    out = {name: values[name] * valid for name in metrics if name != "predicted_tokens"}
    if predicted is not None:
        out["predicted_tokens"] = torch.where(valid, predicted, IGNORE_INDEX)
    return Rows(nll, lse, mass, out)


def rows_behind(metrics: Sequence[str]) -> tuple[str, ...]:
    """The per-row values that the metrics asked for are made of."""
    unknown = [m for m in metrics if m not in METRICS]
    if unknown:
        raise ValueError(f"unknown metrics {unknown}; there are {', '.join(METRICS)}")
    return tuple(dict.fromkeys("predicted_tokens" if m == "accuracy" else m for m in metrics))


def finish_metrics(
    rows: dict[str, Tensor], targets: Tensor, metrics: Sequence[str]
) -> dict[str, Tensor]:
    """The metrics asked for; "accuracy" is the share of the valid targets predicted right."""
    if "accuracy" in metrics:
        valid = targets != IGNORE_INDEX
        right = (rows["predicted_tokens"] == targets) & valid
        rows = {**rows, "accuracy": right.sum() / valid.sum().clamp(min=1)}
    return {name: rows[name] for name in metrics}


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Every target is -100 or in [0, V): an error that names it, without a host sync on a GPU."""
    bad = (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= vocab_size))
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(
            ~bad.any(), f"a label is neither {IGNORE_INDEX} nor in [0, {vocab_size})"
        )
    elif bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"label {targets[tuple(where)].item()} at {where} is neither {IGNORE_INDEX} nor in "
            f"[0, {vocab_size}), the vocabulary of the head"
        )
