"""A conversation with a model in the terminal: streamed answers, history, a few commands."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.cli.main import INTERRUPTED
from tigon.cli.terminal import read_lines
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import NO_TIMEOUT, World
from tigon.utils.launcher import launcher_repeats_errors
from tigon.utils.terminal import escape_controls, one_line, raw_stream

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "another system message; without TEXT, none",
    "/help": "this list",
    "/exit": "end, as Ctrl-D does",
}
Message = dict[str, str]


class Chat:
    """Holds a conversation: its messages, and the settings of the next answer.

    Every turn encodes the whole conversation again, as the chat template may render earlier turns
    in another way. The oldest turns are dropped once they no longer fit the context.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        settings: dict[str, Any] | None = None,  # of model.generate
    ) -> None:
        """Raises ValueError for a tokenizer without chat template or system messages."""
        if tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template: use `tigon generate`")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.generate: Callable[..., Any] = model.generate
        self.context: int = model.config.max_position_embeddings
        self.max_new_tokens, self.settings = max_new_tokens, settings or {}
        self.system, self.messages = system, list[Message]()
        self._encode([{"role": "user", "content": "?"}])

    def answer(self, text: str, write: Callable[[str], None]) -> int:
        """Streams the answer to `text` into `write`, and adds both to the messages.

        Returns the number of messages that were dropped to make room. A KeyboardInterrupt stops the
        answer, keeps what was written of it, and is raised again. Raises ValueError, changing
        nothing, for a text that does not fit.
        """
        messages, ids = self._fit_context([*self.messages, {"role": "user", "content": text}])
        dropped = len(self.messages) + 1 - len(messages)
        pieces: list[str] = []
        stream = self.tokenizer.decode_stream(skip_special_tokens=True)

        def show(piece: str | None) -> None:
            if piece:
                pieces.append(piece)
                write(piece)

        try:
            self.generate(
                torch.tensor([ids], device="cpu"),
                max_new_tokens=min(self.max_new_tokens, self.context - len(ids)),
                streamer=lambda new: show(stream.step(int(new))),
                **self.settings,
            )
            show(stream.finish())
        finally:
            if pieces:  # an empty answer would be a turn that says nothing
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return dropped

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        self.messages = []

    def use_system(self, text: str | None) -> None:
        """Replaces the system message; ValueError if the chat template takes none."""
        before, self.system = self.system, text
        try:
            self._encode([{"role": "user", "content": "?"}])
        except ValueError:
            self.system = before
            raise

    def _encode(self, messages: list[Message]) -> list[int]:
        """Returns the tokens of the conversation and the prompt for an answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        ids = self.tokenizer.apply_chat_template([*system, *messages], add_generation_prompt=True)
        assert isinstance(ids, list)
        return ids

    def _fit_context(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """Returns the newest turns that leave room for an answer, and their tokens."""
        room = self.context - min(self.max_new_tokens, self.context // 2)
        while len(ids := self._encode(messages)) > room and len(messages) > 1:
            # After a turn of the user begins the next one
            messages = messages[2:]
        if len(ids) >= self.context:
            raise ValueError(
                f"that is too long: {len(ids)} tokens, and the model's context is {self.context}"
            )
        return messages, ids


def talk(chat: Chat, name: str) -> None:
    """Answers lines of standard input on standard output until its end or /exit."""
    terminal = sys.stdin.isatty()
    if terminal:
        print_note(f"{name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
    for line in read_lines(terminal):
        if line.startswith("/"):
            if not run_chat_command(chat, line):
                return
        elif line.strip():
            answer_turn(chat, line.strip(), name)


def answer_turn(chat: Chat, text: str, name: str) -> None:
    """Streams the answer to a text to standard output and keeps both in the conversation; notes an
    interruption, an unusable text and forgotten messages on standard error."""
    try:
        text.encode()  # some locales accept any byte
        forgotten = chat.answer(text, print_text)
    except KeyboardInterrupt:
        print(flush=True)
        print_note("stopped")
    except UnicodeError:
        print_note("that is not UTF-8 text")
    except ValueError as error:
        print_note(str(error))
    else:
        print(flush=True)
        if forgotten:
            print_note(
                f"the oldest {forgotten} messages are forgotten: {name} reads {chat.context} "
                "tokens at most"
            )


def print_text(piece: str) -> None:
    """Prints a model's text unchanged; on a terminal, with control characters escaped."""
    if sys.stdout.isatty():
        piece = escape_controls(piece.replace("\r", ""))
    print(piece, end="", flush=True, file=raw_stream(sys.stdout))


def run_chat_command(chat: Chat, line: str) -> bool:
    """Runs a line that begins with a slash; returns whether the conversation goes on."""
    word, _, text = line.strip().partition(" ")
    match word:
        case "/exit" | "/quit":
            return False
        case "/reset":
            chat.reset()
            print_note("a new conversation")
        case "/system":
            try:
                chat.use_system(text.strip() or None)
                print_note(f"system message: {chat.system or 'none'}")
            except ValueError as error:
                print_note(str(error))
        case "/help":
            for name, what in COMMANDS.items():
                print_note(f"{name:<14}{what}")
        case _:
            names = ", ".join(COMMANDS)
            print_note(
                f"no command {word}; there are {names}. A blank before it says it to the model"
            )
    return True


def print_note(text: str) -> None:
    """Prints a text in parentheses, as one line on standard error."""
    print(f"({one_line(text)})", file=sys.stderr, flush=True)


def talk_on_ranks(chat: Chat, name: str, world: World) -> None:
    """Runs `talk` on the first rank and its calls of the model on all; every rank calls this.

    Ctrl-C stops an answer after the same token on all ranks; under torchrun, which ends with its
    ranks at Ctrl-C, it ends the chat.
    """
    calls = GenerateCalls(chat.model, world)
    if world.main:
        chat.generate = calls.generate
        calls.lead(lambda: talk(chat, name))
    else:
        calls.follow()


class StopGeneration(Exception):
    """Ends an answer after the same token on all ranks."""


class GenerateCalls:
    """Repeats the first rank's calls of model.generate on all ranks."""

    def __init__(self, model: CausalLM, world: World) -> None:
        """Makes a process group, so every rank calls it."""
        self.model, self.progress = model, world.progress
        # A collective of the default group may last some minutes; a person may take longer to type
        self.group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        self.interrupted = False

    def lead(self, talk: Callable[[], None]) -> None:
        """Runs `talk` on the first rank; the other ranks follow its calls until it ends."""
        if not launcher_repeats_errors():
            signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
        try:
            talk()
        except (KeyboardInterrupt, BrokenPipeError, SystemExit):  # never amid a step
            self._broadcast_call(None)
            raise
        self._broadcast_call(None)

    def follow(self) -> None:
        """Repeats the calls of the first rank until it ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one says what it stops
        while (call := self._broadcast_call(None)) is not None:
            ids, settings = call
            self.progress.step += 1
            with suppress(StopGeneration, ValueError):  # on all ranks: the first one says it
                self.model.generate(ids, streamer=self._step, **settings)

    def generate(
        self, ids: Tensor, *, streamer: Callable[[Tensor], object], **settings: Any
    ) -> None:
        """Runs model.generate on all ranks. A KeyboardInterrupt or an error of `streamer` is raised
        after a step of all ranks."""
        self.interrupted = False
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self._broadcast_call((ids, settings))
            self.progress.step += 1
            with suppress(StopGeneration):
                self.model.generate(
                    ids, streamer=partial(self._step, streamer=streamer), **settings
                )
        finally:
            signal.signal(signal.SIGINT, before)
        if self.interrupted:
            signal.raise_signal(signal.SIGINT)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Notes Ctrl-C, by which all ranks stop after the present step."""
        self.interrupted = True

    def _step(self, new: Tensor, streamer: Callable[[Tensor], object] | None = None) -> None:
        """Streams a token on the first rank; raises StopGeneration on all if that one stops."""
        self.progress.step += 1
        stop = True
        try:
            if streamer is not None:
                streamer(new)
            stop = self.interrupted
        finally:
            flag = torch.tensor([int(stop)], device="cpu")
            dist.broadcast(flag, 0, group=self.group)
        if flag:
            raise StopGeneration

    def _broadcast_call(self, call: tuple[Tensor, dict[str, Any]] | None) -> Any:
        """Returns the first rank's `call` on all ranks; None ends the chat."""
        calls = [call]
        dist.broadcast_object_list(calls, 0, group=self.group)
        return calls[0]
