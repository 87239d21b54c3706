"""Pushes exports to the hub, with a model card of the run that they are from.

The card says nothing of this machine: no directory, and of settings only numbers and fixed words.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tigon.hub import contains_file, is_hub_name
from tigon.models.pretrained.upload import (
    CARD,
    MAX_CARD,
    UploadTarget,
    escape_markdown,
    list_export,
    write_card,
)
from tigon.report.read import RunFiles, read
from tigon.settings.config import Config
from tigon.utils.json import read_bytes, read_json
from tigon.version import __version__
from tigon.weights.header import read_header

SETTINGS = (
    *("steps", "epochs", "seq_len", "packing", "batch_size", "train_on", "loss_reduction"),
    *("optimizer", "lr", "schedule", "warmup_steps", "min_lr_ratio", "weight_decay", "beta1"),
    *("beta2", "max_grad_norm", "label_smoothing", "z_loss", "ema_decay", "dtype", "param_dtype"),
    *("router_aux_loss_coef", "seed"),
)
WORD = re.compile(r"[\w.-]{1,40}")
VERSION = re.compile(r"\b(python|torch|tokenizers|safetensors|numpy) (\d[\w.+-]{0,30})")
SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]{40}")
STEP = re.compile(r"hf-step-(\d{1,18})")
HUB = "https://huggingface.co"


def push(
    source: Path,
    repository: str,
    *,
    message: str | None = None,
    overwrite_card: bool = False,
    **destination: Any,
) -> str:
    """Uploads an exported model, or a run's last export; returns its URL.

    `destination`: private, revision, token and create_pr of `UploadTarget`.
    """
    folder = _find_export(source) if is_run(source) else source
    list_export(folder)  # an error before the repository is created
    target = UploadTarget(repository, **destination)
    card = _find_or_write_card(folder, target)
    return target.upload(folder, card=card, message=message, overwrite_card=overwrite_card)


def push_or_explain(config: Config) -> str:
    """Pushes the last export of a run that ends; returns a line with its URL, or how to push it."""
    try:
        url = push(Path(config.run_dir), config.push_to_hub, private=config.push_private)
        return f"pushed to {url}"
    except Exception as error:  # no push is worth a run
        private = " --private" * bool(config.push_private)
        return (
            f"not pushed: {' '.join(str(error).split())}\n"
            f"  {config.run_dir}/hf is whole; to push it: "
            f"tigon push {config.run_dir} {config.push_to_hub}{private}"
        )


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()


def _find_export(run: Path) -> Path:
    """Returns RUN/hf, or RUN/adapter where there is no other; raises FileNotFoundError if both are
    missing, or for a link."""
    export = run / "hf"
    if export.is_symlink():
        raise FileNotFoundError(
            f"{export} is a link to {os.readlink(export)}: if that is the export that "
            "you mean, name it in place of the run"
        )
    if not export.is_dir():
        if (run / "adapter").is_dir():
            return run / "adapter"
        raise FileNotFoundError(
            f"{run} has no export: `tigon export {run} DIRECTORY` makes one of its newest "
            "checkpoint, which `tigon push DIRECTORY` takes"
        )
    return export


def _find_or_write_card(folder: Path, target: UploadTarget) -> str:
    """Returns the text of the model card: the folder's own, or a generated one, which describes the
    training if the folder is an export in a run's directory."""
    if contains_file(folder, CARD):
        return read_bytes(folder / CARD, MAX_CARD).decode(errors="replace")
    resolved = folder.resolve()
    if resolved.name.startswith("hf") and is_run(resolved.parent):
        return run_card(resolved.parent, folder, target.name, target.is_public)
    kind = read_json(folder / "config.json").get("model_type")
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    count = sum(math.prod(info.shape) for header in headers for info in header.values())
    return write_card(
        target.name,
        f"A {escape_markdown(kind)} model with {count:,} parameters in its files, saved by Tigon.",
        tags=[kind] if isinstance(kind, str) else [],
    )


def run_card(
    run: Path, export: Path, repository: str, is_public: Callable[[str, str], bool]
) -> str:
    """Returns the text of README.md for one of a run's exports, such as RUN/hf or RUN/hf-best.

    `is_public`: whether a name is that of a public repository of a "model" or "dataset". Names of
    private ones and of directories are left out.
    """
    files = read(run)
    base = _base_model(files.config)
    base = base if base is not None and is_public(base, "model") else None
    origin = f"[{base}]({HUB}/{base})" if base else "a checkpoint that is not on the hub"
    origin = (
        "trained from random weights" if files.config.get("init") else f"fine-tuned from {origin}"
    )
    task = _word(files.config.get("task", "sft"))
    trained, held_out = (
        {name for name in map(_hub_name, _data_paths(files.config.get(key))) if name}
        for key in ("data", "eval_data")
    )
    public = {name for name in sorted(trained | held_out) if is_public(name, "dataset")}
    count = f" with {files.parameters:,} parameters" if files.parameters else ""
    versions = [("tigon", __version__), *VERSION.findall(files.machine)]
    return write_card(
        repository,
        f"{escape_markdown(files.architecture) or 'A language model'}{count}, {origin}, "
        "with Tigon.",
        _training_section(files, task, public),
        _results_section(files, export),
        _settings_section(files),
        "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in versions),
        base_model=base,
        datasets=sorted(public & trained),
        tags=[task] if task else [],
    )


def _training_section(files: RunFiles, task: str, public: set[str]) -> str:
    """Returns the card's section on task, data and training."""
    held_out = _link_data(files.config.get("eval_data"), public)
    if fraction := files.config.get("eval_fraction"):
        held_out = f"a fraction of {fraction} of its rows"
    lines = [
        f"- Task: {escape_markdown(task) or 'unknown'}",
        f"- Data: {_link_data(files.config.get('data'), public)}",
        f"- Held-out data: {held_out or 'none'}",
    ]
    if files.last_step is not None:
        epochs = files.column("epoch").last()
        suffix = f", {epochs:.2f} epochs" if math.isfinite(epochs) else ""
        lines.append(f"- Steps: {files.last_step:,}{suffix}")
    if tokens := sum(files.column("tokens").finite()):
        lines.append(f"- Tokens seen: {tokens:,.0f}")
    return "## Training\n\n" + "\n".join(lines)


def _results_section(files: RunFiles, export: Path) -> str:
    """Returns the card's section on the weights' step and the losses."""
    best, step = files.column("eval_loss").lowest(), files.exported
    if named := STEP.fullmatch(export.name):
        step = int(named[1])
    elif export.name == "hf-best":
        step = best[0] if best else None
    lines = ["## Results"]
    if step is not None:
        lines.append(f"The weights are those after step {step:,}.")
    if export.name == "hf-ema":
        lines.append(
            "They are an average over the steps before; what was measured is that step's own."
        )
    loss = files.column("loss").last()
    if math.isfinite(loss):
        lines.append(f"Training loss of the last step: {loss:.4f}.")
    measured = {step: "these weights"}
    if best is not None:
        measured.setdefault(best[0], "best")
    rows = [row for at, label in measured.items() for row in _evaluation_rows(files, at, label)]
    if rows:
        lines.append(markdown_table(["weights", "step", "data", "loss", "accuracy"], rows))
    else:
        lines.append("There was no evaluation.")
    return "\n\n".join(lines)


def _evaluation_rows(files: RunFiles, step: int | None, label: str) -> Iterator[list[object]]:
    """Yields a row for each data set that was evaluated after `step`."""

    def value_at_step(key: str) -> float | None:
        column = files.column(key)
        values = [v for s, v in zip(column.steps, column.values, strict=True) if s == step]
        return values[-1] if values and math.isfinite(values[-1]) else None

    for key in files.columns:
        prefix, _, name = key.partition("/")
        if prefix == "eval_loss" and (loss := value_at_step(key)) is not None:
            accuracy = value_at_step(key.replace("eval_loss", "eval_accuracy", 1))
            percent = "" if accuracy is None else f"{100 * accuracy:.2f}%"
            yield [label, step, escape_markdown(name) or "all held-out", f"{loss:.4f}", percent]


def _settings_section(files: RunFiles) -> str:
    """Returns the card's table of settings: those in SETTINGS that are numbers or single words."""
    rows = [
        [f"`{name}`", escape_markdown(str(value).lower())]
        for name in SETTINGS
        if isinstance(value := files.config.get(name), bool | int | float) or _word(value)
    ]
    return "## Settings\n\n" + markdown_table(["setting", "value"], rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; the cells are not escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _base_model(config: dict[str, Any]) -> str | None:
    """Returns the hub name of the model that the run began with, or None."""
    model = config.get("model")
    if not isinstance(model, str):
        return None
    if cached := SNAPSHOT.search(model):
        return f"{cached[1]}/{cached[2]}"
    return model if is_hub_name(model) and not Path(model).exists() else None


def _data_paths(data: Any) -> list[str]:
    """Returns the paths that the setting `data` names."""
    items = data if isinstance(data, list | tuple) else [data]
    paths = [item.get("path") if isinstance(item, dict) else item for item in items]
    return [path for path in paths if isinstance(path, str) and path]


def _hub_name(path: str) -> str | None:
    """Returns OWNER/NAME of a path hf://OWNER/NAME; None for any other path."""
    name = path.removeprefix("hf://")
    return name if path.startswith("hf://") and is_hub_name(name) else None


def _link_data(data: Any, public: set[str]) -> str:
    """Returns what the card calls the data, joined by commas: a link to each repository in
    `public`, "a data set that is not public" for others, and names of files without directories."""
    texts = []
    for path in _data_paths(data):
        name = _hub_name(path)
        if name in public:
            texts.append(f"[{name}]({HUB}/datasets/{name})")
        elif path.startswith("hf://"):
            texts.append("a data set that is not public")
        else:
            texts.append(escape_markdown(Path(path).name))
    return ", ".join(dict.fromkeys(texts))


def _word(value: Any) -> str:
    """Returns a text of at most 40 letters, digits, "_", "." and "-", "" for any other value."""
    return value if isinstance(value, str) and WORD.fullmatch(value) else ""
