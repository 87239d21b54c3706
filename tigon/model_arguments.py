"""The model that a command's arguments name."""

import shlex
from argparse import Namespace
from typing import Any, Literal

import torch

from tigon.models import CausalLM, split_gguf
from tigon.parallel import from_pretrained
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World
from tigon.train.export import find_checkpoint, is_adapter, load_checkpoint, load_with_adapter
from tigon.utils.json import parse_object
from tigon.weights import Repository


def load(args: Namespace, world: World | None = None) -> tuple[CausalLM, Tokenizer]:
    """`world`: of ranks that share the model."""
    model, tokenizer = _load(args, world)
    if (text := args.chat_template_kwargs) is not None:
        given = parse_object(text.encode(), "--chat-template-kwargs")
        tokenizer.use_chat_template_kwargs(tokenizer.chat_template_kwargs | given)
    return model, tokenizer


def _load(args: Namespace, world: World | None) -> tuple[CausalLM, Tokenizer]:
    dtype = dtype_of(args)
    ranks: dict[str, Any] = {}
    device: str | torch.device
    if world is None:
        device = device_of(args.device)
    else:
        device = world.device
        if world.meshes is not None:
            ranks = {"mesh": world.meshes.tensor, "expert_parallel": args.expert_parallel}
    if checkpoint := find_checkpoint(args.model):
        own = None if dtype == "auto" else dtype
        return load_checkpoint(checkpoint, dtype=own, device=device, base=args.base, **ranks)
    if is_adapter(args.model, args.revision):
        if ranks:
            raise refused_on_ranks(args.model)
        return load_with_adapter(args.model, args.revision, dtype, device, base=args.base)
    check_no_base(args)
    tokenizer = tokenizer_of(args)
    model = from_pretrained(args.model, revision=args.revision, dtype=dtype, device=device, **ranks)
    return model, tokenizer


def check_no_base(args: Namespace) -> None:
    """Of a model that is not made of a base and an adapter."""
    if args.base is not None:
        raise ValueError(f"--base {args.base}: {args.model} is no adapter, and needs no base")


def refused_on_ranks(adapter: str) -> ValueError:
    return ValueError(
        f"{adapter} is an adapter, which ranks cannot share: `tigon export {shlex.quote(adapter)} "
        "DIRECTORY --merge` writes it and its base as a model, which they can"
    )


def tokenizer_of(args: Namespace) -> Tokenizer:
    """The model's; of a GGUF file, what its directory has."""
    place, gguf_file = split_gguf(args.model)
    if gguf_file is not None:
        directory = Repository(place, revision=args.revision)
        directory.file(gguf_file)  # raises if there is none
        if directory.optional_file("tokenizer.json") is None:
            raise FileNotFoundError(
                f"{args.model}: the tokenizer in a GGUF file is not read, and {place} has no "
                "tokenizer.json: put that of the original model there, as `hf download OWNER/NAME "
                f"tokenizer.json tokenizer_config.json --local-dir {place}` does"
            )
    return Tokenizer.from_pretrained(place, revision=args.revision)


def dtype_of(args: Namespace) -> torch.dtype | Literal["auto"]:
    return "auto" if args.dtype == "auto" else getattr(torch, args.dtype)


def device_of(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name
