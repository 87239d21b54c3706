"""What tests of checkpoints share."""

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tigon
from tigon.train.checkpoint import files, saver
from tigon.train.checkpoint.format import full_state, state_blocks


class State:
    """A model after one step of AdamW, and what a Saver wants besides."""

    def __init__(self, directory: Path, world):
        self.model = tigon.from_pretrained(directory).train()
        self.tokenizer = tigon.Tokenizer.from_pretrained(directory)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.world = world
        self.step(seed=1)

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()

    def save(self, to: saver.Saver, step: int) -> Path:
        return to.save(step, self.model, self.optimizer, self.tokenizer, {"config": {}})

    def tensors(self) -> dict[str, torch.Tensor]:
        state = full_state(self.model, self.optimizer, None)
        return {block.name: block.rows.clone() for block in state_blocks(state)}


def saved_steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@contextmanager
def changed_metadata(source: Path) -> Iterator[dict[str, Any]]:
    """The content of run.json, to change; the checksums are right again."""
    metadata = json.loads((source / "run.json").read_text())
    yield metadata
    (source / "run.json").write_text(json.dumps(metadata))
    (source / files.SUMS).unlink()
    files.write_sums(source, {})


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol=1e-4, atol=1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=told)


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def put_tensors(path: Path, tensors: dict[str, torch.Tensor], offsets: Sequence[int] = ()) -> None:
    """A file of a checkpoint whose tensors begin at `offsets`; without, they are whole."""
    info = {n: {"saved_offsets": list(offsets) or [0] * t.dim()} for n, t in tensors.items()}
    save_file(tensors, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info)})
