"""Language models from a shell: generate, chat, train, plan, report, data, eval, export, ..."""

import argparse
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tigon.utils.terminal import escaping_output, one_line
from tigon.version import __version__

CACHES = ("dynamic", "static", "quantized")
OFFLINE = "set HF_HUB_OFFLINE=1, or name a local directory in place of the model"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; errors that a user can fix are one line on stderr, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Closed by whoever started this, as some schedulers do
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    with escaping_output():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    training = arguments[:1] == ["train"]  # has a syntax and a help of its own
    args = argparse.Namespace(command="train") if training else _parse(arguments)
    args.arguments_given = arguments
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # Imported now: torch takes seconds, and --help must not
            if training:
                status = _import_interruptibly("tigon.train").main(arguments[1:]) or 0
            elif args.command == "report":  # needs no torch
                print(one_line(import_module("tigon.report").write(args.runs, args.out)))
                status = 0
            else:
                status = getattr(_import_interruptibly(args.module), args.run)(args)
        sys.stdout.flush()  # a closed pipe raises here
        return status
    except BrokenPipeError:  # as in `tigon generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError) as error:
        # An unreachable hub raises with advice for callers from Python
        reading = isinstance(error, ConnectionError) and args.command != "push"
        hint = f"; for this command: {OFFLINE}" * reading
        print(f"tigon {args.command}: {one_line(error)}{hint}", file=sys.stderr)
        return 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments, `key=value`s behind an option too, which argparse does not take."""
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
    """Whether `tigon info` needs only config.json and headers, and so no torch."""
    if args.check or args.model is None or args.model.endswith(".gguf"):
        return False
    return not any(Path(args.model, name).exists() for name in ("run.json", "checkpoints"))


def _import_interruptibly(name: str) -> Any:
    """Imports a module that needs torch. Ctrl-C ends the process at once: a KeyboardInterrupt
    inside compiled modules may be lost, or become another error with a traceback."""
    before = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    # Whoever ignores SIGINT, as nohup's scripts do, goes on
    if name in sys.modules or not main_thread or before is not signal.default_int_handler:
        return import_module(name)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        return import_module(name)
    finally:
        signal.signal(signal.SIGINT, before)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"tigon: {one_line(message)}", file=sys.stderr)


def _sampling_arguments(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group(
        "sampling", "default: the model's generation_config, which is usually greedy"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens that add up to P"
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from tokens at least P times as likely as the best",
    )
    group.add_argument("--repetition-penalty", type=float, metavar="F", help="1 is none")
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")


def _ranks_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="processes, each with a GPU, that share every layer; or under torchrun (default: 1)",
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="with --tp: each process has some experts of a layer, whole, not a part of every one",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tigon", description=__doc__)
    parser.add_argument("--version", action="version", version=f"tigon {__version__}")
    parser.set_defaults(module="tigon.cli.commands")  # has the function `run`
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_text(commands)
    _add_runs(commands)
    _add_models(commands)
    return parser


def _add_text(commands: Any) -> None:
    """Adds the commands that write text."""
    p = commands.add_parser("generate", help="answer a prompt, or continue a text")
    _model_arguments(p)
    p.add_argument("prompt", help="what the user says; - reads it from standard input")
    p.add_argument("--raw", action="store_true", help="continue the text, without a chat template")
    p.add_argument("--system", metavar="TEXT", help="system message of the chat")
    _template_argument(p)
    p.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="default: 256; fewer where the model's context ends",
    )
    p.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end after this text; may be given several times",
    )
    p.add_argument(
        "--assistant",
        metavar="MODEL",
        help="a smaller model with the same tokenizer, which proposes tokens",
    )
    p.add_argument(
        "--cache",
        choices=CACHES,
        help="default: static on a GPU, dynamic elsewhere; quantized is static in int8",
    )
    _ranks_argument(p)
    _sampling_arguments(p)
    p.set_defaults(run="generate")

    p = commands.add_parser("chat", help="talk with a model, or with what a run has made of it")
    _model_arguments(p)
    p.add_argument("--system", metavar="TEXT", help="system message of the chat")
    _template_argument(p)
    p.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        metavar="N",
        help="of an answer (default: 512; fewer where the model's context ends)",
    )
    _ranks_argument(p)
    _sampling_arguments(p)
    p.set_defaults(run="chat")


def _add_runs(commands: Any) -> None:
    """Adds the commands for training, its data and its results."""
    commands.add_parser("train", help="train: tigon train config.yaml key=value ...")

    p = commands.add_parser("plan", help="which layout a run on many GPUs should have, on paper")
    p.add_argument(
        "model",
        metavar="MODEL",
        help="a directory, a hub repository or a config.json; no weights are read",
    )
    p.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="GPUs of the run, over all hosts"
    )
    p.add_argument(
        "--gpu", default="h200", metavar="NAME", help="which GPU: h100 or h200 (default: h200)"
    )
    p.add_argument(
        "--seq-len",
        type=int,
        required=True,
        metavar="T",
        help="tokens in a row: tigon train's seq_len",
    )
    p.add_argument(
        "--batch-tokens",
        type=int,
        metavar="N",
        help="tokens in a step, over all GPUs: tigon train's batch_size x seq_len (default: a row "
        "for each GPU)",
    )
    p.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings of tigon train, such as param_dtype=bfloat16 optimizer=adamw_8bit; one that "
        "a plan does not use is an error (default: tigon train's defaults)",
    )
    p.add_argument(
        "--most", type=int, default=8, metavar="N", help="layouts to show, at most (default: 8)"
    )
    p.set_defaults(run="plan")

    p = commands.add_parser("report", help="a page of a run, or of several side by side")
    p.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory")
    p.add_argument(
        "--out",
        metavar="FILE",
        help="default: RUN/report.html; of several, comparison.html in the first one's directory",
    )

    p = commands.add_parser("data", help="show what is learned of data, or make or clean its cache")
    kinds = p.add_subparsers(dest="kind", required=True, metavar="WHAT")
    p = kinds.add_parser(
        "show", help="print the first rows as text, with the learned tokens marked"
    )
    _data_arguments(p, run="data_show")
    p.add_argument(
        "-n",
        "--rows",
        type=int,
        default=5,
        metavar="N",
        help="rows of each entry of data (default: 5)",
    )
    p = kinds.add_parser("pack", help="tokenise, and report examples, tokens, rows and padding")
    _data_arguments(p, run="data_pack")
    p = kinds.add_parser("clean", help="remove what was tokenized")
    p.add_argument(
        "--days", type=float, default=0.0, metavar="N", help="only what was not used for N days"
    )
    p.set_defaults(module="tigon.cli.data", run="data_clean")


def _data_arguments(parser: argparse.ArgumentParser, *, run: str) -> None:
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="CONFIG | FILE | key=value",
        help="a run's config.yaml, or data files and settings such as model=DIRECTORY seq_len=4096",
    )
    parser.set_defaults(module="tigon.cli.data", run=run)


def _add_models(commands: Any) -> None:
    """Adds the commands that measure, copy or describe a model."""
    p = commands.add_parser("eval", help="perplexity, or parity with transformers")
    kinds = p.add_subparsers(dest="kind", required=True, metavar="MEASURE")
    p = kinds.add_parser("perplexity", help="of texts, or of the answers in chats")
    _model_arguments(p)
    p.add_argument("files", nargs="+", help='.txt, or .jsonl rows with "text" or "messages"')
    _template_argument(p)
    p.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens in a window (default: 1024, or the model's context if less)",
    )
    p.add_argument(
        "--stride", type=int, metavar="N", help="tokens between windows (default: half a window)"
    )
    _ranks_argument(p)
    p.set_defaults(run="eval_perplexity")
    p = kinds.add_parser("parity", help="logits, loss and greedy text beside transformers'")
    _model_arguments(p, dtype=False)
    p.add_argument("--new-tokens", type=int, default=64, metavar="N", help="greedy text to compare")
    p.set_defaults(run="eval_parity")

    p = commands.add_parser("export", help="write a model, or a run's checkpoint, for transformers")
    _model_arguments(p, device=False)
    p.add_argument("directory", help="a new or empty directory")
    p.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)"
    )
    p.add_argument(
        "--stack-experts",
        action=argparse.BooleanOptionalAction,
        help="one tensor for all experts of a layer, as transformers 5 has them in memory, or each "
        "expert apart (default: as the model has them)",
    )
    p.add_argument(
        "--merge",
        action="store_true",
        help="of a run with lora the model with its adapter merged (default: the adapter); of an "
        "adapter's directory or repository, the base that it names with the adapter merged",
    )
    p.set_defaults(run="export")

    p = commands.add_parser("push", help="upload a run's export, or an exported model, to the hub")
    p.add_argument("model", help="a run, meaning its hf; or a directory that export wrote")
    p.add_argument("repository", metavar="OWNER/NAME", help="made if there is none")
    p.add_argument("--private", action="store_true", help="of a repository that is made")
    p.add_argument("--revision", metavar="BRANCH", help="default: main; made if there is none")
    p.add_argument("--message", metavar="TEXT", help="of the commit")
    p.add_argument("--create-pr", action="store_true", help="as a pull request, to anybody's")
    p.add_argument(
        "--overwrite-card", action="store_true", help="also a README.md that somebody has changed"
    )
    p.set_defaults(run="push")

    p = commands.add_parser("info", help="describe a model, or this machine")
    p.add_argument("model", nargs="?", help="as for generate")
    p.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub repository")
    p.add_argument(
        "--check",
        action="store_true",
        help="compare every tensor with the model's: would it load? takes seconds; of runs and "
        ".gguf files always",
    )
    p.set_defaults(module="tigon.cli.info", run="info")


def _template_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the chat template, as in '{\"enable_thinking\": false}'",
    )


def _model_arguments(
    parser: argparse.ArgumentParser, *, dtype: bool = True, device: bool = True
) -> None:
    parser.add_argument(
        "model",
        help="a directory, a run or one of its checkpoints, a .gguf file, or a hub repository; of "
        "a model, or of an adapter, which names its base",
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of a hub repository"
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="of an adapter or a run with lora, in place of the base that it names",
    )
    if device:
        parser.add_argument(
            "--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda where there is one)"
        )
    if dtype:
        parser.add_argument(
            "--dtype", choices=DTYPES, default="auto", help="default: auto, the model's own"
        )
