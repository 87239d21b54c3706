import pytest

from tests.kernels.test_linear_cross_entropy import inputs
from tigon.kernels import selected_logprobs
from tigon.kernels.loss.api import Options


@pytest.mark.parametrize("options", [Options(label_smoothing=0.1), Options(z_loss=0.1)], ids=str)
def test_options_that_are_no_part_of_a_probability(options: Options) -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match="label_smoothing and z_loss are for cross-entropy alone"):
        selected_logprobs(hidden, weight, targets, options=options)
