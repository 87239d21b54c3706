"""What the model says to a few prompts at each evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tigon.data.messages import normalize_messages
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.train.distributed import World, reshard
from tigon.utils.json import parse_json

MAX_PROMPTS = 64  # prompts, which are one batch


@dataclass(frozen=True)
class SamplePrompt:
    text: str  # for people
    ids: list[int]


def read_prompts(config: Config, tokenizer: Tokenizer, model: CausalLM) -> list[SamplePrompt]:
    """Reads `sample_prompts`: texts, and .jsonl files of rows with "prompt" or "messages".

    A text is what a user says, but with task=pretrain or without a chat template it is what the
    model goes on with. Raises ValueError for what cannot be read, or is too long for the model.
    """
    found = []
    for item in config.sample_prompts:
        if item.endswith(".jsonl"):
            found += [_prompt(row, where, config, tokenizer) for where, row in _rows(Path(item))]
        else:
            found.append(_prompt({"prompt": item}, "sample_prompts", config, tokenizer))
    if len(found) > MAX_PROMPTS:
        raise ValueError(f"sample_prompts has {len(found)} prompts: give at most {MAX_PROMPTS}")
    longest, room = (
        max((len(p.ids) for p in found), default=0),
        model.config.max_position_embeddings,
    )
    if longest + config.sample_tokens > room:
        raise ValueError(
            f"sample_prompts has a prompt of {longest} tokens, to which sample_tokens="
            f"{config.sample_tokens} come; the model reads {room} at most"
        )
    return found


def generate(
    model: CausalLM,
    prompts: Sequence[SamplePrompt],
    tokenizer: Tokenizer,
    tokens: int,
    world: World,
) -> list[dict[str, str]]:
    """The likeliest `tokens` tokens after each prompt, or fewer where the text ends: rows with
    "prompt" and "text".

    All ranks generate the same texts in the same number of passes, as sharded weights need it: no
    pass is saved where texts end early. The model is left in training, and no random number is
    drawn.
    """
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p.ids)) + p.ids for p in prompts])
    real = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts])
    always: dict[str, Any] = {"do_sample": False, "num_return_sequences": 1, "stop_strings": None}
    model.eval()
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        made = model.generate(
            ids.to(world.device),
            attention_mask=real.to(world.device),
            max_new_tokens=tokens,
            eos_token_id=None,
            cache_implementation="dynamic",  # the same steps on all ranks, and little memory
            **always,
        )
    model.train()
    reshard(model)
    ends = _ends(model)
    texts = [tokenizer.decode(truncate_at(row, ends)) for row in made[:, width:].tolist()]
    return [{"prompt": p.text, "text": text} for p, text in zip(prompts, texts, strict=True)]


def truncate_at(ids: Sequence[int], ends: set[int]) -> list[int]:
    """The tokens before the first that ends a text."""
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:stop])


def _ends(model: CausalLM) -> set[int]:
    ends = model.generation_config.get("eos_token_id", model.config.eos_token_id)
    return {ends} if isinstance(ends, int) else set(ends or ())


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"sample_prompts={path}: there is no such file")
    lines = path.read_bytes().split(b"\n")  # not splitlines: JSON may have U+2028 as it is
    if not any(map(bytes.strip, lines)):
        raise ValueError(f"sample_prompts={path} has no prompts")
    for number, text in enumerate(lines, 1):
        if text.strip():
            where = f"{path}:{number}"
            yield where, parse_json(text, where, nan=True)


def _prompt(row: Any, where: str, config: Config, tokenizer: Tokenizer) -> SamplePrompt:
    """`where` the row is from, for messages."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(messages, list) and messages:
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"{where}: a message is an object with role and content")
        try:
            messages = normalize_messages(messages, "messages")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]  # what the model is to say
        text = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)
    else:
        given = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(given, str) or not given:
            raise ValueError(f'{where}: a prompt has "prompt", a text, or "messages", a list')
        text = given
        chats = config.task != "pretrain" and tokenizer.chat_template is not None
        messages = [{"role": "user", "content": text}] if chats else None
    if messages is None:
        return SamplePrompt(text, tokenizer.encode(text))
    try:
        messages = tokenizer.convert_messages(messages)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    assert isinstance(ids, list)
    return SamplePrompt(text, ids)
