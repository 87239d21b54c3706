"""Exports of a run, written while training goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon.models import CausalLM
from tigon.models.adapters.peft_files import prepare_adapter, write_adapter
from tigon.models.pretrained.save import prepare_save, write_model
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint
from tigon.weights import WriterGroup
from tigon.weights.files import explain_full_disk
from tigon.weights.write import copy_to_host


class Exporter(checkpoint.BackgroundWriter):
    """Writes the exports of one run."""

    def export(
        self,
        model: CausalLM,
        target: Path,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype,
        values: Mapping[str, Tensor] | None = None,
        copy: bool = True,
    ) -> None:
        """Writes Hugging Face's format, or PEFT's of an adapter; what was at `target` stays until
        the new one is complete. Returns at once with `background` if host memory has room for a
        copy, unless copy=False.

        `values` replace parameters, by name: this rank's shard of each. Raises FloatingPointError
        for weights that `dtype` cannot hold, and SaveError if this or the export before it cannot
        be written.
        """
        held = dtype if model.active_adapter is None else None
        checkpoint.check_finite(model, averages=values, target=target, dtype=held)
        self.wait()
        options: dict[str, Any] = {"tokenizer": tokenizer, "ranks": WriterGroup()}
        if model.active_adapter is not None:  # in the adapter's dtype
            tensors, describe = prepare_adapter(model, **options)
            write: Any = write_adapter
        else:
            tensors, describe = prepare_save(model, dtype=dtype, values=values, **options)
            write = write_model
        nbytes = sum(block.rows * entry.row_bytes for entry in tensors for block in entry.blocks)
        background = copy and self.background and checkpoint.fits_in_memory(nbytes, self.world)
        if background:
            with self._ranks.sync_errors():  # the thread of a rank without a copy would not write
                tensors = copy_to_host(tensors)

        def write_files() -> None:
            with explain_full_disk(target, sum(entry.nbytes for entry in tensors)):
                write(target, tensors, describe, ranks=self._ranks, replace=True)
            self.world.log_rank0(f"exported to {target}")

        self.start(target, write_files, wait=not background)
