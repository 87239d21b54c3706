"""The tokenizer of a model repository."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import tokenizers

from tigon.hub import HubOptions, Repository
from tigon.tokenizer.assistant_mask import UNMARKED, Span, TrainOn, token_weights, weighted_rows
from tigon.tokenizer.chat_template import (
    RESERVED,
    Message,
    check_messages,
    check_unicode,
    check_variables,
    choose_template,
    format_time,
    render,
    template_times,
)
from tigon.tokenizer.decode_stream import DecodeStream
from tigon.tokenizer.files import (
    TokenizerFiles,
    add_tokens,
    find_files,
    library_errors,
    read_backend,
    read_config,
    read_template,
    read_templates,
)
from tigon.tokenizer.message_format import detect_format
from tigon.utils.json import escape

if TYPE_CHECKING:  # importing it takes seconds, and worker processes that tokenize need none of it
    import torch

NO_LIMIT = int(1e30)  # what transformers writes where a model sets no length


class EncodedChat(NamedTuple):
    """A conversation as rows of token ids, each with the tokens' loss weights."""

    rows: list[tuple[list[int], list[float]]]
    rewritten: int  # turns in no row: the chat template writes them differently when others follow
    missing_opener: str  # of reasoning: ends the prompts of inference, but is not in the rows


class Tokenizer:
    """Encodes text and conversations to token ids, and decodes token ids to text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        model_max_length: int = NO_LIMIT,
        files: Mapping[str, Path] | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})  # {"bos_token": "<s>", ...}
        self.chat_template = chat_template  # or several, by name
        self.chat_template_kwargs: dict[str, Any] = {}  # defaults for all chats
        self.strftime_now: datetime | None = None  # the time that templates write; None: now
        self.times: dict[str, str] = {}  # what they have written of it, by format
        self.model_max_length = model_max_length
        self._files = TokenizerFiles(files or {})
        path = (files or {}).get("tokenizer.json")
        self._error_message = f"{f'{escape(path)}: ' if path else ''}the tokenizer failed"
        self._changed_special_tokens: dict[str, str] = {}
        self._has_new_tokens = False
        self._special_ids = _special_ids(backend)
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.pad_token = self.special_tokens.get("pad_token")
        self.unk_token = self.special_tokens.get("unk_token")
        self.bos_token_id = self._token_id(self.bos_token)
        self.eos_token_id = self._token_id(self.eos_token)
        self.pad_token_id = self._token_id(self.pad_token)
        self.unk_token_id = self._token_id(self.unk_token)

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | os.PathLike[str], **options: Unpack[HubOptions]
    ) -> "Tokenizer":
        """Loads tokenizer.json, settings and chat templates of a directory or hub repository."""
        repository = Repository(path_or_repo, **options)
        # All files now: an export at the end of a long run must not depend on the hub
        files = find_files(repository)
        config = read_config(files.get("tokenizer_config.json"))
        backend = read_backend(files["tokenizer.json"])
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        return cls(
            backend,
            special_tokens=add_tokens(backend, config, files),
            chat_template=read_templates(config, files),
            model_max_length=int(config.get("model_max_length") or NO_LIMIT),
            files=files,
        )

    def use_chat_template(self, path: str | os.PathLike[str]) -> None:
        """Replaces the chat template by a Jinja file, which `save_pretrained` then copies."""
        self.chat_template = read_template(Path(path))
        self._files.use_template(path)

    def add_tokens(
        self,
        new_tokens: str | tokenizers.AddedToken | Sequence[str | tokenizers.AddedToken],
        special_tokens: bool = False,
    ) -> int:
        """Add tokens to the vocabulary, and return the number of new ones, as in transformers.

        `save_pretrained` then writes them too. A model needs a row for each:
        `model.resize_token_embeddings(len(tokenizer))`. ValueError for a token without text.
        """
        if isinstance(new_tokens, str | tokenizers.AddedToken):
            new_tokens = [new_tokens]
        present = self.backend.get_added_tokens_decoder().values()
        special = {token.content for token in present if token.special}  # these stay special
        tokens = []
        for token in new_tokens:
            if isinstance(token, str):
                check_unicode(token)
                token = tokenizers.AddedToken(token, special=special_tokens)
            if not isinstance(token, tokenizers.AddedToken):
                raise TypeError(f"a new token is a text or an AddedToken, not {token!r}")
            if not token.content:
                raise ValueError("a new token is empty: give its text")
            if token.content not in special:
                tokens.append(token)
        before = len(self)
        add = self.backend.add_special_tokens if special_tokens else self.backend.add_tokens
        add(tokens)
        self._has_new_tokens = self._has_new_tokens or bool(tokens)
        self._special_ids = _special_ids(self.backend)
        return len(self) - before

    def special_id(self, text: str) -> int | None:
        """Returns the id of a special token, which `skip_special_tokens` drops, or None."""
        token = self._token_id(text)
        return token if token in self._special_ids else None

    def keep_files(self) -> None:
        """Reads the files into memory, so that `save_pretrained` works after they are deleted."""
        self._files.read_all()

    def use_chat_template_kwargs(self, variables: Mapping[str, Any]) -> None:
        """Sets the defaults of template variables for all chats.

        Raises ValueError for a variable that the template does not read.
        """
        self.check_chat_template_kwargs(variables)
        self.chat_template_kwargs = dict(variables)

    def check_chat_template_kwargs(self, variables: Mapping[str, Any]) -> None:
        """Raises ValueError for a variable that the chat template does not read."""
        check_variables(variables, "chat_template_kwargs")
        if unread := [name for name in variables if not self.template_reads(name)]:
            raise ValueError(
                f"chat_template_kwargs has {unread[0]!r}, which the chat template does not read"
                if self.chat_template
                else "chat_template_kwargs: the tokenizer has no chat template"
            )

    def template_reads(self, name: str) -> bool:
        """Whether the name of a variable occurs in a chat template."""
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self._templates())

    def use_eos(self, token_id: int) -> None:
        """Uses this token as eos; `save_pretrained` then writes it too."""
        self.eos_token, self.eos_token_id = self._set_special("eos_token", token_id), token_id

    def use_pad(self, token_id: int) -> None:
        """Uses this token as pad; `save_pretrained` then writes it too."""
        self.pad_token, self.pad_token_id = self._set_special("pad_token", token_id), token_id

    def _set_special(self, name: str, token_id: int) -> str:
        """Notes a token as a special one and returns its text; ValueError if unknown."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            raise ValueError(f"the tokenizer has no token {token_id}")
        self.special_tokens = self.special_tokens | {name: token}
        self._changed_special_tokens = self._changed_special_tokens | {name: token}
        return token

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the added ones, as in transformers; `len` counts all."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def files(self) -> list[Path]:
        """The files that the tokenizer came from."""
        return list(self._files.paths.values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, with the special tokens, such as bos, that the tokenizer
        adds, unless `add_special_tokens` is False."""
        return self._encode(text, add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encodes many texts in parallel, each as `encode` does."""
        try:
            with library_errors(self._error_message):
                encode = self.backend.encode_batch_fast
                encodings = encode(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            for text in texts:
                check_unicode(text)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(
        self, ids: "Sequence[int] | torch.Tensor", *, skip_special_tokens: bool = False
    ) -> str:
        """Returns the text of token ids, without special tokens if these are to be skipped."""
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        with library_errors(self._error_message):
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, *, skip_special_tokens: bool = False) -> DecodeStream:
        """Returns a decoder for tokens that come one at a time."""
        ignored_ids = self._special_ids if skip_special_tokens else frozenset()
        return DecodeStream(self.backend, ignored_ids, self._error_message)

    def pad(
        self, list_of_ids: Sequence[Sequence[int]], *, side: str = "left"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Pad rows of token ids on one side to the longest.

        Returns input_ids [B, T] and attention_mask [B, T], both int64, with 1 for each token.
        """
        torch = import_module("torch")
        # The mask hides padding, so without a pad token any id will do
        fill = next((i for i in (self.pad_token_id, self.eos_token_id) if i is not None), 0)
        rows = [torch.as_tensor(ids, dtype=torch.int64, device="cpu") for ids in list_of_ids]
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
        return pad(rows, padding_value=fill), pad([torch.ones_like(row) for row in rows])

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """Renders a conversation, and returns its token ids, or with tokenize=False its text.

        Tools are JSON schemas, or functions where transformers is installed; chat_template is a
        template or the name of one; `variables` are those that the template reads (enable_thinking,
        date_string, ...).
        """
        check_messages(messages)
        text = render(
            choose_template(self.chat_template, chat_template, tools),
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **self._template_variables(variables),
        ).text
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_messages(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[Any]:
        """Converts messages to the form that the chat template expects.

        They come with content as text and with tool arguments as objects; some templates expect
        content in parts or arguments as JSON text. `apply_chat_template` converts nothing, as in
        transformers.
        """
        template = choose_template(self.chat_template, None, tools)
        return detect_format(template, tuple(self.special_tokens.items())).convert(messages)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[bool]]:
        """Encodes a conversation, and returns its token ids and its assistant mask.

        The mask covers the template's {% generation %} blocks. Without any, it covers what each
        turn adds to the prompt before it, end-of-turn token included; ValueError where that is
        ambiguous. It leaves out turns that the template writes differently when others follow, and
        empty blocks of reasoning: `encode_chat_rows` can include them.
        """
        ((ids, weights),) = self.encode_chat_rows(
            messages, tools=tools, chat_template=chat_template, **variables
        ).rows
        return ids, [weight > 0 for weight in weights]

    def encode_chat_rows(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        train_on: TrainOn = "assistant",
        weights: Sequence[float | None] | None = None,
        train_on_empty_thinking: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> EncodedChat:
        """Encodes a conversation for fine-tuning: token ids with a loss weight for each.

        `train_on`: "assistant" (as in `encode_chat`), its "last" turn, or "all" of the text; or
        "all_turns", which adds a row for each turn that the template writes differently when others
        follow: the conversation up to that turn. `weights` has the weight of each message; None
        stands for what `train_on` gives it. With `train_on_empty_thinking`, an empty block of
        reasoning in front of an answer is learned like the answer.
        """
        check_messages(messages)
        special = [self.backend.id_to_token(i) for i in self._special_ids]
        rows, rewritten, missing_opener = weighted_rows(
            choose_template(self.chat_template, chat_template, tools),
            messages,
            frozenset(token for token in (*special, self.eos_token) if token),
            tools=tools,
            train_on=train_on,
            weights=weights,
            train_on_empty_thinking=train_on_empty_thinking,
            **self._template_variables(variables),
        )
        encoded = []
        for text, spans in rows:
            encoding = self._encode(text)
            row_weights = token_weights(encoding.offsets, spans)
            if not any(row_weights) and any(span.weight for span in spans):
                raise ValueError(UNMARKED)
            encoded.append((encoding.ids, row_weights))
        return EncodedChat(encoded, rewritten, missing_opener)

    def encode_weighted(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[float]]:
        """Encodes a text and returns ids and weights, each the largest of spans over it."""
        encoding = self._encode(text, add_special_tokens=True)
        text_tokens = [i for i, added in enumerate(encoding.special_tokens_mask) if not added]
        # The offsets of special tokens at the end are (0, 0), as of those at the start
        stop = text_tokens[-1] + 1 if text_tokens else len(encoding.ids)
        offsets = encoding.offsets[:stop] + [(len(text), len(text))] * (len(encoding.ids) - stop)
        return encoding.ids, token_weights(offsets, spans)

    def digest(self, *, chats: bool = True) -> str:
        """Hashes what the tokens of a text depend on or, with `chats`, those of a conversation.

        The time is hashed as the chat template writes it: only its day, if it writes a date.
        """
        parts: tuple[Any, ...] = (self.backend.encode_special_tokens,)
        if chats:
            tokens = self.special_tokens.items()
            read = sorted(item for item in tokens if self.template_reads(item[0]))
            kwargs = json.dumps(self.chat_template_kwargs, sort_keys=True)
            parts = read, self.chat_template, *parts, kwargs, self.template_times()
        return hashlib.sha256(f"{self.backend.to_str()} {parts}".encode()).hexdigest()

    def template_times(self) -> dict[str, str]:
        """Returns what strftime_now writes, by format; empty if variables pin the time."""
        times: dict[str, str] = {}
        variables = self.special_tokens | self.chat_template_kwargs
        for template in self._templates():
            if "strftime_now" in template:
                times |= template_times(template, variables, self.strftime_now)
        return times

    def end_of_turn(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **variables: Any
    ) -> int:
        """Returns the token that ends the assistant's last turn, at which generation should stop.

        Raises ValueError if the turn does not end in a special token that is learned.
        """
        check_messages(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: turns[-1] + 1] if turns else messages
        ((ids, weights),) = self.encode_chat_rows(
            messages, tools=tools, train_on="last", **variables
        ).rows
        learned = [i for i, weight in enumerate(weights) if weight]
        turn = [ids[i] for i in learned]
        while len(turn) > 1 and not self.decode(turn[-1:]).strip():
            turn.pop()
        if turn[-1] in self.backend.get_added_tokens_decoder() or turn[-1] == self.eos_token_id:
            return turn[-1]
        rest = self.decode(ids[learned[-1] + 1 :])
        note = f", and what follows, {rest!r:.40}, is not learned" if rest.strip() else ""
        raise ValueError(
            f"the chat template ends what the assistant says in ...{self.decode(turn[-24:])!r}, "
            f"which is not a special token{note}: the model would never learn to stop. End these "
            "turns in one token, such as {{ eos_token }}, inside {% generation %} if there is one "
            "(chat_template= takes the new template, in training its file)"
        )

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes the files of the tokenizer to a directory, with changed and new tokens."""
        content = json.loads(self.backend.to_str()) if self._has_new_tokens else {}
        added_tokens = content.get("added_tokens", [])
        self._files.save(directory, self._changed_special_tokens, added_tokens)

    def __getstate__(self) -> dict[str, Any]:
        # The library's pickle leaves this out
        return self.__dict__ | {"_split_special": self.backend.encode_special_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        split = state.pop("_split_special")
        self.__dict__ |= state
        self.backend.encode_special_tokens = split

    def _encode(self, text: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        """Encodes a text with offsets; ValueError if it is not Unicode or the library fails."""
        try:
            with library_errors(self._error_message):
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            check_unicode(text)
            raise

    def _token_id(self, token: str | None) -> int | None:
        """The id of a token's text; None if there is none."""
        return None if token is None else self.backend.token_to_id(token)

    def _template_variables(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Joins what a template may read: special tokens, defaults for all chats, `variables`, and
        the time; TypeError for reserved names."""
        if reserved := (RESERVED - {"documents"}) & variables.keys():
            raise TypeError(f"not supported with a chat template: {', '.join(sorted(reserved))}")
        variables = self.special_tokens | self.chat_template_kwargs | variables
        return variables | {"strftime_now": self.write_time}

    def write_time(self, format: str) -> str:
        """Writes the time as templates do, and notes it in `times`."""
        self.times[format] = format_time(format, self.strftime_now)
        return self.times[format]

    def _templates(self) -> list[str]:
        templates = self.chat_template or {}
        return [*templates.values()] if isinstance(templates, dict) else [templates]


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)
