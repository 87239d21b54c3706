"""config.json's quantization_config: what Tigon reads, and what it refuses by name."""

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
# Of fp8, besides those that are read below; they change no weight
OTHER_KEYS = {
    "activation_scheme",
    "dequantize",
    "ignored_layers",
    "kv_cache_scheme",
    "modules_to_convert",
    "modules_to_not_convert",
    "quant_method",
}


def read_quantisation(config: Mapping[str, Any]) -> BlockScales | None:
    """How the fp8 tensors of a checkpoint with this config are read; None: it is not quantised.

    A multimodal config has it at its top or in its text's part. ConfigError, which names the format
    and says what to use instead, for a checkpoint quantised in a way that is not read.
    """
    text = config.get("text_config")
    given = config.get(KEY)
    if given is None and isinstance(text, Mapping):
        given = text.get(KEY)
    if given is None:
        return None
    if method_of(given) != "fp8":
        raise refusal(given)
    return _fp8(given)


def method_of(given: Any) -> Any:
    """The format that a quantization_config names."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{KEY}={quote(given)} is not an object with a quant_method")
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        return "bitsandbytes"  # its first versions say no more
    return method


def refusal(given: Any) -> ConfigError:
    """Why the checkpoint of this quantization_config is not read, and what to use instead."""
    method = method_of(given)
    if method == "fp8":
        return ConfigError(
            f"{KEY} (fp8) says how weights are stored, and a config alone has none: leave it out"
        )
    known = REFUSED.get(method) if isinstance(method, str) else None
    if known is None:
        return ConfigError(
            f"{KEY}: the quant_method {quote(method)} is not known; Tigon reads plain checkpoints "
            f"and block-scaled fp8 ones: {ORIGINAL}"
        )
    name, how = known
    if method == "bitsandbytes":
        name += " (4 bits)" if given.get("load_in_4bit") else " (8 bits)"
    message = f"{KEY}: the checkpoint is quantised with {name} (quant_method {method!r}), which "
    message += f"Tigon does not read: {ORIGINAL}"
    if how:
        message += f", or dequantise it with transformers, {how}, and save_pretrained"
    return ConfigError(message)


def _fp8(given: Mapping[str, Any]) -> BlockScales:
    wanted: dict[str, tuple[Any, ...]] = {
        "fmt": ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", None),
        "expert_dtype": ("fp8", None),
        "scale_fmt": ("float", "ue8m0", None),  # powers of two are numbers as any others
    }
    for key, values in wanted.items():
        if given.get(key) not in values:
            raise ConfigError(
                f"{KEY}: {key}={quote(given[key])} is not read; what is: "
                f"{', '.join(str(value) for value in values[:-1])}; {ORIGINAL}"
            )
    if unknown := given.keys() - wanted.keys() - OTHER_KEYS - {"weight_block_size"}:
        warnings.warn(
            f"{KEY} keys not understood and ignored: {quote(sorted(unknown))}", stacklevel=5
        )
    block = given.get("weight_block_size", [128, 128])
    if block is None:
        return BlockScales(None)
    name = f"{KEY}.weight_block_size"
    sizes = check_type(name, list(block) if isinstance(block, tuple) else block, list[int])
    if len(sizes) != 2 or min(sizes) < 1:
        raise ConfigError(f"{name}={quote(block)} is not two sizes, of rows and columns, or null")
    return BlockScales((sizes[0], sizes[1]))
