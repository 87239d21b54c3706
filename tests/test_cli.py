"""The tigon command: its help, errors of one line, and how it ends."""

import errno
import importlib
import io
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import tigon
from tests.models.gguf_files import write_gguf
from tests.support.small import LLAMA, write_chats, write_model
from tigon.cli import main

COMMANDS = (
    "generate", "chat", "serve", "train", "plan", "report", "data", "eval", "export", "push", "info"
)  # fmt: skip
HEAVY = ["torch", "huggingface_hub", "tokenizers", "numpy"]
LATER = ["transformers", "matplotlib", "tensorboard", "gguf", "datasets", "multiprocess", "pyarrow"]
LATER += ["torch._dynamo", "torch._inductor", "flash_attn", "cutlass", "wandb", "lm_eval"]
LATER += ["huggingface_hub.hf_api"]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model", eos_token_id=5000)


@pytest.fixture(scope="module")
def places(directory: Path) -> dict[str, Path]:
    """Models and files by the word that stands for them in a command."""
    root = directory.parent
    places = {"MODEL": directory, "NEW": root / "new", "FOLDER": root}
    for name, content in (("EMPTY", ""), ("BAD", '{"text": "a b"}\n{"text"\n')):
        places[name] = root / f"{name.lower()}.jsonl"
        places[name].write_text(content)
    for name, file, values in (
        ("SEVERAL", "generation_config.json", {"do_sample": True, "num_return_sequences": 2}),
        ("ENDLESS", "generation_config.json", {"do_sample": True, "min_new_tokens": 10**21}),
        ("MUTE", "tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
    ):
        places[name] = Path(shutil.copytree(directory, root / name))
        (places[name] / file).write_text(json.dumps(values))
    places["LARGER"] = write_model(root / "larger", vocab_size=322)
    places["DRAFT"] = write_model(root / "draft", num_hidden_layers=1)
    places["GGUF"] = root / "gguf/a.gguf"
    places["GGUF"].parent.mkdir()
    write_gguf(directory, places["GGUF"])
    places["NO.GGUF"] = root / "gguf/b.gguf"
    return places


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process with these arguments, which has ended."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.run([sys.executable, *arguments], **options)


@pytest.mark.parametrize("module", ["tigon", "tigon.cli"])
def test_version(module: str) -> None:
    done = python("-m", module, "--version")
    assert (done.returncode, done.stdout) == (0, f"tigon {tigon.__version__}\n")


def test_help_names_every_command(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split()[0] for line in lines if line[:4] == "    ") == COMMANDS


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import tigon", HEAVY),
        ("main(['-h'])", HEAVY),
        ("main(['info', MODEL])", ["torch", "numpy", "tokenizers", "tigon.train"]),
        ("main(['report', RUN])", ["torch"]),
        pytest.param("import tigon.cli.commands, tigon.train", LATER, marks=pytest.mark.slow),
    ],
)
def test_modules_that_commands_do_not_import(code, modules, directory, tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    program = (
        f"import atexit, sys, tigon; from tigon.cli import main; MODEL, RUN = sys.argv[1:]\n"
        f"atexit.register(lambda: print([m for m in {modules} if m in sys.modules]))\n{code}"
    )
    done = python("-c", program, str(directory), str(tmp_path))
    assert done.stdout.endswith("[]\n"), done
    assert "MODEL" not in code or "architecture  LlamaForCausalLM" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --help", ""),
        ("train nonsense=1", "unknown setting 'nonsense'"),
        ("train none.yaml", "no config file none.yaml"),
        ("train --nproc 2 nonsense=1", "unknown setting 'nonsense'"),
        ("train CONFIG", "no directory ./none"),
        ("train CONFIG model=MODEL data=none.jsonl", "no data file matches 'none.jsonl'"),
        ("train CONFIG eval_data=none.jsonl", "eval_data: no data file matches 'none.jsonl'; give"),
        ("train CONFIG lora.targets=[]", "targets is empty"),
        ("train CONFIG task=kto beta=0", "beta=0 of task=kto must be above 0"),
        ("train CONFIG task=distill beta=2", "beta=2 of task=distill is not in [0, 1]"),
        (
            "train CONFIG log_to=[tensorboard,wandb,tensorboard]",
            "log_to has tensorboard more than once: name it once",
        ),
        ("train CONFIG task=stf", "no task is called task='stf'; did you mean 'sft'?"),
        ("train CONFIG format=alpaca", "format='alpaca' is not one of messages, "),
        ("train CONFIG chat_template_kwargs.messages=x", "chat_template_kwargs must be an object"),
        ("train CONFIG --nproc 3", "batch_size=8 must be a multiple of 3 ranks"),
        ("train CONFIG parallel.tensor=2", "parallel: tensor 2 is for 2 ranks, and there are 1"),
        ("data show data=DATA model=m wrong=1", "unknown setting 'wrong'"),
        ("data pack none.jsonl model=m", "no data file matches 'none.jsonl'"),
        ("generate ./none hi", "no directory ./none"),
        ("plan ./none --gpus 8 --seq-len 64", "no directory ./none"),
        ("plan MODEL --gpus 8 --seq-len 64 --settings wrong=1", "unknown setting 'wrong'"),
    ],
)
def test_a_wrong_setting_is_told_without_torch(arguments, message, directory, tmp_path):
    """Which takes seconds to import."""
    path = tmp_path / "config.yaml"
    path.write_text(f"model: ./none\ndata: {__file__}\nrun_dir: {tmp_path}/run\n")
    program = (
        "import atexit, sys; from tigon.cli import main\n"
        "atexit.register(lambda: print([m for m in ('torch', 'numpy') if m in sys.modules]))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for name, place in (("CONFIG", path), ("MODEL", directory), ("DATA", __file__)):
        arguments = arguments.replace(name, str(place))
    given = arguments.split()
    done = python("-c", program, *given)
    assert done.stdout.endswith("[]\n"), done.stderr
    command = "tigon.train" if given[0] == "train" else f"tigon {given[0]}"
    assert done.stderr.startswith(f"{command}: {message}" if message else ""), done.stderr
    assert done.stderr.count("\n") == done.returncode == bool(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate ./none hi", "no directory ./none"),
        ("generate not-a-name/at/all hi", "no directory not-a-name/at/all (absolute: "),
        ("generate MODEL hi --device nowhere", "--device nowhere: "),
        ("generate MODEL hi --raw --system x", "--raw and --system: a raw text has no system"),
        ("generate MODEL hi --temperature -1", "temperature=-1.0 is not above 0"),
        ("generate MODEL hi --max-new-tokens -3", "max_new_tokens=-3 must be at least 0"),
        (f"generate MODEL hi --temperature 1 --seed {2**64}", f"seed={2**64} must be at most"),
        (["generate", "MODEL", "\udcff"], "the prompt is not UTF-8 text (position 0)"),
        ("generate MODEL hi --system \udcff", "the prompt is not UTF-8 text"),
        (["generate", "MODEL", "the " * 600], "tokens, for a context of 512"),
        (["generate", "MODEL", "", "--raw"], "the prompt is empty"),
        ("generate MODEL hi --base x", "is no adapter, and needs no base"),
        ("generate MODEL hi --chat-template-kwargs {", "--chat-template-kwargs is not valid JSON"),
        ('generate MODEL hi --chat-template-kwargs {"x":1}', "has 'x', which the"),
        ("generate MODEL hi --assistant LARGER", "vocabulary of 322 tokens, but the model one"),
        ("generate MODEL hi --assistant DRAFT --cache dynamic", "needs a cache that can go back"),
        ("generate MODEL hi --expert-parallel", "--expert-parallel needs --tp N"),
        ("generate MUTE hi --system x", "--system needs a chat template"),
        ("generate SEVERAL hi", "generation_config.json: num_return_sequences=2, and a command"),
        ("generate ENDLESS hi", "generation_config.json: min_new_tokens=1"),
        ("chat SEVERAL", "generation_config.json: num_return_sequences=2, and a command"),
        ("chat MUTE", "has no chat template: use `tigon generate`"),
        ("chat MODEL --max-new-tokens 0", "max_new_tokens=0 must be at least 1"),
        ("chat GGUF", "has no tokenizer.json: put that of the original model there"),
        ("chat NO.GGUF", "has no file b.gguf"),
        ("serve ./none --port 0", "no directory ./none"),
        ("serve MODEL --host 0.0.0.0", "--host 0.0.0.0: others than this machine could reach it"),
        ("serve MODEL --host localhost.evil", "so it needs a key: set TIGON_API_KEY"),
        ("serve MODEL --host 127.0.0.256", "so it needs a key"),
        ("serve MODEL --port 99999", "--port 99999 must be between 0 and 65535"),
        ("serve MODEL --port 0 --max-rows 0", "--max-rows=0 must be at least 1"),
        ("serve MODEL --port 0 --max-queue -1", "--max-queue=-1 must be at least 0"),
        ("serve MODEL --port 0 --max-rows 1025", "--max-rows=1025 must be at most 1024"),
        ("serve MODEL --port 0 --adapter one=./none", "no directory ./none"),
        ("serve MODEL --port 0 --name one --adapter one=./x", "names must differ, also from the"),
        ("serve SEVERAL --port 0", "num_return_sequences=2, and a command"),
        ("serve ENDLESS --port 0", "min_new_tokens=1"),
        ("eval perplexity MODEL none.txt", "no data file matches 'none.txt'"),
        ("eval perplexity MODEL EMPTY", "empty.jsonl is empty"),
        ("eval perplexity MODEL BAD", "bad.jsonl:2: not valid JSON"),
        ("eval perplexity MODEL BAD --context 1", "context=1 is not in"),
        ("eval parity ./none", "no directory ./none"),
        ("export a/b MODEL", "exists and is a directory with files in it"),
        ("export MODEL NEW --max-shard-size 5XB", "5XB"),
        ("export MODEL NEW --dtype q8_0", "--dtype q8_0 needs a GGUF file"),
        ("export MODEL GGUF", "a.gguf exists: remove it, choose another path"),
        ("export MODEL b.gguf --stack-experts", "b.gguf is a GGUF file, where experts are always"),
        ("info FOLDER", "has no file config.json"),
        ("train none.yaml", "no config file none.yaml"),
    ],
)
def test_errors_are_one_line(places, capfd, arguments, message):
    words = arguments.split(" ") if isinstance(arguments, str) else arguments
    before = sorted(places["MODEL"].iterdir())
    try:
        status: object = main([str(places.get(word, word)) for word in words])
    except SystemExit as error:  # train's way
        print(error, file=sys.stderr)
        status = int(isinstance(error.code, str))
    out, err = capfd.readouterr()
    assert (status, out) == (1, "")
    assert err.startswith(f"tigon{'.' if words[0] == 'train' else ' '}{words[0]}: ")
    assert message in err
    assert err.count("\n") == 1
    assert not places["NEW"].exists()
    assert sorted(places["MODEL"].iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "m", "hi", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["generate", "m"], "the following arguments are required: prompt"),
        (["generate", "m", "hi", "more"], "unrecognized arguments: more"),
        (["bake", "m"], "invalid choice: 'bake'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_usage_errors(capsys: Capture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_prompt_of_other_bytes_than_text(directory, errors, capfd, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["generate", str(directory), "-"]) == 1
    expected = "tigon generate: the prompt is not UTF-8 text (position 3)\n"
    assert capfd.readouterr() == ("", expected)


def test_warnings_name_only_given_options(directory: Path, capfd: Capture) -> None:
    command = ["generate", str(directory), "hi", "--max-new-tokens", "2"]
    for arguments, message in (
        (["--seed", "3"], "seed has no effect"),
        (["--temperature", "0", "--top-k", "3"], "top_k has no effect"),
        (["--temperature", "0"], ""),
        (["--top-k", "3", "--seed", "3", "--repetition-penalty", "1.1"], ""),
    ):
        assert main([*command, *arguments]) == 0
        err = capfd.readouterr().err
        assert message in err
        assert err.count("\n") == bool(message)


def test_warnings_are_one_line(tmp_path: Path, capfd: Capture) -> None:
    model = write_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(LLAMA | {"attention_dropout": 0.5}))
    assert main(["info", "--check", str(model)]) == 0
    assert capfd.readouterr().err == (
        "tigon: attention_dropout=0.5 is not applied: Tigon trains without dropout\n"
    )


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConnectionError("cannot reach it"), 1, "tigon generate: cannot reach it\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_inside_a_command(error, status, message, capfd, monkeypatch):
    def fail(args: Namespace) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module("tigon.cli.commands"), "generate", fail)
    assert main(["generate", "a/b", "hi"]) == status
    err = capfd.readouterr().err
    assert message in err and bool(err) == bool(message)


def test_every_package_is_an_attribute() -> None:
    packages = {module.name for module in pkgutil.iter_modules(tigon.__path__) if module.ispkg}
    assert packages - {"cli", "utils"} == set(tigon.PACKAGES) - {"hub"}


@pytest.mark.parametrize("arguments", [["info"], ["train", "model=m", "data=hf://d", "run_dir=r"]])
def test_interrupt_during_the_import_of_torch(arguments, tmp_path):
    """Which loses it, as compiled modules do."""
    (tmp_path / "torch.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('interrupted') from None\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(tigon.__file__).parents[1])])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job has ignored
    process = subprocess.Popen(
        [sys.executable, "-m", "tigon.cli", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 130


def test_process_ends_after_threads_and_exit_handlers() -> None:
    """As Python's own end has it, buffered output too, but without taking modules apart."""
    program = (
        "import atexit, threading, time; from unittest.mock import patch\n"
        "from tigon.cli import run\n"
        "class Late:\n    def __del__(self): print('taken apart')\n"
        "late = Late()\n"
        "def wait(): time.sleep(0.3); print('thread')\n"
        "def main(): threading.Thread(target=wait).start(); return 7\n"
        "atexit.register(print, 'exit')\n"
        "with patch.dict(run.__globals__, main=main): run()"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (7, "thread\nexit\n", "")


def test_imported_objects_are_not_garbage(tmp_path: Path) -> None:
    """While a module is imported nothing is collected, after it what it has made is not visited,
    and at the end of the process all is as it was."""
    (tmp_path / "module.py").write_text("import gc\nenabled = gc.isenabled()\n")
    program = (
        "import atexit, gc, importlib; cli = importlib.import_module('tigon.cli.main')\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "module = cli._import_interruptibly('module')\n"
        "print(module.enabled, gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(tigon.__file__).parents[1])])
    done = python("-c", program, env=os.environ | {"PYTHONPATH": path})
    assert (done.stdout, done.stderr) == ("False True True\n0\n", "")


@pytest.mark.parametrize(("target", "code", "lines"), [("closed pipe", 141, 0), ("full", 1, 1)])
def test_output_that_is_held_back_until_the_end(directory, target, code, lines):
    if target == "full":
        write = os.open("/dev/full", os.O_WRONLY)
    else:
        read, write = os.pipe()
        os.close(read)
    command = "-m", "tigon.cli", "info", str(directory)  # imports no torch
    done = python(*command, env=os.environ | {"PYTHONUNBUFFERED": ""}, stdout=write)
    os.close(write)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, lines)


class FullDisk(io.StringIO):
    name = "<stdout>"

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


PACK = "data pack CHATS model=MODEL seq_len=64"
RUN = "CHATS model=MODEL seq_len=64 run_dir=NEW steps=1 batch_size=1 device=cpu"


@pytest.mark.parametrize(
    "arguments", ["--version", "info MODEL", PACK, f"train --dry-run data={RUN}"]
)
def test_output_that_cannot_be_written(arguments, places, tmp_path, capfd, monkeypatch):
    """Also where argparse or a log goes on after the error."""
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdout", FullDisk())
    chats = write_chats(tmp_path / "chats.jsonl", 3)
    for word, path in (("MODEL", places["MODEL"]), ("CHATS", chats), ("NEW", tmp_path / "new")):
        arguments = arguments.replace(word, str(path))
    assert main(arguments.split()) == 1
    command = f"tigon {arguments.split()[0]}"
    assert capfd.readouterr().err == f"{command}: [Errno 28] No space left on device: '<stdout>'\n"


def test_closed_input_and_output_are_empty(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr("tigon.cli.info.info", lambda args: len(sys.stdin.read()))
    assert main(["info"]) == 0
