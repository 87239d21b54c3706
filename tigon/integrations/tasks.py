"""lm-eval's tasks: found by name, and run on a model without a trace in it or in random numbers."""

import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tigon.integrations.lm_eval import TigonLM  # first, since it says what to install

# isort: split
import lm_eval.api.task
import numpy as np
import torch
import yaml
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict
from lm_eval.utils import handle_non_serializable, make_table
from tqdm import tqdm

from tigon.utils.config import suggest
from tigon.utils.json import quote
from tigon.utils.paths import expand_user, new_file

__all__ = ["TigonLM", "evaluate_tasks", "flatten_metrics", "load_tasks"]
BOOTSTRAPS = 100_000  # resamples of a standard error, as in lm-eval
# What lm-eval raises for a file that is no task
FAULTS = (
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    yaml.YAMLError,
)


def load_tasks(names: Sequence[str], include_path: str | None = None) -> TaskDict:
    """Loads tasks, groups, tags and patterns of names, and YAML files, with their data; a name may
    be several with commas between them.

    Those of the folder `include_path` replace lm-eval's of the same name; a file there may name
    Python functions, which then run. Raises ValueError for a name that nothing has, with the
    nearest one, and for a task that cannot be loaded, and FileNotFoundError for a missing folder.
    """
    names = [name for text in names for name in map(str.strip, text.split(",")) if name]
    if not names:
        raise ValueError("no task is named: give names such as arc_easy")
    include_path = str(expand_user(include_path)) if include_path else None
    if include_path and not Path(include_path).is_dir():
        raise FileNotFoundError(f"include_path={include_path}: there is no such folder")
    with seeded():
        if include_path:  # alone at first: reading lm-eval's own thousands of files takes seconds
            with suppress(KeyError):  # of a group that has tasks of lm-eval
                manager = TaskManager(include_path=include_path, include_defaults=False)
                if not _find_unknown(manager, names):
                    return _load(manager, names)
        manager = TaskManager(include_path=include_path)
        if unknown := _find_unknown(manager, names):
            hints = [suggest(name, manager.all_tasks) or "none is near" for name in unknown]
            named = [f"{quote(n)} ({hint})" for n, hint in zip(unknown, hints, strict=True)]
            raise ValueError(
                f"lm-eval has no task {', '.join(named)}: `lm-eval ls tasks` lists all, and "
                "include_path adds a folder of your own"
            )
        try:
            return _load(manager, names)
        except KeyError as error:
            raise ValueError(f"a task of {', '.join(names)} cannot be loaded: {error}") from error


def _find_unknown(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Returns the names that are no task, group, tag, pattern of one or YAML file."""
    return [n for n in names if not manager.match_tasks([n]) and not Path(n).is_file()]


def _load(manager: TaskManager, names: Sequence[str]) -> TaskDict:
    """Loads the tasks of known names, each once; raises ValueError for a file that is no task, and
    OSError for data that cannot be had."""
    known = [match for n in names for match in manager.match_tasks([n]) or [n]]
    try:
        return manager.load(list(dict.fromkeys(known)))
    except FAULTS as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"a task of {', '.join(names)} cannot be loaded: {problem}") from error
    except ConnectionError as error:  # main's advice on it is about models
        raise OSError(f"the data of {', '.join(names)} cannot be had: {error}") from error


def evaluate_tasks(
    lm: TigonLM,
    tasks: TaskDict,
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    apply_chat_template: bool = False,
    bootstrap_iters: int = BOOTSTRAPS,
) -> dict[str, Any]:
    """Returns lm-eval's results of the tasks, those of its `simple_evaluate` with the same options;
    under ranks on each of them.

    `num_fewshot` replaces the tasks' own, but for those that fix it at 0; `limit` is a number of
    documents of each task, or below 1 a share of them. Python's, NumPy's and torch's generators
    are as before afterwards.
    """
    check_options(num_fewshot, limit)
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)  # each evaluation has the same examples
    with seeded(lm.device), _bars_on_terminals(lm.ranks.rank == 0):
        results = evaluate(
            lm=lm,
            task_dict=tasks,
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=False,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
        )
    return dict(results or {})


def check_options(num_fewshot: int | None, limit: float | None) -> None:
    """Raises ValueError for a number of examples or of documents that there cannot be."""
    if num_fewshot is not None and num_fewshot < 0:
        raise ValueError(f"num_fewshot={num_fewshot} must be at least 0")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit={limit:g} must be above 0: documents of each task, or a share")
    if limit is not None and limit > 1 and limit % 1:
        raise ValueError(f"limit={limit:g} is neither a number of documents nor a share below 1")


def format_tables(results: dict[str, Any]) -> str:
    """Returns lm-eval's table of tasks, and that of groups if there are any."""
    columns = [column for column in ("results", "groups") if column in results]
    return "\n".join(make_table(results, column).strip() for column in columns)


def write_results(path: Path, results: dict[str, Any], config: dict[str, Any]) -> None:
    """Writes a file of JSON with lm-eval's keys, whole or not at all."""
    facts = {"config": {"model": "tigon"} | config, "date": time.time()}
    facts["lm_eval_version"] = version("lm_eval")
    text = json.dumps(results | facts, indent=2, default=handle_non_serializable)
    with new_file(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        file.write(text + "\n")


def flatten_metrics(results: dict[str, Any]) -> dict[str, float]:
    """Returns {"task/metric": value} of lm-eval's results, groups too and without standard errors;
    a metric behind a filter is "metric,filter"."""
    values = {}
    for task, metrics in (results["results"] | results.get("groups", {})).items():
        for key, value in metrics.items():
            name, comma, filter_name = key.partition(",")
            if comma and not name.endswith("_stderr") and isinstance(value, int | float):
                values[f"{task}/{name if filter_name == 'none' else key}"] = float(value)
    return values


@contextmanager
def _bars_on_terminals(shown: bool) -> Iterator[None]:
    """Lets lm-eval show how far it is on a terminal alone, or nowhere; it has no option for it."""
    before = lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = partial(tqdm, disable=None if shown else True, leave=False)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = before


@contextmanager
def seeded(device: torch.device | None = None) -> Iterator[None]:
    """Seeds Python's, NumPy's and torch's generators as lm-eval does, and puts their states back at
    the end; of GPUs that of `device` alone. lm-eval's notes are not shown, its warnings are."""
    logger = logging.getLogger("lm_eval")
    level, states = logger.level, (random.getstate(), np.random.get_state())
    on_gpu = device is not None and device.type == "cuda"
    try:
        logger.setLevel(logging.ERROR)
        with torch.random.fork_rng([device] if on_gpu else []):
            random.seed(DEFAULT_RANDOM_SEED)
            np.random.seed(DEFAULT_OTHER_SEED)
            torch.default_generator.manual_seed(DEFAULT_OTHER_SEED)
            if on_gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(DEFAULT_OTHER_SEED)
            yield
    finally:
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
