"""Requests of OpenAI's protocol: read, checked, and made into what the engine writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from tigon.generation.settings import SAMPLING, GenerationSettings, resolve_settings, set_do_sample
from tigon.models import CausalLM
from tigon.serve.batch import TOP
from tigon.tokenizer import Tokenizer
from tigon.utils.config import (
    ConfigError,
    build_settings,
    check_type,
    find_misspelled,
    read_settings,
    setting,
)
from tigon.utils.json import quote

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
ROLES = ("system", "developer", "user", "assistant", "tool")
SETTINGS = (*SAMPLING, "repetition_penalty", "seed")  # fields that `generate` has, too
# Fields of OpenAI's that are not supported, by the values besides null that change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("logit_bias", "metadata"), ({},)),
    **dict.fromkeys(("store", "echo"), (False,)),
    "best_of": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}


class RequestError(Exception):
    """Refuses a request; `status` is HTTP's, and the rest is what OpenAI's errors have."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


@dataclass(frozen=True)
class StreamOptions:
    """What a stream has besides its text."""

    include_usage: bool = False


@dataclass(frozen=True)
class Request:
    """The fields that both kinds of completions have."""

    answers_by: ClassVar[str]  # the field that holds what is answered

    model: str | None = None
    max_tokens: int | None = setting(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = setting(None, ge=1, le=2**31 - 1)
    temperature: float | None = setting(None, ge=0, le=1e30)
    top_p: float | None = setting(None, gt=0, le=1)
    top_k: int | None = setting(None, ge=-1, le=2**31 - 1)
    min_p: float | None = setting(None, ge=0, le=1)
    repetition_penalty: float | None = setting(None, ge=1e-30, le=1e30)
    seed: int | None = setting(None, ge=-(2**63), le=2**64 - 1)
    stop: tuple[str, ...] | None = None
    n: int = setting(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def top(self) -> int | None:
        """Returns how many likely tokens come with each; None: no log-probabilities at all."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChatRequest(Request):
    """What /v1/chat/completions takes."""

    answers_by = "messages"

    messages: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the chat template
    logprobs: bool = False
    top_logprobs: int = setting(0, ge=0, le=TOP)

    @property
    def top(self) -> int | None:
        """Returns `top_logprobs`, which count where log-probabilities are asked for."""
        return self.top_logprobs if self.logprobs else None


@dataclass(frozen=True)
class TextRequest(Request):
    """What /v1/completions takes."""

    answers_by = "prompt"

    prompt: Any = None
    logprobs: int | None = setting(None, ge=0, le=TOP)

    @property
    def top(self) -> int | None:
        return self.logprobs


@dataclass(frozen=True)
class EngineRequest:
    """What a request asks the engine for: n answers to each prompt."""

    request: Request
    prompts: list[list[int]]
    settings: GenerationSettings
    max_tokens: list[int]  # of an answer to each prompt


def read_request(kind: type[Request], body: Mapping[str, Any]) -> Request:
    """Reads the fields of a request; raises RequestError that names a field that is unknown or does
    not fit. A null is a field that is left out, and so is a value of NEUTRAL."""
    values: dict[str, Any] = {}
    known = [f.name for f in fields(kind)]
    for name, value in body.items():
        if name in NEUTRAL:
            if value is not None and value not in NEUTRAL[name]:
                message = f"{name}={quote(value)} is not supported: leave it out"
                raise RequestError(message, name)
            continue
        if name not in known:
            closest = find_misspelled(name, known)
            hint = f": did you mean {closest!r}?" if closest else ", which is not supported"
            raise RequestError(f"unknown field {quote(name)}{hint}", name[:100])
        if value is None:
            continue
        try:
            values |= read_settings(kind, {name: value})
        except ConfigError as error:
            raise RequestError(str(error), name) from None
    request = build_settings(kind, values)
    _check_together(request)
    return request


def _check_together(request: Request) -> None:
    """Raises RequestError for fields that contradict each other or that need another one."""
    if getattr(request, request.answers_by) is None:
        raise RequestError(f"{request.answers_by!r} is missing", request.answers_by)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true", "stream_options")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) == 2:
        raise RequestError(
            f"max_tokens={request.max_tokens} and max_completion_tokens="
            f"{request.max_completion_tokens} are the same limit: give one of them",
            "max_completion_tokens",
        )
    stops = request.stop or ()
    if len(stops) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_CHARACTERS for s in stops):
        raise RequestError(
            f"stop={quote(list(stops))} must be up to {MAX_STOPS} texts, each of 1 to "
            f"{MAX_STOP_CHARACTERS} characters",
            "stop",
        )


def make_engine_request(
    request: Request, model: CausalLM, tokenizer: Tokenizer, ends: Sequence[int], capacity: int
) -> EngineRequest:
    """Returns prompts as tokens and the settings of a request.

    `ends` are the tokens that end an answer; prompt and answer together have at most `capacity`
    tokens. Raises RequestError for what the model or its tokenizer cannot follow.
    """
    if isinstance(request, ChatRequest):
        assert request.messages is not None
        variables = request.chat_template_kwargs or {}
        prompts = [encode_messages(request.messages, tokenizer, variables)]
    else:
        assert isinstance(request, TextRequest)
        prompts = encode_prompts(request.prompt, tokenizer, model.config.vocab_size)
    limit = request.max_completion_tokens or request.max_tokens
    rooms = [_room(prompt, limit, capacity, request.answers_by) for prompt in prompts]
    return EngineRequest(request, prompts, resolve(request, model, ends), rooms)


def resolve(request: Request | None, model: CausalLM, ends: Sequence[int]) -> GenerationSettings:
    """Returns the settings of a request, by default (and for None) those of the model's
    generation_config.json. Temperature 0 is greedy; any other setting of sampling samples, as in
    OpenAI's protocol from all tokens unless a top_k is given."""
    passed: dict[str, Any] = {name: getattr(request, name, None) for name in SETTINGS}
    passed = {name: value for name, value in passed.items() if value is not None}
    if passed.get("top_k") == -1:  # as other servers have it
        passed["top_k"] = 0
    passed = set_do_sample(passed)
    if (model.generation_config or {}).get("top_k") is None:
        passed.setdefault("top_k", 0)
    if request is not None and request.stop is not None:
        passed["stop_strings"] = request.stop
    passed |= {"num_return_sequences": 1, "eos_token_id": list(ends)}
    try:
        settings, _ = resolve_settings(model, None, passed)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from None
    return settings


def choice_settings(settings: GenerationSettings, choice: int) -> GenerationSettings:
    """Returns the settings of one of n answers to a prompt: with a seed each has its own."""
    if settings.seed is None or not choice:
        return settings
    generator = torch.Generator().manual_seed(settings.seed)
    seeds = torch.randint(1 << 62, (choice,), generator=generator, device="cpu")
    return replace(settings, seed=int(seeds[-1]))


def _room(prompt: Sequence[int], limit: int | None, capacity: int, param: str) -> int:
    """Returns how many tokens may follow a prompt; raises RequestError if they do not fit."""
    room = capacity - len(prompt)
    if not prompt:
        raise RequestError(f"{param} is empty: it has no token", param)
    if room < (limit or 1):
        wanted = f" and {limit} tokens of its answer" if limit else ""
        raise RequestError(
            f"a prompt of {len(prompt)} tokens{wanted}: the context has {capacity} tokens",
            param,
            code="context_length_exceeded",
        )
    return room if limit is None else limit


def encode_messages(
    messages: Sequence[Any], tokenizer: Tokenizer, variables: Mapping[str, Any]
) -> list[int]:
    """Returns the tokens of a conversation by the model's chat template, which reads `variables`.

    Raises RequestError for messages that are none, for what the template refuses, and for variables
    that it does not read.
    """
    if tokenizer.chat_template is None:
        raise RequestError("no chat template: use /v1/completions", "messages", status=404)
    if not messages:
        raise RequestError("messages is empty", "messages")
    checked = [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    try:
        tokenizer.check_chat_template_kwargs(variables)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error), "chat_template_kwargs") from None
    try:
        converted = tokenizer.convert_messages(checked)
        ids = tokenizer.apply_chat_template(converted, add_generation_prompt=True, **variables)
    except (TypeError, ValueError) as error:
        raise RequestError(f"messages: {error}", "messages") from None
    assert isinstance(ids, list)
    return ids


def _check_message(message: Any, name: str) -> dict[str, Any]:
    """Returns a message whose content is text; raises RequestError unless it has a role and text,
    or parts of text. Of other keys, such as tool_calls, it may have empty ones."""
    if not isinstance(message, dict):
        raise RequestError(f"{name}={quote(message)} is not an object", "messages")
    keys = {key for key, value in message.items() if value not in (None, [])}
    if unknown := keys - {"role", "content", "name"}:
        raise RequestError(f"{name} has {quote(min(unknown))}: only text is supported", "messages")
    role, content, author = (message.get(key) for key in ("role", "content", "name"))
    if role not in ROLES:
        raise RequestError(
            f"{name}.role={quote(role)} is not one of {', '.join(ROLES)}", "messages"
        )
    if isinstance(content, list):
        content = "".join(_part_text(p, f"{name}.content[{i}]") for i, p in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(f"{name}.content={quote(content)} is not text", "messages")
    if author is not None and not isinstance(author, str):
        raise RequestError(f"{name}.name={quote(author)} is not text", "messages")
    return {"role": role, "content": content} | ({} if author is None else {"name": author})


def _part_text(part: Any, name: str) -> str:
    """Returns the text of a part of a message; raises RequestError for a picture, a sound ..."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(f"{name}={quote(part)} is not {{type: text, text: ...}}", "messages")
    return text


def encode_prompts(prompt: Any, tokenizer: Tokenizer, vocab: int) -> list[list[int]]:
    """Returns the tokens of a text or token ids, or a list of either, or raises RequestError."""
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    if len(prompts) > 128:
        raise RequestError(f"{len(prompts)} prompts: at most 128 come in a request", "prompt")
    encoded = []
    for item in prompts:
        if isinstance(item, str):
            try:
                encoded.append(tokenizer.encode(item))
            except (TypeError, ValueError) as error:
                raise RequestError(f"prompt: {error}", "prompt") from None
            continue
        try:
            ids = check_type("prompt", item, list[int])
        except ConfigError:
            message = f"prompt={quote(item)} is neither text nor a list of token ids"
            raise RequestError(message, "prompt") from None
        outside = next((i for i in ids if not 0 <= i < vocab), None)
        if outside is not None:
            message = f"prompt has {quote(outside)}, outside the vocabulary [0, {vocab})"
            raise RequestError(message, "prompt")
        encoded.append(ids)
    return encoded
