"""Ranks that share the requests of an evaluation, and the state of a live model around it."""

import os
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tigon.eval.likelihood import gathers_weights
from tigon.models import CausalLM
from tigon.weights import WriterGroup
from tigon.weights.entries import RankError

IDLE, RUNS, FAILED = range(3)  # what a rank says before a pass

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class DataRanks:
    """This process among those that share requests: `rank` of `size` parts, and a gloo group of all
    processes, of which several may have the same part; None: this process alone."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_all(cls) -> "DataRanks":
        """Makes ranks of all processes; every one of them calls this."""
        group = dist.new_group(backend="gloo")
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @classmethod
    def launched(cls) -> "DataRanks":
        """Makes ranks of the processes that torchrun or accelerate have started, if any."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return ALONE
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            dist.init_process_group("gloo")
        return cls.of_all()

    def choose(self, costs: Mapping[K, int]) -> set[K]:
        """Returns this rank's keys: the dearest first, each to the rank with the least so far."""
        loads, keys = [0] * self.size, set()
        for key in sorted(costs, key=lambda k: -costs[k]):
            rank = loads.index(min(loads))
            loads[rank] += costs[key]
            if rank == self.rank:
                keys.add(key)
        return keys

    def gather(self, value: T) -> list[T]:
        """Returns every process's value, on all of them."""
        return [value] if self.group is None else WriterGroup(self.group).gather(value)

    def largest(self, number: int) -> int:
        """Returns the largest of all processes' numbers."""
        tensor = torch.tensor(number, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return int(tensor)


ALONE = DataRanks()


@contextmanager
def equal_passes(model: CausalLM, ranks: DataRanks) -> Iterator[None]:
    """Lets all ranks run as many passes as the one with the most, where a pass gathers weights:
    those that are done read one token. An error on one rank is raised on all.

    Before each pass the ranks say whether they run one, so that none waits for another's weights.
    """
    if ranks.group is None:
        yield
        return
    if not gathers_weights(model):
        with WriterGroup(ranks.group).sync_errors():
            yield
        return

    def announce(*_: Any) -> None:
        if ranks.largest(RUNS) == FAILED:
            raise RankError("another rank has failed in an evaluation")

    hook = model.register_forward_pre_hook(announce, prepend=True)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        yield
        hook.remove()
        while (state := ranks.largest(IDLE)) == RUNS:
            with torch.no_grad():
                model(token, logits_to_keep=1)
        if state == FAILED:
            raise RankError("another rank has failed in an evaluation")
    except RankError:
        raise
    except BaseException:  # also what another hook raises, of all ranks alike
        ranks.largest(FAILED)
        raise
    finally:
        hook.remove()


@contextmanager
def evaluation_mode(model: CausalLM) -> Iterator[None]:
    """Puts the model into evaluation mode and every module back into its own; ranks that share the
    tokens of rows read whole rows in between."""
    modes = {module: module.training for module in model.modules()}
    context_ranks = model.context_ranks
    model.eval()
    model.context_ranks = None
    try:
        yield
    finally:
        model.context_ranks = context_ranks
        for module, training in modes.items():
            module.training = training
