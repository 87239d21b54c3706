"""Where a run goes on from, and whether it may."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tigon.data import Loader
from tigon.train import checkpoint
from tigon.train.config import Config
from tigon.train.parallel import World


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


def check(source: Path, config: Config, data: Loader) -> list[str]:
    """The settings that differ from the checkpoint's; an error if the data stream does."""
    was, now = checkpoint.facts(source), facts(config, data)
    stream = {field.name for field in fields(Config) if field.metadata["stream"]}
    changed = {
        name: f"{name} {was['config'].get(name)!r} -> {value!r}"
        for name, value in now["config"].items()
        if name not in ("resume", "run_dir") and was["config"].get(name) != value
    }
    wrong = [text for name, text in changed.items() if name in stream]
    if wrong:
        raise ValueError(f"{source} was made with another order of the data: {', '.join(wrong)}")
    if was["data"] != now["data"]:
        raise ValueError(f"{source} was made with other data than data={config.data}")
    return list(changed.values())
