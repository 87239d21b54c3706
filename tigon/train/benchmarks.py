"""Measures the model in training on tasks of lm-eval, at each evaluation."""

from collections.abc import Callable
from typing import Any

from tigon.models import CausalLM
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World, reshard


class Interrupted(Exception):
    """Says that a signal ended the evaluation, which is made when the run resumes."""


def load_tasks(config: Config) -> Any:
    """Returns the tasks of `eval` with their data, None without any. Raises ValueError for a task
    that there is not, and ImportError without lm-eval."""
    if config.eval is None or not config.eval.tasks:
        return None
    from tigon.integrations import tasks  # needs an extra

    return tasks.load_tasks(config.eval.tasks, config.eval.include_path)


def build_benchmarks(
    found: Any, config: Config, model: CausalLM, tokenizer: Tokenizer, world: World
) -> Callable[[], dict[str, float]] | None:
    """Returns the function that evaluates the model on the tasks of `load_tasks`, None without.

    The function returns {"eval/task/metric": value}. Every rank calls it and answers its part of
    the questions; the model is in training mode before and after it. It raises Interrupted on all
    ranks once one of them has received a signal.
    """
    if found is None:
        return None
    assert config.eval is not None
    from tigon.integrations import tasks
    from tigon.integrations.ranks import DataRanks

    options: dict[str, Any] = {"num_fewshot": config.eval.num_fewshot, "limit": config.eval.limit}
    ranks = DataRanks(world.data.rank, world.data.size, world.group)
    lm = tasks.TigonLM(model, tokenizer, ranks=ranks)

    def stop_if_signaled(*_: Any) -> None:
        if world.any(world.signals.received > 0):
            raise Interrupted

    def measure() -> dict[str, float]:
        hook = model.register_forward_pre_hook(stop_if_signaled)
        try:
            results = tasks.evaluate_tasks(lm, found, bootstrap_iters=0, **options)
        finally:
            hook.remove()
            reshard(model)
        return {f"eval/{name}": value for name, value in tasks.flatten_metrics(results).items()}

    return measure
