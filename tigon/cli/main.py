"""Language models from a shell: generate, chat, train, plan, report, data, eval, export, ..."""

import argparse
import atexit
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tigon.utils.launcher import is_launched
from tigon.utils.terminal import check_output_written, escaping_output, one_line
from tigon.version import __version__

CACHES = ("dynamic", "static", "quantized")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CLOSED, INTERRUPTED = 141, 130  # exit codes: of `| head`, and of Ctrl-C


def run() -> NoReturn:
    """Runs the command of a shell and ends the process."""
    end(main())


def end(status: int) -> NoReturn:
    """Ends the process as soon as threads and exit handlers are done: Python would go on to take
    apart what torch has made, for up to a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # `main` has said it
            stream.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 1, after one line on stderr, for errors that a
    user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Closed by whoever started this, as some schedulers do
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    with escaping_output():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code, 1 if its output cannot be written."""
    command = " ".join(["tigon", *arguments[:1]])
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                status = _run(arguments)
            except SystemExit as stop:
                if stop.code:
                    raise
                status = 0  # of --help and --version
        sys.stdout.flush()  # a closed pipe raises here
        if command != "tigon train" or "--dry-run" in arguments:  # training goes on without a log
            check_output_written()
        return status
    except BrokenPipeError:  # as in `tigon generate ... | head`
        return CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, ImportError) as error:
        print(f"{command}: {one_line(error)}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    """Parses the arguments and runs the command; returns its exit code."""
    # Imported now: torch takes seconds, and --help must not
    if arguments[:1] == ["train"]:  # has a syntax and a help of its own
        options = import_module("tigon.settings.command").read_command(arguments[1:])
        if options is not None:
            _import_interruptibly("tigon.train.launch").run_command(options)
        return 0
    args = _parse(arguments)
    args.arguments_given = arguments
    if args.command == "report":  # needs no torch
        print(one_line(import_module("tigon.report").write(args.runs, args.out)))
        return 0
    _check_arguments(args)
    return getattr(_import_interruptibly(args.module), args.run)(args)


def _check_arguments(args: argparse.Namespace) -> None:
    """Checks what needs no torch, by OSError or ValueError: settings of a plan, and of data, which
    become `args.config`, and a model's path, but not in one of several ranks, which must not end
    alone."""
    if args.command == "data" and args.kind != "clean":
        args.config = import_module("tigon.settings.command").read_data_arguments(args.arguments)
    if args.command == "plan":
        import_module("tigon.settings.plan").read_plan_settings(args.model, args.settings)
    model = None if args.command == "push" or is_launched() else getattr(args, "model", None)
    if model and not Path(model).exists() and not model.endswith((".gguf", ".json")):
        import_module("tigon.hub").Repository(model, revision=getattr(args, "revision", None))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments, `key=value`s behind an option too, which argparse does not
    take; `module` and `run` name the function of the command."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and ("arguments" not in args or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.arguments += rest
    if args.command == "info" and _needs_headers_alone(args):
        args.module = "tigon.cli.summary"
    return args


def _needs_headers_alone(args: argparse.Namespace) -> bool:
    """Returns whether `tigon info` needs only config.json and headers, and so no torch."""
    if args.check or args.model is None or args.model.endswith(".gguf"):
        return False
    return not any(Path(args.model, name).exists() for name in ("run.json", "checkpoints"))


def _import_interruptibly(name: str) -> Any:
    """Returns a module that needs torch. While it is imported Ctrl-C ends the process at once: a
    KeyboardInterrupt inside compiled modules may be lost, or become an error with a traceback."""
    before = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    # Whoever ignores SIGINT, as nohup's scripts do, goes on
    if name in sys.modules or not main_thread or before is not signal.default_int_handler:
        return _import_module(name)
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        return _import_module(name)
    finally:
        signal.signal(signal.SIGINT, before)


def _import_module(name: str) -> Any:
    """Returns a module, in which the garbage collector looks for nothing: a quarter of the time of
    importing torch is a search through what stays to the end of the process."""
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()
        # Whoever calls `main` from Python ends by Python's own end, which frees no frozen cycle
        atexit.register(gc.unfreeze)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning as one line on standard error, without where it came from."""
    print(f"tigon: {one_line(message)}", file=sys.stderr)


def _flag(help: str) -> dict[str, Any]:
    """Returns the keywords of add_argument for an option without a value."""
    return {"action": "store_true", "help": help}


def _text(metavar: str, help: str, **options: Any) -> dict[str, Any]:
    """Returns the keywords of add_argument for an argument that stays text."""
    return {"metavar": metavar, "help": help, **options}


def _number(help: str, type: type = int, metavar: str = "N", **options: Any) -> dict[str, Any]:
    """Returns the keywords of add_argument for a number, by default an int."""
    return {"type": type, "metavar": metavar, "help": help, **options}


def _name_and_place(text: str) -> tuple[str, str]:
    """Returns the parts of NAME=PLACE; raises argparse's error if one is missing."""
    name, _, place = text.partition("=")
    if not name or not place:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ADAPTER")
    return name, place


MODEL = {
    "model": {
        "help": "a directory, a run or one of its checkpoints, a .gguf file, or a hub repository; "
        "of a model, or of an adapter, which names its base"
    },
    "--revision": _text("NAME", "branch, tag or commit of a hub repository"),
    "--base": _text("MODEL", "of an adapter or a run with lora, in place of the base it names"),
}
DEVICE = {"--device": _text("NAME", "cpu, cuda, cuda:1 (default: cuda where there is one)")}
DTYPE = {
    "--dtype": {"choices": DTYPES, "default": "auto", "help": "default: auto, the model's own"}
}
TEMPLATE = {
    "--chat-template-kwargs": _text(
        "JSON", "variables of the chat template, as in '{\"enable_thinking\": false}'"
    )
}
CHAT = {
    "--system": _text("TEXT", "system message of the chat"),
    **TEMPLATE,
    "--max-new-tokens": _number(
        "of an answer (default: 512; fewer where the model's context ends)", default=512
    ),
}
RANKS = {
    "--tp": _number(
        "processes, each with a GPU, that share every layer; or under torchrun (default: 1)",
        default=1,
    ),
    "--expert-parallel": _flag(
        "with --tp: each process has some experts of a layer, whole, not a part of every one"
    ),
}
SAMPLING = {
    "--temperature": _number("0 is greedy", float, "T"),
    "--top-k": _number("sample from the N likeliest tokens"),
    "--top-p": _number("sample from the likeliest tokens that add up to P", float, "P"),
    "--min-p": _number("sample from tokens at least P times as likely as the best", float, "P"),
    "--repetition-penalty": _number("1 is none", float, "F"),
    "--seed": _number("makes sampling repeatable"),
}
GENERATE = {
    "prompt": {"help": "what the user says; - reads it from standard input"},
    "--raw": _flag("continue the text, without a chat template"),
    **CHAT,
    "--max-new-tokens": _number("default: 256; fewer where the model's context ends", default=256),
    "--stop": _text("TEXT", "end after this text; may be given several times", action="append"),
    "--assistant": _text("MODEL", "a smaller model with the same tokenizer, which proposes tokens"),
    "--cache": {
        "choices": CACHES,
        "help": "default: static on a GPU, dynamic elsewhere; quantized is static in int8",
    },
}
SERVE = {
    **TEMPLATE,
    "--adapter": _text(
        "NAME=ADAPTER",
        "requests for the model NAME get this adapter; may be given several times",
        type=_name_and_place,
        action="append",
        default=[],
    ),
    "--host": _text(
        "ADDRESS",
        "default: 127.0.0.1, this machine alone; others need a key in TIGON_API_KEY",
        default="127.0.0.1",
    ),
    "--port": _number("default: 8000; 0 takes a free one", default=8000),
    "--name": _text("NAME", "of the model in requests (default: the last part of its path)"),
    "--max-rows": _number("texts generated at once (default: 64 on a GPU, 8 elsewhere)"),
    "--max-queue": _number("texts that may wait for that (default: 256)", default=256),
}
PLAN = {
    "model": _text("MODEL", "a directory, a hub repository or a config.json; no weights are read"),
    "--gpus": _number("GPUs of the run, over all hosts", required=True),
    "--gpu": _text("NAME", "which GPU: h100 or h200 (default: h200)", default="h200"),
    "--seq-len": _number("tokens in a row: tigon train's seq_len", metavar="T", required=True),
    "--batch-tokens": _number(
        "tokens in a step, over all GPUs: tigon train's batch_size x seq_len (default: a row for "
        "each GPU)"
    ),
    "--settings": _text(
        "key=value",
        "settings of tigon train, such as param_dtype=bfloat16 optimizer=adamw_8bit; one that a "
        "plan does not use is an error (default: tigon train's defaults)",
        action="extend",
        nargs="+",
        default=[],
    ),
    "--most": _number("layouts to show, at most (default: 8)", default=8),
}
REPORT = {
    "runs": _text("RUN", "a run's directory", nargs="+"),
    "--out": _text(
        "FILE", "default: RUN/report.html; of several, comparison.html in the first one's directory"
    ),
}
DATA = {
    "arguments": _text(
        "CONFIG | FILE | key=value",
        "a run's config.yaml, or data files and settings such as model=DIRECTORY seq_len=4096",
        nargs="+",
    )
}
DATA_ROWS = {"-n --rows": _number("rows of each entry of data (default: 5)", default=5)}
DAYS = {"--days": _number("only what was not used for N days", float, default=0.0)}
PERPLEXITY = {
    "files": {"nargs": "+", "help": '.txt, or .jsonl rows with "text" or "messages"'},
    **TEMPLATE,
    "--context": _number("tokens in a window (default: 1024, or the model's context if less)"),
    "--stride": _number("tokens between windows (default: half a window)"),
}
PARITY = {
    "--new-tokens": _number("greedy text to compare", default=64),
    "--layers": _flag("name the first layer that departs from transformers', and by how much"),
}
TASKS = {
    "--tasks": _text(
        "NAME,NAME", "tasks, groups or tags of lm-eval, or YAML files: arc_easy,mmlu", required=True
    ),
    "--include-path": _text("DIR", "a folder with tasks of your own; code that they name runs"),
    "--num-fewshot": _number("answered examples before a question (default: the task's)"),
    "--apply-chat-template": _flag("ask in the model's chat format, each example a turn"),
    **TEMPLATE,
    "--limit": _number("documents of each task; below 1: a share (default: all)", float),
    "--out": _text("FILE.json", "write the results there too, as lm-eval does"),
}
EXPORT = {
    "directory": {
        "metavar": "DST",
        "help": "a new or empty directory; or a new FILE.gguf, for llama.cpp and Ollama",
    },
    "--dtype": {
        "choices": (*DTYPES, "q8_0"),
        "default": "auto",
        "help": "default: auto, the model's own; q8_0, 8 bits, for a .gguf file",
    },
    "--max-shard-size": _text("SIZE", "of one file (default: 5GB)", default="5GB"),
    "--stack-experts": {
        "action": argparse.BooleanOptionalAction,
        "help": "one tensor for all experts of a layer, as transformers 5 has them in memory, or "
        "each expert apart (default: as the model has them)",
    },
    "--merge": _flag(
        "of a run with lora the model with its adapter merged (default: the adapter); of an "
        "adapter's directory or repository, the base that it names with the adapter merged"
    ),
}
PUSH = {
    "model": {"help": "a run, meaning its hf; or a directory that export wrote"},
    "repository": _text("OWNER/NAME", "made if there is none"),
    "--private": _flag("of a repository that is made"),
    "--revision": _text("BRANCH", "default: main; made if there is none"),
    "--message": _text("TEXT", "of the commit"),
    "--create-pr": _flag("as a pull request, to anybody's"),
    "--overwrite-card": _flag("also a README.md that somebody has changed"),
}
INFO = {
    "model": {"nargs": "?", "help": "as for generate"},
    "--revision": MODEL["--revision"],
    "--check": _flag(
        "compare every tensor with the model's: would it load? takes seconds; of runs and .gguf "
        "files always"
    ),
}
OWN_MODULES = ("info", "serve")  # the others are in commands.py
# The help of each command with its arguments, or the name of what follows it. `data show` is
# `data_show` of commands.py
COMMANDS: dict[str, tuple[str, dict[str, Any] | str]] = {
    "generate": ("answer a prompt, or continue a text", MODEL | DEVICE | DTYPE | GENERATE | RANKS),
    "chat": ("talk with a model, or with that of a run", MODEL | DEVICE | DTYPE | CHAT | RANKS),
    "serve": ("answer requests of OpenAI's protocol", MODEL | DEVICE | DTYPE | SERVE),
    "train": ("train: tigon train config.yaml key=value ...", {}),
    "plan": ("which layout a run on many GPUs should have, on paper", PLAN),
    "report": ("a page of a run, or of several side by side", REPORT),
    "data": ("show what is learned of data, or make or clean its cache", "WHAT"),
    "data show": ("print the first rows as text, with the learned tokens marked", DATA | DATA_ROWS),
    "data pack": ("tokenise, and report examples, tokens, rows and padding", DATA),
    "data clean": ("remove what was tokenized", DAYS),
    "eval": ("perplexity, lm-eval's tasks, or parity with transformers", "MEASURE"),
    "eval perplexity": (
        "of texts, or of the answers in chats",
        MODEL | DEVICE | DTYPE | PERPLEXITY | RANKS,
    ),
    "eval tasks": (
        "benchmarks, by lm-eval (pip install 'tigon[eval]')",
        MODEL | DEVICE | DTYPE | TASKS | RANKS,
    ),
    "eval parity": ("logits, loss and greedy text beside transformers'", MODEL | DEVICE | PARITY),
    "export": ("write a model or a run for transformers, or for llama.cpp", MODEL | EXPORT),
    "push": ("upload a run's export, or an exported model, to the hub", PUSH),
    "info": ("describe a model, or this machine", INFO),
}


def _parser() -> argparse.ArgumentParser:
    """Builds the parser from the table of commands."""
    parser = argparse.ArgumentParser(prog="tigon", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tigon {__version__}")
    groups: dict[str, Any] = {
        "": parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    }
    for names, (help, arguments) in COMMANDS.items():
        group, _, name = names.rpartition(" ")
        command = groups[group].add_parser(name, help=help)
        if isinstance(arguments, str):  # of a group of commands
            groups[name] = command.add_subparsers(dest="kind", required=True, metavar=arguments)
            continue
        for flags, options in arguments.items():
            command.add_argument(*flags.split(), **options)
        if names in ("generate", "chat"):
            description = "default: the model's generation_config, which is usually greedy"
            sampling = command.add_argument_group("sampling", description)
            for flag, options in SAMPLING.items():
                sampling.add_argument(flag, **options)
        module = f"tigon.cli.{name if name in OWN_MODULES else 'commands'}"
        command.set_defaults(module=module, run=names.replace(" ", "_"))
    return parser
