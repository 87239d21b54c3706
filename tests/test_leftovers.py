"""What a test leaves behind is put back, and its compiled functions are forgotten."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo import convert_frame

from tests.support.leftovers import STATE, put_back


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_all_is_put_back(tmp_path: Path) -> None:
    before = [read() for read, _ in STATE]
    with put_back():
        os.chdir(tmp_path)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        assert sum(read() != value for (read, _), value in zip(STATE, before, strict=True)) == 9
    assert [read() for read, _ in STATE] == before


def test_what_is_compiled_is_forgotten() -> None:
    with put_back():
        torch.compile(double, backend="eager")(torch.ones(3))
        assert convert_frame.input_codes.seen
    assert not convert_frame.input_codes.seen
