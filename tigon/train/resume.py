"""Where a run goes on from, and whether it may."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tigon.data import Loader
from tigon.train import checkpoint
from tigon.train.config import Config
from tigon.train.parallel import World

AFRESH = "give the same again, or begin another run_dir, with model= an export of this one"


def find(config: Config, world: World) -> Path | None:
    """The checkpoint to resume from, or None to begin; `claim` has seen to the run directory.

    Every rank calls this: together they check that the files are as they were written.
    """
    run = Path(config.run_dir)
    newest = checkpoint.latest(run / "checkpoints")
    if not config.resume:
        return None
    if config.resume in (True, "auto"):
        return checkpoint.newest_whole(run / "checkpoints", world.say)
    chosen = Path(str(config.resume))
    checkpoint.step_of(chosen)
    if newest is not None and newest.resolve() != chosen.resolve():
        raise FileExistsError(
            f"{run} already has {newest.name}: to go on from {chosen}, choose another run_dir"
        )
    checkpoint.verify(chosen)
    return chosen


def facts(config: Config, data: Loader) -> dict[str, Any]:
    """What a checkpoint must remember to be resumed: settings, and which data its steps meant."""
    return json.loads(json.dumps({"data": data.identity(), "config": asdict(config)}))


def _check_adapter(
    source: Path, before: dict[str, Any], now: dict[str, Any], changed: dict[str, str]
) -> None:
    """Raises ValueError for another adapter, and for another model under the same one."""
    was, own = ({"quantize": None, **(c["lora"] or {}), "merge": False} for c in (before, now))
    names = ("model", "revision", "init") if before["lora"] and now["lora"] else ()
    others = [changed[name] for name in names if name in changed]
    if was != own or others:
        others += [changed["lora"]] if was != own else []
        raise ValueError(f"{source} is of another adapter or model: {', '.join(others)}; {AFRESH}")


def check_base(source: Path, config: Config, found: str) -> None:
    """Raises ValueError if an adapter was trained on other weights than the base has now. `found`:
    their digest. Checkpoints of earlier versions do not say."""
    if checkpoint.facts(source).get("base", found) != found:
        raise ValueError(
            f"{source} is an adapter of other weights than {config.model or config.init} has now: "
            "put the files back that it had, or name the revision"
        )


def check(source: Path, config: Config, data: Loader) -> list[str]:
    """The settings that differ from the checkpoint's; an error if the data stream does.

    A setting that the checkpoint does not know had today's default. Earlier versions read the data
    in another order, so that the steps of their checkpoints cannot be compared.
    """
    was, now = checkpoint.facts(source), facts(config, data)
    if was.get("step", step := checkpoint.step_of(source)) != step:
        raise ValueError(f"{source} is of step {was['step']}: give it its own name back")
    for name in ("config", "data"):
        if name not in was:
            raise ValueError(f"{source / 'run.json'} lacks {name}: it is no run's checkpoint")
    settings = {field.name: field for field in fields(Config)}
    before = {name: field.default for name, field in settings.items()} | was["config"]
    changed = {
        name: f"{name} {json.dumps(before[name])} -> {json.dumps(value)}"
        for name, value in now["config"].items()
        if name not in ("resume", "run_dir") and json.loads(json.dumps(before[name])) != value
    }
    if checkpoint.is_legacy(source):
        return [*changed.values(), "the order of the data, which an earlier version of Tigon chose"]
    _check_adapter(source, before, now["config"], changed)
    wrong = [text for name, text in changed.items() if settings[name].metadata["stream"]]
    if wrong:
        raise ValueError(
            f"{source} was made with another order of the data: {', '.join(wrong)}; {AFRESH}"
        )
    if was["data"] != now["data"]:
        paths = ", ".join(e if isinstance(e, str) else e.path for e in config.data)
        raise ValueError(f"{source} was made with other data than {paths}; {AFRESH}")
    return list(changed.values())
