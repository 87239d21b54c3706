"""Notes on the settings of a run that have no effect, or less than they could have.

Each function returns a line for each of them, which a run and a dry run print first.
"""

import math

import torch
from huggingface_hub import get_token

from tigon.kernels.attention.backends import missed_speed
from tigon.layers import Experts, SoftmaxAttention
from tigon.models import CausalLM
from tigon.settings.config import Config
from tigon.train.model import compute_dtype, match_fp8_except, named_projections
from tigon.train.optim.groups import num_steps

GPU_SETTINGS = {"activation_offload": "memory", "optimizer_offload": "memory", "fp8": "time"}


def find_unused_settings(config: Config, steps: int, device: torch.device) -> list[str]:
    """Returns a note for each setting that has no effect with the others on this device."""
    notes = []
    if config.warmup_steps > steps > 0:
        notes.append(
            f"lr={config.lr} is not reached: warmup_steps={config.warmup_steps} of {steps} steps; "
            "below 1 it is a share of them, as warmup_steps=0.1"
        )
    decay = num_steps(config.decay_steps, steps)
    if config.schedule == "wsd" and decay < 2 and steps:
        notes.append(
            f"lr does not fall: decay_steps={config.decay_steps} of {steps} steps is {decay}, and "
            "the first of them still has lr"
        )
    if config.eval is not None and not config.eval.tasks:
        notes.append("eval names no tasks, and measures nothing")
    if not config.held_out:
        default = Config.__dataclass_fields__
        names = [n for n in default if n.startswith("eval_")]
        if config.eval is not None:
            names.remove("eval_every")
        unused = [n for n in names if getattr(config, n) not in (default[n].default, ())]
        if unused:
            notes.append(f"without eval_data, nothing comes of {', '.join(unused)}")
    common = math.lcm(config.eval_every, config.save_every)
    if config.keep_best and not 0 < common < steps:
        notes.append(
            f"keep_best={config.keep_best}: no step before the last is both evaluated and saved; "
            "give eval_every and save_every a common multiple"
        )
    if device.type == "cpu":
        notes += [
            f"{name}=true saves no {resource} on a CPU"
            for name, resource in GPU_SETTINGS.items()
            if getattr(config, name)
        ]
    if config.accumulate_fp32 and config.param_dtype == "float32":
        notes.append("accumulate_fp32=true changes nothing: float32 weights have float32 sums")
    if config.spike != Config.spike and not config.spike_sigma:
        notes.append(f"spike={config.spike} needs spike_sigma, without which nothing is a spike")
    if config.push_to_hub and get_token() is None:
        notes.append(
            f"push_to_hub={config.push_to_hub} needs a token: run `hf auth login`, or set HF_TOKEN"
        )
    return notes


def find_slow_attention(config: Config, model: CausalLM) -> list[str]:
    """Returns a note on the backend that attention=auto would take if it were installed, if any."""
    if config.attention != "auto" or compute_dtype(config, model.device) != torch.bfloat16:
        return []
    dims = [layer.head_dim for layer in model.modules() if isinstance(layer, SoftmaxAttention)]
    if not dims:
        return []
    missed = missed_speed(model.device, max(dims), packed=config.packing)
    return [] if missed is None else [f"attention=auto: {missed}"]


def find_unquantized_layers(config: Config, model: CausalLM) -> list[str]:
    """Returns notes on the projections that keep their 16 bits with fp8, or with a base in fewer
    bits: experts, and for fp8 those of sizes that it does not support."""
    quantize = None if config.lora is None else config.lora.quantize
    notes = []
    if any(isinstance(module, Experts) for module in model.modules()):
        given = {"fp8=true": config.fp8, f"lora.quantize={quantize}": quantize}
        notes += [f"{name} leaves the experts in 16 bits" for name, value in given.items() if value]
    if not config.fp8:
        return notes
    excluded = match_fp8_except(config, model)
    names = [
        name for name, layer in named_projections(model) if not layer.fp8 and name not in excluded
    ]
    if names:
        listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        sizes = "parts with sizes" if model.shard_specs else "sizes"
        notes.append(
            f"fp8=true leaves in bfloat16 what has {sizes} that 16 does not divide: {listed}"
        )
    return notes
