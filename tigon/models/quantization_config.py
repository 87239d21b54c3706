"""quantization_config of config.json: fp8 and MXFP4 are read; an error names any other format."""

import warnings
from collections.abc import Mapping, Set
from typing import Any

from tigon.utils.config import ConfigError, check_type
from tigon.utils.json import quote
from tigon.weights import BlockScales

KEY = "quantization_config"
ORIGINAL = "use the model's unquantized repository (bf16)"
# quant_method -> the way in which transformers makes a plain checkpoint of it
DEQUANTIZATION = {
    "bitsandbytes": "model.dequantize()",
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
    "higgs": "model.dequantize()",
}
READ = ("fp8", "mxfp4")
# Keys of these that change no weight
NEUTRAL_KEYS = {
    *("activation_scheme", "dequantize", "ignored_layers", "kv_cache_scheme", "quant_method"),
    *("modules_to_convert", "modules_to_not_convert"),
}


def read_quantization(config: Mapping[str, Any]) -> BlockScales | None:
    """The blocks of an fp8 checkpoint; None for MXFP4, which has but one form, and for none.

    A multimodal config has the key at its top or in text_config. Raises ConfigError, which names
    the format and an alternative, for other quantized checkpoints.
    """
    text = config.get("text_config")
    settings = config.get(KEY)
    if settings is None and isinstance(text, Mapping):
        settings = text.get(KEY)
    if settings is None:
        return None
    method = quantization_method(settings)
    if method not in READ:
        raise unsupported_error(settings)
    if method == "fp8":
        return _read_fp8(settings)
    _warn_of_unknown(settings, set())
    return None


def quantization_method(settings: Any) -> Any:
    """The format that a quantization_config names, or None; ConfigError if no object."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{KEY}={quote(settings)} is not an object with a quant_method")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # its first versions wrote no quant_method
    return method


def unsupported_error(settings: Any) -> ConfigError:
    """An error that says why the checkpoint is not read, and what to use instead."""
    method = quantization_method(settings)
    if method in READ:
        return ConfigError(
            f"{KEY} ({method}) describes stored weights, and a config alone has none: leave it out"
        )
    message = f"{KEY}: the checkpoint is quantized with quant_method {quote(method)}, which Tigon "
    message += f"does not read, only plain checkpoints, block-scaled fp8 and mxfp4: {ORIGINAL}"
    if isinstance(method, str) and method in DEQUANTIZATION:
        recipe = DEQUANTIZATION[method]
        message += f", or dequantize it with transformers, {recipe}, and save_pretrained"
    return ConfigError(message)


def _read_fp8(settings: Mapping[str, Any]) -> BlockScales:
    """The block sizes of fp8 weights; ConfigError for settings that are not supported."""
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
    _warn_of_unknown(settings, supported.keys() | {"weight_block_size"})
    block = settings.get("weight_block_size", [128, 128])
    if block is None:
        return BlockScales(None)
    name = f"{KEY}.weight_block_size"
    sizes = check_type(name, list(block) if isinstance(block, tuple) else block, list[int])
    if len(sizes) != 2 or min(sizes) < 1:
        raise ConfigError(f"{name}={quote(block)} is not two sizes, of rows and columns, or null")
    return BlockScales((sizes[0], sizes[1]))


def _warn_of_unknown(settings: Mapping[str, Any], known: Set[str]) -> None:
    """Warns of settings that are neither known nor without effect."""
    if unknown := settings.keys() - known - NEUTRAL_KEYS:
        warnings.warn(
            f"{KEY} keys not understood and ignored: {quote(sorted(unknown))}", stacklevel=6
        )
