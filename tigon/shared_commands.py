"""Commands on ranks that share a model: `--tp N`, from a shell or under torchrun."""

import os
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from tigon.chat import terminal_modes
from tigon.model_arguments import dtype_of, refused_on_ranks, tokenizer_of
from tigon.models import MODELS, build, split_gguf
from tigon.parallel import MeshSizes, take_part
from tigon.train.config import Parallel
from tigon.train.distributed import World, end_soon, launched, record_error, start
from tigon.train.export import check_shareable, described_checkpoint, find_checkpoint, is_adapter
from tigon.train.launch import LAUNCHED, run_ranks
from tigon.utils.terminal import one_line
from tigon.weights import Repository

CLOSED, INTERRUPTED = 141, 130  # exit codes, as in cli.py: of `| head`, and of Ctrl-C

Command = Callable[[Namespace, World | None], int]


def run_shared(args: Namespace, command: Command) -> int:
    """The command on this process, or with --tp as one of several that share the model: those that
    torchrun has started, or that are started here."""
    try:
        _check(args)
    except ValueError as error:
        record_error(str(error))
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return 1  # every rank knows it: one of a host says it
        raise
    if args.tp == 1:
        return command(args, None)
    if not launched():
        return _start_ranks(args)
    with start(args.device or "auto", parallel=Parallel(tensor=args.tp)) as world:
        return _run_rank(args, command, world)


def together(world: World | None) -> AbstractContextManager[None]:
    """Raises input errors on all ranks, if there are several."""
    return nullcontext() if world is None else world.raise_on_all_ranks()


def _check(args: Namespace) -> None:
    if args.tp < 1:
        raise ValueError(f"--tp {args.tp} must be at least 1")
    if args.tp == 1 and args.expert_parallel:
        raise ValueError("--expert-parallel needs --tp N, with 2 processes or more")
    # Without --tp each process of torchrun would load the whole model, all on one GPU
    ranks = args.tp
    if (args.tp > 1 or dist.is_torchelastic_launched()) and launched():
        ranks = int(os.environ["WORLD_SIZE"])
    if ranks != args.tp:
        given = f"--tp {args.tp}" if args.tp > 1 else "no --tp"
        raise ValueError(
            f"{given}, but torchrun has started {ranks} processes: give --tp {ranks}, "
            f"or --nproc-per-node {args.tp} to torchrun"
        )
    if args.tp == 1:
        return
    if getattr(args, "assistant", None) is not None:
        raise ValueError(f"--assistant does not work with --tp {args.tp}: leave one out")
    if found := find_checkpoint(args.model):
        check_shareable(found)


def _start_ranks(args: Namespace) -> int:
    """The command on processes of this host."""
    gpus = torch.cuda.device_count()
    if args.tp > gpus and args.device != "cpu" and (gpus or args.device):
        raise ValueError(f"--tp {args.tp}, but torch sees {gpus} CUDA devices")
    # What is wrong with the model and its tokenizer is said before any process starts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first rank says them
        if found := find_checkpoint(args.model):
            model = described_checkpoint(found)
        elif is_adapter(args.model, args.revision):
            raise refused_on_ranks(args.model)
        else:
            place, gguf_file = split_gguf(args.model)
            files = Repository(place, revision=args.revision)
            model, _ = build(files, MODELS, dtype=dtype_of(args), gguf_file=gguf_file)
            tokenizer_of(args)
        take_part(model, MeshSizes(tensor=args.tp, expert=args.tp if args.expert_parallel else 1))
    with _terminal():
        code, problem = run_ranks(
            args.tp, args.arguments_given, "tigon.cli", shutdown_timeout=15, forward_interrupt=True
        )
    # A pipe that is closed is no fault, and rank 0 has said why it ended
    if problem and code != CLOSED and not problem.startswith("rank 0 ended"):
        print(f"tigon {args.command}: {one_line(problem)}", file=sys.stderr)
    return code


@contextmanager
def _terminal() -> Iterator[None]:
    """Of a rank that reads it: a rank that is ended leaves it without echo. Ctrl-Z would stop this
    process alone, and the rank would read what is meant for the shell."""
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    terminal = sys.stdin is not None and sys.stdin.isatty()
    mine = terminal and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    restore = terminal_modes() if mine else None
    try:
        yield
    finally:
        if restore is not None:
            restore()
        signal.signal(signal.SIGTSTP, before)


def _run_rank(args: Namespace, command: Command, world: World) -> int:
    """Run one of several ranks; when it fails, torch's agent ends the others."""
    if not world.main:
        warnings.simplefilter("ignore")  # all ranks have the same
    try:
        return command(args, world)
    except (BrokenPipeError, KeyboardInterrupt) as error:
        end_soon(CLOSED if isinstance(error, OSError) else INTERRUPTED)
        raise
    except Exception as error:
        same = isinstance(error, ValueError)  # on all ranks: the first of them says it
        step = f" in step {world.progress.step}" if world.progress.step else ""
        text = f"rank {world.rank} failed{step}: {type(error).__name__}: {error}"
        record_error(str(error) if same else text)
        end_soon(1)
        if same and (LAUNCHED in os.environ or not world.main):
            return 1
        raise
