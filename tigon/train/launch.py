"""The entry point: settings to a finished run."""

import logging
import os
import signal
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import is_torchelastic_launched
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    record,
)
from torch.distributed.launcher import LaunchConfig, elastic_launch

from tigon.settings.command import read_command, refusal
from tigon.settings.config import Config, parallel_settings
from tigon.train.build import prepare
from tigon.train.distributed import (
    InputError,
    World,
    describe_failure,
    end_soon,
    pick_device,
    prepare_flight_recorder,
    start,
)
from tigon.train.dry_run import dry_run
from tigon.train.less_memory import StepMemoryError, first_sentence
from tigon.train.signals import NUMBERS, Signals, handled_signals
from tigon.train.trainer import train
from tigon.utils.launcher import (
    LAUNCHED,
    count_ranks,
    is_launched,
    launcher_repeats_errors,
    record_error,
)
from tigon.utils.memory import count_cpus, is_out_of_memory
from tigon.utils.terminal import escaping_output, one_line

SIGNAL_CODES = tuple(128 + number for number in NUMBERS)  # exit codes
USER_ERRORS = (InputError, OSError, FloatingPointError)  # a person can mend these: no traceback


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with one line on bad settings and bad data."""
    with escaping_output():
        options = read_command(list(sys.argv[1:] if arguments is None else arguments))
        if options is not None:
            run_command(options)


def run_command(options: Namespace) -> None:
    """Trains, with what `read_command` returned, on this process or on `--nproc` ranks; exits
    unless all went well."""
    config, count, dry = options.config, options.nproc, options.dry_run
    gpus = torch.cuda.device_count()
    if count is not None and not (dry and count > gpus and config.device != "cpu"):
        try:
            check_count(count, config.device)
        except ValueError as error:
            sys.exit(refusal(error))
        if count > 1:
            given = [*(["--dry-run"] if dry else []), *options.settings]
            code, problem = run_ranks(count, ["train", *given])
            if problem is not None:
                print(f"tigon.train: {one_line(problem)}", file=sys.stderr)
            sys.exit(code)
    run = record(launch) if is_torchelastic_launched() else launch  # tells torch's agent
    if status := run(config, plan=(count or 1) if dry else None):
        sys.exit(status)


def launch(config: Config, plan: int | None = None) -> str | int:
    """Runs on this process, or on all that torchrun started; returns what sys.exit gets.

    `plan`: only describes a run on so many ranks, or on all that there are.
    """
    device = config.device
    if plan and device == "cuda" and not torch.cuda.is_available():
        device = "cpu"  # where a run for GPUs can be planned
    try:
        ranks = count_ranks()
        pick_device(device)
    except ValueError as error:
        return refusal(error)
    signals = Signals(silent=is_launched() and os.environ.get("RANK", "0") != "0")
    known = config.parallel != "auto" and (plan is None or plan <= ranks)
    parallel = parallel_settings(config) if known else None
    prepare_flight_recorder(config)
    settings = asdict(config) | {"--dry-run": plan is not None}
    try:
        with signals, start(device, signals, parallel, settings) as world:
            return (_run_rank if world.size > 1 else _run)(config, world, plan)
    except InputError as error:  # the same on all ranks
        return refusal(error)
    except USER_ERRORS as error:
        return one_line(f"tigon.train: {error}")


def _run(config: Config, world: World, plan: int | None) -> int:
    """Prepares and trains; returns the exit code."""
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
    except RuntimeError as error:
        if world.size > 1 or not is_out_of_memory(error):
            raise
        raise InputError(
            f"the model: {first_sentence(error)}: give param_dtype=bfloat16, lora.quantize=nf4, or "
            "a GPU that other processes leave free, as nvidia-smi shows"
        ) from error
    try:
        return train(run)
    except RuntimeError as error:  # where memory ends in an update or an evaluation
        if world.size > 1 or not is_out_of_memory(error):  # the others wait for this one
            raise
        raise StepMemoryError(first_sentence(error), run) from error


def _run_rank(config: Config, world: World, plan: int | None) -> int:
    """Runs one of several ranks; returns the exit code, 1 after an error, which is printed or left
    to the launcher, and recorded for torch's agent, which ends the other ranks."""
    try:
        return _run(config, world, plan)
    except (InputError, FloatingPointError) as error:  # the same on all ranks
        text, says = str(error), os.environ.get("LOCAL_RANK", "0") == "0"
    except Exception as error:
        text, says = f"rank {world.rank}: {error}", True
        if not isinstance(error, USER_ERRORS):
            traceback.print_exc()
            text = describe_failure(world, error)
    record_error(text)
    if says and not launcher_repeats_errors():
        print(f"tigon.train: {one_line(text)}", file=sys.stderr, flush=True)
    end_soon(1)
    return 1


def check_count(count: int, device: str) -> None:
    """Raises ValueError for an --nproc that this machine or environment does not allow."""
    if count < 1:
        raise ValueError(f"--nproc {count} must be at least 1")
    if "WORLD_SIZE" in os.environ:
        raise ValueError(f"--nproc {count} inside torchrun, which starts the ranks: leave it out")
    gpus = torch.cuda.device_count()
    if count > gpus and (device == "cuda" or (device == "auto" and gpus)):
        raise ValueError(f"--nproc {count}, but torch sees {gpus} CUDA devices")


def run_ranks(
    count: int,
    arguments: Sequence[str],
    *,
    shutdown_timeout: int = 300,
    forward_interrupt: bool = False,
) -> tuple[int, str | None]:
    """Runs `tigon arguments` on `count` ranks of this host, by torch's elastic agent.

    Returns the exit code, and which rank failed and why. When a rank fails, the others have 30 s
    to end; after a signal all have `shutdown_timeout` seconds (30 before torch 2.12). With
    `forward_interrupt` they get Ctrl-C and go on.
    """
    environment = {
        "OMP_NUM_THREADS": str(max(1, count_cpus() // count)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(shutdown_timeout),
    }
    os.environ[LAUNCHED] = str(os.getpid())  # also in place of one that a shell has left
    added = environment.keys() - os.environ.keys()
    os.environ.update({name: environment[name] for name in added})
    agent = "torch.distributed.elastic"
    for name in [agent, *logging.root.manager.loggerDict]:  # some have a level of their own
        if name.startswith(agent):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    numbers = [n for n in handled_signals() if not (forward_interrupt and n == signal.SIGINT)]
    interrupt_handler = signal.getsignal(signal.SIGINT)
    if forward_interrupt:
        signal.signal(signal.SIGINT, _interrupt_ranks)
    with tempfile.TemporaryDirectory(prefix="tigon-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="tigon",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            signals_to_handle=",".join(signal.Signals(n).name for n in numbers),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "tigon", *arguments)
        except ChildFailedError as error:
            return summarize(error.failures)
        except SignalException as stop:  # the ranks have said what they did
            return 128 + stop.sigval, None
        finally:
            signal.signal(signal.SIGINT, interrupt_handler)
            for name in {*added, LAUNCHED}:
                os.environ.pop(name, None)
    return 0, None


def summarize(failures: Mapping[int, ProcessFailure]) -> tuple[int, str | None]:
    """Returns the exit code of the rank that failed first, and what it has recorded."""
    first = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        code, time = item[1].exitcode, item[1].timestamp
        ended_elastic = code in (-signal.SIGTERM, *SIGNAL_CODES)
        # A rank that was killed records nothing, and others may fail of it within the second
        return ended_elastic, not (code < 0 and time <= first + 2), time

    rank, failure = min(failures.items(), key=order)
    code, text = failure.exitcode, failure.error_file_data["message"]
    if isinstance(text, dict):  # recorded by torch
        text = f"rank {rank}: {text['message']}"
    elif code in SIGNAL_CODES:
        return code, None
    elif code < 0:
        name = signal.Signals(-code).name
        memory = ", perhaps because memory ran out" if name == "SIGKILL" else ""
        text = f"rank {rank} was killed by {name}{memory}"
    elif text == "<NONE>":
        text = f"rank {rank} ended with exit code {code}"
    return (code if code > 0 else 128 - code), text


def _interrupt_ranks(number: int, frame: FrameType | None) -> None:
    """Passes Ctrl-C on to the ranks."""
    process = os.getpid()
    with suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            os.kill(int(child), signal.SIGINT)
