"""Exports to the hub, with a model card of the run that they are from."""

import math
import os
import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from tigon.hub import (
    CARD,
    MAX_CARD,
    UploadTarget,
    contains_file,
    escape_markdown,
    is_hub_name,
    list_export,
    markdown_table,
    usage_section,
    write_card,
)
from tigon.report.read import RunFiles, read
from tigon.train.config import Config
from tigon.utils.json import read_bytes, read_json
from tigon.weights import read_header


def push(
    source: Path,
    repository: str,
    *,
    message: str | None = None,
    overwrite_card: bool = False,
    **destination: Any,
) -> str:
    """Upload an exported model, or a run's last export; returns where it is on the hub.

    `destination`: private, revision, token and create_pr of `UploadTarget`.
    """
    folder = _export_of(source)
    list_export(folder)  # an error before the repository is made
    to = UploadTarget(repository, **destination)
    card = _card(folder, to)
    return to.upload(folder, card=card, message=message, overwrite_card=overwrite_card)


def push_or_explain(config: Config) -> str:
    """Push the last export of a run that ends: a line that says where it is, or how to push it."""
    try:
        where = push(Path(config.run_dir), config.push_to_hub, private=config.push_private)
        return f"pushed to {where}"
    except Exception as error:  # no push is worth a run
        private = " --private" * bool(config.push_private)
        return (
            f"not pushed: {' '.join(str(error).split())}\n"
            f"  {config.run_dir}/hf is whole; to push it: "
            f"tigon push {config.run_dir} {config.push_to_hub}{private}"
        )


def lacks_token(config: Config) -> bool:
    return bool(config.push_to_hub) and get_token() is None


def _export_of(source: Path) -> Path:
    if not is_run(source):
        return source
    if (source / "hf").is_symlink():
        raise FileNotFoundError(
            f"{source}/hf is a link to {os.readlink(source / 'hf')}: if that is the export that "
            "you mean, name it in place of the run"
        )
    if not (source / "hf").is_dir():
        raise FileNotFoundError(
            f"{source} has no export: `tigon export {source} DIRECTORY` makes one of its newest "
            "checkpoint, which `tigon push DIRECTORY` takes"
        )
    return source / "hf"


def _card(folder: Path, to: UploadTarget) -> str:
    if contains_file(folder, CARD):
        return read_bytes(folder / CARD, MAX_CARD).decode(errors="replace")
    if run := find_run(folder):
        return run_card(run, folder, to.name, _version(), to.is_public)
    config = read_json(folder / "config.json")
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    count = sum(math.prod(info.shape) for header in headers for info in header.values())
    kind = config.get("model_type")
    about = (
        f"A {escape_markdown(kind)} model with {count:,} parameters in its files, saved by Tigon."
    )
    return write_card(
        [f"# {escape_markdown(to.name.split('/')[-1])}", about, usage_section(to.name)],
        tags=[kind] if isinstance(kind, str) else [],
    )


def _version() -> str:
    try:
        return version("tigon")
    except PackageNotFoundError:  # a source tree that was not installed
        return "from source"


# The card says nothing of this machine: no directory, and of settings only numbers and fixed words.

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


def find_run(folder: Path) -> Path | None:
    """The run that an export such as RUN/hf or RUN/hf-best is of."""
    parent = folder.resolve().parent
    return parent if folder.resolve().name.startswith("hf") and is_run(parent) else None


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()


def run_card(
    run: Path, export: Path, repository: str, version: str, is_public: Callable[[str, str], bool]
) -> str:
    """The text of README.md for one of a run's exports.

    `is_public`: whether a name is that of a public repository of a "model" or "dataset". Other
    names, of private ones and of directories, are not told.
    """
    files = read(run)
    base, local = _base_model(files.config), "a checkpoint that is not on the hub"
    base = base if base is not None and is_public(base, "model") else None
    task = _word(files.config.get("task", "sft"))
    entries = _entries(files.config.get("data")), _entries(files.config.get("eval_data"))
    named = {name for name in map(_hub_name, [*entries[0], *entries[1]]) if name}
    public = {name for name in sorted(named) if is_public(name, "dataset")}
    trained = sorted(public & set(map(_hub_name, entries[0])))
    count = f" with {files.parameters:,} parameters" if files.parameters else ""
    begun = "trained from random weights"
    if not files.config.get("init"):
        begun = f"fine-tuned from {f'[{base}]({HUB}/{base})' if base else local}"
    architecture = escape_markdown(files.architecture) or "A language model"
    return write_card(
        [
            f"# {escape_markdown(repository.split('/')[-1])}",
            f"{architecture}{count}, {begun}, with Tigon.",
            usage_section(repository),
            _training(files, task, public),
            _results(files, _step(files, export), export.name == "hf-ema"),
            _settings(files),
            _versions(files, version),
        ],
        base_model=base,
        datasets=trained,
        tags=[task] if task else [],
    )


def _training(files: RunFiles, task: str, public: set[str]) -> str:
    held_out = _sources(files.config.get("eval_data"), public)
    if fraction := files.config.get("eval_fraction"):
        held_out = f"a fraction of {fraction} of its rows"
    lines = [
        f"- Task: {escape_markdown(task) or 'unknown'}",
        f"- Data: {_sources(files.config.get('data'), public)}",
        f"- Held-out data: {held_out or 'none'}",
    ]
    if files.last_step is not None:
        epochs = files.column("epoch").last()
        some = f", {epochs:.2f} epochs" if math.isfinite(epochs) else ""
        lines.append(f"- Steps: {files.last_step:,}{some}")
    if tokens := sum(files.column("tokens").finite()):
        lines.append(f"- Tokens seen: {tokens:,.0f}")
    return "## Training\n\n" + "\n".join(lines)


def _results(files: RunFiles, step: int | None, average: bool) -> str:
    lines = ["## Results"]
    if step is not None:
        lines.append(f"The weights are those after step {step:,}.")
    if average:
        lines.append(
            "They are an average over the steps before; what was measured is that step's own."
        )
    loss = files.column("loss").last()
    if math.isfinite(loss):
        lines.append(f"Training loss of the last step: {loss:.4f}.")
    best = files.column("eval_loss").lowest()
    rows = []
    measured = {step: "these weights"}
    if best is not None:
        measured.setdefault(best[0], "best")
    for at, when in measured.items():
        rows += [row for row in _measured(files, at, when) if at is not None]
    if rows:
        lines.append(markdown_table(["weights", "step", "data", "loss", "accuracy"], rows))
    else:
        lines.append("There was no evaluation.")
    return "\n\n".join(lines)


def _measured(files: RunFiles, step: int | None, when: str) -> Iterator[list[object]]:
    for key in files.columns:
        if key != "eval_loss" and not key.startswith("eval_loss/"):
            continue
        name = key.partition("/")[2]
        loss = _at(files, key, step)
        accuracy = _at(files, key.replace("eval_loss", "eval_accuracy", 1), step)
        if loss is not None:
            shown = "" if accuracy is None else f"{100 * accuracy:.2f}%"
            yield [when, step, escape_markdown(name) or "all held-out", f"{loss:.4f}", shown]


def _at(files: RunFiles, key: str, step: int | None) -> float | None:
    column = files.column(key)
    found = [v for s, v in zip(column.steps, column.values, strict=True) if s == step]
    return found[-1] if found and math.isfinite(found[-1]) else None


def _settings(files: RunFiles) -> str:
    rows = []
    for name in SETTINGS:
        value = files.config.get(name)
        if isinstance(value, bool | int | float) or (isinstance(value, str) and _word(value)):
            rows.append(
                [f"`{name}`", escape_markdown(str(value).lower() if value is not None else "")]
            )
    return "## Settings\n\n" + markdown_table(["setting", "value"], rows)


def _versions(files: RunFiles, version: str) -> str:
    found = [("tigon", version), *VERSION.findall(files.machine)]
    return "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in found)


def _step(files: RunFiles, export: Path) -> int | None:
    """Whose weights the export has."""
    if named := STEP.fullmatch(export.name):
        return int(named[1])
    if export.name == "hf-best":
        best = files.column("eval_loss").lowest()
        return best[0] if best else None
    return files.exported


def _base_model(config: dict[str, Any]) -> str | None:
    model = config.get("model")
    if not isinstance(model, str):
        return None
    if cached := SNAPSHOT.search(model):
        return f"{cached[1]}/{cached[2]}"
    return model if is_hub_name(model) and not Path(model).exists() else None


def _entries(data: Any) -> list[str]:
    items = data if isinstance(data, list | tuple) else [data]
    paths = [item.get("path") if isinstance(item, dict) else item for item in items]
    return [path for path in paths if isinstance(path, str) and path]


def _hub_name(path: str) -> str | None:
    name = path.removeprefix("hf://")
    return name if path.startswith("hf://") and is_hub_name(name) else None


def _sources(data: Any, public: set[str]) -> str:
    """Public data sets of the hub with links; of files the names, without their directories."""
    found = []
    for path in _entries(data):
        name = _hub_name(path)
        if name in public:
            found.append(f"[{name}]({HUB}/datasets/{name})")
        elif path.startswith("hf://"):
            found.append("a data set that is not public")
        else:
            found.append(escape_markdown(Path(path).name))
    return ", ".join(dict.fromkeys(found))


def _word(value: Any) -> str:
    return value if isinstance(value, str) and WORD.fullmatch(value) else ""
