"""Next-token cross-entropy: supervised fine-tuning on chats, and pretraining on text.

# B lines, n kept positions of a line
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tigon.data import (
    ChatEncoder,
    Encoder,
    MicroBatch,
    PackedRows,
    TextEncoder,
    Window,
    pack_documents,
)
from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.kernels.loss.terms import CrossEntropy, LossTerm, WeightedTerm
from tigon.models import CausalLM, Targets
from tigon.models import CausalLMOutput as Output
from tigon.parallel import gather_output
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train.callbacks import POSITION_METRICS, PassOutput
from tigon.train.distributed import World
from tigon.train.model import has_experts
from tigon.train.tasks.base import MicroBatchLoss, StepInputs, Task

ROUTER_METRICS = ("aux_loss", "expert_load")
MEAN_METRICS = ("accuracy", *POSITION_METRICS)


class CrossEntropyTask(Task):
    """Next-token cross-entropy, plus the balance of experts where the model adds it.

    Logged are the accuracy, the means of the other requested metrics over the targets, and how
    evenly a mixture of experts spreads its tokens.
    """

    predicts_tokens: ClassVar[bool] = True

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        for setting in ("metrics", "eval_metrics"):
            for name in getattr(config, setting) or ():
                check_metric(setting, name)

    def chat_encoder(self, tokenizer: Tokenizer) -> ChatEncoder:
        """Returns the encoder of chats, which adds the tokens that end a learned turn to `ends`."""
        config = self.config
        encoder = ChatEncoder(
            tokenizer,
            train_on=config.train_on,
            train_on_empty_thinking=config.train_on_empty_thinking,
        )
        encoder.ends = self.ends
        return encoder

    def options(self, micro_batch: MicroBatch, *, training: bool) -> dict[str, Any]:
        """Returns label_smoothing, z_loss and logits_to_keep of the settings."""
        names = "label_smoothing", "z_loss"
        options = {name: self.setting(name, training=training) or None for name in names}
        keep = self.setting("logits_to_keep", training=training)
        return options | {"logits_to_keep": keep and last_positions(micro_batch, keep)}

    def metrics(self, model: CausalLM, inputs: StepInputs) -> tuple[str, ...]:
        """Returns the names of the metrics that the model computes: predictions, those of the
        settings and of callbacks, and the balance of experts if it has any."""
        requested = self.setting("metrics", training=inputs.training)
        requested += () if inputs.request is None else inputs.request.metrics
        head_metrics = (name for name in requested if name != "accuracy")
        routing = ROUTER_METRICS if has_experts(model) else ()
        return tuple(dict.fromkeys(("predicted_tokens", *head_metrics, *routing)))

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        """Adds "targets", the number of positions that predict a token."""
        return super().sums(model, inputs) | {"targets": inputs.targets.mask.sum()}

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        """Returns this micro-batch's part of the step's mean cross-entropy, with the balance of
        experts where the model adds it, and of the metrics."""
        targets = inputs.targets.with_num_items(sums["items"])
        output = self._forward(model, inputs, targets, self.criteria(inputs))
        loss = output.loss
        if loss is None:
            loss = self.token_losses(output, targets).sum() / sums["items"].clamp(min=1)
            loss = loss + self.balance(model, output, inputs, sums)
        return self._part(loss, output, inputs, sums)

    def evaluate(
        self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]
    ) -> MicroBatchLoss:
        """Returns this micro-batch's part of cross-entropy, without the balance, and metrics."""
        criteria = tuple(self.criteria(inputs) or (CrossEntropy(),))
        if inputs.request is not None and inputs.request.losses:
            # The loss stays the same sum; copies of its terms return the summands
            terms = [c for c in criteria if isinstance(c, WeightedTerm)]
            criteria += tuple(replace(c, reduction="none") for c in terms)
        # The sum of the weighted losses, without aux_loss of experts
        targets = inputs.targets.replace(reduction="sum", num_items=None)
        output = self._forward(model, inputs, targets, criteria)
        loss = output.loss
        if loss is None:
            loss = self.token_losses(output, inputs.targets).sum()
        return self._part(loss / sums["items"].clamp(min=1), output, inputs, sums)

    def criteria(self, inputs: StepInputs) -> tuple[LossTerm, ...] | None:
        """Returns the terms of the loss; None means one cross-entropy. `(LogProbs(),)` leaves the
        loss to `token_losses`."""
        return None

    def token_losses(self, output: Output, targets: Targets) -> Tensor:
        """Returns the summands [B, n] of the loss, before its division. A task whose criteria have
        no loss, but log-probabilities, makes one of these here, with `targets.weights`."""
        num_terms = sum(x.dim() == 0 for x in output.criteria)  # sums; their summands come last
        return torch.stack(output.criteria[-num_terms:]).sum(0)

    def _forward(
        self,
        model: CausalLM,
        inputs: StepInputs,
        targets: Targets,
        criteria: Sequence[LossTerm] | None,
    ) -> Output:
        """Returns the model's output, on each rank for whole rows, with the metrics and logits that
        the settings and the callbacks ask for."""
        request, training = inputs.request, inputs.training
        at = None if request is None else request.positions
        logits = request is not None and self.setting("return_logits", training=training)
        output = model(
            batch=inputs.batch,
            targets=targets,
            criteria=criteria,
            metrics=self.metrics(model, inputs),
            return_logits=logits,
            logits_at=at,
            logits_bytes=self.setting("logits_bytes", training=training),
        )
        return gather_output(model, output, targets, at)

    def _part(
        self, loss: Tensor, output: Output, inputs: StepInputs, sums: dict[str, Tensor]
    ) -> MicroBatchLoss:
        """Returns the loss with this micro-batch's part of each metric's mean over the step."""
        values, targets = dict(output.metrics), inputs.targets
        routing = {name: values.pop(name) for name in ROUTER_METRICS if name in values}
        predictions = values.pop("predicted_tokens")  # [B, n], as the rest of `values`
        right = (predictions == targets.labels) & targets.mask
        logged = self.setting("metrics", training=inputs.training)
        token_metrics = {"accuracy": right} | {n: x for n, x in values.items() if n in logged}
        count, share = sums["targets"].clamp(min=1), targets.items / sums["items"].clamp(min=1)
        means = {name: x.sum(dtype=torch.float64) / count for name, x in token_metrics.items()}
        means |= {name: value * share for name, value in routing.items()}
        if inputs.request is None:
            return MicroBatchLoss(loss, means)
        assert targets.labels is not None
        pass_output = PassOutput(
            loss=loss.detach(),
            labels=targets.scatter_to_positions(targets.labels, IGNORE_INDEX),
            predictions=targets.scatter_to_positions(predictions, IGNORE_INDEX),
            metrics={name: targets.scatter_to_positions(x, 0) for name, x in values.items()},
            logits=output.logits if output.logits is None else output.logits.detach(),
            logits_at=output.logits_at,
            losses=targets.scatter_to_positions(self.token_losses(output, targets), 0)
            if inputs.request.losses
            else None,
        )
        return MicroBatchLoss(loss, means, pass_output)

    def metrics_to_log(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replaces expert_load by expert_imbalance: the busiest expert's load over the mean."""
        metrics = dict(metrics)
        if "expert_load" in metrics:
            load = metrics.pop("expert_load")  # [layers, E]
            metrics["expert_imbalance"] = load.max() * load.shape[1]
        return metrics


def check_metric(setting: str, name: str) -> None:
    """Raises ValueError for a metric that is unknown, or of which no mean can be logged."""
    if name == "predicted_tokens":
        raise ValueError(
            f"{setting}={name}: what is logged are means, and predicted_tokens has no mean; "
            "callbacks see predictions, and predictions=true writes them to a file"
        )
    if name not in MEAN_METRICS:
        raise ValueError(f"{setting}={name} is not one of {', '.join(MEAN_METRICS)}")


def last_positions(micro_batch: MicroBatch, keep: int) -> int | Tensor:
    """Returns the last `keep` positions of each line's one sequence, before its padding: [B, keep].

    A shorter sequence has all of its positions, and some of the padding, which has no targets.
    Returns `keep` itself without padding.
    """
    real = micro_batch.attention_mask
    if real is None:
        return keep
    keep = min(keep, real.shape[1])
    first = (real.sum(1, keepdim=True) - keep).clamp(min=0)
    return first + torch.arange(keep, device=real.device)


class SFT(CrossEntropyTask):
    """Supervised fine-tuning on chats: learns the assistant's messages."""

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return self.chat_encoder(tokenizer)


class Pretrain(CrossEntropyTask):
    """Pretraining on text: learns every token; documents are joined and cut to rows."""

    refuses = ("chat_template", "chat_template_kwargs", "train_on", "train_on_empty_thinking")

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        return TextEncoder(tokenizer)

    def rows(self, window: Window, **_: Any) -> PackedRows:
        """Returns the documents of a window in rows, joined and cut at the ends of rows, or with
        packing=false one part of a document to a row."""
        return pack_documents(window, self.config.seq_len, packing=self.config.packing)
