"""Generates from a few prompts at each evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from tigon.data.formats import Format
from tigon.data.messages import index_names, normalize_messages
from tigon.data.sources import JsonFile
from tigon.models import CausalLM
from tigon.models.config import eos_ids
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World, eval_mode
from tigon.utils.config import prefix_errors

MAX_PROMPTS = 64  # one batch


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt of `sample_prompts`: its text and its tokens."""

    text: str  # for people
    ids: list[int]


def read_prompts(config: Config, tokenizer: Tokenizer, context: int) -> list[SamplePrompt]:
    """Reads `sample_prompts`: texts, and .jsonl files of rows with "prompt" or "messages".

    A text is what a user says, but with task=pretrain or without a chat template it is what the
    model goes on with. Raises ValueError for what cannot be read, or is too long for the model's
    context.
    """
    prompts = []
    for item in config.sample_prompts:
        rows: list[tuple[str, Any]] = [("sample_prompts", {"prompt": item})]
        if item.endswith(".jsonl"):
            rows = _read_rows(Path(item))
        prompts += [_read_prompt(row, where, config, tokenizer) for where, row in rows]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"sample_prompts has {len(prompts)} prompts: give at most {MAX_PROMPTS}")
    longest = max((len(p.ids) for p in prompts), default=0)
    if longest + config.sample_tokens > context:
        raise ValueError(
            f"sample_prompts has a prompt of {longest} tokens, to which sample_tokens="
            f"{config.sample_tokens} come; the model reads {context} at most"
        )
    return prompts


def generate(
    model: CausalLM,
    prompts: Sequence[SamplePrompt],
    tokenizer: Tokenizer,
    tokens: int,
    world: World,
) -> list[dict[str, str]]:
    """Returns rows with "prompt" and "text": the likeliest `tokens` tokens after each prompt, or
    fewer if the text ends.

    All ranks generate the same texts in the same number of passes, as sharded weights need it. The
    model is left in training mode, and no random number is drawn.
    """
    ids, mask = tokenizer.pad([prompt.ids for prompt in prompts])
    greedy: dict[str, Any] = {"do_sample": False, "num_return_sequences": 1, "stop_strings": None}
    devices = [world.device] if world.device.type == "cuda" else []
    with eval_mode(model), torch.random.fork_rng(devices):
        sequences = model.generate(
            ids.to(world.device),
            attention_mask=mask.to(world.device),
            max_new_tokens=tokens,
            eos_token_id=None,
            cache_implementation="dynamic",  # the same steps on all ranks, and little memory
            **greedy,
        )
    end_ids = set(eos_ids(model.config, model.generation_config))
    rows = sequences[:, ids.shape[1] :].tolist()
    texts = [tokenizer.decode([*takewhile(lambda i: i not in end_ids, row)]) for row in rows]
    return [{"prompt": p.text, "text": text} for p, text in zip(prompts, texts, strict=True)]


def _read_rows(path: Path) -> list[tuple[str, Any]]:
    """Returns each row of a .jsonl file with its place, file:line."""
    if not path.is_file():
        raise FileNotFoundError(f"sample_prompts={path}: there is no such file")
    rows = [(f"{path}:{line}", row) for line, row in JsonFile(str(path), Format()).rows()]
    if not rows:
        raise ValueError(f"sample_prompts={path} has no prompts")
    return rows


def _read_prompt(row: Any, where: str, config: Config, tokenizer: Tokenizer) -> SamplePrompt:
    """Returns the prompt of a row {"prompt"} or {"messages"}; ValueError names `where`."""
    fields = row if isinstance(row, dict) else {}
    text, messages = fields.get("prompt"), fields.get("messages")
    with prefix_errors(where, ValueError):
        if isinstance(row, ValueError):
            raise row
        if isinstance(messages, list) and messages:
            if not all(isinstance(message, dict) for message in messages):
                raise ValueError("a message is an object with role and content")
            messages = normalize_messages(messages, index_names("messages", len(messages)))
            while messages and messages[-1].get("role") == "assistant":
                messages = messages[:-1]  # what the model is to say
            text = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)
        elif not isinstance(text, str) or not text:
            raise ValueError('a prompt has "prompt", a text, or "messages", a list')
        elif config.task == "pretrain" or tokenizer.chat_template is None:
            return SamplePrompt(text, tokenizer.encode(text))
        else:
            messages = [{"role": "user", "content": text}]
        messages = tokenizer.convert_messages(messages)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert isinstance(ids, list)
    return SamplePrompt(text, ids)
