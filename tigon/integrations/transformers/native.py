"""Loads native models with the keywords of transformers' `from_pretrained`."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tigon import models
from tigon.models.causal_lm import CausalLM
from tigon.models.pretrained.load import LoadOptions
from tigon.utils.config import check_keywords

# Keywords of transformers that change nothing here
IGNORED = frozenset(
    (
        *("low_cpu_mem_usage", "trust_remote_code", "use_safetensors", "weights_only"),
        *("adapter_kwargs", "_from_auto", "code_revision"),
    )
)
# Keywords of transformers that nothing here stands for; scripts give them as None or False
UNSUPPORTED = frozenset(
    (
        *("device_mesh", "distributed_config", "experts_implementation", "fusion_config"),
        *("kernel_config", "use_kernels"),
        *("force_download", "from_flax", "from_tf", "mirror", "proxies", "resume_download"),
        *("generation_config", "ignore_mismatched_sizes", "key_mapping", "output_loading_info"),
        *("max_memory", "offload_buffers", "offload_folder", "offload_state_dict", "state_dict"),
        *("tp_plan", "tp_size", "variant"),
    )
)
QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_config", "quantize")
OPTIONS = frozenset(LoadOptions.__annotations__) - {"dtype", "device", "labels", "quantize"}
OPTIONS |= {"device_map", "num_labels", "tigon_options"}  # for hints
# Fields of a config that may differ from the file's: forward reads transformers' config for them
MUTABLE = frozenset(
    (
        *("source", "dtype", "labels", "output_router_logits", "router_aux_loss_coef"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
)


def load_native(
    path_or_repo: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = "auto",
    torch_dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    num_labels: int | None = None,
    **options: Any,
) -> CausalLM:
    """Loads a native model by transformers' keywords, in evaluation mode.

    Raises TypeError for unknown keywords, ValueError for quantization, adapters or many devices.
    """
    for name in QUANTIZED:
        if options.pop(name, None):
            raise ValueError(
                f"{name}: transformers' models of Tigon are not quantized; for LoRA over 4 bits "
                'use tigon.from_pretrained(path, quantize="nf4") and its add_adapter'
            )
    if adapter := (options.get("adapter_kwargs") or {}).get("_adapter_model_path"):
        raise ValueError(
            f"{os.fspath(adapter)!r} is or has an adapter: load its model alone, and then "
            "peft.PeftModel.from_pretrained(model, adapter), or AutoPeftModelForCausalLM after "
            "register()"
        )
    if num_labels is not None and not (isinstance(num_labels, int) and num_labels > 0):
        raise ValueError(f"num_labels={num_labels!r} is no number of labels: leave it out for none")
    if options.get("revision") == "main" and os.path.isdir(path_or_repo):
        del options["revision"]  # transformers' default, of a directory too
    unset = {name for name in UNSUPPORTED & {*options} if options[name] in (None, False)}
    options = {name: value for name, value in options.items() if name not in IGNORED | unset}
    check_keywords("from_pretrained", options, OPTIONS)
    dtype, device = torch_dtype or dtype or "auto", find_device(device_map)
    return models.from_pretrained(
        path_or_repo, dtype=dtype, device=device, labels=num_labels or 0, **options
    )


def warn_of_attention(name: Any, config: PreTrainedConfig | None) -> None:
    """Warns of an attn_implementation, by keyword or in a config, where Auto classes put it; not of
    transformers' two defaults, which stand for no wish."""
    name = name or getattr(config, "_attn_implementation", None)
    if name not in (None, "sdpa", "eager"):
        warnings.warn(
            f"attn_implementation={name!r} has no effect: attention= chooses Tigon's kernels",
            stacklevel=3,
        )


def find_device(device_map: Any) -> torch.device | str:
    """The device of a `device_map`, by default the CPU; ValueError if that means several."""
    named = device_map
    if isinstance(device_map, Mapping):
        devices = {str(device): device for device in device_map.values()}
        named = next(iter(devices.values())) if len(devices) == 1 else None
    elif device_map is None:
        named = "cpu"
    elif device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        several = torch.accelerator.device_count() > 1
        named = None if several else torch.accelerator.current_accelerator() or "cpu"
    if not isinstance(named, str | int | torch.device):
        raise ValueError(
            f"device_map={device_map!r} may spread the layers over several devices, which Tigon "
            'does not: name one, as device_map="cuda:0"; torchrun and accelerate use several'
        )
    return torch.device(named) if isinstance(named, int) else named  # a name is checked on loading


def check_config(native: CausalLM, config: PreTrainedConfig) -> None:
    """Raises ValueError if a config says another model than the native one."""
    own = native.config
    other = type(own).from_dict(config.to_dict())
    for name in (f.name for f in fields(own) if f.name not in MUTABLE):
        if getattr(other, name) != getattr(own, name):
            raise ValueError(
                f"config.{name} is {getattr(other, name)!r}, but the checkpoint's is "
                f"{getattr(own, name)!r}: change config.json"
            )


def assemble_parameters(
    model: nn.Module, state: dict[str, Tensor], prefix: str, *unused: Any
) -> None:
    """Puts parameters into `state` in place of the checkpoint's tensors that they are made of.

    So a state dict of a file can be loaded in which the experts of a layer, or queries, keys and
    values, are apart and the model has them in one. `state`: its names begin with `prefix`.
    """
    native: CausalLM = model.native  # type: ignore[assignment]
    for name, parts in native.layout().items():
        sources = [prefix + part.name for part in parts]
        if prefix + name in state or not all(source in state for source in sources):
            continue
        tensors = [state.pop(source) for source in sources]
        whole = tensors[0].new_empty(native.get_parameter(name).shape)
        for part, tensor in zip(parts, tensors, strict=True):
            rows = whole.view(-1, *part.shape[1:])
            for source, target, count in part.rows:
                rows[target : target + count] = tensor[source : source + count]
        state[prefix + name] = whole
