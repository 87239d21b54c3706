"""What ranks with the same rows decide by, after a fault of one of them."""

import math
import os

import torch

from tests.train.ranks import Ranks
from tigon.train import start
from tigon.train.config import Parallel


def decide() -> None:
    rank = int(os.environ["RANK"])
    with start("cpu", parallel=Parallel(tensor=2)) as world:

        def agreed(*losses: float) -> float:
            return float(world.same_loss(torch.tensor(losses[rank], dtype=torch.double)))

        assert agreed(1.0, 1.0) == 1.0
        assert agreed(1.0, 1e6) == 1e6  # a spike on one
        assert agreed(-1.0, -2.0) == -1.0  # rewards are negative
        assert math.isnan(agreed(1.0, math.nan)) and not math.isfinite(agreed(math.inf, 1.0))
        assert agreed(math.inf, math.inf) == math.inf


def test_ranks_decide_by_one_loss() -> None:
    Ranks(2, decide).finish()
