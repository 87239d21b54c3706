"""What ranks that share the tokens of rows compute, beside what each computes of whole rows.

Without transformers, whose import would take each rank seconds.

# B batch, T tokens
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.kernels.loss.terms import KL, CrossEntropy, LogProbs
from tigon.models import MODELS, Batch, CausalLM, CausalLMOutput, LoraConfig, Targets
from tigon.models.adapters.adapters import adapter_parameters
from tigon.models.moe import MoEConfig
from tigon.parallel import gather_output, share_context

Result = dict[str, Tensor]


def model_of(config: dict[str, Any]) -> CausalLM:
    """Norms and biases are random, and matrices so large that no error hides."""
    torch.manual_seed(0)
    model = MODELS[config["model_type"]].from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1 else 0.1 * torch.randn_like(p))
    return model


def draw(*shape: int, most: int = 90) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(sum(shape)))


def packed_and_padded() -> dict[str, Any]:
    """As the loader has it: sequences of 3, 6 and 4 and none; of 9 and padding of 4."""
    lengths = [3, 6, 4, 9, 4]
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, 9:] = False
    return {
        "input_ids": draw(2, 13),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).view(2, 13),
        "attention_mask": real,
        "cu_seq_lens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_length_q": 9,
    }


def padded() -> dict[str, Any]:
    """Rows of 11, 2 and 7 tokens, padded at different ends: a rank has nothing of a row."""
    real = torch.ones(3, 11, dtype=torch.long)
    real[1, 2:] = 0
    real[2, :4] = 0
    return {"input_ids": draw(3, 11), "attention_mask": real}


def restarting(*lengths: int) -> dict[str, Any]:
    return {
        "input_ids": draw(1, sum(lengths)),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "packed and padded": packed_and_padded,
    "padded": padded,
    "restarting": lambda: restarting(5, 11, 1),
    "a sequence from the last token of a rank": lambda: restarting(8, 9),
    "long": lambda: {"input_ids": draw(1, 31)},
    "two tokens each": lambda: {"input_ids": draw(2, 4)},
    "three tokens": lambda: {"input_ids": draw(2, 3)},
}


def labels_of(batch: dict[str, Any]) -> Tensor:
    """With ignored ones, and nothing to learn on the last tokens."""
    labels = batch["input_ids"].clone()
    if "attention_mask" in batch:
        labels[~batch["attention_mask"].bool()] = -100
    labels[:, 1::5] = -100
    return labels


def upstream(x: Tensor) -> Tensor:
    """A gradient other than 1, the same on all ranks."""
    return torch.linspace(-1, 1, x.numel()).view(x.shape)


def trained(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    routing = ("expert_load", "aux_loss") if isinstance(model.config, MoEConfig) else ()
    metrics = "predicted_tokens", "entropy", *routing
    return model(**batch, labels=labels_of(batch), metrics=metrics)


def by_sequence(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    weights = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    more: dict[str, Any] = {"loss_reduction": "sequence", "label_smoothing": 0.1, "z_loss": 1e-2}
    return model(**batch, labels=labels_of(batch), loss_weights=weights, **more)


def of_a_larger_step(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    return model(**batch, labels=labels_of(batch), num_items_in_batch=100)


def per_token(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    return model(**batch, labels=labels_of(batch), loss_reduction="none", return_logits=True)


def log_probabilities(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    return model(**batch, labels=labels_of(batch), criteria=(LogProbs(metrics=("nll",)),))


def kept(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    more: dict[str, Any] = {"logits_to_keep": 3, "logits_at": logits_at(batch), "metrics": "nll"}
    return model(**batch, labels=labels_of(batch), **more)


def logits_at(batch: dict[str, Any]) -> Tensor:
    return (batch["input_ids"] % 7 < 4).flatten().nonzero()[:, 0]


def kept_by_index(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    keep = index_per_row(batch)
    return model(**batch, labels=labels_of(batch), logits_to_keep=keep, loss_reduction="sum")


def index_per_row(batch: dict[str, Any]) -> Tensor:
    b, t = batch["input_ids"].shape
    return (torch.arange(3)[None] + torch.arange(b)[:, None]) % t


def logits(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    return model(**batch)


def distilled(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    """From the model as it is, which the same ranks share."""
    with torch.no_grad():
        hidden = model(**batch, logits_to_keep=1, return_hidden=True).hidden * 0.9
    stored = {"teacher_tokens": (batch["input_ids"][..., None] + torch.arange(3)) % 90}
    stored["teacher_logprobs"] = -torch.arange(1.0, 4).expand(stored["teacher_tokens"].shape)
    kl = KL(teacher_hidden=hidden, teacher=model.lm_head, beta=0.3)
    return model(**batch, labels=labels_of(batch), criteria=(kl, KL(**stored), CrossEntropy()))


def without_gradients(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    with torch.no_grad():
        out = model(**batch, return_logits=True, labels=labels_of(batch))
        out.metrics |= model(**batch, metrics=("max_logit", "entropy")).metrics
    return out


def dropped(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    """An adapter's inputs, by keys of whole rows."""
    if not model.adapters:
        model.add_adapter(LoraConfig(rank=2, dropout=0.4))
        for i, p in enumerate(adapter_parameters(model, "default").values()):
            p.data = 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return model(**batch, labels=labels_of(batch), dropout_keys=draw(*batch["input_ids"].shape))


def generated(model: CausalLM, batch: dict[str, Any]) -> CausalLMOutput:
    """Passes with a cache are made by every rank, whole."""
    ids = model.generate(batch["input_ids"][:, :3], max_new_tokens=4, do_sample=False)
    return CausalLMOutput(logits=ids.float())


CALLS: dict[str, Callable[[CausalLM, dict[str, Any]], CausalLMOutput]] = {
    f.__name__.replace("_", " "): f
    for f in (
        trained,
        by_sequence,
        of_a_larger_step,
        per_token,
        log_probabilities,
        kept,
        kept_by_index,
        logits,
        distilled,
        without_gradients,
        dropped,
        generated,
    )
}


def found(model: CausalLM, call: str, batch: str) -> Result:
    """All that comes out, and the gradients, which ranks add up."""
    rows = BATCHES[batch]()
    out = CALLS[call](model, rows)
    whole = out
    if call != "generated":
        keep = {"kept": 3, "kept by index": index_per_row(rows)}.get(call, 0)
        targets = Targets.of(Batch.of(model, **rows), labels=labels_of(rows), logits_to_keep=keep)
        whole = gather_output(model, out, targets, logits_at(rows) if call == "kept" else None)
    names = "loss", "logits", "logprobs", "aux_loss", "logits_at"
    values = {name: getattr(whole, name) for name in names}
    values |= whole.metrics | {f"criterion {i}": x for i, x in enumerate(whole.criteria)}
    values = {name: x for name, x in values.items() if x is not None}
    # A rank's loss is its part of the sum
    loss = whole.loss if out.loss is None or out.loss.dim() else out.loss
    learned = [x for x in (loss, whole.logprobs, whole.logits) if x is not None and x.requires_grad]
    if learned:
        sum((x * upstream(x)).sum() if x.dim() else x for x in learned).backward()
    gradients = {f"d {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    for x in gradients.values():
        if model.context_ranks is not None:
            x.copy_(model.context_ranks.sum(x))
    model.zero_grad()
    return {name: x.detach() for name, x in (values | gradients).items()}


def compared(case: dict[str, Any], ranks: Any) -> dict[str, float]:
    """How far what the ranks compute together is from what each computes alone, of its largest."""
    model = model_of(case["config"])
    if case["call"] == "dropped":  # on some CPUs, rounding to float32 moves its gradients by 4e-4
        model.double()
    model.activation_checkpointing = case.get("recomputed", False)
    alone = found(model, case["call"], case["batch"])
    share_context(model, ranks)
    model = copy.deepcopy(model)  # which knows the ranks too
    together = found(model, case["call"], case["batch"])
    assert alone.keys() == together.keys(), alone.keys() ^ together.keys()
    errors = {}
    for name, x in alone.items():
        y = together[name]
        assert x.shape == y.shape and x.dtype == y.dtype, (name, x.shape, y.shape)
        x, y = x.double(), y.double()
        errors[name] = float((x - y).abs().max() / x.abs().max().clamp(min=1e-3))
    return errors


def compare_cases(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each case on the ranks that it names."""
    rank, meshes = dist.get_rank(), {}
    for ranks in sorted({tuple(case["ranks"]) for case in cases.values()}):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            meshes[ranks] = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    own = {name: case for name, case in cases.items() if rank in case["ranks"]}
    return {name: compared(case, meshes[tuple(case["ranks"])]) for name, case in own.items()}
