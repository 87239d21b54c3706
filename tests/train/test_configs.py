"""Every file of configs/ trains: two steps of a tiny model of its family."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.train_cases import MODELS, config
from tests.support.small import LLAMA, write_chats, write_model, write_tokenizer
from tests.train import preferences
from tigon.train import load, main, tasks
from tigon.train.choices import StepChoice, resolve_choices
from tigon.train.distributed import World
from tigon.train.logging import read_metrics

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
# `make quickstart` runs the first, bench/recipes.py the others
EXAMPLES = ("quickstart", "recipe_dpo", "recipe_lora")
READY = [path for path in CONFIGS if path.stem not in EXAMPLES]
FAMILIES: dict[str, dict[str, Any]] = {
    "smollm2": {},
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "gemma": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
    },
}  # fmt: skip

SMOLLM2 = config("llama", 49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True)
SIZES: dict[str, dict[str, Any]] = {  # of the real models
    "smollm2_135m": SMOLLM2,
    "llama_3_2_1b": MODELS["Llama-3.2-1B"][2],
    "llama_3_1_8b": MODELS["Llama-3.1-8B"][2],
    "mistral_7b": config("mistral", 32768, 4096, 14336, 32, 32, 8, 128, tie_word_embeddings=False),
    "gemma_3_1b": MODELS["Gemma3-1B"][2],
    "qwen3_4b": MODELS["Qwen3-4B"][2],
    "qwen3_30b_a3b": MODELS["Qwen3-30B-A3B"][2] | {"num_hidden_layers": 48},
}
SIZES["mistral_7b"] |= {"sliding_window": None}
PAIRED = "dpo", "orpo", "reward"
LOSSES = {  # between which the first two are
    "sft": (4, 8),
    "pretrain": (4, 8),
    "dpo": (0.69, 0.7),  # log 2 at first
    "kto": (0.49, 0.51),  # a half at first
    "orpo": (4, 8),
    "reward": (0.3, 1.5),  # log 2 at a margin of 0
    "grpo": (-2, 2),
    "distill": (0.5, 2),
}


BUDGETS = {80: 74, 24: 20.5}  # GiB for tensors of GPUs with so many GB: of an H100 and an RTX 4090
TASKS = {load(path).task: path for path in READY}
BY_TASK = [*TASKS.values(), *(path for path in READY if path not in TASKS.values())]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of all tasks, and a tokenizer."""
    root = tmp_path_factory.mktemp("configs")
    write_tokenizer(root / "tokenizer")
    chats = write_chats(root / "sft.jsonl", 40).read_text().splitlines()
    texts = [" ".join(m["content"] for m in json.loads(line)["messages"]) for line in chats]
    rows = [json.dumps({"text": text}) for text in texts]
    for task, lines in ("sft", chats), ("distill", chats), ("pretrain", rows):
        (root / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
        (root / f"{task}-held-out.jsonl").write_text("\n".join(lines[:1]) + "\n")
    of_tasks = dict.fromkeys(PAIRED, preferences.pairs)
    of_tasks |= {"kto": preferences.labeled, "grpo": preferences.rewarded}
    for task, make in of_tasks.items():
        preferences.write(root / f"{task}.jsonl", make(40))
        preferences.write(root / f"{task}-held-out.jsonl", make(2))
    write_model(root / "teacher", initializer_range=0.2)
    return root


@pytest.mark.slow(first=len(TASKS))
@pytest.mark.parametrize("path", BY_TASK, ids=lambda path: path.stem)
def test_two_steps(path: Path, files: Path, tmp_path: Path) -> None:
    family = max((f for f in FAMILIES if path.stem.startswith(f)), key=len)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | FAMILIES[family]))
    config = load(path)
    small = {
        "run_dir": tmp_path / "run", "model": "", "init": tmp_path / "config.json",
        "tokenizer": files / "tokenizer", "data": files / f"{config.task}.jsonl",
        "eval_data": files / f"{config.task}-held-out.jsonl", "seq_len": 64, "batch_size": 2,
        "micro_batch_size": 1, "epochs": "null", "steps": 2, "workers": 0, "device": "cpu",
        "export": "false",
    }  # fmt: skip
    if config.max_length is not None:
        assert config.seq_len >= 2 * config.max_length  # both answers of a row fit
        small |= {"seq_len": 96, "max_length": "null"}
    if config.teacher:
        small["teacher"] = files / "teacher"
    main([str(path), *(f"{key}={value}" for key, value in small.items())])
    losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
    least, most = LOSSES[config.task]
    assert len(losses) == 2 and all(least < loss < most for loss in losses)
    assert Path(config.run_dir).name == path.stem


def chosen_for(path: Path, changes: list[str], gpus: int, gigabytes: int, root: Path) -> StepChoice:
    """What a config's run chooses on GPUs with so much memory, with these changes."""
    (root / "config.json").write_text(json.dumps(SIZES[path.stem.rsplit("_", 1)[0]]))
    own = [
        "model=",
        f"init={root}/config.json",
        "tokenizer=x",
        f"memory_budget={BUDGETS[gigabytes]}",
    ]
    if load(path).teacher:
        (root / "teacher").mkdir(exist_ok=True)
        (root / "teacher/config.json").write_text(json.dumps(SIZES["llama_3_1_8b"]))
        own.append(f"teacher={root}/teacher")
    config, world = load(path, [*own, *changes]), World(0, 1, torch.device("cpu"))
    task = tasks.TASKS[config.task](config, world)
    task.share_prompts = task.one_prompt
    choice = resolve_choices(config, world, task, None, gpus, torch.device("cuda"))[1]
    assert choice is not None
    return choice


@pytest.mark.slow(first=len(TASKS))
@pytest.mark.parametrize("path", BY_TASK, ids=lambda path: path.stem)
def test_memory_in_the_first_lines(path: Path, tmp_path: Path) -> None:
    """As it is chosen on the GPUs that the first line names, and with the change for one."""
    text = path.read_text()
    first = re.match(r".*, on (one|8) GPUs? of (80|24) GB: (\d+) GiB each, estimated\.\n", text)
    assert first is not None
    said = [(1 if first[1] == "one" else 8, "", first[3])]
    said += [(1, *found) for found in re.findall(r"# On one: (.*), (\d+) GiB\.\n", text)]
    for gpus, changes, gib in said:
        choice = chosen_for(path, changes.split(), gpus, int(first[2]), tmp_path)
        assert abs(choice.total / 2**30 - int(gib)) <= 0.6, choice
        assert not choice.offload
