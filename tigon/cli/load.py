"""The model of a command: on one process, or with --tp N on ranks that share it."""

import functools
import os
import shlex
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from tigon.cli.main import CLOSED, INTERRUPTED
from tigon.cli.terminal import save_terminal
from tigon.models import MODELS, CausalLM, build
from tigon.models.pretrained.gguf_export import check_gguf_target
from tigon.models.pretrained.load import parse_gguf_path
from tigon.parallel import MeshSizes, from_pretrained, keep_rank_zero
from tigon.settings.config import Parallel
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World, describe_failure, end_soon, start
from tigon.train.export import (
    check_shareable,
    find_checkpoint,
    is_adapter,
    load_checkpoint,
    load_with_adapter,
    meta_model_from_checkpoint,
)
from tigon.train.launch import run_ranks
from tigon.utils.json import parse_object
from tigon.utils.launcher import count_ranks, is_launched, launcher_repeats_errors, record_error
from tigon.utils.terminal import one_line
from tigon.weights import Repository
from tigon.weights.files import check_free

Command = Callable[[Namespace, World], int]


def load_model_and_tokenizer(args: Namespace, world: World) -> tuple[CausalLM, Tokenizer]:
    """Loads what MODEL names, with its adapter; over `world`, each rank has its shard."""
    dtype, device = parse_dtype(args), world.device
    ranks: dict[str, Any] = {}
    if world.meshes is not None:
        ranks = {"mesh": world.meshes.tensor, "expert_parallel": args.expert_parallel}
    if checkpoint := find_checkpoint(args.model):
        checkpoint_dtype = None if dtype == "auto" else dtype
        model, tokenizer = load_checkpoint(
            checkpoint, dtype=checkpoint_dtype, device=device, base=args.base, **ranks
        )
    elif is_adapter(args.model, args.revision):
        if ranks:
            raise adapter_on_ranks_error(args.model)
        model, tokenizer = load_with_adapter(
            args.model, args.revision, dtype, device, base=args.base
        )
    else:
        refuse_base(args)
        tokenizer = load_tokenizer(args)
        model = from_pretrained(
            args.model, revision=args.revision, dtype=dtype, device=device, **ranks
        )
    if args.chat_template_kwargs is not None:
        kwargs = parse_object(args.chat_template_kwargs.encode(), "--chat-template-kwargs")
        tokenizer.use_chat_template_kwargs(tokenizer.chat_template_kwargs | kwargs)
    return model, tokenizer


def refuse_base(args: Namespace) -> None:
    if args.base is not None:
        raise ValueError(f"--base {args.base}: {args.model} is no adapter, and needs no base")


def adapter_on_ranks_error(adapter: str) -> ValueError:
    """Returns the error that says that ranks cannot share an adapter, and what to do."""
    return ValueError(
        f"{adapter} is an adapter, which ranks cannot share: `tigon export {shlex.quote(adapter)} "
        "DIRECTORY --merge` writes it and its base as a model, which they can"
    )


def load_tokenizer(args: Namespace) -> Tokenizer:
    """Loads the model's tokenizer, that of its directory for a GGUF file."""
    directory, gguf_file = parse_gguf_path(args.model)
    if gguf_file is not None:
        files = Repository(directory, revision=args.revision)
        files.file(gguf_file)  # raises if there is none
        if files.optional_file("tokenizer.json") is None:
            raise FileNotFoundError(
                f"{args.model}: the tokenizer in a GGUF file is not read, and {directory} has no "
                "tokenizer.json: put that of the original model there, as `hf download OWNER/NAME "
                f"tokenizer.json tokenizer_config.json --local-dir {directory}` does"
            )
    return Tokenizer.from_pretrained(directory, revision=args.revision)


def parse_dtype(args: Namespace) -> torch.dtype | Literal["auto"]:
    return "auto" if args.dtype == "auto" else getattr(torch, args.dtype)


def parse_gguf_export(args: Namespace) -> str | None:
    """Returns the --dtype of `tigon export` to a .gguf file, which may be "auto"; None for a
    directory. Raises FileExistsError unless the target is free."""
    if not args.directory.endswith(".gguf"):
        if args.dtype == "q8_0":
            raise ValueError(f"--dtype q8_0 needs a GGUF file: {args.directory}.gguf")
        check_free(args.directory)
        return None
    if args.stack_experts is not None:
        raise ValueError(f"{args.directory} is a GGUF file, where experts are always stacked")
    check_gguf_target(args.directory)
    return args.dtype


def parse_device(name: str | None) -> str:
    """Returns the device of --device after using it once; by default a GPU, if there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name


def on_ranks(command: Command) -> Callable[[Namespace], int]:
    """Returns a function that runs the command on this process or, with --tp, on ranks that share
    the model: those of torchrun, or new processes of this host. Rank 0 reads and writes."""

    @functools.wraps(command)
    def run(args: Namespace) -> int:
        try:
            _check_ranks(args)
        except ValueError as error:
            record_error(str(error))
            if os.environ.get("LOCAL_RANK", "0") != "0":
                return 1  # every rank raises it: the first of a host prints it
            raise
        if args.tp == 1:
            return command(args, one_process(args))
        if not is_launched():
            return _start_ranks(args)
        with start(args.device or "auto", parallel=Parallel(tensor=args.tp)) as world:
            return _run_rank(args, command, world)

    return run


def one_process(args: Namespace) -> World:
    """Returns the world of a command without ranks, on the device of --device."""
    return World(0, 1, torch.device(parse_device(args.device)))


def _check_ranks(args: Namespace) -> None:
    """Raises ValueError if `--tp` does not fit the processes, another option or a checkpoint."""
    if args.tp < 1:
        raise ValueError(f"--tp {args.tp} must be at least 1")
    if args.tp == 1 and args.expert_parallel:
        raise ValueError("--expert-parallel needs --tp N, with 2 processes or more")
    # Without --tp each process of torchrun would load the whole model, all on one GPU
    ranks = args.tp
    if (args.tp > 1 or dist.is_torchelastic_launched()) and is_launched():
        ranks = count_ranks()
    if ranks != args.tp:
        option = f"--tp {args.tp}" if args.tp > 1 else "no --tp"
        raise ValueError(
            f"{option}, but torchrun has started {ranks} processes: give --tp {ranks}, "
            f"or --nproc-per-node {args.tp} to torchrun"
        )
    if args.tp == 1:
        return
    if getattr(args, "assistant", None) is not None:
        raise ValueError(f"--assistant does not work with --tp {args.tp}: leave one out")
    if checkpoint := find_checkpoint(args.model):
        check_shareable(checkpoint)


def _start_ranks(args: Namespace) -> int:
    """Runs the command on --tp processes of this host; returns its exit code."""
    gpus = torch.cuda.device_count()
    if args.tp > gpus and args.device != "cpu" and (gpus or args.device):
        raise ValueError(f"--tp {args.tp}, but torch sees {gpus} CUDA devices")
    # What is wrong with the model and its tokenizer is said before any process starts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first rank says them
        if checkpoint := find_checkpoint(args.model):
            model = meta_model_from_checkpoint(checkpoint)
        elif is_adapter(args.model, args.revision):
            raise adapter_on_ranks_error(args.model)
        else:
            directory, gguf_file = parse_gguf_path(args.model)
            files = Repository(directory, revision=args.revision)
            model, _ = build(files, MODELS, dtype=parse_dtype(args), gguf_file=gguf_file)
            load_tokenizer(args)
        keep_rank_zero(
            model, MeshSizes(tensor=args.tp, expert=args.tp if args.expert_parallel else 1)
        )
    with _restore_terminal():
        code, problem = run_ranks(
            args.tp, args.arguments_given, shutdown_timeout=15, forward_interrupt=True
        )
    # A closed pipe is no fault, and rank 0 has said why it ended
    if problem and code != CLOSED and not problem.startswith("rank 0 ended"):
        print(f"tigon {args.command}: {one_line(problem)}", file=sys.stderr)
    return code


@contextmanager
def _restore_terminal() -> Iterator[None]:
    """Restores the terminal that a rank reads: a rank that is killed leaves it without echo.

    Ctrl-Z is ignored: it would stop only this process, and the rank would read the shell's input.
    """
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    is_foreground = sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    restore = save_terminal() if is_foreground else None
    try:
        yield
    finally:
        if restore is not None:
            restore()
        signal.signal(signal.SIGTSTP, before)


def _run_rank(args: Namespace, command: Command, world: World) -> int:
    """Runs the command on one of several ranks and returns its exit code. An error is recorded for
    torch's agent, which ends the other ranks, and raised again; a ValueError, which all ranks raise
    alike, is raised only where nobody else prints it, and 1 is returned elsewhere."""
    if not world.main:
        warnings.simplefilter("ignore")  # all ranks have the same
    try:
        return command(args, world)
    except (BrokenPipeError, KeyboardInterrupt) as error:
        end_soon(CLOSED if isinstance(error, OSError) else INTERRUPTED)
        raise
    except Exception as error:
        same = isinstance(error, ValueError)  # on all ranks: the first of them says it
        record_error(str(error) if same else describe_failure(world, error))
        end_soon(1)
        if same and (launcher_repeats_errors() or not world.main):
            return 1
        raise
