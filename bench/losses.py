"""Problems of the operators over the vocabulary: cross-entropy, with and without the head."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import peers
from bench.measure import Problem, Provider, Run, Tensors, leaf, randn, truth
from bench.peers import imported, liger, plain, quack

VALID = 0.3  # share of the targets that are not ignored in the sparse cases


def cross_entropy(n: int, v: int) -> Problem:
    logits, targets = leaf(n, v, scale=2.0), torch.randint(v, (n,))

    def of_tigon(overwrite: bool) -> Run:
        function = imported("tigon.kernels:cross_entropy")
        return lambda: function(logits, targets, overwrite=overwrite)[0]

    providers = [
        Provider("tigon", lambda: of_tigon(False)),
        Provider("tigon overwrite", lambda: of_tigon(True), overwrites=(logits,)),
        *plain(peers.cross_entropy, logits, targets, "sum"),
        # writes the gradient over the logits, in forward
        liger("liger_cross_entropy", logits, targets, reduction="sum", overwrites=(logits,)),
        quack("cross_entropy:cross_entropy", logits, targets, reduction="sum"),
    ]
    define = partial(peers.cross_entropy, reduction="sum", up=torch.float64)
    rows = {"logits": logits, "targets": targets}
    exact = partial(truth, define, rows, {}, ("loss",), ())
    return Problem({"logits": logits}, ("loss",), (), exact, providers)


def peaked(n: int, c: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and targets whose predictions look like a trained model's.

    Tokens have Zipf frequencies, which feature 0 puts into every row's logits and which the
    targets follow; noise of deviation 1.5 tells the rest of the vocabulary apart; and the row
    of the target is mixed into the hidden state with a margin uniform in [0, 2 log V], so that
    some tokens are open and many are nearly certain. `notes` in the results say how many.
    """
    log_rank = (torch.randperm(v) + 1.0).log()
    targets = torch.multinomial((-log_rank).exp(), n, replacement=True)
    weight = torch.randn(v, c) * 0.02
    weight[:, 0] = 0.0
    hidden = torch.randn(n, c) * (1.5 / (0.02 * math.sqrt(c)))
    margin = torch.rand(n) * (2 * math.log(v))
    rows = weight[targets]
    hidden += rows * (margin / rows.square().sum(-1))[:, None]
    hidden[:, 0], weight[:, 0] = 16.0, log_rank / -16.0
    return hidden.bfloat16(), weight.bfloat16(), targets


def certainty(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, float]:
    """Of the first 1024 tokens: their mean loss, and the share predicted with p > 1/2."""
    loss = F.cross_entropy((hidden[:1024] @ weight.T).float(), targets[:1024], reduction="none")
    return {
        "mean_loss": loss.mean().item(),
        "share_over_half": (loss < math.log(2.0)).float().mean().item(),
    }


def linear_cross_entropy(n: int, c: int, v: int, variant: str) -> Problem:
    if variant == "peaked":
        hidden, weight, targets = peaked(n, c, v)
    else:
        hidden, weight = randn(n, c, scale=0.5), randn(v, c, scale=0.02)
        targets = torch.randint(v, (n,))
    notes = certainty(hidden, weight, targets)
    if variant == "30 % valid":
        targets[torch.rand(n) >= VALID] = -100
    notes["share_valid"] = (targets != -100).float().mean().item()
    hidden.requires_grad_(), weight.requires_grad_()
    count = (targets != -100).sum().float()
    elsewhere = torch.ones(v, dtype=torch.bool)
    elsewhere[targets.clamp(min=0)] = False

    def with_elsewhere(results: Tensors) -> Tensors:
        # where the gradient is all softmax and no target: what a filter of small values loses
        return {**results, "dweight, no target": results["dweight"][elsewhere]}

    def of_tigon() -> Run:
        function = imported("tigon.kernels:linear_cross_entropy")
        # as a model does it: before its blocks, so that nobody waits for the count
        active = imported("tigon.kernels.linear_cross_entropy:active_rows")(targets)
        known = {"denominator": count, "active": active}
        return lambda: function(hidden, weight, targets, **known)[0]

    def define(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return peers.linear_cross_entropy(hidden, weight, targets, "sum") / count

    def exact() -> Tensors:
        rows, options = {"hidden": hidden, "targets": targets}, {"dtype": torch.float32}
        return with_elsewhere(
            truth(define, rows, {"weight": weight}, ("loss",), (), step=1024, **options)
        )

    args = (hidden, weight, targets)
    flce = "liger_fused_linear_cross_entropy"
    fp32 = liger(flce, *args, accum_dtype=torch.float32)
    fp32.name = "Liger fp32 dW"
    providers = [
        Provider("tigon", of_tigon),
        *plain(peers.linear_cross_entropy, *args, "mean"),
        liger(flce, *args),
        fp32,
        quack("linear_cross_entropy:chunked_linear_cross_entropy", *args),
        Provider("CCE", lambda: partial(peers.cce(exact=False), *args)),
        Provider("CCE exact", lambda: partial(peers.cce(exact=True), *args)),
    ]
    for provider in providers:
        provider.split = with_elsewhere
    products: dict[str, Run] = {}
    if variant != "30 % valid":
        x, w = hidden.detach(), weight.detach()
        d = x @ w.T  # stands for the logits' gradient: the same shape, and not zeros
        products = {"x @ W.T": lambda: x @ w.T, "d @ W": lambda: d @ w, "d.T @ x": lambda: d.T @ x}
        parts = tuple(products.values())
        products["gemms_ms"] = lambda: [run() for run in parts]
    leaves = {"hidden": hidden, "weight": weight}
    return Problem(leaves, ("loss",), (), exact, providers, products, notes)
