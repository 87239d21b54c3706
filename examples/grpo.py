"""Learning from rewards: a model answers prompts, answers are rewarded, and it learns from them.

    python examples/grpo.py HuggingFaceTB/SmolLM2-135M-Instruct --out runs/grpo

Each round samples several answers to some prompts with the model's own `generate`, gives each its
reward, and takes a few steps of GRPO's loss over them (`epochs`), which is what `task: grpo` of
`tigon train` does with answers that are in files. Here the prompts are sums of two numbers, and the
reward is whether the answer has the right one; bring your own `Reward` for anything else.

# P prompts, G answers to each, B = P G, T tokens of the longest sequence
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import tigon
from tigon.data.encode_answers import compute_advantages
from tigon.kernels.loss.terms import LogProbs
from tigon.models import CausalLM
from tigon.train.tasks.losses import Clip, divergence, policy_gradient

CLIP = Clip(0.2, 0.28)
Reward = Callable[[str, str], float]  # of a prompt and an answer


@dataclass(frozen=True)
class Settings:
    rounds: int = 20
    prompts: int = 8  # of a round
    group: int = 8  # answers to each
    epochs: int = 2  # steps over the answers of a round
    max_new_tokens: int = 32
    temperature: float = 1.0
    lr: float = 1e-6
    beta: float = 0.0  # weight of the divergence from the model as it was
    clip: Clip = CLIP
    seed: int = 0


class Answers(NamedTuple):
    ids: Tensor  # [B, T], prompts and answers, padded on both sides
    mask: Tensor  # bool [B, T], False on padding
    answered: Tensor  # bool [B, T], the tokens of answers
    texts: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory or a hub repository")
    parser.add_argument("--out", required=True, help="new directory for the model")
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--lr", type=float, default=Settings.lr)
    parser.add_argument("--beta", type=float, default=Settings.beta)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = tigon.from_pretrained(args.model, device=args.device, dtype="float32")
    tokenizer = tigon.Tokenizer.from_pretrained(args.model)
    draw = random.Random(0)
    pairs = [(draw.randrange(2, 50), draw.randrange(2, 50)) for _ in range(256)]
    prompts = [f"What is {a} + {b}? Answer with the number alone." for a, b in pairs]
    right = {prompt: str(a + b) for prompt, (a, b) in zip(prompts, pairs, strict=True)}
    settings = Settings(rounds=args.rounds, lr=args.lr, beta=args.beta)
    learn(model, tokenizer, prompts, lambda p, text: float(right[p] in text.split()), settings)
    model.save_pretrained(args.out, tokenizer=tokenizer)


def learn(
    model: CausalLM,
    tokenizer: tigon.Tokenizer,
    prompts: Sequence[str],
    reward: Reward,
    settings: Settings,
) -> list[float]:
    """Train the model in place; the mean reward of each round."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=0.0)
    initial = {k: v.clone() for k, v in model.state_dict().items()} if settings.beta else {}
    draw, means = random.Random(settings.seed), []
    for number in range(settings.rounds):
        chosen = draw.sample(list(prompts), min(settings.prompts, len(prompts)))
        answers = sample(model, tokenizer, chosen, settings, seed=settings.seed + number)
        asked = [prompt for prompt in chosen for _ in range(settings.group)]
        rewards = torch.tensor([reward(*one) for one in zip(asked, answers.texts, strict=True)])
        grouped = rewards.view(-1, settings.group).double().numpy()
        advantages = torch.cat([torch.from_numpy(compute_advantages(row)) for row in grouped])
        advantages = advantages.float().to(model.device)[:, None]
        with torch.no_grad():
            old = logprobs(model, answers)
            reference = of_initial(model, initial, answers) if initial else None
        for _ in range(settings.epochs):
            now = logprobs(model, answers)
            each, _ = policy_gradient(now, now - old, advantages.expand_as(now), settings.clip)
            if reference is not None:
                each = each + settings.beta * divergence(now, reference)
            # The answer's tokens are predicted one place before them
            counted = answers.answered.roll(-1, 1)
            loss = (each * counted).sum() / counted.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        means.append(rewards.mean().item())
        length = answers.answered.sum(1).double().mean().item()
        print(
            f"round {number + 1}: reward {means[-1]:.3f}, {length:.1f} tokens an answer", flush=True
        )
    return means


@torch.no_grad()
def sample(
    model: CausalLM,
    tokenizer: tigon.Tokenizer,
    prompts: Sequence[str],
    settings: Settings,
    *,
    seed: int,
) -> Answers:
    """Several answers to each prompt, up to the token that ends them."""
    model.eval()
    asked = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert isinstance(ids, list)
        asked.append(ids)
    prompt_ids, prompt_mask = tokenizer.pad(asked, side="left")
    eos = [i for i in (tokenizer.eos_token_id,) if i is not None]
    ids = model.generate(
        prompt_ids,
        attention_mask=prompt_mask,
        do_sample=True,
        temperature=settings.temperature,
        top_k=None,
        max_new_tokens=settings.max_new_tokens,
        num_return_sequences=settings.group,
        eos_token_id=eos or None,
        seed=seed,
    )
    model.train()
    start = prompt_ids.shape[1]
    ended = torch.isin(ids[:, start:], torch.tensor(eos, device=ids.device))
    said = ended.cumsum(1) - ended.long() == 0  # up to the first end, with it
    prompt_mask = prompt_mask.bool().repeat_interleave(settings.group, 0).to(ids.device)
    answered = torch.cat([torch.zeros_like(prompt_mask), said], dim=1)
    mask = torch.cat([prompt_mask, said], dim=1)
    texts = [
        tokenizer.decode(row[some], skip_special_tokens=True)
        for row, some in zip(ids, answered, strict=True)
    ]
    return Answers(ids, mask, answered, texts)


def logprobs(model: CausalLM, answers: Answers) -> Tensor:
    """fp32 [B, T], of each answer's token at the place before it; no logits [B, T, V] are made."""
    labels = answers.ids.masked_fill(~answers.answered, -100)
    found = model(
        answers.ids, attention_mask=answers.mask, labels=labels, criteria=(LogProbs(),)
    ).logprobs
    assert found is not None
    return found


def of_initial(model: CausalLM, initial: dict[str, Tensor], answers: Answers) -> Tensor:
    """`logprobs` by the model with the weights that it began with."""
    own = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(initial)
    found = logprobs(model, answers)
    model.load_state_dict(own)
    return found


if __name__ == "__main__":
    main()
