"""The cross-entropy of the supervised tokens, which fine-tuning and pretraining share."""

from torch import Tensor

from tigon.kernels.cross_entropy import IGNORE_INDEX
from tigon.models import CausalLM, Targets
from tigon.train.model import has_experts
from tigon.train.objectives.base import Inputs, Objective, Part

ROUTING = ("aux_loss", "expert_load")


class CrossEntropyObjective(Objective):
    """Next-token cross-entropy, plus the balance of experts where the model adds it.

    Logged are the means, over the step's targets, of the metrics in `model.defaults.metrics`, and
    how evenly a mixture of experts spread its tokens.
    """

    def begin(self, model: CausalLM) -> None:
        asked = model.defaults.metrics
        asked = (asked,) if isinstance(asked, str) else tuple(asked)
        if "predicted_tokens" in asked:
            raise ValueError(
                f"model.defaults.metrics={asked}: training logs means, and predicted_tokens has no "
                "mean; leave it out"
            )
        routing = ROUTING if has_experts(model) else ()
        self.metrics = tuple(dict.fromkeys((*asked, *routing)))
        self.of_tokens = any(name not in ROUTING for name in self.metrics)

    def sums(self, model: CausalLM, inputs: Inputs) -> dict[str, Tensor]:
        sums = super().sums(model, inputs)
        if self.of_tokens:
            sums["targets"] = _count(inputs.targets)
        return sums

    def loss(self, model: CausalLM, inputs: Inputs, sums: dict[str, Tensor]) -> Part:
        targets = inputs.targets.with_num_items(sums["items"])
        output = model(batch=inputs.batch, targets=targets, metrics=self.metrics)
        return Part(output.loss, self._means(output.metrics, inputs, sums))

    def evaluate(self, model: CausalLM, inputs: Inputs, sums: dict[str, Tensor]) -> Part:
        """Of the tokens alone: what the balance of experts adds belongs to training."""
        targets = inputs.targets.summed()
        output = model(batch=inputs.batch, targets=targets, metrics=self.metrics)
        loss = output.loss / sums["items"].clamp(min=1)
        return Part(loss, self._means(output.metrics, inputs, sums))

    def _means(
        self, values: dict[str, Tensor], inputs: Inputs, sums: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """This micro-batch's part of each metric's mean over the step."""
        share = inputs.targets.items / sums["items"].clamp(min=1)
        if not self.of_tokens:
            return {name: value * share for name, value in values.items()}
        count, total = _count(inputs.targets), sums["targets"].clamp(min=1)

        def mean(name: str, value: Tensor) -> Tensor:
            if name in ROUTING:
                return value * share
            return (value.sum() if value.dim() else value * count) / total  # [B, n], or their mean

        return {name: mean(name, value) for name, value in values.items()}

    def logged(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """expert_imbalance for expert_load: the busiest expert of all, in multiples of the mean."""
        metrics = dict(metrics)
        if "expert_load" in metrics:
            load = metrics.pop("expert_load")  # [layers, E]
            metrics["expert_imbalance"] = load.max() * load.shape[1]
        return metrics


def _count(targets: Targets) -> Tensor:
    """How many tokens are predicted, whatever the reduction."""
    assert targets.labels is not None
    return (targets.labels != IGNORE_INDEX).sum()
