"""The settings of an adapter."""

from dataclasses import dataclass

from tigon.models import LoraConfig, Quantize
from tigon.utils.config import setting


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter, which is trained in place of the model."""

    rank: int = setting(16, "columns of its matrices", least=1)
    alpha: float = setting(32.0, "what it adds is multiplied by alpha / rank", least=0)
    targets: tuple[str, ...] = setting(
        ("all-linear",), "projections, such as q_proj, or shell patterns of their whole names"
    )
    dropout: float = setting(
        0.0, "share of the projections' inputs that it does not read in training", least=0
    )
    rslora: bool = setting(False, "multiplied by alpha / sqrt(rank) instead")
    dora: bool = setting(False, "learn the lengths of weights' rows, too (DoRA)")
    rank_pattern: dict[str, int] | None = setting(  # noqa: RUF009
        None, "ranks of some projections, by name or pattern"
    )
    alpha_pattern: dict[str, float] | None = setting(None, "likewise alpha")  # noqa: RUF009
    modules_to_save: tuple[str, ...] = setting(
        (), "embed_tokens and lm_head, where they are to be trained whole"
    )
    quantize: Quantize | None = setting(  # noqa: RUF009
        None, "nf4: the frozen base in 4 bits (QLoRA); keep: an fp8 checkpoint's as it is"
    )
    merge: bool = setting(False, "write run_dir/hf too at the end, the model with what was added")

    def adapter(self, base: str = "", revision: str = "") -> LoraConfig:
        """ValueError for numbers and names that no adapter has."""
        own = {n: value for n, value in vars(self).items() if n not in ("merge", "quantize")}
        patterns = {name: own[name] or {} for name in ("rank_pattern", "alpha_pattern")}
        return LoraConfig(**own | patterns, base=base, revision=revision)
