import importlib
import io
import json
import os
import pkgutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import tigon
from tests.small import LLAMA, write_model
from tigon.cli import main

COMMANDS = (
    "generate", "chat", "train", "plan", "report", "data", "eval", "export", "push", "info"
)  # fmt: skip
HEAVY = ["torch", "huggingface_hub", "tokenizers", "numpy"]
SEVERAL = "num_return_sequences=2, and a command writes one text: set it to 1 there, or call"
Capture = pytest.CaptureFixture[str]
SCRIPT = Path(sys.executable).with_name("tigon")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "tigon.cli"], [sys.executable, "-m", "tigon"], [str(SCRIPT)]]
)
def test_version(command: list[str]) -> None:
    if command == [str(SCRIPT)] and not SCRIPT.exists():
        pytest.skip("tigon is not installed beside this python")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"tigon {tigon.__version__}\n")


def test_help_names_every_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split()[0] for line in lines if line[:4] == "    ") == COMMANDS


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import tigon", HEAVY),
        ("main(['-h'])", HEAVY),
        ("main(['trian', 'c.yaml'])", HEAVY),
        ("main(['info', MODEL])", ["torch", "numpy", "tokenizers", "tigon.train"]),
        ("main(['report', RUN])", ["torch", "tokenizers"]),
        pytest.param(
            "import tigon.cli.commands, tigon.train",
            ["transformers", "matplotlib", "tensorboard", "gguf"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_modules_that_commands_do_not_import(code, modules, directory, tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    program = (
        f"import atexit, sys, tigon; from tigon.cli import main; MODEL, RUN = sys.argv[1:]\n"
        f"atexit.register(lambda: print([m for m in {modules} if m in sys.modules]))\n{code}"
    )
    command = [sys.executable, "-c", program, str(directory), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done
    assert "MODEL" not in code or "architecture  LlamaForCausalLM" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate ./none hi", "no directory ./none"),
        ("generate not-a-name/at/all hi", "no directory not-a-name/at/all (absolute: "),
        ("generate MODEL hi --device nowhere", "--device nowhere: "),
        ("generate MODEL hi --device cuda:99", "--device cuda:99: "),
        ("generate MODEL hi --raw --system x", "--raw and --system: a raw text has no system"),
        ("generate MODEL hi --temperature -1", "temperature=-1.0 is not above 0"),
        ("generate MODEL hi --max-new-tokens -3", "max_new_tokens=-3 must be at least 0"),
        (f"generate MODEL hi --temperature 1 --seed {2**64}", f"seed={2**64} must be at most"),
        (["generate", "MODEL", "\udcff"], "the prompt is not UTF-8 text (position 0)"),
        ("generate MODEL hi --system \udcff", "the prompt is not UTF-8 text"),
        (["generate", "MODEL", "the " * 600], "tokens, but the model's context is 512"),
        (["generate", "MODEL", "", "--raw"], "the prompt is empty"),
        ("eval perplexity MODEL none.txt", "no data file matches 'none.txt'"),
        ("eval perplexity MODEL EMPTY", "empty.jsonl is empty"),
        ("eval perplexity MODEL BAD", "bad.jsonl:2: not valid JSON"),
        ("eval perplexity MODEL BAD --context 1", "context=1 is not in"),
        ("eval parity ./none", "no directory ./none"),
        ("export MODEL MODEL", "exists and is a directory with files in it"),
        ("export MODEL NEW --max-shard-size 5XB", "5XB"),
        ("info ./none", "no directory ./none"),
        ("info FOLDER", "has no file config.json"),
        ("train none.yaml", "no config file none.yaml"),
    ],
)
def test_errors_are_one_line(directory, tmp_path, capfd, arguments, message):
    places = {"MODEL": directory, "NEW": tmp_path / "new", "FOLDER": tmp_path}
    for name, content in (("EMPTY", ""), ("BAD", '{"text": "a b"}\n{"text"\n')):
        places[name] = tmp_path / f"{name.lower()}.jsonl"
        places[name].write_text(content)
    words = arguments.split() if isinstance(arguments, str) else arguments
    before = sorted(directory.iterdir())
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
    assert not (tmp_path / "new").exists()
    assert sorted(directory.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "m", "hi", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["generate", "m"], "the following arguments are required: prompt"),
        (["bake", "m"], "invalid choice: 'bake'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_usage_errors(capsys: Capture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_no_text(directory, errors, capfd, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["generate", str(directory), "-"]) == 1
    expected = "tigon generate: the prompt is not UTF-8 text (position 3)\n"
    assert capfd.readouterr() == ("", expected)


def test_generate_ends_after_a_text(directory: Path, capfd: Capture) -> None:
    command = ["generate", str(directory), "hi", "--max-new-tokens", "24"]
    assert main(command) == 0
    text = capfd.readouterr().out[:-1]
    first, second = text[2:4], text[12:14]
    assert text.find(second) > text.find(first) >= 0
    for stops in ([first, second], [second, first], [second]):
        assert main([*command, *(word for stop in stops for word in ("--stop", stop))]) == 0
        out = capfd.readouterr().out[:-1]
        assert text.startswith(out)
        end = min(text.find(stop) + len(stop) for stop in stops)
        assert end <= len(out) < end + 12  # a token may go on


def test_generate_warns_of_what_was_asked_alone(directory: Path, capfd: Capture) -> None:
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


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        (["generate", "MODEL", "hi"], {"num_return_sequences": 2}, SEVERAL),
        (["chat", "MODEL"], {"num_return_sequences": 2}, SEVERAL),
        (["generate", "MODEL", "hi"], {"min_new_tokens": 10**21}, "min_new_tokens=1"),
    ],
)
def test_settings_of_a_model_that_no_command_follows(tmp_path, capfd, command, settings, message):
    path = write_model(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, **settings}))
    assert main([str(path) if word == "MODEL" else word for word in command]) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"tigon {command[0]}: {path}/generation_config.json: {message}")
    assert err.count("\n") == 1


def test_ends_beyond_the_vocabulary_do_no_harm(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", eos_token_id=5000)
    assert main(["generate", str(model), "hi", "--max-new-tokens", "2"]) == 0


def test_a_hub_out_of_reach_is_for_a_shell(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(args: Namespace) -> int:
        raise ConnectionError("cannot reach it; pass local_files_only=True")

    monkeypatch.setattr(importlib.import_module("tigon.cli.commands"), "generate", unreachable)
    assert main(["generate", "a/b", "hi"]) == 1
    assert "for this command: set HF_HUB_OFFLINE=1, or name a local" in capfd.readouterr().err


def test_every_package_comes_when_asked_for() -> None:
    found = pkgutil.iter_modules(tigon.__path__)
    assert {module.name for module in found if module.ispkg} - {"cli", "utils"} == (
        set(tigon.PACKAGES) - {"hub"}
    )


def test_interrupt_is_quiet(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("tigon.cli.info"), "info", interrupted)
    assert main(["info"]) == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["info"], ["train", "config.yaml"]])
def test_an_interrupt_while_torch_is_imported_is_quiet(arguments, tmp_path):
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
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 130


def test_closed_pipe_is_quiet(directory: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "tigon.cli", "info", str(directory)],  # imports no torch
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_warnings_are_one_line(tmp_path: Path, capfd: Capture) -> None:
    config = json.dumps(LLAMA | {"attention_dropout": 0.5})
    write_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(config)
    assert main(["info", "--check", str(tmp_path / "model")]) == 0
    assert capfd.readouterr().err == (
        "tigon: attention_dropout=0.5 is not applied: Tigon trains without dropout\n"
    )


def test_help_of_plan_has_units_and_defaults(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "--gpus N GPUs of the run, over all hosts", "(default: h200)", "--seq-len T tokens in",
        "tokens in a step, over all GPUs", "(default: a row for each GPU)",
        "(default: tigon train's defaults)", "(default: 8)",
    ):  # fmt: skip
        assert text in said
