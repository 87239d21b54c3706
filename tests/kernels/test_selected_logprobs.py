import pytest
import torch

from tests.kernels.test_linear_cross_entropy import inputs
from tigon.kernels import selected_logprobs, selected_logprobs_ref
from tigon.kernels.loss.api import Options

OPTIONS = {"plain": Options(), "temperature": Options(logit_scale=2.0), "cap": Options(softcap=3.0)}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("logits_bytes", [3000, 2**30])
def test_any_upstream_gradient(options: Options, logits_bytes: int) -> None:
    *tensors, targets = inputs()
    hidden, weight, bias = tensors
    found, metrics = selected_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        options=options,
        metrics=("entropy",),
        logits_bytes=logits_bytes,
    )
    expected = selected_logprobs_ref(hidden, weight, targets, bias=bias, options=options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found[targets == -100] == 0).all() and metrics["entropy"].shape == found.shape
    coefficient = found.detach().exp() * torch.randn_like(found)  # known only now, as in PPO
    for a, b in zip(
        torch.autograd.grad(found, tensors, coefficient),
        torch.autograd.grad(expected, tensors, coefficient),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [Options(label_smoothing=0.1), Options(z_loss=0.1)], ids=str)
def test_options_that_are_no_part_of_a_probability(options: Options) -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match="label_smoothing and z_loss are for cross-entropy alone"):
        selected_logprobs(hidden, weight, targets, options=options)
