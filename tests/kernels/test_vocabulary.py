"""A head whose vocabulary is cut over ranks (gloo) against one rank's with the whole, and float64.

# N rows, C and D model dims of student and teacher, V vocab, W rows of a rank's weight and padding,
# K stored tokens
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.definitions import criterion
from tests.support import interpreter
from tests.support.numbers import assert_as_near, relative_error
from tests.train.ranks import Ranks
from tigon.kernels import (
    KL,
    CrossEntropy,
    Head,
    HeadValue,
    LogProbs,
    VocabularyShard,
    run_loss_terms,
    use,
)
from tigon.kernels.loss.logits import METRICS, Options, scale_and_cap
from tigon.kernels.loss.terms import find_valid_rows
from tigon.layers import LMHead

N, C, D, V, K = 23, 8, 5, 131, 6
CAPPED = Options(softcap=4.0, logit_scale=0.7)
WIDTHS = {2: 66, 4: 44}  # W by the number of ranks: the last of four has no row but padding


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
        self.teacher_hidden = make(N, D)
        self.teacher = Head(make(V, D), make(V), Options(softcap=5.0))
        self.logprobs, self.tokens = self.teacher_logits().float().log_softmax(-1).topk(K)
        self.tokens[3, 2:] = -1
        self.low, self.up = make(N, 3), make(V, 3)
        self.ups = torch.randn(N, generator=random, device="cpu")

    def learned(self) -> dict[str, Tensor]:
        names = ("hidden", "weight", "bias", "low", "up")
        return {name: getattr(self, name).requires_grad_() for name in names}

    def teacher_logits(self) -> Tensor:
        weight, bias, options = self.teacher
        return scale_and_cap(F.linear(self.teacher_hidden, weight, bias), options)

    def cut(self, shard: VocabularyShard, width: int) -> None:
        """What is left on a rank, with padding that would be most of every row's probability."""

        def rows(x: Tensor, fill: float) -> Tensor:
            padding = x.new_full((width - shard.rows, *x.shape[1:]), fill)
            return torch.cat((x[shard.first : shard.first + shard.rows], padding))

        self.weight, self.bias = rows(self.weight, 3.0), rows(self.bias, 1e3)
        self.up = rows(self.up, 3.0)
        weight, bias, options = self.teacher
        self.teacher = Head(rows(weight, 3.0), rows(bias, 1e3), options)


Make = Callable[[Batch], list[Any]]


def _smoothed(b: Batch, **more: Any) -> CrossEntropy:
    more |= {"label_smoothing": 0.2, "z_loss": 0.01, "class_weights": b.class_weights}
    return CrossEntropy(targets=b.targets, weights=b.weights, **more)


def _kl(b: Batch, beta: float, **more: Any) -> KL:
    more |= {"teacher_hidden": b.teacher_hidden, "teacher": b.teacher, "beta": beta}
    return KL(weights=b.weights, temperature=1.3, **more)


def _stored(b: Batch, beta: float, **more: Any) -> KL:
    more |= {"teacher_tokens": b.tokens, "teacher_logprobs": b.logprobs, "beta": beta}
    return KL(targets=b.targets, weights=b.weights, **more)


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
    "forward KL": (
        lambda b: [_kl(b, 0.0, targets=b.targets)],
        {"options": CAPPED, "logits_bytes": 96 * V},
    ),
    "reverse KL per row": (lambda b: [_kl(b, 1.0, reduction="none")], {"options": CAPPED}),
    "JSD": (lambda b: [_kl(b, 0.3)], {}),
    "stored, forward": (lambda b: [_stored(b, 0.0)], {"options": CAPPED}),
    "stored, reverse": (lambda b: [_stored(b, 1.0, reduction="none")], {"logits_bytes": 96 * V}),
    "all kinds": (
        lambda b: [_stored(b, 0.3), _smoothed(b), _kl(b, 0.3), _stored(b, 0.0), _kl(b, 0.0)],
        {"options": CAPPED},
    ),
    "bf16, all kinds": (
        lambda b: [_smoothed(b), _kl(b, 0.0), _kl(b, 0.5), _stored(b, 0.5)],
        {"dtype": torch.bfloat16},
    ),
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
INTERPRETED = {  # on the four ranks, too, one of which has no rows: "all kinds"
    2: ("log-probabilities", "ties", "reverse KL per row", "bf16, all kinds"),
    4: ("all kinds",),
}
COMPILED = "per row"
CUT, SUMMED = ("weight", "bias", "up"), ("hidden", "low")  # gradients


def objective(values: list[Tensor], b: Batch) -> Tensor:
    """With an upstream gradient of its own for each row of each criterion."""
    terms = [(v * b.ups.to(v)).sum() if v.dim() else v for v in values]
    return torch.stack([(1 + 0.5 * i) * t for i, t in enumerate(terms)]).sum()


def run(
    name: str,
    shard: VocabularyShard | None = None,
    width: int = V,
    call: Callable[..., list[HeadValue]] = run_loss_terms,
) -> dict[str, Tensor]:
    """Values, metrics and gradients; those of the weight and bias with padding."""
    make, settings = CASES[name]
    more = dict(settings)
    b = Batch(more.pop("dtype", torch.float32), more.pop("ties", False))
    if shard is not None:
        b.cut(shard, width)
        more["vocabulary"] = shard
    learned = b.learned()
    hidden, weight, bias, low, up = learned.values()
    found = call(hidden, weight, bias, make(b), added=(low, up), **more)
    grads = torch.autograd.grad(objective([x.value for x in found], b), [*learned.values()])
    out = dict(zip(learned, grads, strict=True))
    for i, (value, metrics) in enumerate(found):
        out |= {f"value {i}": value.detach()} | {f"{n} {i}": x for n, x in metrics.items()}
    return out


def run_head(shard: VocabularyShard | None = None, width: int = V) -> dict[str, Tensor]:
    """What a head returns, with a head as the teacher, and gradients."""
    b, out = Batch(), {}
    if shard is not None:
        b.cut(shard, width)
    student = LMHead(C, width, bias=True, softcap=4.0, logit_scale=0.7)
    teacher = LMHead(D, width, bias=True, softcap=5.0).requires_grad_(False)
    student.vocabulary = teacher.vocabulary = shard
    student.load_state_dict({"weight": b.weight, "bias": b.bias})
    teacher.load_state_dict({"weight": b.teacher.weight, "bias": b.teacher.bias})
    b.hidden.requires_grad_()
    of_teacher = {"teacher_hidden": b.teacher_hidden, "teacher": teacher, "beta": 0.3}
    criteria = [_smoothed(b), KL(targets=b.targets, **of_teacher)]
    active = find_valid_rows(b.targets)
    for name, more in {"fused": {"active": active}, "logits": {"return_logits": True}}.items():
        found = student(b.hidden, criteria, at=b.hidden[:3], **more)
        loss = objective([x.value for x in found.values], b)
        out |= {f"value {name} {i}": x.value.detach() for i, x in enumerate(found.values)}
        out[f"at {name}"] = found.logits_at
        if found.logits is not None:
            assert found.logits.is_contiguous()
            out["logits"] = found.logits.detach()
            loss = loss + found.logits.square().mean()
        grads = torch.autograd.grad(loss, (b.hidden, student.weight, student.bias))
        out |= zip((f"{x} {name}" for x in ("hidden", "weight", "bias")), grads, strict=True)
    return out


def rank(directory: str, widths: Mapping[int, int]) -> None:
    """Every case on this rank, into a file of its own."""
    interpreter.install()
    dist.init_process_group("gloo")
    width = widths[dist.get_world_size()]
    first = min(dist.get_rank() * width, V)
    group = dist.group.WORLD
    assert group is not None
    shard = VocabularyShard.build(group.group_name, group.size(), first, min(width, V - first), V)
    found = {}
    for path, names in (("reference", CASES), ("triton", INTERPRETED[shard.ranks])):
        with use(path):
            found[path] = {name: run(name, shard, width) for name in names}
    if shard.ranks == 2:
        compiled = torch.compile(run_loss_terms, fullgraph=True, backend="aot_eager")
        with use("triton"):
            found["compiled"] = {COMPILED: run(COMPILED, shard, width, compiled)}
    found["head"] = {"": run_head(shard, width)}
    torch.save(found, Path(directory, f"{dist.get_rank()}.pt"))
    dist.destroy_process_group()


Found = dict[str, dict[str, dict[str, Tensor]]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, id=f"{n} ranks", marks=[pytest.mark.slow] * (n > 2)) for n in WIDTHS],
)
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
        parts = [f[name] for f in found]
        if name.startswith(SUMMED):
            out[name] = torch.stack(parts).double().sum(0).to(x)
        elif name.startswith(CUT):
            whole = torch.cat(parts)
            assert whole.shape[0] == width * len(found)
            assert not whole[V:].any(), f"padding has a gradient of the {name}"
            out[name] = whole[:V]
        else:
            assert all(torch.equal(x, other) for other in parts), name
    return out


def truth(name: str) -> dict[str, Tensor]:
    """Values and gradients by the definitions, in float64."""
    make, settings = CASES[name]
    b = Batch(settings.get("dtype", torch.float32), settings.get("ties", False))
    criteria = make(b)
    learned = {name: x.detach().double().requires_grad_() for name, x in b.learned().items()}
    hidden, weight, bias, low, up = learned.values()
    raw = F.linear(hidden, weight, bias) + low @ up.T
    z = scale_and_cap(raw, settings.get("options", Options()))
    values = [criterion(c, z) for c in criteria]
    grads = torch.autograd.grad(objective(values, b), [*learned.values()])
    out = dict(zip(learned, grads, strict=True))
    out |= {f"value {i}": v.detach() for i, v in enumerate(values)}
    logp, index = z.detach().log_softmax(-1), b.targets.clamp(min=0)[:, None]
    lse, valid = z.detach().logsumexp(-1), b.targets != -100
    rows = {"nll": -logp.gather(1, index)[:, 0], "z": lse, "max_logit": z.detach().amax(-1)}
    rows["entropy"] = -(logp.exp() * logp).sum(-1)
    for i, c in enumerate(criteria):
        names = getattr(c, "metrics", ())
        out |= {f"{m} {i}": rows[m] * valid for m in names if m in rows}
    return out


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_one_are_the_same(ranks: list[Found], path: str, name: str) -> None:
    if path == "triton" and name not in INTERPRETED[len(ranks)]:
        pytest.skip("compared on the other path")
    assert_same(ranks, path, name)


def test_compiled(ranks: list[Found], path: str) -> None:
    if path == "reference" or len(ranks) != 2:
        pytest.skip("compiled with Triton's kernels, on two ranks")
    assert_same(ranks, "compiled", COMPILED)


def assert_same(ranks: list[Found], way: str, name: str) -> None:
    found = joined([f[way][name] for f in ranks], WIDTHS[len(ranks)])
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


def test_a_head_whose_logits_are_joined(ranks: list[Found], path: str) -> None:
    found = joined([f["head"][""] for f in ranks], WIDTHS[len(ranks)])
    with use("reference"):
        expected = run_head()
    assert found["logits"].shape == (N, V)
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, msg=key)
