"""What a teacher, or a reference that runs at each step, takes of the memory, as estimated.

# B rows of a micro-batch, T tokens of a row, C model dim
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small import EXPERTS, LLAMA
from tigon.layers import Experts
from tigon.models import MODELS, CausalLM
from tigon.parallel import MeshSizes, keep_rank_zero
from tigon.settings.config import Config, Lora, Parallel
from tigon.train import start
from tigon.train.choices import StepChoice, resolve_choices
from tigon.train.distributed import World
from tigon.train.memory import Estimate, estimate
from tigon.train.model import add_lora
from tigon.train.tasks import TASKS

WORLD = World(0, 1, torch.device("cpu"))
B, T = 4, 256
BLOCK = 512  # bytes that the allocator gives at least
LARGE = LLAMA | {"hidden_size": 128, "intermediate_size": 192}
SMALL_MIXED = EXPERTS | {"num_experts": 4}
MIXED = SMALL_MIXED | {"hidden_size": 128}


Folder = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Makes a directory with a config.json and no weights."""

    def make(values: dict[str, Any]) -> str:
        path = tmp_path_factory.mktemp("other")
        (path / "config.json").write_text(json.dumps(values))
        return str(path)

    return make


def settings(**changes: Any) -> Config:
    given: Any = {"seq_len": T, "micro_batch_size": B, "batch_size": 4 * B} | changes
    return Config(run_dir="run", data=("data",), **({"model": "model"} | given))


def planned(
    config: Config, gpus: int = 1, values: dict[str, Any] = LLAMA, *, lora: bool = False
) -> Estimate:
    model = of(values).to(getattr(torch, config.param_dtype)).train()
    if lora:
        add_lora(model, config)
    objective = TASKS[config.task](config, WORLD)
    return estimate(model, objective, config, gpus, torch.bfloat16)


def of(values: dict[str, Any]) -> CausalLM:
    return MODELS[values["model_type"]].from_config(values, device="meta")


def held(*modules: nn.Module, ranks: int = 1) -> int:
    """Bytes of bfloat16 parameters, of which each rank has a share."""
    found = dict.fromkeys(p for module in modules for p in module.parameters())
    sizes = [2 * -(-len(p) // ranks) * p[0].numel() for p in found]
    return sum(sizes if ranks > 1 else (-(-size // BLOCK) * BLOCK for size in sizes))


def gathered(*modules: nn.Module, ranks: int) -> int:
    return -(-ranks * held(*modules, ranks=ranks) // BLOCK) * BLOCK  # one buffer


HIDDEN = B * T * LARGE["hidden_size"] * 2


def test_teacher_on_one_gpu(folder: Folder) -> None:
    """Its weights and, as long as the loss is computed, its hidden states."""
    config = settings(task="distill", teacher=folder(LARGE))
    alone = planned(settings(task="sft")).kinds
    found = planned(config).kinds
    assert found.pop("teacher") == held(of(LARGE)) + HIDDEN
    # The logits of a chunk, and the teacher's
    assert found.pop("logits and loss") > alone.pop("logits and loss")
    assert found == alone


def divided(teacher: CausalLM, alone: Sequence[nn.Module] = ()) -> int:
    """What FSDP over two ranks has of it after a pass: the group of embedding, norm and head stays
    gathered, and so does the buffer from which the last block was copied. `alone`: of no group."""
    apart = {p for module in alone for p in module.parameters()}
    last = nn.ParameterList(p for p in teacher.model.layers[-1].parameters() if p not in apart)
    rest = nn.ParameterList(p for p in teacher.parameters() if p not in apart)
    ends = teacher.model.embed_tokens, teacher.model.norm, teacher.lm_head
    return held(rest, ranks=2) + gathered(*ends, ranks=2) + gathered(last, ranks=2)


@pytest.mark.parametrize("sharding", ["weights", "gradients"])
def test_teacher_under_fsdp(folder: Folder, sharding: str) -> None:
    """Whatever the model is divided by."""
    config = settings(task="distill", teacher=folder(LARGE), sharding=sharding)
    assert planned(config, 2).kinds["teacher"] == divided(of(LARGE)) + HIDDEN


def test_teacher_under_tensor_parallel(folder: Folder) -> None:
    shared: Any = {"task": "distill", "teacher": folder(LARGE), "parallel": Parallel(tensor=2)}
    teacher = of(LARGE)
    keep_rank_zero(teacher, MeshSizes(tensor=2))
    assert held(teacher) < 0.6 * held(of(LARGE))
    assert planned(settings(**shared), 2).kinds["teacher"] == held(teacher) + HIDDEN


def test_teacher_under_expert_parallel(folder: Folder) -> None:
    """A dense one is divided as without them."""
    shared: Any = {"task": "distill", "parallel": Parallel(expert=2)}
    found = planned(settings(**shared, teacher=folder(LARGE)), 2, SMALL_MIXED)
    assert found.kinds["teacher"] == divided(of(LARGE)) + HIDDEN
    teacher = of(MIXED)
    keep_rank_zero(teacher, MeshSizes(fsdp=2, expert=2))
    experts = [module for module in teacher.modules() if isinstance(module, Experts)]
    assert held(*experts) < 0.6 * held(*(m for m in of(MIXED).modules() if isinstance(m, Experts)))
    found = planned(settings(**shared, teacher=folder(MIXED)), 2, SMALL_MIXED)
    assert found.kinds["teacher"] == held(*experts) + divided(teacher, experts) + HIDDEN


def test_live_reference(folder: Folder) -> None:
    """That of a stream; in bfloat16 if it is another model, and else as the model is."""
    pairs: Any = {"task": "dpo", "packing": False, "model": folder(LLAMA), "reference": ""}
    stream: Any = pairs | {"streaming": True, "steps": 1}
    without = planned(settings(**pairs)).kinds
    assert "reference" not in without
    assert "reference" not in planned(settings(**pairs | {"reference": folder(LARGE)})).kinds
    found = planned(settings(**stream | {"reference": folder(LARGE)})).kinds
    assert found.pop("reference") == held(of(LARGE)) and found == without
    # In float32, of which those of embedding and head are in bfloat16 besides
    found = planned(settings(**stream)).kinds
    expected = without["parameters"] + without["gathered weights"]
    assert found.pop("reference") == expected and found == without
    lora: Any = {"lora": Lora(rank=2)}  # without its adapter the model is its own
    assert "reference" not in planned(settings(**stream, **lora), lora=True).kinds


def test_padded_teacher_vocabulary_is_not_counted(folder: Folder) -> None:
    same, more = (
        planned(settings(task="distill", teacher=folder(LARGE | {"vocab_size": size})))
        for size in (321, 322)
    )
    assert more.kinds == same.kinds


def test_auto_checkpointing_makes_room_for_teacher(folder: Folder) -> None:
    """activation_checkpointing=auto: what fits alone does not beside it."""
    model = folder(LLAMA)
    alone = settings(task="sft", model=model)
    tight = (planned(alone).total + 2**16) / 2**30
    given: Any = {"model": model, "activation_checkpointing": "auto", "memory_budget": tight}
    given |= {"sharding": "full"}

    def chosen(config: Config) -> StepChoice:
        task, cuda = TASKS[config.task](config, WORLD), torch.device("cuda")
        choice = resolve_choices(config, WORLD, task, None, 1, cuda)[1]
        assert choice is not None
        return choice

    with start("cpu"):
        assert chosen(settings(task="sft", **given)).blocks == 0
        found = chosen(settings(task="distill", teacher=folder(LARGE), **given))
    assert found.blocks > 0
