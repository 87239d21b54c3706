"""The entry point: a config file and `key=value`s to a finished run."""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict

import torch

from tigon.train.board import LAUNCHED, Failure, end_soon, report
from tigon.train.build import prepare
from tigon.train.config import Config, mesh_sizes, parallel_settings
from tigon.train.config_file import dump, load
from tigon.train.estimate.report import dry_run
from tigon.train.flight import flight_recorder, prepare_flight_recorder
from tigon.train.loop import train
from tigon.train.parallel import InputError, World, check_interfaces, launched, pick_device, start
from tigon.train.processes import check_count, run_ranks
from tigon.train.signals import Signals
from tigon.train.usage import USAGE, help_text
from tigon.utils.terminal import escaping_output, one_line

EXPECTED = (InputError, OSError, FloatingPointError)  # a person can mend these: no traceback


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with one line on bad settings and bad data."""
    try:
        with escaping_output():
            _main(list(sys.argv[1:] if arguments is None else arguments))
    except SystemExit as stop:
        if isinstance(stop.code, str):  # which Python prints
            raise SystemExit(one_line(stop.code)) from None
        raise


def _main(rest: list[str]) -> None:
    if "--help" in rest or "-h" in rest:
        print(help_text())
        return
    if not rest:
        print(f"{USAGE}\ntigon.train: settings are needed", file=sys.stderr)
        sys.exit(2)
    show, dry = "--print-config" in rest, "--dry-run" in rest
    rest = [a for a in rest if a not in ("--print-config", "--dry-run")]
    try:
        count, rest = take_count(rest)
        named = rest and "=" not in rest[0] and not rest[0].startswith("-")
        config = load(rest[0], rest[1:]) if named else load(None, rest)
        gpus = torch.cuda.device_count()
        alone = dry and count is not None and count > gpus and config.device != "cpu"
        if count is not None and not (show or alone):
            check_count(count, config.device)
            if config.parallel != "auto":
                mesh_sizes(config, count)
    except (ValueError, OSError) as error:
        sys.exit(refusal(error))
    if show:
        print(dump(config), end="")
        return
    if count is not None and count > 1 and not alone:
        code, problem = run_ranks(count, [*(["--dry-run"] if dry else []), *rest])
        if problem is not None:
            print(f"tigon.train: {one_line(problem)}", file=sys.stderr)
        sys.exit(code)
    if status := launch(config, plan=(count or 1) if dry else None):
        sys.exit(status)


def refusal(error: Exception) -> str | int:
    """For sys.exit, of settings that are wrong. A launcher gives all ranks the same ones, so that
    one of a host says it; ranks that were started one by one all do."""
    report(Failure(str(error)))
    launched = LAUNCHED in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if launched and os.environ.get("LOCAL_RANK", "0") != "0":
        return 1
    rank = "" if launched else prefix(os.environ.get("RANK", "0"))
    return f"tigon.train: {rank}{error}"


def prefix(rank: str) -> str:
    return "" if rank == "0" else f"rank {rank}: "


def take_count(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The N of `--nproc N` or `--nproc=N`, and the other arguments."""
    count, rest = None, list(arguments)
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--nproc":
            used = 1 if equals else 2
            value = value if equals else " ".join(arguments[i + 1 : i + 2])
            if not value.isdecimal():
                raise ValueError(f"--nproc {value}: needs the number of processes to start")
            count, rest = int(value), [*arguments[:i], *arguments[i + used :]]
    return count, rest


def launch(config: Config, plan: int | None = None) -> str | int:
    """Run on this process, or on all that torchrun started; 0, or what sys.exit should be told.

    `plan`: only say what a run on so many ranks, or on all that there are, would be.
    """
    device = config.device
    if plan and device == "cuda" and not torch.cuda.is_available():
        device = "cpu"  # where a run for GPUs can be planned
    try:
        ranks = int(os.environ["WORLD_SIZE"]) if launched() else 1
        check_interfaces()
        pick_device(device)
        if config.parallel != "auto":
            mesh_sizes(config, ranks if plan is None else max(plan, ranks))
    except ValueError as error:
        return refusal(error)
    signals = Signals(silent=os.environ.get("RANK", "0") != "0")
    known = config.parallel != "auto" and (plan is None or plan <= ranks)
    parallel = parallel_settings(config) if known else None
    prepare_flight_recorder(config)
    settings = asdict(config) | {"--dry-run": plan is not None}
    try:
        with signals, start(device, signals, parallel, settings) as world:
            if world.size > 1:
                return _run_rank(config, world, plan)
            return _run(config, world, plan)
    except InputError as error:  # the same on all ranks
        return refusal(error)
    except EXPECTED as error:
        return f"tigon.train: {error}"


def _run(config: Config, world: World, plan: int | None) -> int:
    try:
        if plan is not None:
            dry_run(config, world, max(plan, world.size))
            return 0
        run = prepare(config, world)
    except InputError:
        raise
    except (ValueError, OSError, ImportError) as error:
        where = f"rank {world.rank}: " if world.size > 1 else ""
        raise InputError(f"{where}{error}") from None
    with flight_recorder(config, world):
        return train(run)


def _run_rank(config: Config, world: World, plan: int | None) -> int:
    """One of several ranks; a rank that fails tells the others, which end with it."""
    details = ""
    try:
        return _run(config, world, plan)
    except (InputError, FloatingPointError) as error:  # the same on all ranks
        text = str(error)
    except SystemExit as stop:  # by a signal
        world.board.fail("stopped by a signal", int(str(stop.code)))
        raise
    except Exception as error:
        if is_doubtful(error) and (other := world.board.failure()):
            world.board.say(other)
            end_soon(other.code)
            return other.code
        if isinstance(error, EXPECTED):
            text = f"rank {world.rank}: {error}"
        else:
            details, step = traceback.format_exc(), world.board.step
            where = f", whose last step was {step}" if step else ""
            text = f"rank {world.rank}{where}: {type(error).__name__}: {error}"
    failure = Failure(text)
    report(failure)
    if world.board.fail(text):
        sys.stderr.write(details)
        if LAUNCHED not in os.environ:  # whoever started this rank has the last word
            print(f"tigon.train: {one_line(text)}", file=sys.stderr, flush=True)
    end_soon(failure.code)
    return failure.code


def is_doubtful(error: BaseException) -> bool:
    """Whether it may be what the end of another rank looks like from here: a collective that fails
    raises any exception, and may be behind a file that was not written."""
    if isinstance(error, Exception) and not isinstance(error, EXPECTED):
        return True
    failures = getattr(error, "failures", {})  # of a checkpoint, by rank
    behind = [error.__cause__, *(cause for cause, _ in failures.values())]
    return any(is_doubtful(cause) for cause in behind if cause is not None)
