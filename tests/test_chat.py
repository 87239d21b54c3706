"""`tigon chat`: turns, history, commands and interruptions, with a small model on the CPU."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tigon
from tests.support.small import CHATML, write_model
from tests.support.terminal import Screen
from tigon.cli.chat import Chat, print_text, talk


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def chat(directory: Path) -> Chat:
    model = tigon.from_pretrained(directory)
    return Chat(model, tigon.Tokenizer.from_pretrained(directory), max_new_tokens=12)


def say(chat: Chat, text: str) -> str:
    said: list[str] = []
    chat.answer(text, said.append)
    return "".join(said)


def test_answers_are_greedy_after_the_whole_conversation(chat: Chat) -> None:
    first = say(chat, "hello")
    second = say(chat, "and again")
    expected = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        f"{first}<|im_end|>\n<|im_start|>user\nand again<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([chat.tokenizer.encode(expected)])
    tokens = chat.model.generate(ids, max_new_tokens=12)[0, ids.shape[1] :]
    assert second == chat.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    chat.reset()
    assert say(chat, "hello") == first


def test_system_message_comes_first(chat: Chat) -> None:
    plain = say(chat, "hello")
    chat.reset()
    chat.use_system("the model says words back to whoever asked it")
    assert say(chat, "hello") != plain
    ids = chat._encode(chat.messages[:1])
    assert chat.tokenizer.decode(ids).startswith("<|im_start|>system\nthe model says")


def test_oldest_turns_are_forgotten(chat: Chat) -> None:
    assert chat.context == 512
    text = "words " * 60
    counts = [chat.answer(f"{i} {text}", lambda piece: None) for i in range(6)]
    assert counts[0] == 0 and counts[-1] >= 2 and all(count % 2 == 0 for count in counts)
    assert chat.messages[0]["role"] == "user" and chat.messages[0]["content"][0] != "0"
    assert len(chat._encode(chat.messages[:-1])) <= 512 - 12
    with pytest.raises(ValueError, match=r"too long: \d+ tokens, and the model's context is 512"):
        chat.answer("words " * 600, lambda piece: None)
    assert chat.messages[-2]["content"].startswith("5 words")  # nothing has changed


def test_stopped_answer_is_remembered(chat: Chat) -> None:
    said: list[str] = []

    def write(piece: str) -> None:
        said.append(piece)
        if len(said) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.answer("hello", write)
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(said)}
    say(chat, "go on")
    assert len(chat.messages) == 4


def test_lines_of_standard_input(chat, monkeypatch, capsys):
    first = say(chat, "hello")
    chat.reset()
    text = "hello\n\n/reset\nhello\n/nothing\n/system be brief\n/help\n/exit\nnever said\n"
    for typed, answers, notes in (
        (text, 2, ("(a new conversation)", "(system message: be brief)", "/exit",
                   "no command /nothing; there are /reset")),
        ("\udcff\n" + "words " * 600, 0, ("not UTF-8 text", "too long")),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        talk(chat, "tiny")
        out, err = capsys.readouterr()
        assert out.splitlines() == first.splitlines() * answers
        assert all(note in err for note in notes)
    assert chat.system == "be brief"


def test_terminal_shows_control_characters(monkeypatch, capsys):
    text = "\tred \x1b[31m, the clipboard \x1b]52;c;eA==\x07, \x9b2J, gone\b\x7f\rover\r\né\n"
    print_text(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_text(text)
    shown = "\tred \\x1b[31m, the clipboard \\x1b]52;c;eA==\\x07, \\x9b2J, gone\\x08\\x7fover\né\n"
    assert capsys.readouterr().out == shown


def test_template_without_system_messages(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = model / "tokenizer_config.json"
    values = json.loads(config.read_text())
    refuses = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    config.write_text(json.dumps(values | {"chat_template": refuses + CHATML}))
    loaded = tigon.from_pretrained(model), tigon.Tokenizer.from_pretrained(model)
    with pytest.raises(ValueError, match="no system"):
        Chat(*loaded, system="be brief")
    chat = Chat(*loaded, max_new_tokens=2)
    with pytest.raises(ValueError, match="no system"):
        chat.use_system("be brief")
    assert chat.system is None and isinstance(say(chat, "hello"), str)


ENDLESS = """
import sys, time
import tigon.cli.chat as chat
from tigon.cli import main
answer = chat.Chat.answer
def endless(self, text, write):
    def pause(piece):
        write("an answer")
        time.sleep(600)
    return answer(self, text, pause)
chat.Chat.answer = endless
sys.exit(main(sys.argv[1:]))
"""


def test_chat_in_a_terminal(directory: Path) -> None:
    """Ctrl-C stops an answer and keeps the chat, Ctrl-D ends it."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a background job has ignored
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = ["chat", str(directory), "--temperature", "1", "--seed", "0"]
        os.execve(
            sys.executable,
            [sys.executable, "-c", ENDLESS, *command],
            os.environ | {"TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""},
        )
    screen = Screen(terminal)
    try:
        screen.read_until("Ctrl-D ends)", "> ")
        screen.type(b"hello\n")
        screen.read_until("hello", "an answer")  # behind the echo
        screen.type(b"\x03")
        screen.read_until("(stopped)", "> ", again=b"\x03")
        screen.type(b"\x03")  # of an empty line: another one
        screen.read_until("> ", again=b"\x03")
        screen.type(b"/system be brief\n")
        screen.read_until("(system message: be brief)", "> ")
        screen.type(b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_at_the_prompt_restores_the_echo(number):
    signal.signal(number, signal.SIG_DFL)  # which nohup has ignored
    ours, theirs = pty.openpty()
    program = "from tigon.cli.terminal import read_lines; next(read_lines(True))"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs)
    try:
        seen, end = b"", time.monotonic() + 120
        while not seen.endswith(b"> "):
            assert select.select([ours], [], [], end - time.monotonic())[0], seen
            seen += os.read(ours, 100)
        while termios.tcgetattr(theirs)[3] & termios.ECHO:  # until readline has begun
            assert time.monotonic() < end
            time.sleep(0.01)
        for _ in range(60):  # readline misses one that comes just before it waits
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                assert process.wait(1) == -number
                break
        else:
            pytest.fail(f"signal {number} does not end the prompt")
    finally:
        process.kill()
        process.wait()
    assert termios.tcgetattr(theirs)[3] & termios.ECHO
    os.close(ours)
    os.close(theirs)
