"""A conversation with a model in the terminal: streamed answers, history, a few commands."""

import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.utils.terminal import escape_controls, one_line, raw_stream

with suppress(ImportError):  # not on Windows; input() then has editing and history
    import readline  # noqa: F401

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "another system message; without TEXT, none",
    "/help": "this list",
    "/exit": "end, as Ctrl-D does",
}
Message = dict[str, str]


class Chat:
    """Messages so far, and how the next answer is made.

    Every turn reads the whole conversation again, as its template may write earlier turns in
    another way. Messages that no longer fit are forgotten from the oldest on, by whole turns.
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
        """ValueError if the tokenizer has no chat template, or one that takes no system message."""
        if tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template, so it knows no turns: "
                "`tigon generate` continues a text"
            )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.generate: Callable[..., Any] = model.generate
        self.context: int = model.config.max_position_embeddings
        self.max_new_tokens, self.settings = max_new_tokens, settings or {}
        self.system, self.messages = system, list[Message]()
        self._ids([{"role": "user", "content": "?"}])

    def answer(self, text: str, write: Callable[[str], None]) -> int:
        """Say `text`, pass the answer to `write` as it comes, and remember both.

        Returns how many messages were forgotten to make room. A KeyboardInterrupt stops the answer
        and is passed on; what was written of it is remembered. Raises ValueError for a text that
        does not fit; then nothing has changed.
        """
        messages, ids = self._fitting([*self.messages, {"role": "user", "content": text}])
        forgotten = len(self.messages) + 1 - len(messages)
        said: list[str] = []
        stream = self.tokenizer.decode_stream(skip_special_tokens=True)

        def show(piece: str | None) -> None:
            if piece:
                said.append(piece)
                write(piece)

        try:
            self.generate(
                torch.tensor([ids]),
                max_new_tokens=min(self.max_new_tokens, self.context - len(ids)),
                streamer=lambda new: show(stream.step(int(new))),
                **self.settings,
            )
            show(stream.finish())
        finally:
            if said:  # an empty answer would be a turn that says nothing
                self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]
        return forgotten

    def reset(self) -> None:
        self.messages = []

    def use_system(self, text: str | None) -> None:
        """ValueError if the template takes no system message; it stays as it was then."""
        before, self.system = self.system, text
        try:
            self._ids([{"role": "user", "content": "?"}])
        except ValueError:
            self.system = before
            raise

    def _ids(self, messages: list[Message]) -> list[int]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        ids = self.tokenizer.apply_chat_template([*system, *messages], add_generation_prompt=True)
        assert isinstance(ids, list)
        return ids

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The newest turns that leave room for an answer, and their tokens."""
        room = self.context - min(self.max_new_tokens, self.context // 2)
        while len(ids := self._ids(messages)) > room and len(messages) > 1:
            # After a turn of the user begins the next one
            messages = messages[2:]
        if len(ids) >= self.context:
            raise ValueError(
                f"that is too long: {len(ids)} tokens, and the model's context is {self.context}"
            )
        return messages, ids


def talk(chat: Chat, name: str) -> None:
    """Read lines from standard input and write the answers to standard output, until the end of
    the input or /exit. What is said about the conversation goes to standard error."""
    terminal = sys.stdin.isatty()
    if terminal:
        note(f"{name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
    for line in lines(terminal):
        if line.startswith("/"):
            if not command(chat, line):
                return
        elif line.strip():
            turn(chat, line.strip(), name)


def turn(chat: Chat, text: str, name: str) -> None:
    try:
        text.encode()  # some locales accept any byte
        forgotten = chat.answer(text, put)
    except KeyboardInterrupt:
        print(flush=True)
        note("stopped")
        return
    except UnicodeError:
        note("that is not UTF-8 text")
        return
    except ValueError as error:
        note(str(error))
        return
    print(flush=True)
    if forgotten:
        note(
            f"the oldest {forgotten} messages are forgotten: {name} reads {chat.context} tokens "
            "at most"
        )


def put(piece: str) -> None:
    """Print what a model says: exactly, but on a terminal with control characters escaped."""
    if sys.stdout.isatty():
        piece = escape_controls(piece.replace("\r", ""))
    print(piece, end="", flush=True, file=raw_stream(sys.stdout))


def command(chat: Chat, line: str) -> bool:
    """Follow a line that begins with a slash; False ends the conversation."""
    word, _, text = line.strip().partition(" ")
    match word:
        case "/exit" | "/quit":
            return False
        case "/reset":
            chat.reset()
            note("a new conversation")
        case "/system":
            try:
                chat.use_system(text.strip() or None)
                note(f"system message: {chat.system or 'none'}")
            except ValueError as error:
                note(str(error))
        case "/help":
            for name, what in COMMANDS.items():
                note(f"{name:<14}{what}")
        case _:
            names = ", ".join(COMMANDS)
            note(f"no command {word}; there are {names}. A blank before it says it to the model")
    return True


def lines(terminal: bool) -> Iterator[str]:
    if not terminal:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    while True:
        try:
            with terminal_kept():
                line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # an empty line again
            print()
        else:
            yield line


def terminal_modes() -> Callable[[], None]:
    """Gives the terminal back the modes that it has now."""
    modes = termios.tcgetattr(sys.stdin)

    def restore() -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)

    return restore


@contextmanager
def terminal_kept() -> Iterator[None]:
    """While a line is edited there is no echo: a signal that ends the process gives it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    restore = terminal_modes()

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    numbers = [signal.SIGTERM, signal.SIGHUP]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def note(text: str) -> None:
    print(f"({one_line(text)})", file=sys.stderr, flush=True)
