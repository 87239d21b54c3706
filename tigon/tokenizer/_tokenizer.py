"""The tokenizer of a model repository."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import tokenizers

from tigon.hub import Repository, Source
from tigon.tokenizer import chat, source
from tigon.tokenizer.backend import read_backend
from tigon.tokenizer.failures import Failures
from tigon.tokenizer.files import Files
from tigon.tokenizer.mask import UNMARKED, Span, TrainOn, never_ends, token_weights, weighted_rows
from tigon.tokenizer.probe import probe
from tigon.tokenizer.stream import DecodeStream
from tigon.tokenizer.times import time_formats

if TYPE_CHECKING:  # worker processes that tokenise need none of it, and it takes seconds
    import torch

NO_LIMIT = int(1e30)  # what transformers writes where a model sets no length
# Arguments of transformers' method that would be taken for template variables here
_NOT_VARIABLES = {
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "add_generation_prompt",
    "continue_final_message",
    "strftime_now",
}


class EncodedChat(NamedTuple):
    """What is learned of a conversation: rows of token ids, each with the tokens' weights."""

    rows: list[tuple[list[int], list[float]]]
    rewritten: int  # turns in no row: the chat template writes them differently when others follow
    missing_opener: str  # in which inference's prompts end, and which conversations do not have


class Tokenizer:
    """Text to token ids and back, as the repository's tokenizer.json says."""

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
        self.chat_template_kwargs: dict[str, Any] = {}  # of all chats that do not say otherwise
        self.strftime_now: datetime | None = None  # the time that templates write; None: now
        self.model_max_length = model_max_length
        self._files = Files(files or {})
        self._failures = Failures((files or {}).get("tokenizer.json"))
        self._changed: dict[str, str] = {}  # of tokenizer_config.json
        self._added = False  # whether add_tokens has added any
        self._special_ids = _special_ids(backend)
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.pad_token = self.special_tokens.get("pad_token")
        self.unk_token = self.special_tokens.get("unk_token")
        self.bos_token_id = self._id(self.bos_token)
        self.eos_token_id = self._id(self.eos_token)
        self.pad_token_id = self._id(self.pad_token)
        self.unk_token_id = self._id(self.unk_token)

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | os.PathLike[str], **where: Unpack[Source]
    ) -> "Tokenizer":
        """The tokenizer of a local directory or hub repository that has a tokenizer.json."""
        repository = Repository(path_or_repo, **where)
        # All of them now: an export at the end of a long run must not depend on the hub
        files = source.find_files(repository)
        config = source.read_config(files.get("tokenizer_config.json"))
        backend = read_backend(files["tokenizer.json"])
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        return cls(
            backend,
            special_tokens=source.add_tokens(backend, config, files),
            chat_template=source.read_templates(config, files),
            model_max_length=source.read_length(config, files) or NO_LIMIT,
            files=files,
        )

    def use_chat_template(self, path: str | os.PathLike[str]) -> None:
        """Chats by the template in this Jinja file, which `save_pretrained` then copies too."""
        self.chat_template = source.read_template(Path(path))
        self._files.use_template(path)

    def add_tokens(
        self,
        new_tokens: str | tokenizers.AddedToken | Sequence[str | tokenizers.AddedToken],
        special_tokens: bool = False,
    ) -> int:
        """Add tokens to the vocabulary, as in transformers; returns how many it lacked.

        `save_pretrained` then writes them too. A model needs a row for each:
        `model.resize_token_embeddings(len(tokenizer))`. ValueError for a token without text.
        """
        if isinstance(new_tokens, str | tokenizers.AddedToken):
            new_tokens = [new_tokens]
        present = self.backend.get_added_tokens_decoder().values()
        special = {token.content for token in present if token.special}  # they stay so
        tokens = [_added_token(token, special_tokens) for token in new_tokens]
        tokens = [token for token in tokens if token.content not in special]
        before = len(self)
        add = self.backend.add_special_tokens if special_tokens else self.backend.add_tokens
        add(tokens)
        self._added = self._added or bool(tokens)
        self._special_ids = _special_ids(self.backend)
        return len(self) - before

    def keep_files(self) -> None:
        """Read them into memory, for a `save_pretrained` when they are gone."""
        self._files.keep()

    def use_chat_template_kwargs(self, variables: Mapping[str, Any]) -> None:
        """Variables of the chat template for all chats; ValueError for one that it does not read.

        A chat's own variables win, name by name.
        """
        chat.check_variables(variables, "chat_template_kwargs")
        if unread := [name for name in variables if not self.template_reads(name)]:
            raise ValueError(
                f"chat_template_kwargs has {unread[0]!r}, which the chat template does not read"
                if self.chat_template
                else "chat_template_kwargs: the tokenizer has no chat template"
            )
        self.chat_template_kwargs = dict(variables)

    def template_reads(self, name: str) -> bool:
        """Whether a chat template speaks of a variable."""
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self._templates())

    def use_eos(self, token_id: int) -> None:
        """Another token as eos, which `save_pretrained` then writes too."""
        self.eos_token, self.eos_token_id = self._use("eos_token", token_id), token_id

    def use_pad(self, token_id: int) -> None:  # likewise
        self.pad_token, self.pad_token_id = self._use("pad_token", token_id), token_id

    def _use(self, name: str, token_id: int) -> str:
        token = self.backend.id_to_token(token_id)
        if token is None:
            raise ValueError(f"the tokenizer has no token {token_id}")
        self.special_tokens = self.special_tokens | {name: token}
        self._changed = self._changed | {name: token}
        return token

    @property
    def vocab_size(self) -> int:
        """Tokens without the added ones, as in transformers; `len` counts all."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def files(self) -> list[Path]:
        """The files that the tokenizer came from."""
        return list(self._files.paths.values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encoding(text, add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        try:
            with self._failures:
                encode = self.backend.encode_batch_fast
                encodings = encode(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            for text in texts:
                chat.check_unicode(text)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(
        self, ids: "Sequence[int] | torch.Tensor", *, skip_special_tokens: bool = False
    ) -> str:
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        with self._failures:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, *, skip_special_tokens: bool = False) -> DecodeStream:
        """A decoder for tokens that come one at a time."""
        ignored = self._special_ids if skip_special_tokens else frozenset()
        return DecodeStream(self.backend, ignored, self._failures)

    def pad(
        self, list_of_ids: Sequence[Sequence[int]], *, side: str = "left"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """input_ids [B, T] and attention_mask [B, T], both int64; 1 in the mask is a token."""
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right', got {side!r}")
        if not list_of_ids:
            raise ValueError("nothing to pad: list_of_ids is empty")
        torch = import_module("torch")
        # The mask hides padding, so without a pad token any id will do
        fill = next((i for i in (self.pad_token_id, self.eos_token_id) if i is not None), 0)
        longest = max(map(len, list_of_ids))
        input_ids = torch.full((len(list_of_ids), longest), fill, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(list_of_ids):
            columns = slice(0, len(ids)) if side == "right" else slice(longest - len(ids), longest)
            input_ids[row, columns] = torch.as_tensor(ids, dtype=torch.int64)
            attention_mask[row, columns] = 1
        return input_ids, attention_mask

    def apply_chat_template(
        self,
        messages: Sequence[chat.Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The conversation as the model expects it: token ids, or the text with tokenize=False.

        Tools are functions or JSON schemas; chat_template is a template or the name of one;
        `variables` are the template's own (enable_thinking, date_string, ...).
        """
        chat.check_messages(messages)
        text = chat.render(
            self._template(chat_template, tools),
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **self._variables(variables),
        ).text
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_messages(
        self, messages: Sequence[chat.Message], tools: Sequence[Any] | None = None
    ) -> list[Any]:
        """Messages with content as text and tool arguments as objects, as the template reads them.

        `apply_chat_template` passes messages on as they are, as transformers does.
        """
        template = self._template(None, tools)
        return probe(template, tuple(self.special_tokens.items())).convert(messages)

    def encode_chat(
        self,
        messages: Sequence[chat.Message],
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[bool]]:
        """Token ids of the conversation, and which of them the assistant says.

        Those are the template's {% generation %} blocks. Without any, they are what each turn adds
        to the prompt before it, end-of-turn token included; ValueError where that is ambiguous. A
        turn that the template writes differently when others follow is left out, and so is an empty
        block of reasoning: `encode_chat_rows` has them.
        """
        ids, weights = self.encode_weighted_chat(
            messages, tools=tools, chat_template=chat_template, **variables
        )
        return ids, [weight > 0 for weight in weights]

    def encode_weighted_chat(
        self, messages: Sequence[chat.Message], **options: Any
    ) -> tuple[list[int], list[float]]:
        """The only row of `encode_chat_rows`, which has the same arguments."""
        rows = self.encode_chat_rows(messages, **options).rows
        if len(rows) > 1:
            raise ValueError("the conversation has several rows: encode_chat_rows returns them")
        return rows[0]

    def encode_chat_rows(
        self,
        messages: Sequence[chat.Message],
        *,
        tools: Sequence[Any] | None = None,
        train_on: TrainOn = "assistant",
        weights: Sequence[float | None] | None = None,
        train_on_empty_thinking: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> EncodedChat:
        """Token ids of the conversation, and how much each counts when it is learned.

        `train_on`: what the assistant says (as in `encode_chat`), its last turn, or all; or
        all_turns, with more rows for the turns that the template writes differently when others
        follow: each the conversation up to such a turn. `weights` has one for each message, in
        place of what `train_on` says of it; None: as that says. `train_on_empty_thinking`: an empty
        block of reasoning in front of an answer counts like the answer.
        """
        chat.check_messages(messages)
        rows, rewritten, missing_opener = weighted_rows(
            self._template(chat_template, tools),
            messages,
            self._special_texts(),
            tools=tools,
            train_on=train_on,
            weights=weights,
            train_on_empty_thinking=train_on_empty_thinking,
            **self._variables(variables),
        )
        encoded = []
        for text, spans in rows:
            encoding = self._encoding(text)
            counted = token_weights(encoding.offsets, spans)
            if not any(counted) and any(span.weight for span in spans):
                raise ValueError(UNMARKED)
            encoded.append((encoding.ids, counted))
        return EncodedChat(encoded, rewritten, missing_opener)

    def encode_weighted(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[float]]:
        """Token ids of the text, with special tokens, and how much each counts: as its span."""
        encoding = self._encoding(text, add_special_tokens=True)
        special, last = encoding.special_tokens_mask, len(text)
        inside = [i for i, added in enumerate(special) if not added]
        # Tokens added at the end have no place, and those at the start the first one
        after = inside[-1] if inside else -1
        offsets = [
            (last, last) if i > after and inside else at for i, at in enumerate(encoding.offsets)
        ]
        return encoding.ids, token_weights(offsets, spans)

    def digest(self, *, chats: bool = True) -> str:
        """Changes with whatever changes the tokens of a text or, with `chats`, of a conversation.

        The time counts as the chat template writes it: by the day, if it writes a date.
        """
        parts: tuple[Any, ...] = (self.backend.encode_special_tokens,)
        if chats:
            tokens = self.special_tokens.items()
            read = sorted(item for item in tokens if self.template_reads(item[0]))
            kwargs = json.dumps(self.chat_template_kwargs, sort_keys=True)
            parts = read, self.chat_template, *parts, kwargs, self.template_times()
        return hashlib.sha256(f"{self.backend.to_str()} {parts}".encode()).hexdigest()

    def template_times(self) -> dict[str, str]:
        """What strftime_now gives the chat template, by format; empty if variables pin the time."""
        time, variables = self.strftime_now or chat.now(), self.chat_template_kwargs
        return {
            format: time.strftime(format)
            for template in self._templates()
            for format in time_formats(template, self.special_tokens, variables)
        }

    def end_of_turn(
        self, messages: Sequence[chat.Message], *, tools: Sequence[Any] | None = None, **given: Any
    ) -> int:
        """The token with which the assistant ends its last turn, and generation should stop.

        ValueError if it is not learned, or not a token of its own.
        """
        chat.check_messages(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: turns[-1] + 1] if turns else messages
        ids, weights = self.encode_weighted_chat(messages, tools=tools, train_on="last", **given)
        said = [i for i, weight in zip(ids, weights, strict=True) if weight]
        while len(said) > 1 and not self.decode(said[-1:]).strip():
            said.pop()
        added = self.backend.get_added_tokens_decoder()
        if said[-1] not in added and said[-1] != self.eos_token_id:
            after = self.decode(ids[max(i for i, w in enumerate(weights) if w) + 1 :])
            raise never_ends(self.decode(said[-24:]), after)
        return said[-1]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Copies the files that the tokenizer came from, byte for byte but for other special tokens
        and added ones."""
        added = json.loads(self.backend.to_str())["added_tokens"] if self._added else []
        self._files.save(directory, self._changed, added)

    def __getstate__(self) -> dict[str, Any]:
        # The library's pickle leaves this out
        return self.__dict__ | {"_split_special": self.backend.encode_special_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        split = state.pop("_split_special")
        self.__dict__ |= state
        self.backend.encode_special_tokens = split

    def _encoding(self, text: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        try:
            with self._failures:
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            chat.check_unicode(text)
            raise

    def _special_texts(self) -> frozenset[str]:
        tokens = [self.backend.id_to_token(i) for i in self._special_ids]
        return frozenset(token for token in (*tokens, self.eos_token) if token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def _variables(self, variables: dict[str, Any]) -> dict[str, Any]:
        if wrong := _NOT_VARIABLES & variables.keys():
            raise TypeError(f"not supported with a chat template: {', '.join(sorted(wrong))}")
        given = self.special_tokens | self.chat_template_kwargs | variables
        return given | {"strftime_now": self.strftime_now}

    def _templates(self) -> list[str]:
        templates = self.chat_template or {}
        return [*templates.values()] if isinstance(templates, dict) else [templates]

    def _template(self, chosen: str | None, tools: Sequence[Any] | None) -> str:
        named = self.chat_template if isinstance(self.chat_template, dict) else {}
        if chosen is None and isinstance(self.chat_template, str):
            return self.chat_template
        if chosen is None:
            chosen = "tool_use" if tools is not None and "tool_use" in named else "default"
            if chosen not in named:
                raise ValueError(
                    f"choose one of the templates {sorted(named)} with chat_template=NAME"
                    if named
                    else "the tokenizer has no chat template: pass one as chat_template= (to "
                    "train, its file), or put it into chat_template.jinja beside tokenizer.json"
                )
        if chosen not in named and "{" not in chosen:
            raise ValueError(f"no chat template is called {chosen!r}: there are {sorted(named)}")
        return named.get(chosen, chosen)


def _added_token(token: str | tokenizers.AddedToken, special: bool) -> tokenizers.AddedToken:
    """TypeError or ValueError for what is no token, or has no text."""
    if isinstance(token, str):
        chat.check_unicode(token)
        token = tokenizers.AddedToken(token, special=special)
    if not isinstance(token, tokenizers.AddedToken):
        raise TypeError(f"a new token is a text or an AddedToken, not {token!r}")
    if not token.content:
        raise ValueError("a new token is empty: give its text")
    return token


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)
