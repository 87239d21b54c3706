"""The cross-entropy of the supervised tokens, which fine-tuning and pretraining share."""

from torch import Tensor

from tigon.models import CausalLM, aux_loss_coef
from tigon.train.model import has_experts
from tigon.train.objectives.base import Inputs, Objective, Part

ROUTING = ("aux_loss", "expert_load")


class CrossEntropyObjective(Objective):
    """Next-token cross-entropy, plus the balance of experts where the model adds it.

    Logged are the means, over the step's targets, of the metrics in `model.defaults.metrics`, and
    how evenly a mixture of experts spread its tokens.
    """

    def begin(self, model: CausalLM) -> None:
        asked = tuple(model.defaults.metrics)
        if "predicted_tokens" in asked:
            raise ValueError(
                f"model.defaults.metrics={asked}: training logs means, and predicted_tokens has no "
                "mean; leave it out"
            )
        routing = ROUTING if has_experts(model) else ()
        self.metrics = tuple(dict.fromkeys((*asked, *routing)))
        self.of_tokens = [name for name in self.metrics if name not in ROUTING]

    def sums(self, model: CausalLM, inputs: Inputs) -> dict[str, Tensor]:
        sums = super().sums(model, inputs)
        if self.of_tokens:
            sums["targets"] = self._targets(model, inputs)
        return sums

    def loss(self, model: CausalLM, inputs: Inputs, sums: dict[str, Tensor]) -> Part:
        output = model(**inputs.model, num_items_in_batch=sums["items"], metrics=self.metrics)
        share = inputs.items / sums["items"].clamp(min=1)
        metrics = {name: output.metrics[name] * share for name in ROUTING if name in self.metrics}
        if self.of_tokens:
            targets, total = self._targets(model, inputs), sums["targets"].clamp(min=1)
            for name in self.of_tokens:  # [B, T], or the mean over this micro-batch's targets
                value = output.metrics[name]
                metrics[name] = (value.sum() if value.dim() else value * targets) / total
        return Part(output.loss, metrics)

    def evaluate(self, model: CausalLM, inputs: Inputs, sums: dict[str, Tensor]) -> Part:
        """Of the tokens alone, whatever the balance of experts adds in training."""
        part = self.loss(model, inputs, sums)
        coef = aux_loss_coef(model.config)
        if coef is None:
            return part
        return Part(part.loss - coef * part.metrics["aux_loss"], part.metrics)

    def _targets(self, model: CausalLM, inputs: Inputs) -> Tensor:
        """How many tokens this micro-batch predicts."""
        if inputs.model["loss_reduction"] == "token":
            return inputs.items
        return model.num_items(**inputs.model | {"loss_reduction": "token"})

    def logged(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """expert_imbalance for expert_load: the busiest expert of all, in multiples of the mean."""
        metrics = dict(metrics)
        if "expert_load" in metrics:
            load = metrics.pop("expert_load")  # [layers, E]
            metrics["expert_imbalance"] = load.max() * load.shape[1]
        return metrics
