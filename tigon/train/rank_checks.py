"""Checks that ranks, which may be on several hosts, begin the same run."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tigon.data import Loader
from tigon.models import MODELS
from tigon.models.pretrained.load import read_config
from tigon.train import resume
from tigon.train.config import Config
from tigon.train.distributed import InputError, World
from tigon.train.model import sampled_digest
from tigon.train.samples import SamplePrompt
from tigon.weights import Repository

ANOTHER, OTHER = "reads another model than rank 0 from {}", "has other {} than rank 0"


def check_data(config: Config, data: Loader, eval_data: Loader | None, world: World) -> None:
    """Raises InputError if ranks have other data than the first one."""
    with world.raise_on_all_ranks():
        sample = data.sample() if world.size > 1 else ""
        own = {"data": [resume.run_metadata(config, data), sample]}
        if eval_data is not None:
            own["eval_data"] = [eval_data.identity()]
    _compare(own, world, OTHER)


def check_prompts(prompts: Sequence[SamplePrompt], world: World) -> None:
    """Raises InputError if ranks have other prompts of samples than the first one."""
    _compare({"sample_prompts": [prompt.ids for prompt in prompts]}, world, OTHER)


def check_models(config: Config, digest: str, world: World) -> None:
    """Raises InputError if ranks begin with other models than the first one, as from other files of
    one name on several hosts. `digest`: of the weights."""
    with world.raise_on_all_ranks():
        own = digest
        if config.model:  # `init` is a config.json, of which the digest is
            own += _describe_model(config.model, config.revision)
    _compare({config.init or config.model: own}, world, ANOTHER)


def check_reference_and_teacher(config: Config, world: World) -> None:
    """Raises InputError if ranks have another reference or teacher than the first one."""
    for path in filter(None, (config.reference, config.teacher)):
        own = ""
        with (
            world.raise_on_all_ranks(),
            suppress(FileNotFoundError),
        ):  # what they gave may be in the cache
            own = sampled_digest(path) + _describe_model(path)
        _compare({path: own}, world, ANOTHER)


def _describe_model(path: str, revision: str | None = None) -> str:
    """Returns config and generation settings of a model, to compare between ranks."""
    repository = Repository(path, revision=revision)
    file = repository.optional_file("generation_config.json")  # which samples go by
    generation = b"" if file is None else file.read_bytes()
    return repr((read_config(repository, MODELS)[1], generation))


def _compare(own: dict[str, Any], world: World, what: str) -> None:
    """Raises InputError with `what` for the first name whose value differs between ranks."""
    first, *others = map(json.loads, world.gather(json.dumps(own)))
    for rank, other in enumerate(others, start=1):
        for name in own:
            if other.get(name) != first.get(name):
                raise InputError(f"rank {rank} {what.format(name)}: give all hosts the same files")
