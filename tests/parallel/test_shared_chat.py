"""`tigon chat` on two ranks, against one process."""

import importlib
import io
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tigon
from tests.support.small import write_model
from tests.support.terminal import Screen
from tests.test_chat import say
from tests.train.ranks import Ranks
from tigon.cli import main
from tigon.cli.chat import Chat
from tigon.utils.launcher import LAUNCHED
from tigon.utils.terminal import escape_controls

NEW = 12
SHORT = 3.0  # seconds that a collective may last


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("chat") / "model", eos_token_id=None, max_position_embeddings=8192
    )


@pytest.fixture
def alone(directory: Path) -> Chat:
    model = tigon.from_pretrained(directory)
    return Chat(model, tigon.Tokenizer.from_pretrained(directory), max_new_tokens=NEW)


def converse(typed: str, settings: list[str], seconds: float = 0) -> None:
    """A rank, whose standard input is a file that the test writes; a token takes so long."""
    torch.set_num_threads(1)
    if LAUNCHED in os.environ:  # pytest's helper started this process
        os.environ[LAUNCHED] = str(os.getppid())
    if os.environ["RANK"] == "0":
        sys.stdin = os.fdopen(os.open(typed, os.O_RDONLY))
    shared: Any = importlib.import_module("tigon.cli.chat")
    generate = shared.GenerateCalls.generate

    def slow(self: Any, ids: Any, *, streamer: Callable[..., object], **more: Any) -> None:
        def paused(new: Any) -> None:
            streamer(new)
            time.sleep(seconds)

        generate(self, ids, streamer=paused, **more)

    shared.GenerateCalls.generate = slow
    sys.exit(main(["chat", *settings, "--device", "cpu", "--tp", "2"]))


def converse_slowly(typed: str, settings: list[str]) -> None:
    """The collectives of all groups that there are before the chat may last a short time alone."""
    shared: Any = importlib.import_module("tigon.cli.chat")

    class ShortCalls(shared.GenerateCalls):
        def __init__(self, *arguments: Any) -> None:
            for group in dist.distributed_c10d._world.pg_map:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), group)
            super().__init__(*arguments)

    shared.GenerateCalls = ShortCalls
    converse(typed, settings)


class Typed:
    """A pipe with a name: what a person types."""

    def __init__(self, directory: Path):
        self.path = str(directory / "typed")
        os.mkfifo(self.path)

    def __enter__(self) -> io.TextIOWrapper:
        self.file = open(self.path, "w", buffering=1)
        return self.file

    def __exit__(self, *_: Any) -> None:
        self.file.close()


def until(found: Callable[[], bool], ranks: Ranks) -> None:
    end = time.monotonic() + 300
    while not found():
        assert time.monotonic() < end and ranks.codes == [None, None], ranks.errors
        time.sleep(0.02)


@pytest.mark.slow
def test_two_ranks_answer_as_one_however_long_a_person_types(directory, alone, tmp_path):
    first, second = say(alone, "hello"), say(alone, "and again")
    alone.reset()
    alone.use_system("be brief")
    third = say(alone, "hello")
    typed = Typed(tmp_path)
    settings = [str(directory), "--max-new-tokens", str(NEW)]
    ranks = Ranks(2, converse_slowly, typed.path, settings)
    with typed as keys:
        keys.write("hello\n")
        until(lambda: first in ranks.printed, ranks)
        time.sleep(2 * SHORT)
        keys.write(f"and again\n\n{'words ' * 9000}\n/reset\n/nothing\n/system be brief\nhello\n")
    assert ranks.finish() == f"{first}\n{second}\n{third}\n"
    long, new, unknown, system = ranks.errors.splitlines()
    assert "that is too long" in long and "a new conversation" in new
    assert "no command /nothing" in unknown and "system message: be brief" in system


@pytest.mark.parametrize("launched", [True, False])
def test_an_interrupt_stops_the_answer_or_under_torchrun_the_chat(
    directory, alone, tmp_path, launched
):
    typed = Typed(tmp_path)
    settings = [str(directory), "--max-new-tokens", "4000"]
    environment = {LAUNCHED: ""} if launched else {}
    ranks = Ranks(2, converse, typed.path, settings, 0.02, environment=environment)
    with typed as keys:
        keys.write("hello\n")
        until(lambda: len(ranks.printed) > 3, ranks)
        for process in ranks.processes:  # as run_ranks and torchrun do
            os.kill(process.pid, signal.SIGINT)
        if launched:
            until(lambda: "(stopped)" in ranks.errors, ranks)
            before = len(ranks.printed)
            keys.write("/reset\nhello\n")
            until(lambda: len(ranks.printed) > before + 3, ranks)
            for process in ranks.processes:
                os.kill(process.pid, signal.SIGINT)
    if launched:
        stopped, again = ranks.finish().splitlines()
        assert ranks.errors.splitlines() == ["(stopped)", "(a new conversation)", "(stopped)"]
        alone.max_new_tokens = 400
        assert say(alone, "hello").startswith(min(stopped, again, key=len))
    else:
        assert ranks.fail(130, 0) == []


def test_a_tokenizer_without_turns_is_said_once(directory, tmp_path):
    bare = write_model(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    ranks = Ranks(2, converse, os.devnull, [str(bare)])
    (line,) = ranks.fail(1, 1)
    assert line.startswith(f"tigon chat: {bare}: the tokenizer has no chat template")


def test_the_starter_is_not_stopped_alone(directory, monkeypatch):
    """By Ctrl-Z: the rank that reads the terminal would read what is meant for the shell."""
    before, found = signal.getsignal(signal.SIGTSTP), []

    def run_ranks(*_: Any, **__: Any) -> tuple[int, None]:
        found.append(signal.getsignal(signal.SIGTSTP))
        return 0, None

    monkeypatch.setattr(importlib.import_module("tigon.cli.load"), "run_ranks", run_ranks)
    assert main(["chat", str(directory), "--tp", "2", "--device", "cpu"]) == 0
    assert found == [signal.SIG_IGN] and signal.getsignal(signal.SIGTSTP) == before


def children(pid: int) -> dict[str, int]:
    """Of a process that has started ranks, the process of each."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {e[5:].decode(): int(child) for e in environment if e.startswith(b"RANK=")}
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_in_a_terminal(directory, alone):
    """The ranks that the command starts: two turns, one of them stopped, and the loss of a rank."""
    terminal, theirs = pty.openpty()
    screen = Screen(terminal)
    # Its own session, with the terminal: Ctrl-C is for the starter alone
    enter = "import fcntl, os, runpy, signal, sys, termios\n"
    enter += "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    enter += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    enter += "sys.argv[0] = 'tigon'\nrunpy.run_module('tigon.cli', run_name='__main__')\n"
    command = ["chat", str(directory), "--max-new-tokens", "4000", "--tp", "2", "--device", "cpu"]
    environment = os.environ | {"TERM": "dumb", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    starter = subprocess.Popen(
        [sys.executable, "-c", enter, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    modes = termios.tcgetattr(theirs)

    try:
        screen.read_until("Ctrl-D ends)", "> ")
        text = escape_controls(say(alone, "hello")[:20])
        for _ in range(2):
            screen.type(b"hello\n")
            screen.read_until("hello\n", text)  # behind the echo
            screen.type(b"\x03")
            screen.read_until("(stopped)", "> ", again=b"\x03")
            screen.type(b"/reset\n")
            screen.read_until("(a new conversation)", "> ")
        ranks = children(starter.pid)
        os.kill(ranks["1"], signal.SIGKILL)
        screen.read_until("tigon chat: rank 1 was killed by SIGKILL")
        assert starter.wait(60) == 128 + signal.SIGKILL
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
        assert termios.tcgetattr(theirs) == modes
    finally:
        with suppress(subprocess.TimeoutExpired):
            starter.terminate()  # its ranks too, if it still runs
            starter.wait(30)
        starter.kill()
        starter.wait()
        os.close(terminal)
        os.close(theirs)
