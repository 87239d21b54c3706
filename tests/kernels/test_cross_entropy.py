import pytest
import torch
from torch import Tensor

from tigon.kernels import cross_entropy
from tigon.kernels.cross_entropy import METRICS, Options, softmax_rows_

N, V = 37, 211
OPTIONS = {
    "plain": Options(),
    "softcap": Options(softcap=1.5),
    "logit_scale": Options(logit_scale=0.3),
    "smoothing": Options(label_smoothing=0.2),
    "z_loss": Options(z_loss=1e-2),
    "all": Options(softcap=2.0, logit_scale=0.7, label_smoothing=0.1, z_loss=3e-3),
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def exact(logits: Tensor, targets: Tensor, o: Options) -> Tensor:
    """Row by row from the definitions, float64."""
    rows = []
    for x, target in zip(logits.double(), targets.tolist(), strict=True):
        z = x * o.logit_scale
        if o.softcap is not None:
            z = o.softcap * torch.tanh(z / o.softcap)
        z_sum = z.exp().sum().log()
        wanted = torch.full((V,), o.label_smoothing / V, dtype=torch.float64)
        if target == -100:
            rows.append(x.sum() * 0)
            continue
        wanted[target] += 1 - o.label_smoothing
        rows.append((wanted * (z_sum - z)).sum() + o.z_loss * z_sum**2)
    return torch.stack(rows)


def inputs() -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, V, (N,))
    targets[::5] = -100
    targets[1], targets[2] = 0, V - 1
    return (2 * torch.randn(N, V)).requires_grad_(), targets


@options
@pytest.mark.parametrize("strided", [False, True])
def test_forward_and_gradients(options: Options, strided: bool) -> None:
    logits, targets = inputs()
    given = logits.T.contiguous().T if strided else logits * 1
    before = given.detach().clone()
    loss, expected = cross_entropy(given, targets, options=options), exact(logits, targets, options)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert (loss[targets == -100] == 0).all()
    upstream = torch.randn(N)
    (grad,) = torch.autograd.grad(loss, logits, upstream)
    (reference,) = torch.autograd.grad(expected, logits, upstream.double())
    torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-6)
    assert torch.equal(given, before) and given._version == 0


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, targets = inputs()
    logits = logits.detach().bfloat16()
    expected = exact(logits, targets, Options()).float()
    torch.testing.assert_close(cross_entropy(logits, targets), expected, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits, targets = inputs()
    logits = 300 * logits.detach()
    expected = -logits.double().log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    actual = cross_entropy(logits, targets).double()
    torch.testing.assert_close(actual, expected * (targets != -100), rtol=1e-5, atol=1e-4)


def test_confident_predictions_keep_their_small_loss() -> None:
    z, targets = torch.zeros(3, V), torch.tensor([4, 5, 6])
    z[range(3), targets] = torch.tensor([12.0, 16.0, 19.0])
    expected = torch.log1p((V - 1) * torch.tensor([12.0, 16.0, 19.0]).neg().double().exp())
    rows = softmax_rows_(z, targets)
    torch.testing.assert_close(rows.nll.double(), expected, rtol=1e-2, atol=3e-7)


def test_metrics_of_rows() -> None:
    logits, targets = inputs()
    z = logits.detach()
    p = z.double().softmax(-1)
    valid = targets != -100
    expected = {
        "entropy": torch.distributions.Categorical(p).entropy() * valid,
        "max_logit": z.double().max(-1).values * valid,
        "nll": -p.gather(1, targets.clamp(min=0)[:, None])[:, 0].log() * valid,
        "z": z.double().exp().sum(-1).log() * valid,
        "predicted_tokens": torch.where(valid, z.argmax(-1), -100),
    }
    names = [name for name in METRICS if name != "accuracy"]
    assert expected.keys() == set(names)
    rows = softmax_rows_(z.clone(), targets, names)
    for name, value in expected.items():
        actual = rows.metrics[name].to(value.dtype)
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [V, -1, -99, 2**40])
def test_a_target_outside_the_vocabulary(bad: int) -> None:
    logits, targets = inputs()
    targets[11] = bad
    with pytest.raises(ValueError, match=rf"label {bad} at \[11\] is neither -100 nor in \[0, 211"):
        cross_entropy(logits, targets)
