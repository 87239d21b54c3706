"""Muon of sharded parameters: each hidden matrix is orthogonalised by one rank.

# K matrices, [M, N] each
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from math import prod, sqrt
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tigon.train.optim.exchange import Copy, Matrix, Round, plan, rows_of_ranks
from tigon.train.parallel import local
from tigon.weights import own_rows, row_group

T = TypeVar("T")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's, and so is EPS
EPS = 1e-7
# What lr is multiplied by, for a matrix of so many rows and columns
ADJUST: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * sqrt(max(rows, cols)),
}


class Muon(Optimizer):
    """torch.optim.Muon for the matrices of parameters that FSDP2 shards, and AdamW for the rest.

    `matrices` says of each parameter in the groups with `hidden` how many rows each of its
    matrices has, of its flattening [-1, last dim]; the other groups are AdamW's. Momentum has the
    shape and the sharding of the parameter. In each step the matrices are dealt to the ranks by
    cost; their rows travel there and, orthogonalised, back, in `dtype`.
    Source: Keller Jordan, kellerjordan.github.io/posts/muon; match_rms_adamw: arXiv 2502.16982.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Mapping[Tensor, Sequence[int]],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        self.adjust, self.dtype, self.matrices = ADJUST[adjust_lr_fn], dtype, matrices
        rest = [group for group in groups if not group["hidden"]]
        self.adamw = torch.optim.AdamW(rest, lr, betas, eps, fused=True) if rest else None
        super().__init__(groups, {"lr": lr})  # of the same dictionaries
        self.planned: list[int] = []  # ids of the parameters of the rounds
        self.rounds: list[Round] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("Muon.step takes no closure")
        hidden = [group for group in self.param_groups if group["hidden"]]
        pairs = [(p, group) for group in hidden for p in group["params"] if p.grad is not None]
        if pairs:
            self._step([p for p, _ in pairs], [group for _, group in pairs])
        if self.adamw is not None:
            self.adamw.param_groups = [g for g in self.param_groups if not g["hidden"]]
            self.adamw.state = self.state
            self.adamw.step()

    def _step(self, parameters: list[Tensor], groups: list[dict[str, Any]]) -> None:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        weights = [_flat(p) for p in parameters]
        buffers = [_flat(self.state[p]["momentum_buffer"]) for p in parameters]
        gradients = [_flat(p.grad).to(b.dtype) for p, b in zip(parameters, buffers, strict=True)]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        for decay, same in _by([1 - g["lr"] * g["weight_decay"] for g in groups], weights):
            torch._foreach_mul_(same, decay)
        if self.planned != (known := [id(p) for p in parameters]):
            self.planned, self.rounds = known, self._plan(parameters)
        exchange = _Exchange(parameters[0], self.dtype)

        def send(turn: Round) -> "_Message":
            momenta = _slices(turn.out, buffers)
            if not self.nesterov or not momenta:
                return exchange.gather(turn, momenta)
            ahead = torch._foreach_lerp(_slices(turn.out, gradients), momenta, self.momentum)
            return exchange.gather(turn, list(ahead))

        message = send(self.rounds[0])
        for turn, after in zip(self.rounds, [*self.rounds[1:], None], strict=True):
            matrices = exchange.assemble(turn, message)
            if after is not None:  # its rows travel meanwhile
                message = send(after)
            self._orthogonalise(turn, matrices)
            updates = exchange.scatter(turn, matrices)
            rates = [-groups[c.parameter]["lr"] * self.adjust(*c.shape) for c in turn.out]
            pairs = zip(_slices(turn.out, weights), updates, strict=True)
            for rate, each in _by(rates, pairs):
                torch._foreach_add_([w for w, _ in each], [u for _, u in each], alpha=rate)

    def _orthogonalise(self, turn: Round, matrices: Tensor) -> None:
        """The rank's own matrices of the round, in place; equal shapes in one batch."""
        begin = 0
        for (rows, cols), same in groupby(turn.own, key=lambda m: (m.rows, m.cols)):
            count = sum(1 for _ in same)
            batch = matrices.narrow(0, begin, count * rows * cols).view(count, rows, cols)
            batch.copy_(orthogonalise(batch, self.ns_steps))
            begin += batch.numel()

    def _plan(self, parameters: list[Tensor]) -> list[Round]:
        matrices, bounds = [], []
        mesh = parameters[0].device_mesh if isinstance(parameters[0], DTensor) else None
        # Of the last dimension, along which rows are divided
        ranks, rank = (
            (1, 0) if mesh is None else (mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1))
        )
        for i, p in enumerate(parameters):
            first = 0
            for rows in self.matrices[p]:
                matrices.append(Matrix(i, first, rows, p.shape[-1]))
                first += rows
            bounds.append(rows_of_ranks(p.shape, ranks))
            own, begin = own_rows(f"parameter {i}", p)
            begin *= prod(p.shape[1:-1])
            has = begin, begin + own.numel() // p.shape[-1]
            if own.numel() and has != bounds[i][rank]:
                raise ValueError(f"rank {rank} has rows {has}, not {bounds[i][rank]} as in FSDP2")
        return plan(matrices, bounds, rank)


def orthogonalise(
    x: Tensor,  # [K, M, N]
    steps: int,
) -> Tensor:
    """Of each x = U S V^T about U V^T: singular values go to about 1 in `steps` iterations."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class _Message:
    """Elements that come from all ranks."""

    def __init__(self, elements: Tensor, work: Any = None):
        self._elements, self._work = elements, work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._elements


class _Exchange:
    """Sends rows of matrices to the ranks that own these, and back."""

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.group = None
        if isinstance(like, DTensor) and like.device_mesh.size(-1) > 1:
            self.group = row_group(like)
        self.device, self.dtype = like.device, dtype

    def gather(self, turn: Round, updates: list[Tensor]) -> _Message:
        """This rank's part of all matrices of the round, to their owners."""
        message = self._empty(turn.sizes_out)
        if updates:
            torch._foreach_copy_(message.split([c.length for c in turn.out]), updates)
        return self._send(message, turn.sizes_out, turn.sizes_in)

    def assemble(self, turn: Round, message: _Message) -> Tensor:
        """The rank's own matrices, one after the other."""
        elements = message.wait()
        if len(turn.moves) <= 1:
            return elements
        matrices = self._empty(turn.sizes_in)
        torch._foreach_copy_(*_both(turn, matrices, elements))
        return matrices

    def scatter(self, turn: Round, matrices: Tensor) -> tuple[Tensor, ...]:
        """The rows of own matrices to whom they belong; returns what `gather` had, changed."""
        elements = matrices
        if len(turn.moves) > 1:
            elements = self._empty(turn.sizes_in)
            ours, theirs = _both(turn, matrices, elements)
            torch._foreach_copy_(theirs, ours)
        back = self._send(elements, turn.sizes_in, turn.sizes_out).wait()
        return back.split([c.length for c in turn.out])

    def _send(self, message: Tensor, sizes: list[int], sizes_back: list[int]) -> _Message:
        if self.group is None:
            return _Message(message)
        got = self._empty(sizes_back)
        work = dist.all_to_all_single(got, message, sizes_back, sizes, self.group, async_op=True)
        return _Message(got, work)

    def _empty(self, sizes: Sequence[int]) -> Tensor:
        return torch.empty(sum(sizes), dtype=self.dtype, device=self.device)


def _both(turn: Round, matrices: Tensor, elements: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The pieces of the matrices, and the same of the message."""
    return (
        [matrices.narrow(0, m.target, m.length) for m in turn.moves],
        [elements.narrow(0, m.source, m.length) for m in turn.moves],
    )


def _slices(copies: Sequence[Copy], of: Sequence[Tensor]) -> list[Tensor]:
    return [of[c.parameter].narrow(0, c.offset, c.length) for c in copies]


def _by(keys: Sequence[float], values: Iterable[T]) -> Iterable[tuple[float, list[T]]]:
    """The values with the same key together."""
    found: dict[float, list[T]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return found.items()


def _flat(tensor: Tensor | None) -> Tensor:
    """This rank's elements."""
    assert tensor is not None
    return local(tensor.detach()).view(-1)
