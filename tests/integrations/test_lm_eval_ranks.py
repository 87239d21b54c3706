"""Two ranks answer as one process, each its part of the requests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.support.benchmarks import write_tasks
from tests.support.small import write_model
from tests.train.ranks import Ranks
from tigon.integrations import lm_eval as module
from tigon.integrations.lm_eval import TigonLM
from tigon.integrations.tasks import evaluate_tasks, flatten_metrics, load_tasks
from tigon.train import start
from tigon.train.distributed import reshard, shard
from tigon.weights.entries import RankError

NAMES = ["choices,texts,answers"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    write_model(root / "model")
    write_tasks(root / "tasks")
    return root


def measure(lm: TigonLM, root: Path, **options: Any) -> dict[str, Any]:
    """The metrics, what was answered, and the passes and tokens of this process."""
    tasks = load_tasks(NAMES, str(root / "tasks"))
    passes: list[int] = []
    hook = lm.model.register_forward_pre_hook(lambda _, args: passes.append(args[0].numel()))
    results = evaluate_tasks(lm, tasks, **options)
    hook.remove()
    texts = [instance.resps for instance in tasks["tasks"]["answers"].instances]
    found = {"metrics": flatten_metrics(results), "texts": texts}
    return found | {"passes": len(passes), "tokens": sum(passes)}


def on_rank(root: Path) -> None:
    torch.set_num_threads(1)
    with start("cpu") as world:
        found = {"replicas": measure(TigonLM(str(root / "model")), root)}
        tokenizer = tigon.Tokenizer.from_pretrained(root / "model")
        model = tigon.from_pretrained(str(root / "model")).train()
        shard(model, world, torch.float32)
        lm = TigonLM(model, tokenizer)
        for name, limit in (("sharded", None), ("sharded, few", 1)):
            found[name] = measure(lm, root, limit=limit)
        assert model.training
        # Training goes on: what evaluation has gathered is no inference tensor
        reshard(model)
        ids = torch.arange(12)[None]
        model(ids, labels=ids).loss.backward()
        found["stopped"] = stops(lm, root)
        found["error"] = fails(lm, root, world.rank)
        (root / f"rank-{world.rank}.json").write_text(json.dumps(found))


def stops(lm: TigonLM, root: Path) -> bool:
    """Whether an error that a pass has on all ranks is raised on all, also by one without work."""

    def stop(*_: Any) -> None:
        raise ArithmeticError

    hook = lm.model.register_forward_pre_hook(stop)
    try:
        evaluate_tasks(lm, load_tasks(["texts"], str(root / "tasks")), limit=1)
    except ArithmeticError:
        return True
    finally:
        hook.remove()
    return False


def fails(lm: TigonLM, root: Path, rank: int) -> str:
    """What is raised where the second rank fails after its first pass."""
    score = module.log_likelihoods

    def broken(*args: Any, **options: Any) -> Any:
        score(*args, **options)
        raise ValueError("out of luck")

    module.log_likelihoods = broken if rank == 1 else score
    try:
        measure(lm, root)
    except (ValueError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_answer_as_one_process(root: Path, count: int) -> None:
    Ranks(count, on_rank, root).finish()
    ranks = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(count)]
    lm = TigonLM(str(root / "model"))
    alone = {None: measure(lm, root), 1: measure(lm, root, limit=1)}
    for name, limit in (("replicas", None), ("sharded", None), ("sharded, few", 1)):
        for rank in ranks:
            assert rank[name]["metrics"] == pytest.approx(alone[limit]["metrics"], rel=1e-5)
            assert rank[name]["texts"] == alone[limit]["texts"]
    passes = [[rank[name]["passes"] for rank in ranks] for name in ("sharded", "sharded, few")]
    assert all(len({*counts}) == 1 for counts in passes), passes
    assert sum(rank["replicas"]["tokens"] for rank in ranks) < 1.2 * alone[None]["tokens"]
    assert all(rank["stopped"] for rank in ranks)
    errors = [rank["error"] for rank in ranks]
    assert errors[1] == "ValueError: out of luck"
    assert {*errors[:1], *errors[2:]} == {"RankError: another rank has failed in an evaluation"}
