"""An entry of `data`, the files that it names, and the formats that rows may have."""

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tigon.utils.config import check_ranges, find_misspelled, setting
from tigon.utils.paths import check_file_name, expand_user

HUB = "hf://"
# What a row of each format must have, and what else is read of it
REQUIRED_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "completions": ("prompt", "completions"),
    "distributions": ("input_ids", "teacher_tokens", "teacher_logprobs"),
}

# What each task learns from; tigon.train.tasks has their classes
TASK_ROWS = {
    "pretrain": "text",
    "sft": "chats, learning what the assistant says",
    **dict.fromkeys(("dpo", "ipo", "apo", "cpo", "simpo", "orpo", "reward"), "pairs of answers"),
    "kto": "labeled answers",
    "grpo": "answers with rewards",
    "distill": "chats with a teacher, or its stored distributions",
}


def check_task(task: str) -> None:
    """Raises ValueError unless a task has this name."""
    if task not in TASK_ROWS:
        meant = find_misspelled(task, TASK_ROWS)
        hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(TASK_ROWS)}"
        raise ValueError(f"no task is called task={task!r}; {hint}")


def check_format(format: str | None) -> None:
    """Raises ValueError unless a format has this name, or it is None."""
    if format is not None and format not in REQUIRED_KEYS:
        raise ValueError(f"format={format!r} is not one of {', '.join(REQUIRED_KEYS)}")


@dataclass(frozen=True)
class Entry:
    """One item of a list of data: a path, a glob, or a data set of the hub, hf://owner/name."""

    path: str
    # Its share of the examples drawn from all entries
    weight: float | None = setting(None, gt=0, finite=True)
    format: str | None = None  # one of REQUIRED_KEYS; None: detected from the keys
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a key -> theirs
    split: str | None = None  # or slices of splits, as in `datasets`; None: train. A file is train
    skip: int = setting(0, ge=0)  # rows at the start
    take: int | None = setting(None, ge=1)  # rows after those; None: all
    config: str | None = None  # of a data set of the hub
    revision: str | None = None  # of a data set of the hub
    name: str | None = None  # of held-out data that is also measured on its own

    def __post_init__(self) -> None:
        check_ranges(self)
        check_format(self.format)


def match_paths(pattern: str) -> list[Path]:
    """Lists the path, or the files that a glob matches, sorted; FileNotFoundError without any."""
    path = expand_user(pattern)
    paths = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not paths:
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", pattern) and not path.suffix:
            hint = f"; a data set of the hub is written {HUB}{pattern}"
        elif re.search(r"\.\w+[, ]", pattern):
            hint = "; several files are a list, as in data='[a.jsonl, b.jsonl]'"
        raise FileNotFoundError(f"no data file matches {pattern!r}{hint}")
    for path in paths:
        check_file_name(str(path))
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a pipe or a device: data are read twice, so give a file")
    return sorted(paths)
