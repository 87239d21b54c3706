"""Tigon against transformers, on the same weights and tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.eval.layers import LayerError, compare_layers, report_layers
from tigon.eval.perplexity import perplexity_from_loss
from tigon.models import CausalLM, from_pretrained
from tigon.tokenizer import Tokenizer

TEXT = (
    "Steam drove the first railways, and the railways made time a public matter: a train that "
    "leaves at 10:40 needs every station to agree on what 10:40 means. Before them each town kept "
    "its own noon. By 1847 British companies set their clocks by Greenwich, thirty-three years "
    "before the law did.\n\ndef minutes(a: str, b: str) -> int:\n    h, m = map(int, a.split(':'))"
)
LOGITS_TOLERANCE = 1e-5  # of the largest logit, fp32
LOSS_TOLERANCE = 1e-5  # relative, fp32


@dataclass(frozen=True)
class Parity:
    """The differences from transformers in logits, loss and greedy text on the same input."""

    tokens: int
    largest_logit: float
    logits_error: float  # largest absolute difference, fp32
    loss: float
    loss_error: float  # fp32
    greedy_equal: int  # continuation tokens that agree before the first that does not
    greedy_tokens: int
    bf16_error: float  # of a median token's logits, from transformers' in fp32
    transformers_bf16_error: float  # the same of transformers' own in bf16
    layers: tuple[LayerError, ...] = ()  # if they were asked for, in order

    @property
    def checks(self) -> dict[str, tuple[str, float, float]]:
        """Returns by name of a check what is measured, its value and the allowed one."""
        logits, loss = LOGITS_TOLERANCE * self.largest_logit, LOSS_TOLERANCE * abs(self.loss)
        return {
            "fp32 logits": ("max error", self.logits_error, logits),
            "fp32 loss": ("error", self.loss_error, loss),
            "greedy tokens": ("equal", self.greedy_equal, self.greedy_tokens),
            "bf16 logits": ("median", self.bf16_error, 2 * self.transformers_bf16_error),
        }

    @property
    def failures(self) -> list[str]:
        """Returns the names of the checks that fail, and of layers; none means parity."""
        failed = [
            name
            for name, (measure, value, allowed) in self.checks.items()
            if not (value == allowed if measure == "equal" else value <= allowed)
        ]
        return [*failed, *(layer.name for layer in self.layers if layer.departs)]


@torch.no_grad()
def parity(
    path_or_repo: str,
    *,
    revision: str | None = None,
    text: str = TEXT,
    new_tokens: int = 64,
    layers: bool = False,
    device: str = "cpu",
) -> Parity:
    """Compares logits, loss and greedy text with transformers in fp32, and logits in bf16; both
    load the checkpoint. With `layers` each layer too, as `compare_layers` does."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError("parity needs transformers: pip install transformers") from error

    def load_tigon(dtype: torch.dtype) -> CausalLM:
        return from_pretrained(path_or_repo, revision=revision, dtype=dtype, device=device)

    config: Any = AutoConfig.from_pretrained(path_or_repo, revision=revision)
    of_text = type(config) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if of_text else AutoModelForImageTextToText

    def load_transformers(dtype: torch.dtype) -> Any:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        model: Any = auto.from_pretrained(
            path_or_repo, revision=revision, dtype=dtype, attn_implementation="eager"
        )
        if shown:
            logging.enable_progress_bar()
        return model.to(device).eval()

    tokenizer = Tokenizer.from_pretrained(path_or_repo, revision=revision)
    ids = torch.tensor([tokenizer.encode(text)], device=device)
    ours, reference = load_tigon(torch.float32), load_transformers(torch.float32)
    a, b = ours(ids).logits, reference(ids).logits
    loss = reference(ids, labels=ids).loss.item()
    loss_error = abs(ours(ids, labels=ids).loss.item() - loss)
    equal = _count_equal_tokens(ours, reference, ids, new_tokens)
    layer_errors = compare_layers(ours, reference, ids) if layers else []
    del ours, reference
    ours_bf16, theirs_bf16 = load_tigon(torch.bfloat16)(ids), load_transformers(torch.bfloat16)(ids)
    return Parity(
        tokens=ids.shape[1],
        largest_logit=b.abs().max().item(),
        logits_error=(a - b).abs().max().item(),
        loss=loss,
        loss_error=loss_error,
        greedy_equal=equal,
        greedy_tokens=new_tokens,
        bf16_error=_median_error(ours_bf16.logits - b),
        transformers_bf16_error=_median_error(theirs_bf16.logits - b),
        layers=tuple(layer_errors),
    )


def _median_error(difference: Tensor) -> float:
    """Takes the token in the middle, as rounding sends some tokens to other experts."""
    return difference.square().mean(-1).sqrt().median().item()


def _count_equal_tokens(ours: CausalLM, reference: Any, ids: Tensor, new_tokens: int) -> int:
    """Counts greedy tokens before the first that differs; `new_tokens` if none does."""
    options: Any = {"max_new_tokens": new_tokens, "do_sample": False, "num_return_sequences": 1}
    a = ours.generate(ids, **options)
    b = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    a, b = a[0, ids.shape[1] :], b[0, ids.shape[1] :]
    n = min(len(a), len(b))
    same = int((a[:n] == b[:n]).long().cumprod(0).sum())
    return new_tokens if same == len(a) == len(b) else same


def report(result: Parity) -> str:
    """Formats the result as a table of measured and allowed values."""
    lines = [
        f"{result.tokens} tokens, loss {result.loss:.6f} (perplexity "
        f"{perplexity_from_loss(result.loss):.4f}), largest logit {result.largest_logit:.3f}",
        f"{'':<24}{'measured':>12}{'allowed':>12}",
    ]
    for name, (measure, value, allowed) in result.checks.items():
        label = f"{name} equal" if measure == "equal" else f"{name}, {measure}"
        lines.append(f"{label:<24}{value:>12.3g}{allowed:>12.3g}")
    if result.layers:
        lines.append(report_layers(result.layers))
    verdict = f"differs in {', '.join(result.failures)}" if result.failures else "holds"
    return "\n".join([*lines, f"parity with transformers: {verdict}"])
