"""What the attention benchmark measures: batches, the ways to compute their attention, the truth.

# B batch, T tokens of a row, H query heads, K kv heads, D head dim
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import Problem, Provider, Run, Tensors, leaf, randn
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention import backends
from tigon.kernels.attention.backends import BackendChoice

FA4, OURS, TORCH_ONLY = "flash-attn-4", "tigon", "tigon without flash-attn-4"
VARLEN = "transformers, varlen FA2"  # its flash integration; torch's varlen_attn is the kernel
PEERS = ("SDPA cuDNN", "SDPA flash", "FlexAttention", VARLEN)  # what torch itself has


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]  # of the sequences, in rows of `row` tokens
    row: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    window: int | None = None
    softcap: float | None = None

    @property
    def batch(self) -> int:
        return sum(self.lengths) // self.row

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, over all sequences."""
        w = self.window
        return sum(sum(min(t + 1, w or t + 1) for t in range(n)) for n in self.lengths)

    @property
    def flops(self) -> float:
        """Of the forward pass; the backward pass is counted 2.5 times."""
        return 4.0 * self.pairs * self.heads[0] * self.head_dim


def lognormal(total: int, mean: float, spread: float = 0.8) -> tuple[int, ...]:
    """Lengths that add up to `total`, the same ones every time."""
    draw = np.random.default_rng(0).lognormal(np.log(mean) - spread**2 / 2, spread, total)
    ends = np.cumsum(draw.astype(int).clip(1))
    ends = np.append(ends[ends < total], total)
    return tuple(np.diff(ends, prepend=0).tolist())


GEMMA = {"heads": (8, 4), "head_dim": 256}
CASES = (
    Case("packed 16 x 1024", (1024,) * 16, 16384),
    Case("packed 4 x 4096", (4096,) * 4, 16384),
    Case("packed ragged", lognormal(32768, 700), 32768),
    Case("packed ragged, rows of 4096", sum((lognormal(4096, 700),) * 4, ()), 4096),
    Case("rows 2 x 8192", (8192,) * 2, 8192),
    Case("rows 2 x 8191", (8191,) * 2, 8191),
    Case("head_dim 64, packed ragged", lognormal(32768, 700), 32768, (32, 8), 64),
    Case("Gemma 3, full", (8192,) * 2, 8192, **GEMMA),
    Case("Gemma 3, window 512", (8192,) * 2, 8192, window=512, **GEMMA),
    Case("Gemma 2, softcap 50, packed", (4096,) * 2, 8192, softcap=50.0, **GEMMA),
    Case("Gemma 4, full", (8192,), 8192, (8, 2), 512),
)


@contextmanager
def without_fa4() -> Iterator[None]:
    """As on a machine where flash-attn-4 is not installed."""
    kept = backends.missing
    backends._select_backend.cache_clear()
    backends.missing = lambda device: kept(device) | {"fa4": "left out"}  # type: ignore[assignment]
    try:
        yield
    finally:
        backends.missing = kept
        backends._select_backend.cache_clear()


class Ways:
    """A batch of a case, and the ways to compute its attention: each method makes a run."""

    def __init__(self, case: Case) -> None:
        h, k = case.heads
        shape, lengths = (case.batch, case.row), torch.tensor(case.lengths)
        self.case = case
        self.chosen: dict[str, BackendChoice] = {}
        self.leaves = {
            name: leaf(*shape, n, case.head_dim) for name, n in (("q", h), ("k", k), ("v", k))
        }
        self.parts = tuple(self.leaves.values())
        self.upstream = randn(*shape, h, case.head_dim)
        self.cu = torch.tensor([0, *np.cumsum(case.lengths)], dtype=torch.int32)
        self.ids = torch.arange(len(lengths)).repeat_interleave(lengths).view(shape)
        self.longest, self.window = max(case.lengths), case.window
        self.even = len(set(case.lengths)) == 1

    def ours(self, name: str = OURS) -> Run:
        bounds = {"cu_seq_lens": self.cu, "longest": self.longest}
        mask = AttentionMask(self.case.row, segment_ids=self.ids, **bounds)
        options = {"mask": mask, "window": self.window, "softcap": self.case.softcap}
        attention(*self.parts, **options)  # settles the backend, as the first layer does
        self.chosen[name] = next(iter(mask.plans.values())).choice
        return lambda: attention(*self.parts, **options)

    def ours_without_fa4(self) -> Run:
        with without_fa4():
            return self.ours(TORCH_ONLY)

    def fa4(self) -> Run:
        from flash_attn import cute

        shape, longest = self.parts[0].shape, self.longest
        options: dict[str, Any] = {"causal": True, "softcap": self.case.softcap or 0.0}
        if self.window is not None:
            options["window_size"] = (self.window - 1, 0)
        if self.even:  # as rows, its fastest way
            rows = [x.view(-1, longest, *x.shape[2:]) for x in self.parts]
            return lambda: cute.flash_attn_func(*rows, **options)[0].view(shape)
        flat = [x.flatten(0, 1) for x in self.parts]
        options |= {"cu_seqlens_q": self.cu, "cu_seqlens_k": self.cu}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: cute.flash_attn_varlen_func(*flat, **options)[0].view(shape)

    def varlen(self) -> Run:
        from torch.nn.attention.varlen import varlen_attn

        more = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__annotations__ else {}
        more["window_size"] = (-1 if self.window is None else self.window - 1, 0)
        flat, shape = [x.flatten(0, 1) for x in self.parts], self.parts[0].shape
        bounds = self.cu, self.cu, self.longest, self.longest
        return lambda: varlen_attn(*flat, *bounds, **more).view(shape)

    def sdpa(self, backend: str) -> Run:
        kind = getattr(torch.nn.attention.SDPBackend, backend)  # no Enum to index in 2.11

        def run() -> Tensor:
            q, k, v = (x.view(-1, self.longest, *x.shape[2:]).transpose(1, 2) for x in self.parts)
            if backend == "EFFICIENT_ATTENTION":  # has no grouped heads
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            grouped = q.shape[1] != k.shape[1]
            with torch.nn.attention.sdpa_kernel(kind):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out.transpose(1, 2).reshape(self.parts[0].shape)

        return run

    def flex(self) -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case, ids, window = self.case, self.ids, self.window

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = (j <= i) & (ids[b, i] == ids[b, j])
            return seen if window is None else seen & (i - j < window)

        def cap(score: Tensor, *_: Tensor) -> Tensor:
            return case.softcap * torch.tanh(score / case.softcap)

        sizes = case.batch, None, case.row, case.row
        blocks = create_block_mask(visible, *sizes, device=ids.device)
        options = {"score_mod": cap} if case.softcap else {}
        options |= {"block_mask": blocks, "enable_gqa": True}
        function = torch.compile(flex_attention, dynamic=False)
        parts = self.parts
        return lambda: function(*(x.transpose(1, 2) for x in parts), **options).transpose(1, 2)

    def transformers_sdpa(self) -> Run:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        h, k = self.case.heads
        module = SimpleNamespace(num_key_value_groups=h // k, is_causal=True, training=True)
        # The mask that its masking_utils makes of position_ids that restart
        mask = AttentionMask(self.case.row, segment_ids=self.ids)
        dense, parts = mask.dense(self.window, self.ids.device), self.parts
        return lambda: sdpa_attention_forward(module, *(x.transpose(1, 2) for x in parts), dense)[0]

    def providers(self) -> Iterator[Provider]:
        yield Provider(OURS, self.ours)
        yield Provider(TORCH_ONLY, self.ours_without_fa4)
        yield Provider(FA4, self.fa4)
        if self.case.softcap is None:
            yield Provider(VARLEN, self.varlen)
            if self.window is None and self.even:
                yield Provider("SDPA cuDNN", partial(self.sdpa, "CUDNN_ATTENTION"))
                yield Provider("SDPA flash", partial(self.sdpa, "FLASH_ATTENTION"))
            if self.window is not None or self.longest < self.case.row:
                yield Provider("transformers, SDPA with a mask", self.transformers_sdpa)
        if self.case.head_dim > 256:
            yield Provider("SDPA efficient", partial(self.sdpa, "EFFICIENT_ATTENTION"))
        yield Provider("FlexAttention", self.flex)


def problem(case: Case) -> tuple[Problem, dict[str, BackendChoice]]:
    """The providers of a case, and what ours turn out to choose."""
    ways = Ways(case)
    exact = partial(truth, case, ways.leaves, ways.upstream)
    providers = list(ways.providers())
    return Problem(ways.leaves, ("out",), (ways.upstream,), exact, providers), ways.chosen


def truth(case: Case, leaves: Tensors, upstream: Tensor) -> Tensors:
    """Output and gradients in fp32, one sequence and one group of heads at a time."""
    flat = {name: x.detach().flatten(0, 1) for name, x in (leaves | {"up": upstream}).items()}
    results = {n: torch.empty_like(flat[n], dtype=torch.float32) for n in ("q", "k", "v", "up")}
    groups, start = case.heads[0] // case.heads[1], 0
    for n in case.lengths:
        at = slice(start, start + n)
        start += n
        for kv in range(case.heads[1]):
            query = slice(kv * groups, (kv + 1) * groups)
            heads = {"q": query, "k": slice(kv, kv + 1), "v": slice(kv, kv + 1)}
            part = {x: flat[x][None, at, s].float().requires_grad_() for x, s in heads.items()}
            options = {"window": case.window, "softcap": case.softcap}
            out = attention_ref(*part.values(), mask=AttentionMask(n), **options)
            grads = torch.autograd.grad(out, list(part.values()), flat["up"][None, at, query])
            parts = dict(zip(heads, grads, strict=True)) | {"up": out}
            for name, value in parts.items():
                results[name][at, heads.get(name, query)] = value.detach()[0]
    shaped = {name: x.view(case.batch, case.row, *x.shape[1:]) for name, x in results.items()}
    return {"out": shaped.pop("up")} | {f"d{name}": x for name, x in shaped.items()}
