"""What the attention benchmark measures: batches, the ways to compute their attention, the truth.

# B batch, T tokens of a row, H query heads, K kv heads, D head dim
"""

from collections.abc import Callable, Iterator
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
from tigon.kernels import _attention_backends as backends
from tigon.kernels._attention_backends import Choice

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
)


@contextmanager
def without_fa4() -> Iterator[None]:
    """As on a machine where flash-attn-4 is not installed."""
    kept = backends.missing
    backends._settle.cache_clear()
    backends.missing = lambda device: kept(device) | {"fa4": "left out"}  # type: ignore[assignment]
    try:
        yield
    finally:
        backends.missing = kept
        backends._settle.cache_clear()


def problem(case: Case) -> tuple[Problem, dict[str, Choice]]:
    """The providers of a case, and what ours turn out to choose."""
    chosen: dict[str, Choice] = {}
    h, k = case.heads
    shape = (case.batch, case.row)
    leaves = {name: leaf(*shape, n, case.head_dim) for name, n in (("q", h), ("k", k), ("v", k))}
    upstream = randn(*shape, h, case.head_dim)
    cu = torch.tensor([0, *np.cumsum(case.lengths)], dtype=torch.int32)
    ids = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths)).view(shape)
    longest, window = max(case.lengths), case.window
    even = len(set(case.lengths)) == 1
    q, key, v = leaves.values()

    def ours(name: str = OURS) -> Run:
        mask = AttentionMask(case.row, segment_ids=ids, cu_seq_lens=cu, longest=longest)
        options = {"mask": mask, "window": window, "softcap": case.softcap}
        attention(q, key, v, **options)  # settles the backend, as the first layer does
        chosen[name] = next(iter(mask.plans.values())).choice
        return lambda: attention(q, key, v, **options)

    def ours_without_fa4() -> Run:
        with without_fa4():
            return ours(TORCH_ONLY)

    def fa4() -> Run:
        from flash_attn import cute

        options: dict[str, Any] = {"causal": True, "softcap": case.softcap or 0.0}
        if window is not None:
            options["window_size"] = (window - 1, 0)
        if even:  # as rows, its fastest way
            rows = [x.view(-1, longest, *x.shape[2:]) for x in (q, key, v)]
            return lambda: cute.flash_attn_func(*rows, **options)[0].view(q.shape)
        flat = [x.flatten(0, 1) for x in (q, key, v)]
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: cute.flash_attn_varlen_func(*flat, **options)[0].view(q.shape)

    def varlen() -> Run:
        from torch.nn.attention.varlen import varlen_attn

        more = {"enable_gqa": True} if "enable_gqa" in varlen_attn.__annotations__ else {}
        more["window_size"] = (-1 if window is None else window - 1, 0)
        flat = [x.flatten(0, 1) for x in (q, key, v)]
        return lambda: varlen_attn(*flat, cu, cu, longest, longest, **more).view(q.shape)

    def sdpa(backend: str) -> Callable[[], Run]:
        def make() -> Run:
            kind = getattr(torch.nn.attention.SDPBackend, backend)  # no Enum to index in 2.11

            def run() -> Tensor:
                parts = (x.view(-1, longest, *x.shape[2:]).transpose(1, 2) for x in (q, key, v))
                with torch.nn.attention.sdpa_kernel(kind):
                    out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
                return out.transpose(1, 2).reshape(q.shape)

            return run

        return make

    def flex() -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = (j <= i) & (ids[b, i] == ids[b, j])
            return seen if window is None else seen & (i - j < window)

        def cap(score: Tensor, *_: Tensor) -> Tensor:
            return case.softcap * torch.tanh(score / case.softcap)

        sizes = case.batch, None, case.row, case.row
        blocks = create_block_mask(visible, *sizes, device=q.device)
        function = torch.compile(flex_attention, dynamic=False)
        options = {"score_mod": cap} if case.softcap else {}
        options |= {"block_mask": blocks, "enable_gqa": True}

        def run() -> Tensor:
            return function(*(x.transpose(1, 2) for x in (q, key, v)), **options).transpose(1, 2)

        return run

    def transformers_sdpa() -> Run:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        module = SimpleNamespace(num_key_value_groups=h // k, is_causal=True, training=True)
        # The mask that its masking_utils makes of position_ids that restart
        mask = AttentionMask(case.row, segment_ids=ids).dense(window, q.device)

        def run() -> Tensor:
            parts = (x.transpose(1, 2) for x in (q, key, v))
            return sdpa_attention_forward(module, *parts, mask)[0]

        return run

    providers = [Provider(OURS, ours), Provider(TORCH_ONLY, ours_without_fa4), Provider(FA4, fa4)]
    if case.softcap is None:
        providers.append(Provider(VARLEN, varlen))
        if window is None and even:
            providers.append(Provider("SDPA cuDNN", sdpa("CUDNN_ATTENTION")))
            providers.append(Provider("SDPA flash", sdpa("FLASH_ATTENTION")))
        if window is not None or longest < case.row:
            providers.append(Provider("transformers, SDPA with a mask", transformers_sdpa))
    providers.append(Provider("FlexAttention", flex))
    exact = partial(truth, case, leaves, upstream)
    return Problem(leaves, ("out",), (upstream,), exact, providers), chosen


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
