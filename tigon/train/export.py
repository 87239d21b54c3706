"""A run's weights in Hugging Face format: as it trains, at its end, of any checkpoint later."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.hub import is_own_file
from tigon.models import CausalLM, materialize, torch_dtype
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint
from tigon.train.build import Run, load_tokenizer
from tigon.train.config import Config
from tigon.train.model import build_model, described, export_dtype
from tigon.train.parallel import start

SMALL = (".json", ".txt", ".jinja", ".model")  # what a checkpoint has besides tensors


def find_checkpoint(path: str) -> Path | None:
    """`path` itself, or the newest one of the run directory that it is; None if neither."""
    if Path(path, "run.json").is_file():
        return Path(path)
    return checkpoint.latest(Path(path, "checkpoints"))


def load_checkpoint(
    source: Path, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> tuple[CausalLM, Tokenizer]:
    """Model and tokenizer, in this process alone, however many ranks wrote it.

    `dtype` None is that of config.json, which the run's export has too. Raises ValueError, naming
    the file, if the checkpoint is damaged.
    """
    if checkpoint.is_legacy(source):
        return _load_legacy(source, dtype, device)
    with checkpoint.in_use(source):
        checkpoint.verify(source, wanted=lambda name: name.startswith("weights-") or _small(name))
        model = described(source, torch.float32)
        model.to(dtype or torch_dtype(model.config.dtype or "float32"))
        materialize(model, torch.device(device))
        checkpoint.load(source, model)
        return model.eval(), Tokenizer.from_pretrained(source)


def described_checkpoint(source: Path) -> CausalLM:
    """The model on the meta device, in its config's dtype: nothing of its weights is read."""
    if checkpoint.is_legacy(source):
        model, _ = _load_legacy(source, None, "cpu")
        return model
    model = described(source, torch.float32)
    return model.to(torch_dtype(model.config.dtype or "float32"))


@contextmanager
def as_directory(source: Path) -> Iterator[str]:
    """A checkpoint's model in Hugging Face format, for the time being."""
    with tempfile.TemporaryDirectory() as parent:
        model, tokenizer = load_checkpoint(source)
        model.save_pretrained(Path(parent, "hf"), tokenizer=tokenizer)
        del model
        yield str(Path(parent, "hf"))


def export(run: Run, target: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Hugging Face format, in the dtype of the checkpoint that the run began with unless told.

    `tensors`: in place of the model's parameters, by their names.

    Raises FloatingPointError if a weight is not finite. What was at `target` stays until the new
    one is whole.
    """
    checkpoint.check_finite(run.model, ema=None if tensors is None else run.ema)
    dtype = export_dtype(run.config, run.model)
    needed = dtype.itemsize * sum(p.numel() for p in run.model.parameters())
    temporary, old = (target.with_name(f".{target.name}.{end}") for end in ("partial", "old"))
    fault: list[str | None] = [None]
    if run.world.main:
        try:
            for left in (temporary, old):
                shutil.rmtree(left, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.require_space(target.parent, needed)
        except OSError as error:
            fault = [str(error)]
    dist.broadcast_object_list(fault, src=0)
    if fault[0] is not None:
        raise checkpoint.SaveError(f"{target} was not written: {fault[0]}")
    try:
        with checkpoint.named_if_full(temporary, needed):
            run.model.save_pretrained(
                temporary, tokenizer=run.tokenizer, dtype=dtype, tensors=tensors
            )
    except OSError:
        if run.world.main:  # a full disk needs the room
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if run.world.main:
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    run.world.barrier()
    run.world.say(f"exported to {target}")


def exported_step(config: Config, step: int) -> Path:
    """Where the export after `step`, a multiple of hf_every, belongs."""
    return Path(config.run_dir, f"hf-step-{step:08d}")


def export_step(run: Run, step: int) -> None:
    export(run, exported_step(run.config, step))


def export_best(run: Run, step: int) -> None:
    """run_dir/hf-best, if hf_best is set and the evaluation after `step` is the best so far."""
    if run.config.hf_best and run.state.best_step == step > 0:
        export(run, Path(run.config.run_dir, "hf-best"))


def _small(name: str) -> bool:
    return name.endswith(SMALL)


def _own_template(config: Config, source: Path) -> str:
    """The chat template of the settings, beside them: run.json may be anybody's, and what it names
    anywhere on this machine would be exported."""
    if not config.chat_template:
        return ""
    name = Path(config.chat_template).name
    if not is_own_file(source, name):
        raise FileNotFoundError(
            f"{source} was trained with the chat template {config.chat_template!r}, which it does "
            f"not have: put a copy of that file there, as {name}"
        )
    return str(source / name)


def _load_legacy(
    source: Path, dtype: torch.dtype | None, device: str
) -> tuple[CausalLM, Tokenizer]:
    """An earlier version's checkpoint has no config.json: its settings say what it began with."""
    config = Config(**checkpoint.facts(source)["config"])
    tokenizer = load_tokenizer(replace(config, chat_template=_own_template(config, source)))
    with start("cpu") as world:
        model = build_model(replace(config, dtype=config.param_dtype), world, source)
        checkpoint.load(source, model)
    own = torch_dtype(model.config.dtype or "float32")
    return model.to(device, dtype or own).eval(), tokenizer
