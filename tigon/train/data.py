"""The data of a run: from its settings to a loader, through the cache or as a stream."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tigon.data import (
    Encoder,
    EncodingReport,
    Entry,
    Examples,
    Loader,
    Mixture,
    Source,
    Stream,
    find_sources,
    tokenize,
)
from tigon.data.examples import BadRow, format_count
from tigon.data.packing import TruncationStats
from tigon.data.selection import select_fraction
from tigon.models.moe import aux_loss_coef
from tigon.settings.config import Config, micro_batch_rows
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint
from tigon.train.model import meta_model, meta_model_from_path
from tigon.train.resume import REMEDY
from tigon.train.tasks import Task


def build_loader(
    task: Task,
    items: Sequence[str | Entry],
    tokenizer: Tokenizer,
    *,
    held_out: bool = False,
    cursor: Mapping[str, Any] | None = None,
) -> Loader:
    """Builds a loader of training rows, shuffled, from the `cursor` on, or of held-out rows."""
    config, world = task.config, task.world
    name = "eval_data" if held_out else "data"
    entries = as_entries(config, items)
    check_names(name, entries)
    weights = read_weights(config, entries, held_out=held_out)
    encoder = build_encoder(task, tokenizer)
    if not held_out and encoder.uses_chat_template and (times := tokenizer.template_times()):
        world.log_rank0(
            f"{name}: the chat template writes the time, {', '.join(times.values())}, which a "
            "resumed run keeps. Another run, or data packed earlier, has other data unless "
            "chat_template_kwargs gives a variable for it, such as date_string"
        )
    streaming = config.streaming and not held_out
    cursor = cursor if streaming and cursor else None
    options: dict[str, Any] = {"size": config.shuffle_window, "weights": weights}
    windows: Stream | Mixture
    if streaming:
        sources = find_entry_sources(config, items, streaming=True)
        windows = Stream(sources, encoder, workers=config.workers, cursor=cursor, **options)
    else:
        corpora = tokenize_entries(config, items, encoder, held_out=held_out)
        windows = Mixture(corpora, **options)
    has_dropout = config.lora is not None and config.lora.dropout > 0
    loader = Loader(
        windows,
        task.rows,
        batch_size=config.batch_size,
        micro_batch_size=micro_batch_rows(config),
        seed=None if held_out else config.seed,
        rank=world.data.rank,
        world=world.data.size,
        dropout_seed=config.seed if has_dropout and not held_out else None,
        cursor=cursor,
    )
    if isinstance(windows, Mixture):
        lines = describe(task, loader, windows, entries, held_out=held_out)
    else:
        number = format_count(sum(map(len, sources)), "source")
        lines = [f"streamed from {number} in windows of {format_count(windows.size, task.unit)}"]
        lines += filter(None, [describe_stream_limits(task)])
    for line in lines:
        world.log_rank0(f"{name}: {line}")
    return loader


def read_weights(config: Config, entries: Sequence[Entry], *, held_out: bool) -> list[float] | None:
    """Returns the weight of each entry, None if all count the same as held-out rows always do;
    ValueError for weights in eval_data."""
    if held_out and config.eval_fraction:  # entries of `data`, whose weights are for training
        return None
    if all(entry.weight is None for entry in entries):
        return None
    if held_out:
        raise ValueError("eval_data has weights, but all of it counts the same: leave them out")
    return [1.0 if entry.weight is None else entry.weight for entry in entries]


def build_encoder(task: Task, tokenizer: Tokenizer) -> Encoder:
    """Returns the task's encoder, which leaves bad rows out if the settings say so."""
    encoder = task.encoder(tokenizer)
    encoder.skip_bad_rows = task.config.bad_rows == "skip"
    return encoder


def tokenize_entries(
    config: Config,
    items: Sequence[str | Entry],
    encoder: Encoder,
    *,
    held_out: bool,
    check: bool = True,
) -> list[list[Examples]]:
    """Returns the examples of each entry, by `tokenize`; raises ValueError as that does."""
    sources = find_entry_sources(config, items, held_out=held_out)
    try:
        return [tokenize(entry, encoder, workers=config.workers, check=check) for entry in sources]
    except BadRow as error:
        raise ValueError(f"{error}; bad_rows=skip leaves such rows out") from error


def find_entry_sources(
    config: Config, items: Sequence[str | Entry], *, held_out: bool = False, streaming: bool = False
) -> list[list[Source]]:
    """Returns each entry's sources, of held-out rows or of others; ValueError if there are none."""
    options: dict[str, Any] = {"separator": config.separator, "columns": config.columns}
    entries = as_entries(config, items)
    sources = [find_sources(entry, streaming=streaming, **options) for entry in entries]
    if not (fraction := config.eval_fraction):
        return sources
    sources = [select_fraction(entry, fraction, held_out) for entry in sources]
    if held_out:  # a small source may have no such row
        sources = [entry for entry in sources if entry]
    if not sources or not all(sources):
        what = "holds out no row" if held_out else "leaves no row for training"
        raise ValueError(f"eval_fraction={fraction} {what} of data: give another, or eval_data")
    return sources


def as_entries(config: Config, items: Sequence[str | Entry]) -> list[Entry]:
    """Returns the entries of `data`; those without a format get the one of the settings."""
    entries = [Entry(item) if isinstance(item, str) else item for item in items]
    return [replace(entry, format=entry.format or config.format) for entry in entries]


def check_names(setting: str, entries: Sequence[Entry]) -> None:
    """Raises ValueError for names of data sets that are equal or cannot be written."""
    names = [entry.name for entry in entries if entry.name is not None]
    if names and setting == "data":
        raise ValueError(f"data has name={names[0]}: only entries of eval_data have one")
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{setting}: name={name!r} may have letters, digits, '.', '-' and '_'")
        if names.count(name) > 1:
            raise ValueError(f"{setting}: name={name} is there {names.count(name)} times")


# Lines about the data


def describe(
    task: Task, loader: Loader, windows: Mixture, entries: Sequence[Entry], *, held_out: bool
) -> list[str]:
    """Returns lines about what the data holds, and what is cut or left out."""
    report, unit = loader.report(), task.unit
    truncation = report.truncation
    waste = f", {report.waste:.1%} of them padding" if report.space else ""
    share = f"{report.groups - truncation.dropped:,} of " if truncation.dropped else ""
    lines = [
        f"{share}{format_count(report.groups, unit)}, {format_count(report.row_tokens, 'token')}, "
        f"{format_count(report.rows, 'row')}{waste}; {truncation.truncated:,} cut, "
        f"{truncation.dropped:,} left out",
        *describe_truncation(task.config, truncation, unit),
    ]
    if report.shared:
        before = report.row_tokens + report.shared
        lines.append(
            f"each prompt is computed once for its answers: {report.row_tokens:,} tokens in rows "
            f"in place of {before:,}, {report.shared / before:.1%} less"
        )
    if windows.weights is not None:
        total = sum(windows.weights)
        lines += [
            f"{weight / total:.1%} of {entry.path}: an epoch takes its {format_count(size, unit)} "
            f"{passes:.2f} times"
            for entry, weight, size, passes in zip(
                entries, windows.weights, windows.sizes, windows.passes(), strict=True
            )
        ]
    rows = sum((part.report for part in windows.corpus.parts), EncodingReport())
    return lines + rows.lines() + task.notes(windows, held_out=held_out)


def describe_truncation(config: Config, truncation: TruncationStats, unit: str) -> list[str]:
    """Returns lines that say which limit has cut data or left it out, and what would take all."""
    lines = []
    if count := truncation.max_length_cuts + truncation.max_length_drops:
        lines.append(
            f"{format_count(count, unit)} longer than max_length {config.max_length} (a prompt "
            f"with one answer): {truncation.max_length_cuts:,} cut, "
            f"{truncation.max_length_drops:,} left out; the longest has "
            f"{format_count(truncation.longest, 'token')}"
        )
    if count := truncation.row_cuts + truncation.row_drops:
        lines.append(
            f"{format_count(count, unit)} longer than a row of seq_len {config.seq_len}: "
            f"{truncation.row_cuts:,} cut, {truncation.row_drops:,} left out; "
            f"seq_len={truncation.min_seq_len} takes all"
        )
    if truncation.duplicates:
        verb = "has" if truncation.duplicates == 1 else "have"
        lines.append(
            f"{format_count(truncation.duplicates, unit)} of those left out {verb} equal answers "
            "once they are cut"
        )
    return lines


def describe_stream_limits(task: Task) -> str | None:
    """Returns a line if a stream, whose groups are not counted, may cut or leave out long ones."""
    config, group, most = task.config, task.group, task.config.max_length
    if not config.packing or group == 1 or (most and group * most <= config.seq_len):
        return None
    advice = f"; seq_len={group * most} takes all that max_length {most} leaves" if most else ""
    return f"{task.unit}s longer than a row of seq_len {config.seq_len} are cut or left out{advice}"


# Whether a prompt is computed once for all answers that share a row: then a row is [prompt, chosen]
# and [the prompt's last token, rejected], and the latter goes on from the prompt; or the prompt and
# any number of answers. Log-probabilities and gradients are those of answers behind copies of the
# prompt. Which rows a step has depends on it, so a run that is resumed does as it began.


def set_share_prompts(task: Task, source: Path | None) -> str | None:
    """Sets `task.share_prompts`; returns why prompts are not shared, None if they are or the task
    has none to share.

    ValueError for a checkpoint `source` whose run shared them, where they cannot be now.
    """
    if not task.one_prompt:
        return None
    reason = _find_obstacle(task.config, source)
    if source is not None:
        saved = checkpoint.read_metadata(source)
        if not saved.get("share_prompts", False):
            reason = reason or f"{source} is of a run that did not"
        elif reason is not None:
            raise ValueError(
                f"{source} is of a run that computed each prompt once, which now cannot be "
                f"({reason}); {REMEDY}"
            )
    task.share_prompts = reason is None
    return reason


def _find_obstacle(config: Config, source: Path | None) -> str | None:
    """Returns why prompts cannot be shared, or None."""
    if not config.packing:
        return "packing=false"
    if config.lora is not None and config.lora.dropout:
        return f"lora.dropout={config.lora.dropout} is drawn for each answer's own prompt"
    for name, value in (("cuda_graphs", True), ("attention", "cudnn")):
        if getattr(config, name) == value:
            return f"{name}={str(value).lower()} needs sequences with keys of their own"
    models = [meta_model(config, torch.float32, source)]
    if aux_loss_coef(models[0].config) and config.task != "reward":
        return "the balance of experts, which is part of the loss, counts each answer's own prompt"
    if config.reference:
        try:
            models.append(meta_model_from_path(config.reference))
        except OSError:
            if source is None:  # a run that goes on has its log-probabilities in the cache
                raise
    for model in models:
        if not model.model.shares_prefixes or not model.causal:
            return f"not all layers of {type(model).__name__} are causal attention"
    return None
