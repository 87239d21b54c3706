"""Reads quantization_config of config.json; names the formats that are not supported."""

import warnings
from collections.abc import Mapping
from typing import Any

from tigon.utils.config import ConfigError, check_type
from tigon.utils.json import quote
from tigon.weights import BlockScales

KEY = "quantization_config"
ORIGINAL = "use the model's unquantised repository (bf16)"
# `quant_method` -> the format's name, and how transformers gives back a plain checkpoint, if it can
REFUSED: dict[str, tuple[str, str]] = {
    "aqlm": ("AQLM", ""),
    "auto-round": ("AutoRound", ""),
    "awq": ("AWQ", ""),
    "bitnet": ("BitNet", ""),
    "bitsandbytes": ("bitsandbytes", "model.dequantize()"),
    "compressed-tensors": ("compressed-tensors", "CompressedTensorsConfig(dequantize=True)"),
    "deepspeedfp": ("DeepSpeed fp", ""),
    "eetq": ("EETQ", ""),
    "exl2": ("ExLlamaV2", ""),
    "exl3": ("ExLlamaV3", ""),
    "experts_int8": ("experts_int8", ""),
    "fbgemm_fp8": ("FBGEMM fp8", ""),
    "fouroversix": ("Four over Six", ""),
    "fp_quant": ("FP-Quant", ""),
    "gemma": ("Gemma's quantisation", ""),
    "gguf": ("GGUF", ""),
    "gptq": ("GPTQ", ""),
    "gptq_marlin": ("GPTQ (Marlin)", ""),
    "higgs": ("HIGGS", "model.dequantize()"),
    "hqq": ("HQQ", ""),
    "ipex": ("IPEX", ""),
    "marlin": ("Marlin", ""),
    "metal": ("Metal", ""),
    "modelopt": ("NVIDIA ModelOpt", ""),
    "modelopt_fp4": ("NVIDIA ModelOpt fp4", ""),
    "mxfp4": ("MXFP4", "Mxfp4Config(dequantize=True)"),
    "mxfp8": ("MXFP8", ""),
    "nvfp4": ("NVFP4", ""),
    "quanto": ("Quanto", ""),
    "quark": ("AMD Quark", ""),
    "quip": ("QuIP", ""),
    "sinq": ("SINQ", ""),
    "spqr": ("SpQR", ""),
    "squeezellm": ("SqueezeLLM", ""),
    "torchao": ("torchao", ""),
    "vptq": ("VPTQ", ""),
}
# Keys of fp8 that change no weight
OTHER_KEYS = {
    "activation_scheme",
    "dequantize",
    "ignored_layers",
    "kv_cache_scheme",
    "modules_to_convert",
    "modules_to_not_convert",
    "quant_method",
}


def read_quantization(config: Mapping[str, Any]) -> BlockScales | None:
    """The block sizes of an fp8 checkpoint; None if the checkpoint is not quantised.

    A multimodal config has the key at its top or in text_config. Raises ConfigError, which names
    the format and an alternative, for other quantised checkpoints.
    """
    text = config.get("text_config")
    settings = config.get(KEY)
    if settings is None and isinstance(text, Mapping):
        settings = text.get(KEY)
    if settings is None:
        return None
    if quantization_method(settings) != "fp8":
        raise unsupported_error(settings)
    return _read_fp8(settings)


def quantization_method(settings: Any) -> Any:
    """The format that a quantization_config names."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{KEY}={quote(settings)} is not an object with a quant_method")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # its first versions wrote no quant_method
    return method


def unsupported_error(settings: Any) -> ConfigError:
    """An error that says why the checkpoint is not read, and what to use instead."""
    method = quantization_method(settings)
    if method == "fp8":
        return ConfigError(
            f"{KEY} (fp8) describes stored weights, and a config alone has none: leave it out"
        )
    known = REFUSED.get(method) if isinstance(method, str) else None
    if known is None:
        return ConfigError(
            f"{KEY}: the quant_method {quote(method)} is not known; Tigon reads plain checkpoints "
            f"and block-scaled fp8 ones: {ORIGINAL}"
        )
    name, recipe = known
    if method == "bitsandbytes":
        name += " (4 bits)" if settings.get("load_in_4bit") else " (8 bits)"
    message = f"{KEY}: the checkpoint is quantised with {name} (quant_method {method!r}), which "
    message += f"Tigon does not read: {ORIGINAL}"
    if recipe:
        message += f", or dequantise it with transformers, {recipe}, and save_pretrained"
    return ConfigError(message)


def _read_fp8(settings: Mapping[str, Any]) -> BlockScales:
    supported: dict[str, tuple[Any, ...]] = {
        "fmt": ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", None),
        "expert_dtype": ("fp8", None),
        "scale_fmt": ("float", "ue8m0", None),  # powers of two are numbers as any others
    }
    for key, values in supported.items():
        if settings.get(key) not in values:
            raise ConfigError(
                f"{KEY}: {key}={quote(settings[key])} is not one of "
                f"{', '.join(str(value) for value in values[:-1])}: {ORIGINAL}"
            )
    if unknown := settings.keys() - supported.keys() - OTHER_KEYS - {"weight_block_size"}:
        warnings.warn(
            f"{KEY} keys not understood and ignored: {quote(sorted(unknown))}", stacklevel=5
        )
    block = settings.get("weight_block_size", [128, 128])
    if block is None:
        return BlockScales(None)
    name = f"{KEY}.weight_block_size"
    sizes = check_type(name, list(block) if isinstance(block, tuple) else block, list[int])
    if len(sizes) != 2 or min(sizes) < 1:
        raise ConfigError(f"{name}={quote(block)} is not two sizes, of rows and columns, or null")
    return BlockScales((sizes[0], sizes[1]))
