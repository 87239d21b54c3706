"""Curves of distillation and policy gradients against TRL's trainers, on given answers.

# G answers of a prompt
"""

import json
from typing import Any

import numpy as np
import pytest
import torch

import tigon
from tests.small import write_chats, write_model
from tests.train import preferences
from tests.train.test_preference_curves import ROWS, assert_same, ours, theirs
from tigon.data.encode import compute_advantages

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
G = 4


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("beta", [0.3, 0.0, 1.0])
def test_distillation(workspace: Any, beta: float) -> None:
    """TRL's with the answers of the data alone (lmbda=0), at its only temperature."""
    module = pytest.importorskip("trl.experimental.gkd")
    teacher = write_model(workspace.root / f"teacher-{beta}", initializer_range=0.2)
    chats = write_chats(workspace.root / "chats.jsonl", 64).read_text().splitlines()
    rows = [row for row in map(json.loads, chats) if len(row["messages"]) == 2][:ROWS]
    own = {"task": "distill", "teacher": teacher, "beta": beta}
    run = ours(workspace, f"distill-{beta}", rows, **own)
    tokenizer, tokens = tigon.Tokenizer.from_pretrained(workspace.model), []
    for row in rows:
        ids, learned = tokenizer.encode_chat(row["messages"])
        end = max(i for i, yes in enumerate(learned) if yes) + 1  # TRL's are all to the end
        mask = [int(yes) for yes in learned[:end]]
        tokens.append({"input_ids": ids[:end], "completion_mask": mask, "prompt": ""})
    read = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    settings = {"beta": beta, "lmbda": 0.0, "given": {"teacher_model": read}}
    assert_same(
        workspace, run, theirs(workspace, module.GKDTrainer, module.GKDConfig, tokens, **settings)
    )


def padded(sequences: list[list[Any]], left: bool = False) -> torch.Tensor:
    longest = max(map(len, sequences))
    zeros = [[0] * (longest - len(s)) for s in sequences]
    return torch.tensor([z + s if left else s + z for s, z in zip(sequences, zeros, strict=True)])


def given_answers(rows: list[dict[str, Any]]) -> Any:
    """TRL's trainer with these answers in place of those that its model would give."""
    prompts = [row["prompt"] for row in rows for _ in row["completions"]]
    answers = [answer for row in rows for answer in row["completions"]]
    old = [logprobs for row in rows for logprobs in row["old_logprobs"]]
    advantages = np.concatenate([compute_advantages(np.array(row["rewards"])) for row in rows])

    class Trainer(trl.GRPOTrainer):
        def _generate_and_score_completions(self, _: Any) -> dict[str, Any]:
            mask = padded([[1] * len(answer) for answer in answers])
            return {
                "prompt_ids": padded(prompts, left=True),
                "prompt_mask": padded([[1] * len(p) for p in prompts], left=True),
                "completion_ids": padded(answers),
                "completion_mask": mask,
                "advantages": torch.tensor(advantages, dtype=torch.float32),
                "num_items_in_batch": mask.sum(),
                "old_per_token_logps": padded(old),
            }

    return Trainer


@pytest.mark.slow(first=4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [
        *(("dapo", "token"), ("grpo", "token"), ("grpo", "sequence"), ("dr_grpo", "token")),
        ("cispo", "token"),
    ],
)
def test_policy_gradients(workspace: Any, loss_type: str, level: str) -> None:
    rows = preferences.rewarded(ROWS // G, each=G)
    settings: dict[str, Any] = {"loss_type": loss_type, "epsilon_high": 0.28}
    settings["importance_sampling_level"] = level
    if loss_type == "dr_grpo":
        settings |= {"max_completion_length": 16, "delta": 1.4}
    run = ours(workspace, f"{loss_type}-{level}", rows, task="grpo", **settings)
    same = [{"prompt": "x"}] * ROWS
    settings |= {"num_generations": G, "beta": 0.0, "generation_batch_size": ROWS}
    given = {"reward_funcs": lambda **_: [0.0] * ROWS}
    found = theirs(workspace, given_answers(rows), trl.GRPOConfig, same, given=given, **settings)
    assert_same(workspace, run, found)
