"""A head whose vocabulary is cut over ranks (gloo) against one rank's with the whole, and float64.

# N rows, C and D model dims of student and teacher, V vocab, W rows of a rank's weight with padding
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests import interpreter
from tests.numbers import assert_as_near, relative_error
from tests.train.ranks import Ranks
from tigon.kernels import CrossEntropy, LogProbs, VocabularyShard, run_criteria, use
from tigon.kernels.cross_entropy import METRICS, Options, scale_and_cap

N, C, V = 23, 8, 131
CAPPED = Options(softcap=4.0, logit_scale=0.7)
WIDTHS = {2: 66, 4: 44}  # W by the number of ranks: the last of four has no row but padding
PER_ROW = ("nll", "z", "max_logit", "entropy")


class Batch:
    """The same on all ranks; integers where logits are to be exact, and many of them equal."""

    def __init__(self, dtype: torch.dtype = torch.float32, ties: bool = False) -> None:
        random = torch.Generator("cpu").manual_seed(1)

        def make(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=random, device="cpu")
            return (x.sign() if ties else x).to(dtype)

        self.hidden, self.weight, self.bias = make(N, C), make(V, C), make(V)
        self.targets = torch.randint(0, V, (N,), generator=random, device="cpu")
        self.targets[::5] = -100
        self.weights = torch.rand(N, generator=random, device="cpu")
        self.weights[3] = 0
        self.class_weights = torch.rand(V, generator=random, device="cpu")
        self.ups = torch.randn(N, generator=random, device="cpu")


Make = Callable[[Batch], list[Any]]


def _smoothed(b: Batch, **more: Any) -> CrossEntropy:
    more |= {"label_smoothing": 0.2, "z_loss": 0.01, "class_weights": b.class_weights}
    return CrossEntropy(targets=b.targets, weights=b.weights, **more)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "sum": (lambda b: [CrossEntropy(targets=b.targets, metrics=METRICS)], {}),
    "sum, capped, in chunks": (
        lambda b: [_smoothed(b, denominator=7.0, coefficient=0.5, metrics=METRICS)],
        {"options": CAPPED, "logits_bytes": 16 * V},
    ),
    "per row": (lambda b: [_smoothed(b, reduction="none", metrics=METRICS)], {}),
    "log-probabilities": (
        lambda b: [LogProbs(targets=b.targets, metrics=METRICS)],
        {"options": CAPPED, "logits_bytes": 16 * V},
    ),
    "several": (lambda b: [_smoothed(b), LogProbs(targets=b.targets)], {"options": CAPPED}),
    "bf16": (lambda b: [_smoothed(b, metrics=METRICS)], {"dtype": torch.bfloat16}),
    "bf16, several": (
        lambda b: [_smoothed(b), LogProbs(targets=b.targets, metrics=METRICS)],
        {"dtype": torch.bfloat16, "options": CAPPED},
    ),
    "ties": (lambda b: [CrossEntropy(targets=b.targets, metrics=METRICS)], {"ties": True}),
    "capped ties": (
        lambda b: [LogProbs(targets=b.targets, metrics=METRICS)],
        {"ties": True, "options": Options(softcap=0.5)},
    ),
}
INTERPRETED = ("sum, capped, in chunks", "log-probabilities", "bf16, several", "ties")


def objective(values: list[Tensor], b: Batch) -> Tensor:
    """With an upstream gradient of its own for each row of each criterion."""
    terms = [(v * b.ups.to(v)).sum() if v.dim() else v for v in values]
    return torch.stack([(1 + 0.5 * i) * t for i, t in enumerate(terms)]).sum()


def run(name: str, shard: VocabularyShard | None = None, width: int = V) -> dict[str, Tensor]:
    """Values, metrics and gradients; those of the weight and bias with padding."""
    make, settings = CASES[name]
    more = dict(settings)
    b = Batch(more.pop("dtype", torch.float32), more.pop("ties", False))
    weight, bias = b.weight, b.bias
    if shard is not None:
        rows = slice(shard.first, shard.first + shard.rows)
        padding = width - shard.rows
        weight = F.pad(weight[rows], (0, 0, 0, padding), value=math.nan)
        bias = F.pad(bias[rows], (0, padding), value=math.nan)
        more["vocabulary"] = shard
    leaves = [x.requires_grad_() for x in (b.hidden, weight, bias)]
    found = run_criteria(*leaves, make(b), **more)
    grads = torch.autograd.grad(objective([x.value for x in found], b), leaves)
    out = dict(zip(("hidden", "weight", "bias"), grads, strict=True))
    for i, (value, metrics) in enumerate(found):
        out |= {f"value {i}": value.detach()} | {f"{n} {i}": x for n, x in metrics.items()}
    return out


def rank(directory: str, widths: Mapping[int, int]) -> None:
    """Every case on this rank, into a file of its own."""
    interpreter.install()
    dist.init_process_group("gloo")
    width = widths[dist.get_world_size()]
    first = min(dist.get_rank() * width, V)
    group = dist.group.WORLD
    assert group is not None
    shard = VocabularyShard.of(group, first, min(width, V - first), V)
    found = {}
    for path, names in (("reference", CASES), ("triton", INTERPRETED)):
        with use(path):
            found[path] = {name: run(name, shard, width) for name in names}
    torch.save(found, Path(directory, f"{dist.get_rank()}.pt"))
    dist.destroy_process_group()


Found = dict[str, dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module", params=WIDTHS, ids=lambda n: f"{n} ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Found]]:
    if torch.cuda.is_available():
        pytest.skip("the ranks have no interpreter")
    with tempfile.TemporaryDirectory() as directory:
        Ranks(request.param, rank, directory, WIDTHS).finish()
        yield [torch.load(Path(directory, f"{i}.pt")) for i in range(request.param)]


def joined(found: list[dict[str, Tensor]], width: int) -> dict[str, Tensor]:
    """What all ranks found, as one rank would have it."""
    out = dict(found[0])
    for name, x in out.items():
        if name not in ("hidden", "weight", "bias"):
            assert all(torch.equal(x, other[name]) for other in found), name
    out["hidden"] = torch.stack([f["hidden"].double() for f in found]).sum(0).to(out["hidden"])
    for name in ("weight", "bias"):
        whole = torch.cat([f[name] for f in found])
        assert whole.shape[0] == width * len(found)
        assert not whole[V:].any(), f"padding has a gradient of the {name}"
        out[name] = whole[:V]
    return out


def truth(name: str) -> dict[str, Tensor]:
    """Values and gradients by the definitions, in float64."""
    make, settings = CASES[name]
    b = Batch(settings.get("dtype", torch.float32), settings.get("ties", False))
    criteria = make(b)
    leaves = [x.double().requires_grad_() for x in (b.hidden, b.weight, b.bias)]
    z = scale_and_cap(F.linear(*leaves), settings.get("options", Options()))
    values = [defined(c, z) for c in criteria]
    grads = torch.autograd.grad(objective(values, b), leaves)
    out = dict(zip(("hidden", "weight", "bias"), grads, strict=True))
    out |= {f"value {i}": v.detach() for i, v in enumerate(values)}
    logp, index = z.detach().log_softmax(-1), b.targets.clamp(min=0)[:, None]
    lse, valid = z.detach().logsumexp(-1), b.targets != -100
    rows = {"nll": -logp.gather(1, index)[:, 0], "z": lse, "max_logit": z.detach().amax(-1)}
    rows["entropy"] = -(logp.exp() * logp).sum(-1)
    for i, c in enumerate(criteria):
        out |= {f"{m} {i}": rows[m] * valid for m in c.metrics if m in rows}
    return out


def defined(c: Any, z: Tensor) -> Tensor:
    assert c.targets is not None
    valid, index = c.targets != -100, c.targets.clamp(min=0)
    logp = z.log_softmax(-1)
    of_target = logp.gather(1, index[:, None])[:, 0]
    if isinstance(c, LogProbs):
        return of_target * valid
    s = c.label_smoothing
    losses = -(1 - s) * of_target - s * logp.mean(-1) + c.z_loss * z.logsumexp(-1).square()
    losses = losses * valid
    for w in (c.weights, None if c.class_weights is None else c.class_weights[index]):
        losses = losses if w is None else losses * w.double()
    if c.reduction == "none":
        return losses
    return losses.sum() * c.coefficient / (c.denominator or 1.0)


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_one_are_the_same(ranks: list[Found], path: str, name: str) -> None:
    if path == "triton" and name not in INTERPRETED:
        pytest.skip("compared on the other path")
    found = joined([f[path][name] for f in ranks], WIDTHS[len(ranks)])
    peer, exact = run(name), truth(name)
    for key, x in peer.items():
        if key not in exact:  # accuracy and tokens
            assert torch.equal(found[key], x), key
    for key, x in exact.items():
        if CASES[name][1].get("dtype") is None:
            assert_as_near(found[key], peer[key], x)
        else:  # rounded logits are what the peer is off by, also where its dtype is fp32
            off, eps = relative_error(peer[key], x), torch.finfo(peer[key].dtype).eps
            assert relative_error(found[key], x) <= 2 * off + 4 * eps < 0.1, key
