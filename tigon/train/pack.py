"""Fills the cache of tokenized data before a run needs it: `tigon data pack`."""

import json
from collections.abc import Sequence
from pathlib import Path

from tigon.data import cache_root
from tigon.train.build import load_tokenizer
from tigon.train.config import Config
from tigon.train.config_file import load
from tigon.train.data import build_loader
from tigon.train.distributed import start
from tigon.train.model import check_context
from tigon.train.resume import start_time
from tigon.train.tasks import find_task

CONFIGS = (".yaml", ".yml")


def read_arguments(arguments: Sequence[str]) -> Config:
    """Reads the settings of a config file, or of data files, and of `key=value`s."""
    settings = [argument for argument in arguments if "=" in argument]
    paths = [argument for argument in arguments if "=" not in argument]
    if entries := [path for path in paths if path.startswith(("[", "{"))]:
        raise ValueError(f"{entries[0]}: write data='{entries[0]}'")
    files = [path for path in paths if not path.endswith(CONFIGS)]
    configs = [path for path in paths if path.endswith(CONFIGS)]
    if len(configs) > 1 or (configs and files):
        raise ValueError(f"{' '.join(paths)}: give one config file, or data files")
    if files:
        settings.append(f"data={json.dumps(files, ensure_ascii=False)}")
    return load(configs[0] if configs else None, ["run_dir=unused", *settings])


def pack(arguments: Sequence[str]) -> None:
    """Tokenizes the data of `read_arguments`, and prints what is in it."""
    config = read_arguments(arguments)
    if config.streaming:
        raise ValueError("streaming=true has no cache to make: leave it out")
    with start("cpu") as world:
        task = find_task(config.task)(config, world)
        tokenizer = load_tokenizer(config)
        tokenizer.strftime_now = start_time(None, world)
        check_context(config)
        build_loader(task, config.data, tokenizer)
        if config.held_out:
            build_loader(task, config.held_out, tokenizer, held_out=True)
    print(f"the cache is in {Path(cache_root(), 'data')}")
