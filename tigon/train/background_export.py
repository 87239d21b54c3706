"""Exports of a run, written while training goes on."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.models import CausalLM, prepare_adapter, prepare_save, write_adapter, write_model
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint
from tigon.train.distributed import World
from tigon.weights import TensorEntry, WriterGroup
from tigon.weights.files import explain_full_disk
from tigon.weights.write import RankError, copy_to_host


class Exporter(checkpoint.BackgroundWriter):
    """The exports of one run, one at a time. Every rank makes one and calls its methods alike.

    With `background`, `export` returns when this rank's rows are copied into host memory, and the
    copy is written while training goes on; the next `export`, `wait` and leaving the `with` block
    wait for it and raise what stopped it.
    """

    def __init__(self, world: World, *, background: bool = True) -> None:
        self.world, self.background = world, background
        # Its own group: the thread that writes would else mix its messages with the training's
        self._ranks = WriterGroup(dist.new_group(backend="gloo"))
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._thread.shutdown()

    def export(
        self,
        model: CausalLM,
        target: Path,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Hugging Face format, or PEFT's of a model with an adapter; what was at `target` stays
        until the new one is whole.

        `values`: in place of parameters, by their names, this rank's part of each. Raises SaveError
        if this or the export before it cannot be written.
        """
        self.wait()
        how: dict[str, Any] = {"tokenizer": tokenizer, "ranks": WriterGroup()}
        if model.active_adapter is not None:  # in its own dtype
            tensors, describe = prepare_adapter(model, **how)
            write = write_adapter
        else:
            tensors, describe = prepare_save(model, dtype=dtype, values=values, **how)
            write = write_model
        own = sum(block.rows * entry.row_bytes for entry in tensors for block in entry.blocks)
        background = self.background and checkpoint.fits_in_memory(own, self.world)
        if background:
            with self._ranks.sync_errors():  # the thread of a rank without a copy would not write
                tensors = copy_to_host(tensors)
        self._writing = self._thread.submit(self._write, target, write, tensors, describe)
        if not background:
            self.wait()

    def _write(
        self,
        target: Path,
        write: Callable[..., None],
        tensors: Sequence[TensorEntry],
        describe: Callable[[Path], None],
    ) -> None:
        try:
            with explain_full_disk(target, sum(entry.nbytes for entry in tensors)):
                write(target, tensors, describe, ranks=self._ranks, replace=True)
        except Exception as error:  # whatever stopped it, memory too
            why = error if isinstance(error, OSError | RankError) else repr(error)
            raise checkpoint.SaveError(f"{target} was not written: {why}") from error
        self.world.log_rank0(f"exported to {target}")

    @property
    def failed(self) -> bool:
        return self._writing is not None and checkpoint.has_failed(self._writing)

    def wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()
