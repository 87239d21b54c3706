"""A run's weights in Hugging Face format: at its end, and of any checkpoint later."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint
from tigon.train.build import Run, load_tokenizer
from tigon.train.config import Config
from tigon.train.model import build_model
from tigon.train.parallel import start


def find_checkpoint(path: str) -> Path | None:
    """`path` itself, or the newest one of the run directory that it is; None if neither."""
    if Path(path, "run.json").is_file():
        return Path(path)
    return checkpoint.latest(Path(path, "checkpoints"))


def load_checkpoint(source: Path) -> tuple[CausalLM, Tokenizer]:
    """Model and tokenizer on the CPU, in this process alone, however many ranks wrote it."""
    config = Config(**checkpoint.facts(source)["config"])
    tokenizer = load_tokenizer(config)
    with start("cpu") as world:
        model = build_model(replace(config, dtype=config.param_dtype), world, load=False)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        dcp.load({"model": parameters}, checkpoint_id=source)
    return model.eval(), tokenizer


def export(run: Run, target: Path) -> None:
    """Hugging Face format, in the dtype of the checkpoint that the run began with unless told."""
    run.world.barrier()
    if run.world.main and target.exists():  # of this run, when it had fewer steps
        old = target.with_name(".hf.old")
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(target.rename(old))
    run.world.barrier()
    chosen, own = run.config.export_dtype, run.model.config.dtype or run.config.param_dtype
    dtype = getattr(torch, (own if chosen == "auto" else chosen).removeprefix("torch."))
    run.model.save_pretrained(target, tokenizer=run.tokenizer, dtype=dtype)
    run.world.say(f"exported to {target}")
