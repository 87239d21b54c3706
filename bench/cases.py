"""What the kernel benchmark measures: shapes, the bytes each must move, and what is aimed at.

# N rows, C model dim, I intermediate size, V vocab, B batch, T tokens, H heads, K kv heads, D head
"""

from dataclasses import dataclass, field
from typing import Literal

BF16 = 2
MIB = 2**20
EPS = 1e-6
VALID = 0.3  # share of the targets that are not ignored in the sparse cases
LOGITS_BYTES = 2**30  # what linear_cross_entropy may hold of logits, by its contract

Mode = Literal["forward", "both"]  # both is forward + backward
MODES: tuple[Mode, ...] = ("forward", "both")


@dataclass(frozen=True)
class Case:
    operator: str
    shape: str
    sizes: tuple[int, ...]
    variant: str = ""
    bytes: dict[Mode, int] = field(default_factory=dict)
    against: Literal["floor", "three GEMMs", "dense"] = "floor"
    targets: dict[Mode, float] = field(default_factory=dict)
    memory: Literal["Liger"] | float | None = None  # at most this many MiB, or what Liger takes
    modes: tuple[Mode, ...] = MODES

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.operator, self.variant, self.shape) if part)


def traffic(elements: int, forward: int, backward: int) -> dict[Mode, int]:
    """Bytes of so many bf16 reads and writes per element."""
    return {"forward": BF16 * forward * elements, "both": BF16 * (forward + backward) * elements}


def rms_norm(n: int, c: int) -> Case:
    # x in, y out; x and dy in, dx out
    return Case(
        "rms_norm",
        f"{n}x{c}",
        (n, c),
        bytes=traffic(n * c, 2, 3),
        targets={"forward": 1.08, "both": 1.15},
        memory="Liger",
    )


def rms_norm_residual(n: int, c: int) -> Case:
    # x and residual in, normed and total out; total and both gradients in, one dx out for both
    return Case(
        "rms_norm_residual",
        f"{n}x{c}",
        (n, c),
        bytes=traffic(n * c, 4, 4),
        targets={"forward": 1.08, "both": 1.10},
        memory="Liger",
    )


def sandwich_norm(n: int, c: int) -> Case:
    # as above, but the branch was normed too: x is needed again, and dx is not dresidual
    return Case(
        "sandwich_norm",
        f"{n}x{c}",
        (n, c),
        bytes=traffic(n * c, 4, 6),
        targets={"forward": 1.08, "both": 1.10},
        memory="Liger",
    )


def gated_act(n: int, i: int, act: str) -> Case:
    # gate and up in, y out; gate, up and dy in, dgate and dup out
    return Case(
        "gated_act",
        f"{n}x{i}",
        (n, i),
        act,
        bytes=traffic(n * i, 3, 5),
        targets={"forward": 1.03, "both": 1.05},
        memory="Liger",
    )


def rope(b: int, t: int, h: int, k: int, d: int) -> Case:
    return Case(
        "rope",
        f"B{b} T{t} {h}/{k}x{d}",
        (b, t, h, k, d),
        bytes=traffic(b * t * (h + k) * d, 2, 2),
        targets={"forward": 1.10, "both": 1.15},
    )


def qk_norm_rope(b: int, t: int, h: int, k: int, d: int) -> Case:
    # v is a view on the way out, but dv has to get into the packed gradient on the way back
    need = traffic(b * t * (h + k) * d, 2, 3)
    need["both"] += BF16 * 2 * b * t * k * d
    return Case(
        "qk_norm_rope",
        f"B{b} T{t} {h}/{k}x{d}",
        (b, t, h, k, d),
        bytes=need,
        targets={"forward": 1.10, "both": 1.15},
    )


def cross_entropy(n: int, v: int) -> Case:
    # every logit in once, every gradient out once
    return Case(
        "cross_entropy",
        f"{n}x{v}",
        (n, v),
        bytes={"both": BF16 * 2 * n * v},
        targets={"both": 1.25},
        memory=1.01 * BF16 * n * v / MIB,  # the gradient; 1 % for what is kept per row
    )


def linear_cross_entropy(n: int, c: int, v: int, most: float) -> list[Case]:
    shape, sizes = f"{n}, {c}, {v}", (n, c, v)
    d_hidden, d_weight = BF16 * n * c, (BF16 + 4) * v * c  # the latter in fp32, and then rounded
    memory = (LOGITS_BYTES + d_hidden + d_weight) / MIB
    operator = "linear_cross_entropy"
    return [
        Case(operator, shape, sizes, "dense", {}, "three GEMMs", {"both": most}, memory),
        Case(operator, shape, sizes, "30 % valid", {}, "dense", {"both": 0.40}, memory, ("both",)),
        Case(operator, shape, sizes, "peaked", {}, "three GEMMs", {}, memory, ("both",)),
    ]


CASES: list[Case] = [
    rms_norm(16384, 4096),
    rms_norm(16384, 2048),
    rms_norm(8192, 1152),
    rms_norm(131072, 128),
    rms_norm_residual(16384, 4096),
    sandwich_norm(16384, 4096),
    sandwich_norm(16384, 2560),
    *(
        gated_act(16384, i, act)
        for act in ("silu", "gelu_tanh")
        for i in (14336, 11008, 18944, 6912)
    ),
    rope(2, 8192, 32, 8, 128),
    qk_norm_rope(2, 8192, 32, 8, 128),
    cross_entropy(8192, 128256),
    cross_entropy(16384, 151936),
    cross_entropy(8192, 262144),
    *linear_cross_entropy(8192, 4096, 128256, 1.05),
    *linear_cross_entropy(16384, 2048, 151936, 1.05),
    *linear_cross_entropy(8192, 1152, 262144, 1.10),
    *linear_cross_entropy(8192, 2560, 262144, 1.10),
    *linear_cross_entropy(8192, 1024, 151936, 1.10),
]
HOST = "host"
HOST_SHAPE = (2048, 4096)
OPERATORS = (*dict.fromkeys(case.operator for case in CASES), HOST)
