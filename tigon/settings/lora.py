"""LoraConfig: which modules of a model an adapter has, and how it is computed."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tigon.utils.config import check_keywords
from tigon.utils.json import quote

Quantize = Literal["nf4", "keep"]  # of the frozen weights below an adapter
ALL_LINEAR = "all-linear"
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
IN_BRACKETS = re.compile(r"\[[^]]*\]")  # a character class of a shell pattern
SAVABLE_MODULES = ("embed_tokens", "lm_head", "score")  # values of modules_to_save


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, which adds `scale * B (A x)` with scale = alpha / rank to projections.

    `targets`: names of projections in the family's checkpoints ("q_proj"), longer suffixes
    ("self_attn.q_proj") or shell patterns of full names ("model.layers.1?.*.q_proj"). "all-linear"
    stands for all projections but embedding, head, routers and experts.
    `rank_pattern` and `alpha_pattern` map names of the same forms to other numbers; the first match
    counts. `rslora`: scale = alpha / sqrt(rank) (arXiv 2312.03732). `dora`: learn the magnitudes of
    the weights' rows too (arXiv 2402.09353). `dropout`: the probability with which each input of A
    is dropped in training. `modules_to_save`: "embed_tokens", "lm_head" or "score", which are
    trained in full. `base`, `revision`: the model that the adapter is for, which its files name.
    Raises ValueError for values out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str = ALL_LINEAR
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    base: str = ""
    revision: str = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raises TypeError for an unknown keyword, with the name here for one of PEFT's."""
        check_keywords("LoraConfig", kwargs, frozenset(cls.__dataclass_fields__))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", ALL_LINEAR if targets == (ALL_LINEAR,) else targets)
        saved = self.modules_to_save
        object.__setattr__(
            self, "modules_to_save", (saved,) if isinstance(saved, str) else (*saved,)
        )
        for name, rank in _with_patterns("rank", self.rank, self.rank_pattern).items():
            if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank < 2**31:
                raise ValueError(
                    f"the rank of an adapter is 1 to {2**31 - 1}, not {name}={quote(rank)}"
                )
        for name, alpha in _with_patterns("alpha", self.alpha, self.alpha_pattern).items():
            if not isinstance(alpha, int | float) or not 0 < alpha <= MAX_FLOAT32:
                raise ValueError(f"alpha is a positive float32 number, not {name}={quote(alpha)}")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={quote(self.dropout)} is not in [0, 1)")
        for name in ("rslora", "dora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={quote(getattr(self, name))} is neither True nor False")
        if not self.targets:
            raise ValueError('targets is empty: name projections, such as "q_proj"')
        for name in targets:
            if isinstance(name, str) and "," in IN_BRACKETS.sub("", name):
                names = tuple(part.strip() for part in name.split(",") if part.strip())
                raise ValueError(
                    f"targets={quote(name)} is one name: give a tuple of names, {quote(names)}, "
                    f"or in a shell lora.targets=[{','.join(names)}]"
                )
        for name in self.modules_to_save:
            if name not in SAVABLE_MODULES:
                savable = ", ".join(SAVABLE_MODULES)
                raise ValueError(f"modules_to_save={quote(name)} is not one of {savable}")

    def scale(self, rank: int, alpha: float) -> float:
        """Computes the factor of B A: alpha / rank, or alpha / sqrt(rank) with `rslora`."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _with_patterns(name: str, value: Any, patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Maps names such as "rank" and "rank_pattern[...]" to the values of a setting."""
    return {name: value} | {f"{name}_pattern[{quote(key)}]": v for key, v in patterns.items()}
