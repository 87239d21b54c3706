"""Curves of the trainer against TRL's trainers: the same model, rows and optimizer."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tigon
from tests.support.small import write_chats, write_model
from tests.train import preferences
from tigon.data.encode_answers import compute_advantages
from tigon.models.adapters.adapters import init_adapter
from tigon.train import main

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

ROWS, LR = 8, 1e-3
STEPS = 15
SEED = 7
SAME = {"batch_size": ROWS, "micro_batch_size": ROWS, "lr": LR, "schedule": "constant"}


def ours(
    workspace: Any, name: str, rows: list[dict[str, Any]], steps: int = STEPS, **settings: Any
) -> str:
    """The name of a run over all rows at each step."""
    data = preferences.write(workspace.root / f"{name}.jsonl", rows)
    changes = {"data": data, "packing": "false", **SAME, **settings}
    main(workspace.settings(name, **changes, steps=steps, max_grad_norm=0, log_every=1))
    return name


def theirs(
    workspace: Any,
    trainer: Any,
    config: Any,
    rows: list[dict[str, Any]],
    classifier: Any = None,
    steps: int = STEPS,
    given: dict[str, Any] | None = None,
    prepare: Callable[[Any], Any] = lambda model: model,
    **settings: Any,
) -> list[dict[str, float]]:
    """What TRL logs of each step. `given`: to the trainer, besides; `prepare` wraps the model."""
    cls, path = transformers.AutoModelForCausalLM, workspace.model
    if classifier is not None:
        cls, path = transformers.AutoModelForSequenceClassification, classifier
    model = cls.from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        workspace.model, pad_token="<|endoftext|>"
    )
    if not issubclass(trainer, trl.GRPOTrainer):
        settings["max_length"] = 128
    arguments = config(
        output_dir=str(workspace.root / "trl"),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=LR,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        **settings,
    )
    made = trainer(
        model=prepare(model),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **(given or {}),
    )
    made.train()
    return [row for row in made.state.log_history if "loss" in row]


def assert_same(workspace: Any, run: str, rows: list[dict[str, float]], *names: str) -> None:
    assert len(rows) == STEPS
    for name in ("loss", *names):
        curve = torch.tensor(workspace.metrics(run, name), dtype=torch.float64)
        expected = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        assert curve.std() > 1e-4, name  # it moves
        difference = (curve - expected).abs().max().item()
        assert difference <= 1e-4 * max(1.0, expected.abs().max().item()), (name, difference)


REWARDS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("loss_type", ["sigmoid", "robust"])  # the others: test_losses.py
def test_dpo(workspace: Any, loss_type: str) -> None:
    rows = preferences.pairs(ROWS)
    smoothing = 0.1 if loss_type == "robust" else 0.0
    settings = {"beta": 0.3, "label_smoothing": smoothing, "loss_type": loss_type}
    run = ours(workspace, f"dpo-{loss_type}", rows, task="dpo", **settings)
    found = theirs(workspace, trl.DPOTrainer, trl.DPOConfig, rows, **settings)
    assert_same(workspace, run, found, *REWARDS, "rewards/accuracies")


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"rslora": True, "dora": True},
    # The reference has the base's own embedding and head, of which one is trained whole
    "ends": {"targets": ["all-linear", "embed_tokens"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ADAPTERS)
def test_dpo_with_an_adapter(workspace: Any, case: str) -> None:
    """Beside TRL with PEFT, which begins with our adapter; packed, each prompt computed once."""
    peft = pytest.importorskip("peft")
    rows, name, more = preferences.pairs(ROWS), f"dpo-adapter-{case}", ADAPTERS[case]
    settings = {"lora.rank": 8, "lora.alpha": 16} | {f"lora.{k}": v for k, v in more.items()}
    settings |= {"task": "dpo", "packing": "true", "seq_len": 512, "batch_size": 64, "seed": SEED}
    run = ours(workspace, name, rows, **settings)
    model = tigon.from_pretrained(workspace.model)
    model.add_adapter(tigon.LoraConfig(rank=8, alpha=16, **more))
    init_adapter(model, generator=torch.Generator().manual_seed(SEED))
    model.save_adapter(workspace.root / f"{name}-first")
    found = theirs(
        workspace,
        trl.DPOTrainer,
        trl.DPOConfig,
        rows,
        prepare=lambda base: peft.PeftModel.from_pretrained(
            base, workspace.root / f"{name}-first", is_trainable=True
        ),
    )
    assert_same(workspace, run, found, *REWARDS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo"])
def test_cpo_and_simpo(workspace: Any, loss_type: str) -> None:
    module = pytest.importorskip("trl.experimental.cpo")
    rows = preferences.text_pairs(ROWS, 1)  # TRL's adds eos to chats too, behind their last turn
    shared = {"beta": 0.7, "cpo_alpha": 0.5}
    own = {"task": "cpo", "loss_type": loss_type, **shared}
    if loss_type == "simpo":
        shared["simpo_gamma"] = 0.4
        own = {"task": "simpo", **shared}
    run = ours(workspace, f"cpo-{loss_type}", rows, **own)
    shared |= {"loss_type": loss_type}
    found = theirs(workspace, module.CPOTrainer, module.CPOConfig, rows, **shared)
    assert_same(workspace, run, found, *REWARDS, "nll_loss")


@pytest.mark.timeout(300)
def test_orpo(workspace: Any) -> None:
    module = pytest.importorskip("trl.experimental.orpo")
    rows = preferences.text_pairs(ROWS, 2)
    run = ours(workspace, "orpo", rows, task="orpo", beta=0.3)
    found = theirs(workspace, module.ORPOTrainer, module.ORPOConfig, rows, beta=0.3)
    assert_same(workspace, run, found, *REWARDS, "nll_loss", "log_odds_ratio", "log_odds_chosen")


@pytest.mark.timeout(300)
def test_kto(workspace: Any) -> None:
    rows = preferences.labeled(ROWS, 3)
    settings = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8}
    run = ours(workspace, "kto", rows, task="kto", **settings)
    found = theirs(workspace, trl.KTOTrainer, trl.KTOConfig, rows, **settings)
    assert_same(workspace, run, found, *REWARDS, "kl")


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("dapo", "token"), ("grpo", "sequence"), ("dr_grpo", "token"), ("cispo", "token")],
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
