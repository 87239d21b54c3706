"""Losses and their gradients against TRL's own code, on the same log-probabilities.

# P pairs, T tokens of a padded sequence
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tigon.train.tasks import losses
from tigon.train.tasks.losses import Clip, Scores

trl = pytest.importorskip("trl")

P, T = 7, 9
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def same(value: Any) -> Any:
    return value


ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    gather=same,
    gather_for_metrics=same,
    reduce=lambda x, reduction: x,
    num_processes=1,
)


def bare(trainer: Any, **settings: Any) -> Any:
    """TRL's trainer without a model and data, to call its methods."""
    made = object.__new__(trainer)
    vars(made).update(
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        **settings,
    )
    return made


class Answers:
    """Log-probabilities [2 P, T] of answers of uneven lengths: the chosen ones first, as in TRL."""

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        self.mask = torch.zeros(2 * P, T, dtype=torch.int64)
        for row in self.mask:
            start, length = int(torch.randint(1, 4, ())), int(torch.randint(1, 6, ()))
            row[start : start + length] = 1
        learned = self.mask[:, 1:]
        self.logprobs = (torch.randn(2 * P, T - 1) - 2).clamp(max=-0.01).requires_grad_()
        self.reference = (torch.randn(2 * P, T - 1) - 2).clamp(max=-0.01)
        self.learned = learned

    def outputs(self, **_: Any) -> Any:
        """What TRL's model with a fused head gives: 0 where nothing is learned."""
        nothing = torch.zeros(2 * P, T - 1)
        return SimpleNamespace(
            log_probs=self.logprobs * self.learned,
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
        )

    def inputs(self) -> dict[str, Tensor]:
        ids = torch.ones(2 * P, T, dtype=torch.int64)
        chosen, rejected = (self.reference * self.learned).sum(1).chunk(2)
        references = {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return {"input_ids": ids, "attention_mask": ids, "completion_mask": self.mask, **references}

    def scores(self, *, reference: bool = True) -> Scores:
        logprobs = (self.logprobs * self.learned).sum(1)
        ratios = logprobs - (self.reference * self.learned).sum(1) * reference
        return Scores(*ratios.chunk(2), *self.learned.sum(1).chunk(2))

    def compare(self, ours: Tensor, theirs: Tensor) -> None:
        assert ours.dtype == torch.float32 and ours.shape == ()
        torch.testing.assert_close(ours, theirs, **CLOSE)
        (a,), (b,) = (
            torch.autograd.grad(x, [self.logprobs], retain_graph=True) for x in (ours, theirs)
        )
        assert a.abs().max() > 1e-4
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("loss_type", losses.DPO)
def test_losses_of_log_ratios(loss_type: str, beta: float) -> None:
    answers = Answers()
    smoothing = 0.2 if loss_type == "robust" else 0.0
    trainer = bare(
        trl.DPOTrainer,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
    )
    theirs = trainer._compute_loss(answers.outputs, answers.inputs(), False)
    ours = losses.DPO[loss_type](answers.scores(), beta, smoothing).mean()
    answers.compare(ours, theirs)


def cpo_trainer(**settings: Any) -> Any:
    module = pytest.importorskip("trl.experimental.cpo")
    return bare(module.CPOTrainer, alpha=0.0, **settings)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", [*losses.CPO, "simpo"])
def test_losses_without_a_reference(loss_type: str, smoothing: float) -> None:
    answers, beta, gamma = Answers(1), 0.7, 0.4
    scores = answers.scores(reference=False)
    trainer = cpo_trainer(
        loss_type=loss_type, beta=beta, simpo_gamma=gamma, label_smoothing=smoothing
    )
    given = scores.means() if loss_type in ("ipo", "simpo") else scores
    theirs = trainer.cpo_loss(given.chosen, given.rejected)[0].mean()
    if loss_type == "simpo":
        ours = losses.simpo(scores, beta, smoothing, gamma=gamma).mean()
    else:
        ours = losses.CPO[loss_type](scores, beta, smoothing).mean()
    answers.compare(ours, theirs)


def test_label_smoothing_of_log_ratios() -> None:
    answers = Answers(2)
    scores = answers.scores()
    trainer = cpo_trainer(loss_type="sigmoid", beta=0.3, label_smoothing=0.15)
    theirs = trainer.cpo_loss(scores.chosen, scores.rejected)[0].mean()
    answers.compare(losses.DPO["sigmoid"](scores, 0.3, 0.15).mean(), theirs)


def test_odds_ratio() -> None:
    module = pytest.importorskip("trl.experimental.orpo")
    answers = Answers(3)
    scores = answers.scores(reference=False)
    means = scores.means()
    trainer = bare(module.ORPOTrainer, beta=0.3)
    theirs, *_, odds = trainer.odds_ratio_loss(means.chosen, means.rejected)
    ours, log_odds = losses.orpo(scores, 0.3)
    answers.compare(ours.mean(), -theirs.mean())
    torch.testing.assert_close(log_odds.mean(), odds, **CLOSE)
    near = torch.tensor([0.0, -1e-6, -0.5, -20.0, -200.0], requires_grad=True)
    one = torch.ones(5)
    value, _ = losses.orpo(Scores(near, torch.full((5,), -1.0), one, one), 1.0)
    (gradient,) = torch.autograd.grad(value.sum(), [near])
    assert gradient.isfinite().all()


@pytest.mark.parametrize("positive", [0, 3, P, 2 * P])
def test_kto(positive: int) -> None:
    answers, mismatched = Answers(4), Answers(5)
    labels = torch.zeros(2 * P, dtype=torch.bool)
    labels[torch.randperm(2 * P)[:positive]] = True
    trainer = bare(
        trl.KTOTrainer,
        calculate_KL=True,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.2,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )

    class Model:
        def __call__(self, *, input_ids: Tensor, **_: Any) -> Any:
            return (mismatched if input_ids[0, 0] == 2 else answers).outputs()

    inputs = answers.inputs()
    other = mismatched.inputs()
    reference = (answers.reference * answers.learned).sum(1)
    other_reference = (mismatched.reference * mismatched.learned).sum(1)
    inputs |= {
        "label": labels,
        "ref_logps": reference,
        "ref_KL_logps": other_reference,
        "KL_input_ids": 2 * other["input_ids"],
        "KL_attention_mask": other["attention_mask"],
        "KL_completion_mask": other["completion_mask"],
    }
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        del inputs[name]
    theirs = trainer._compute_loss(Model(), inputs, False)
    ratios = (answers.logprobs * answers.learned).sum(1) - reference
    kl = ((mismatched.logprobs * mismatched.learned).sum(1) - other_reference).mean()
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    ours = losses.kto(ratios, labels, kl.detach().clamp(min=0), beta=0.2, **weights).mean()
    answers.compare(ours, theirs)


@pytest.mark.parametrize("center", [0.0, 0.01])
@pytest.mark.parametrize("with_margin", [False, True])
def test_rewards(with_margin: bool, center: float) -> None:
    torch.manual_seed(6)
    rewards = torch.randn(2 * P, 1, requires_grad=True)
    margin = torch.rand(P)
    trainer = bare(
        trl.RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=center or None)
    )
    inputs = {"margin": margin} if with_margin else {}
    theirs = trainer.compute_loss(lambda **_: SimpleNamespace(logits=rewards), dict(inputs))
    chosen, rejected = rewards.squeeze(1).chunk(2)
    ours = losses.bradley_terry(
        chosen, rejected, margin if with_margin else 0.0, center=center
    ).mean()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    (a,), (b,) = (torch.autograd.grad(x, [rewards]) for x in (ours, theirs))
    torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("delta", [None, 1.3])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_policy_gradients(loss_type: str, level: str, beta: float, delta: float | None) -> None:
    answers = Answers(7)
    mask = answers.learned
    old = answers.logprobs.detach() + 0.3 * torch.randn(2 * P, T - 1)
    advantages = torch.randn(2 * P)
    trainer = bare(
        trl.GRPOTrainer,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=0.28,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=T - 1,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        answers.logprobs,
        torch.zeros(2 * P, T - 1),
        None,
    )
    ids = torch.ones(2 * P, T - 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": answers.reference,
        "num_items_in_batch": mask.sum(),
    }
    theirs = trainer._compute_loss(None, inputs)
    log_ratios = answers.logprobs - old
    if level == "sequence":
        mean = (log_ratios * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        log_ratios = mean.expand_as(log_ratios)
    chosen = losses.cispo if loss_type == "cispo" else losses.policy_gradient
    clip = Clip(0.2, 0.28, delta)
    each, _ = chosen(answers.logprobs, log_ratios, advantages[:, None].expand(-1, T - 1), clip)
    if beta:
        each = each + beta * losses.divergence(answers.logprobs, answers.reference)
    if loss_type == "grpo":
        ours = ((each * mask).sum(1) / mask.sum(1)).mean()
    elif loss_type == "dr_grpo":
        ours = (each * mask).sum() / (2 * P * (T - 1))
    else:
        ours = (each * mask).sum() / mask.sum()
    answers.compare(ours, theirs)


@pytest.mark.parametrize("surrogate", [losses.policy_gradient, losses.cispo])
@pytest.mark.parametrize(("advantage", "delta"), [(0.0, None), (1.0, None), (-1.0, 1.3)])
def test_a_ratio_that_overflows_is_clipped_as_others(
    surrogate: Any, advantage: float, delta: float | None
) -> None:
    """As of a sampler that writes -9999 for what it holds to be impossible."""
    found = []
    for apart in (50.0, 9999.0):
        logprobs = torch.tensor([-0.5], requires_grad=True)
        old, own = -0.5 - apart, torch.tensor([advantage])
        each, clipped = surrogate(logprobs, logprobs - old, own, Clip(delta=delta))
        (gradient,) = torch.autograd.grad(each.sum(), [logprobs])
        found.append((each.item(), gradient.item(), clipped.item()))
    assert found[1] == found[0] and np.isfinite(found[0]).all()


def test_a_ratio_that_nothing_bounds_is_not_hidden() -> None:
    each, _ = losses.policy_gradient(*torch.tensor([[-0.5], [9999.0], [-1.0]]), Clip())
    assert each.item() == torch.inf
