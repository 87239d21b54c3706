"""A task with a loss of its own, made of the log-probabilities."""

from torch import Tensor

from tigon.kernels import LogProbs
from tigon.models import CausalLMOutput, Targets
from tigon.train.tasks import StepInputs
from tigon.train.tasks.language_modeling import SFT


class Focal(SFT):
    """Fine-tuning with the focal loss, (1 - p)^2 times the cross-entropy."""

    def criteria(self, inputs: StepInputs) -> tuple[LogProbs]:
        return (LogProbs(),)

    def token_losses(self, output: CausalLMOutput, targets: Targets) -> Tensor:
        assert output.logprobs is not None
        losses = (1 - output.logprobs.exp()) ** 2 * -output.logprobs
        return losses if targets.weights is None else losses * targets.weights
