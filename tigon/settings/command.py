"""The command lines of `tigon train` and `tigon data`: a config file, settings and options."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import yaml

from tigon.hub import Repository
from tigon.settings.config import SECTIONS, Config, check_batch, mesh_sizes
from tigon.settings.data import HUB, Entry, match_paths
from tigon.settings.load import dump, load
from tigon.utils.config import describe_type, field_types
from tigon.utils.launcher import count_ranks, is_launched, launcher_repeats_errors, record_error
from tigon.utils.terminal import one_line

USAGE = """\
tigon train config.yaml [key=value | --key value ...]
tigon train config.yaml --nproc 8 [key=value | --key value ...]
torchrun --nproc-per-node 8 -m tigon train config.yaml [key=value | --key value ...]

  --nproc N        processes on this host, one for each GPU
  --help           this text
  --print-config   the settings as they would be used, as YAML
  --dry-run        check everything, say what the run takes, time a few steps, and stop
"""


def read_command(arguments: list[str]) -> argparse.Namespace | None:
    """Returns the options of `tigon train` with its `config` and `settings`, the texts that it is
    read from; None after --help and --print-config.

    All is checked that needs no torch: exits with one line on bad settings, and on data or a model
    that are not there.
    """
    # No abbreviations: settings may be given as --key value
    parser = argparse.ArgumentParser("tigon.train", USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    for flags in (["--dry-run"], ["--print-config"], ["-h", "--help"]):
        parser.add_argument(*flags, action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if options.help:
        print(help_text())
        return None
    if not arguments:
        print(f"{USAGE}\ntigon.train: settings are needed", file=sys.stderr)
        sys.exit(2)
    try:
        named = rest and "=" not in rest[0] and not rest[0].startswith("-")
        config = load(rest[0], rest[1:]) if named else load(None, rest)
        if options.print_config:
            print(dump(config), end="")
            return None
        if config.parallel != "auto":
            ranks = max(options.nproc or 1, count_ranks())
            check_batch(config, mesh_sizes(config, ranks).data)
        if not is_launched():  # one rank that ended alone would leave the others waiting
            check_files(config)
    except (ValueError, OSError) as error:
        sys.exit(refusal(error))
    options.config, options.settings = config, rest
    return options


def check_files(config: Config) -> None:
    """Raises OSError or ValueError for files of data, or a model to start from, that are not here,
    and for a run_dir of another run; what is on the hub is not asked for."""
    check_entries(config.data)
    try:
        check_entries(config.eval_data)  # which a ready config may name
    except FileNotFoundError as error:
        advice = "give held-out files, eval_fraction=0.05, or eval_data=[] for none"
        raise FileNotFoundError(f"eval_data: {error}; {advice}") from None
    if not config.resume:
        check_new_run(Path(config.run_dir))
        if config.model:  # a run that goes on needs its checkpoint alone
            Repository(config.model, revision=config.revision)


def check_entries(entries: Sequence[str | Entry]) -> None:
    """Raises FileNotFoundError for entries of data that are neither files here nor on the hub."""
    for entry in entries:
        path = entry if isinstance(entry, str) else entry.path
        if not path.startswith(HUB):
            match_paths(path)


def check_new_run(path: Path) -> None:
    """Raises FileExistsError if the directory has a run, which is not to be resumed."""
    metrics = path / "metrics.jsonl"
    trained = metrics.exists() and metrics.stat().st_size > 0
    if trained or any(path.glob("checkpoints/step-*")):
        raise FileExistsError(f"{path} is not empty: give resume=auto, or another run_dir")


def read_data_arguments(arguments: Sequence[str]) -> Config:
    """Returns the settings of a config file, or of data files, with those given as `key=value`;
    raises ValueError or OSError if they are wrong, or files are not there."""
    settings = [argument for argument in arguments if "=" in argument]
    paths = [argument for argument in arguments if "=" not in argument]
    if entries := [path for path in paths if path.startswith(("[", "{"))]:
        raise ValueError(f"{entries[0]}: write data='{entries[0]}'")
    files = [path for path in paths if not path.endswith((".yaml", ".yml"))]
    configs = [path for path in paths if path.endswith((".yaml", ".yml"))]
    if len(configs) > 1 or (configs and files):
        raise ValueError(f"{' '.join(paths)}: give one config file, or data files")
    if files:
        settings.append(f"data={json.dumps(files, ensure_ascii=False)}")
    config = load(configs[0] if configs else None, ["run_dir=unused", *settings])
    check_entries(config.data)
    return config


def refusal(error: Exception) -> str | int:
    """Returns what sys.exit gets for wrong settings: a text on one rank of a host, as a launcher
    gives all the same, and on every rank that was started by hand."""
    record_error(str(error))
    elastic = is_launched() and "TORCHELASTIC_RUN_ID" in os.environ
    if launcher_repeats_errors() or (elastic and os.environ.get("LOCAL_RANK", "0") != "0"):
        return 1
    rank = os.environ.get("RANK", "0") if is_launched() else "0"
    where = "" if elastic or rank == "0" else f"rank {rank}: "
    return one_line(f"tigon.train: {where}{error}")


def help_text() -> str:
    """Returns all settings with their types and defaults, by section."""
    lines, kinds = [USAGE], field_types(Config)
    for section in SECTIONS:
        lines.append(f"{section.__doc__}")
        for f in fields(section):
            default = yaml.safe_dump(f.default, default_flow_style=True)
            default = default.removesuffix("\n...\n").strip()
            lines.append(f"  {f.name}: {describe_type(kinds[f.name])} = {default}")
            lines.append(f"      {f.metadata['help']}")
        lines.append("")
    return "\n".join(lines)
