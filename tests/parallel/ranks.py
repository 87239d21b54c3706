"""Functions on several ranks whose results come back, of the selected tests alone."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import Ranks
from tigon.cli import main


def run_on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns on each of `count` ranks of a gloo group."""
    with tempfile.TemporaryDirectory(prefix="tigon-results-") as directory:
        Ranks(count, _save_result, directory, function, arguments).finish()
        files = [Path(directory, f"{rank}.pt") for rank in range(count)]
        return [torch.load(file, weights_only=False) for file in files]


def _save_result(directory: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.save(function(*arguments), Path(directory, f"{dist.get_rank()}.pt"))
    dist.destroy_process_group()


def run_command(command: list[str], nowhere: str = "") -> None:
    """`tigon`'s, on each rank; on the second in a directory of its own, if one is given."""
    if nowhere and os.environ["RANK"] == "1":
        os.chdir(nowhere)
    torch.set_num_threads(1)
    sys.exit(main([*command, "--device", "cpu"]))


def selected_cases(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """The values of parameters `names` in the selected tests of the requesting module, in order.

    A fixture of many cases computes these alone.
    """
    params = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    found = [tuple(p[name] for name in names) for p in params if {*names} <= p.keys()]
    return list(dict.fromkeys(values[0] if len(names) == 1 else values for values in found))
