"""The entry point: a config file and `key=value`s to a finished run."""

import sys
from collections.abc import Sequence

from tigon.train import checkpoint
from tigon.train.build import prepare
from tigon.train.config import Config, dump, help_text, load
from tigon.train.loop import train
from tigon.train.parallel import World, pick_device, start


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with one line on bad settings and bad data."""
    rest = list(sys.argv[1:] if arguments is None else arguments)
    if not rest or "--help" in rest or "-h" in rest:
        print(help_text())
        return
    show = "--print-config" in rest
    rest = [argument for argument in rest if argument != "--print-config"]
    path = rest.pop(0) if rest and "=" not in rest[0] and not rest[0].startswith("-") else None
    try:
        config = load(path, rest)
    except (ValueError, OSError) as error:
        sys.exit(f"tigon.train: {error}")
    if show:
        print(dump(config), end="")
        return
    if problem := launch(config):
        sys.exit(problem)


def launch(config: Config) -> str | int:
    """Run on this process, or on all that torchrun started; 0, or what sys.exit should be told."""
    try:
        pick_device(config.device)
    except ValueError as error:
        return f"tigon.train: {error}"
    with start(config.device) as world:
        return _run(config, world)


def _run(config: Config, world: World) -> str | int:
    try:
        run = prepare(config, world)
    except (ValueError, OSError) as error:
        return f"tigon.train: {error}" if world.main else 1
    try:
        return train(run)
    except checkpoint.SaveError as error:
        return f"tigon.train: {error}" if world.main else 1
