"""Muon for parameters that ranks divide: each hidden matrix is orthogonalized by one rank.

`plan` assigns matrices to ranks and says which blocks of a matrix each rank sends and receives.

# K matrices of one shape, [M, N] each. Rows are those of a parameter's flattening [-1, last dim]
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import sqrt
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tigon.parallel import TensorParallel
from tigon.train.distributed import local
from tigon.weights import ShardSpec, TensorSlice, local_blocks, local_rows, row_group, shard_slices

T = TypeVar("T")
Receive: TypeAlias = Callable[[], Tensor]  # waits for the elements that other ranks send
ROUND = 1 << 26  # elements that a rank takes at a time
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's, and so is EPS
EPS = 1e-7
# Factors of lr for a matrix of so many rows and columns
ADJUST: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: sqrt(max(1.0, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * sqrt(max(rows, cols)),
}


class Matrix(NamedTuple):
    """The size of a matrix that one rank orthogonalizes."""

    rows: int
    cols: int

    @property
    def cost(self) -> int:
        """The multiply-adds of a Newton-Schulz iteration, which transposes a tall matrix."""
        short, long = sorted(self)
        return short * short * (2 * long + short)


class MatrixBlock(NamedTuple):
    """Describes a rank's block of a matrix: elements of a parameter's part from `offset` on."""

    parameter: int
    offset: int
    matrix: int
    row: int  # of the matrix, and its column: where the block begins
    col: int
    rows: int
    cols: int


class BlockCopy(NamedTuple):
    """Describes `length` elements of a rank's part of a parameter, in matrices of one shape."""

    parameter: int
    offset: int
    length: int
    shape: Matrix

    def meets(self, after: "BlockCopy") -> bool:
        """Returns whether the next copy continues this one, so that both are one."""
        same = (self.parameter, self.shape) == (after.parameter, after.shape)
        return same and self.offset + self.length == after.offset


class Move(NamedTuple):
    """Describes a copy of `rows` lines of `cols` elements from `source` in a message to `target` in
    matrices, where lines are `step` elements apart."""

    source: int
    target: int
    rows: int
    cols: int
    step: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.rows * self.cols

    def meets(self, after: "Move") -> bool:
        """Returns whether the next move continues this one, so that both are one."""
        ends = self.source + self.length, self.target + self.length
        return self.rows == after.rows == 1 and ends == after[:2]


@dataclass
class Round:
    """Lists what one rank sends, receives and orthogonalizes in a round."""

    matrices: list[Matrix] = field(default_factory=list)  # to compute, sorted by shape
    copies: list[BlockCopy] = field(default_factory=list)  # sent, in the order of the message
    sizes_out: list[int] = field(default_factory=list)  # elements to each rank
    sizes_in: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)  # from the message to the matrices


def blocks_of(
    parameter: Tensor, index: int, heights: Sequence[int], first: int, spec: ShardSpec | None
) -> Iterator[MatrixBlock]:
    """Yields this rank's blocks of a parameter's matrices, which are numbered from `first` on.

    `heights` are the rows of each matrix of the whole parameter; `spec` is the shard of tensor or
    expert parallelism, whose rows FSDP divides further.
    """
    own, begin = local_rows(f"parameter {index}", parameter)
    cols = parameter.shape[-1] if spec is None else spec.shape[-1]
    start = 0
    for matrix, rows in enumerate(heights, first):
        parts: Sequence[TensorSlice] = (TensorSlice.whole("", (rows, cols), start),)
        if spec is not None:
            parts = shard_slices(parts, spec)
        for part in parts:
            for (row, col), block in local_blocks(part, parameter.shape, own, begin):
                assert block.is_contiguous()  # of columns a rank has one piece
                offset = int(block.storage_offset() - own.storage_offset())
                yield MatrixBlock(index, offset, matrix, row, col, *block.shape)
        start += rows


def assign_ranks(matrices: Sequence[Matrix], blocks: Sequence[Sequence[MatrixBlock]]) -> list[int]:
    """Returns the rank of each matrix, so that costs are about equal; `blocks` has those of each
    rank.

    A rank that has all of a matrix keeps it, up to its share of the cost. The other matrices go,
    the costliest first, to the rank with the lowest cost.
    """
    ranks, total = len(blocks), sum(matrix.cost for matrix in matrices)
    holders: dict[int, int] = {}
    for rank, of_rank in enumerate(blocks):
        for b in of_rank:
            if (b.rows, b.cols) == matrices[b.matrix]:
                holders.setdefault(b.matrix, rank)
    costs, owners = [0] * ranks, [-1] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: -matrices[i].cost)
    for i in order:
        if i in holders and (costs[holders[i]] + matrices[i].cost) * ranks <= total:
            owners[i] = holders[i]
            costs[owners[i]] += matrices[i].cost
    for i in order:
        if owners[i] < 0:
            owners[i] = min(range(ranks), key=costs.__getitem__)
            costs[owners[i]] += matrices[i].cost
    return owners


def plan(
    matrices: Sequence[Matrix],
    blocks: Sequence[Sequence[MatrixBlock]],
    rank: int,
    size: int = ROUND,
) -> list[Round]:
    """Returns the rounds of `rank`, of about `size` elements for each owner of matrices.

    `blocks` has those of each rank. A block that several ranks have comes from each of them, and
    goes back to all.
    """
    ranks = len(blocks)
    rounds: list[list[list[int]]] = []  # matrices by round and rank
    owners = assign_ranks(matrices, blocks)
    for owner in range(ranks):
        indices = [i for i, o in enumerate(owners) if o == owner]
        indices.sort(key=lambda i: (-matrices[i].cost, matrices[i].rows, i))  # by shape
        number, elements = 0, 0
        for i in indices:
            numel = matrices[i].rows * matrices[i].cols
            if elements and elements + numel > size:
                number, elements = number + 1, 0
            elements += numel
            if number == len(rounds):
                rounds.append([[] for _ in range(ranks)])
            rounds[number][owner].append(i)
    by_matrix: list[dict[int, list[MatrixBlock]]] = [{} for _ in blocks]  # for each rank
    for rank_blocks, listed in zip(by_matrix, blocks, strict=True):
        for b in listed:
            rank_blocks.setdefault(b.matrix, []).append(b)
    return [_plan_round(matrices, assigned, by_matrix, rank) for assigned in rounds]


def _plan_round(
    matrices: Sequence[Matrix],
    assigned: Sequence[Sequence[int]],  # matrices of each rank
    blocks: Sequence[dict[int, list[MatrixBlock]]],  # of each rank, by matrix
    rank: int,
) -> Round:
    """Returns which blocks this rank sends and receives, and its matrices to compute."""
    result = Round(matrices=[matrices[i] for i in assigned[rank]])
    for indices in assigned:
        size = 0
        for b in (b for i in indices for b in blocks[rank].get(i, ())):
            copy = BlockCopy(b.parameter, b.offset, b.rows * b.cols, matrices[b.matrix])
            if result.copies and result.copies[-1].meets(copy):
                before = result.copies.pop()
                copy = before._replace(length=before.length + copy.length)
            result.copies.append(copy)
            size += b.rows * b.cols
        result.sizes_out.append(size)
    source = 0
    for sender_blocks in blocks:
        target, start = 0, source
        for i in assigned[rank]:
            cols = matrices[i].cols
            for b in sender_blocks.get(i, ()):
                offset = target + b.row * cols + b.col
                move = Move(source, offset, b.rows, b.cols, cols)
                if b.cols == cols or b.rows == 1:
                    move = Move(source, offset, 1, b.rows * b.cols, 0)
                if result.moves and result.moves[-1].meets(move):
                    previous = result.moves.pop()
                    move = previous._replace(cols=previous.cols + move.cols)
                result.moves.append(move)
                source += b.rows * b.cols
            target += matrices[i].rows * cols
        result.sizes_in.append(source - start)
    return result


class Muon(Optimizer):
    """torch.optim.Muon for matrices that ranks divide, and AdamW for the rest.

    `matrices` has the rows of each matrix of a parameter in the groups with `hidden`, counted in
    the whole parameter's flattening [-1, last dim]; the other groups are AdamW's. `shard_specs` has
    the shards of tensor or expert parallelism, whose rows FSDP divides further. Momentum is divided
    as the parameter is.

    Each step assigns the matrices by cost to the ranks that divide them: FSDP's ranks of `like`,
    times those of `tensor`. Blocks go to the rank of their matrix in `dtype`, and come back
    orthogonalized.
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
        shard_specs: Mapping[Tensor, ShardSpec],
        tensor: TensorParallel | None,
        like: Tensor,
    ):
        self.shard_specs, self.tensor, self.like = shard_specs, tensor, like
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        self.adjust, self.dtype, self.matrices = ADJUST[adjust_lr_fn], dtype, matrices
        rest = [group for group in groups if not group["hidden"]]
        self.adamw = torch.optim.AdamW(rest, lr, betas, eps, fused=True) if rest else None
        super().__init__(groups, {"lr": lr})  # AdamW's groups are the same dictionaries
        self.planned: list[int] = []  # ids of the parameters in the rounds
        self.rounds: list[Round] = []
        self.exchange: _RankExchange | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates hidden matrices by Muon and the rest by AdamW; TypeError for a closure."""
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
        """Updates the parameters, a round of matrices at a time."""
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        weights = [_flatten(p) for p in parameters]
        buffers = [_flatten(self.state[p]["momentum_buffer"]) for p in parameters]
        gradients = [_flatten(p.grad).to(b.dtype) for p, b in zip(parameters, buffers, strict=True)]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        decays = [1 - g["lr"] * g["weight_decay"] for g in groups]
        for decay, tensors in _group_by(decays, weights):
            torch._foreach_mul_(tensors, decay)
        exchange = self.exchange
        if exchange is None:
            group = _group(self.like, self.tensor)
            exchange = self.exchange = _RankExchange(group, parameters[0].device, self.dtype)
        if self.planned != (known := [id(p) for p in parameters]):
            self.planned, self.rounds = known, self._plan(parameters, exchange)

        def send(turn: Round) -> Receive:
            momenta = _slices(turn.copies, buffers)
            if not self.nesterov or not momenta:
                return exchange.gather(turn, momenta)
            ahead = torch._foreach_lerp(_slices(turn.copies, gradients), momenta, self.momentum)
            return exchange.gather(turn, list(ahead))

        message = send(self.rounds[0])
        for turn, after in zip(self.rounds, [*self.rounds[1:], None], strict=True):
            matrices = exchange.assemble(turn, message)
            if after is not None:  # its rows travel meanwhile
                message = send(after)
            self._orthogonalize(turn, matrices)
            updates = exchange.scatter(turn, matrices)
            rates = [-groups[c.parameter]["lr"] * self.adjust(*c.shape) for c in turn.copies]
            pairs = zip(_slices(turn.copies, weights), updates, strict=True)
            for rate, each in _group_by(rates, pairs):
                torch._foreach_add_([w for w, _ in each], [u for _, u in each], alpha=rate)

    def _orthogonalize(self, turn: Round, matrices: Tensor) -> None:
        """Orthogonalizes this rank's matrices of the round in place, a batch for each shape."""
        begin = 0
        for (rows, cols), same in groupby(turn.matrices, key=lambda m: (m.rows, m.cols)):
            count = sum(1 for _ in same)
            batch = matrices.narrow(0, begin, count * rows * cols).view(count, rows, cols)
            batch.copy_(orthogonalize(batch, self.ns_steps))
            begin += batch.numel()

    def _plan(self, parameters: list[Tensor], exchange: "_RankExchange") -> list[Round]:
        """Assigns matrices to ranks by cost and returns this rank's rounds. Every rank calls it."""
        matrices: list[Matrix] = []
        own: list[MatrixBlock] = []
        for i, p in enumerate(parameters):
            heights, spec = self.matrices[p], self.shard_specs.get(p)
            own += blocks_of(p, i, heights, len(matrices), spec)
            cols = p.shape[-1] if spec is None else spec.shape[-1]
            matrices += [Matrix(rows, cols) for rows in heights]
        return plan(matrices, *exchange.all_gather_blocks(own))


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Returns about U V^T for each matrix U S V^T of x [K, M, N], by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _group(like: Tensor, tensor: TensorParallel | None) -> dist.ProcessGroup | None:
    """Returns the group of ranks that divide matrices, or None for one. All call this."""
    rows = row_group(like) if isinstance(like, DTensor) else None
    if tensor is None:
        return rows if rows is not None and rows.size() > 1 else None
    each: list[list[int]] = [tensor.members]
    if rows is not None:
        each *= rows.size()
        dist.all_gather_object(each, tensor.members, rows)
    every = sorted(rank for members in each for rank in members)
    group = dist.group.WORLD
    if len(every) < dist.get_world_size():
        group = dist.new_group(every, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


class _RankExchange:
    """Sends blocks of matrices to the ranks that orthogonalize them, and back."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype):
        self.group, self.device, self.dtype = group, device, dtype

    def all_gather_blocks(self, own: list[MatrixBlock]) -> tuple[list[list[MatrixBlock]], int]:
        """Returns the blocks of each rank, and this rank's index."""
        if self.group is None:
            return [own], 0
        every: list[list[MatrixBlock]] = [own] * self.group.size()
        dist.all_gather_object(every, own, self.group)
        return every, self.group.rank()

    def gather(self, turn: Round, updates: list[Tensor]) -> Receive:
        """Begins to send `updates`, this rank's blocks of the round, to the ranks of their
        matrices; returns what waits for the blocks of this rank's matrices."""
        message = self._empty(turn.sizes_out)
        if updates:
            torch._foreach_copy_(message.split([c.length for c in turn.copies]), updates)
        return self._send(message, turn.sizes_out, turn.sizes_in)

    def assemble(self, turn: Round, message: Receive) -> Tensor:
        """Waits for the message and returns this rank's matrices in one vector."""
        elements = message()
        if len(turn.moves) <= 1:
            return elements
        matrices = self._empty(turn.sizes_in)
        _copy(turn.moves, elements, matrices)
        return matrices

    def scatter(self, turn: Round, matrices: Tensor) -> tuple[Tensor, ...]:
        """Sends blocks back, and returns those that `gather` sent, updated."""
        elements = matrices
        if len(turn.moves) > 1:
            elements = self._empty(turn.sizes_in)
            _copy(turn.moves, elements, matrices, back=True)
        back = self._send(elements, turn.sizes_in, turn.sizes_out)()
        return back.split([c.length for c in turn.copies])

    def _send(self, message: Tensor, sizes: list[int], sizes_back: list[int]) -> Receive:
        """Begins to send the message and returns what waits for that of the other ranks; without a
        group, the message is the answer. `sizes` and `sizes_back` are elements to and from each
        rank."""
        if self.group is None:
            return lambda: message
        out = self._empty(sizes_back)
        work = dist.all_to_all_single(out, message, sizes_back, sizes, self.group, async_op=True)

        def receive() -> Tensor:
            work.wait()
            return out

        return receive

    def _empty(self, sizes: Sequence[int]) -> Tensor:
        """Returns an uninitialized vector of as many elements as the sizes add up to."""
        return torch.empty(sum(sizes), dtype=self.dtype, device=self.device)


def _copy(moves: Sequence[Move], message: Tensor, matrices: Tensor, *, back: bool = False) -> None:
    """Copies the elements of a message to matrices, or `back`."""
    whole = [m for m in moves if m.rows == 1]
    pairs = [
        (
            [message.narrow(0, m.source, m.length) for m in whole],
            [matrices.narrow(0, m.target, m.length) for m in whole],
        )
    ]
    for m in moves:  # in lists of one: torch copies one by one if any tensor has gaps
        if m.rows > 1:
            block = message.narrow(0, m.source, m.length).view(m.rows, m.cols)
            lines = matrices.as_strided((m.rows, m.cols), (m.step, 1), m.target)
            pairs.append(([block], [lines]))
    for sent, local_lines in pairs:
        if sent:
            torch._foreach_copy_(*((sent, local_lines) if back else (local_lines, sent)))


def _slices(copies: Sequence[BlockCopy], of: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors' elements that the copies name."""
    return [of[c.parameter].narrow(0, c.offset, c.length) for c in copies]


def _group_by(keys: Sequence[float], values: Iterable[T]) -> Iterable[tuple[float, list[T]]]:
    """Returns each key with the list of its values."""
    groups: dict[float, list[T]] = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return groups.items()


def _flatten(tensor: Tensor | None) -> Tensor:
    """Returns this rank's elements as a vector."""
    assert tensor is not None
    return local(tensor.detach()).view(-1)
