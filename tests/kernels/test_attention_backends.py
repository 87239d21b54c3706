"""Which backend is taken and why, and the forms of a mask that backends are given."""

import itertools
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.flash import on_hopper, played
from tigon.kernels import AttentionMask, attention
from tigon.kernels.attention import backends
from tigon.kernels.attention.backends import (
    CUDNN_MAX_TOKENS,
    MIN_KERNEL_TOKENS,
    AttentionRequest,
    check_backend,
    check_training,
    choose_backend,
    select_backend,
)
from tigon.kernels.attention.mask import (
    BLOCK,
    MIN_SEQUENCES,
    pad_cu_seqlens,
    padded_count,
    round_max_seqlen,
)
from tigon.kernels.attention.sequences import Sequences

__all__ = ["on_hopper", "played"]
NO_FA4 = {"fa4": "flash-attn-4 is not installed: pip install tigon[fa4]"}
TRAINED = {"longest": 4096, "grad": True}
STEP = {"longest": 4096, "cached": True, "single": True}
GEMMA = {**TRAINED, "head_dim": 256}
WIDE = {**TRAINED, "head_dim": 512}
PHI = {**TRAINED, "head_dim": 80}
GPU = "not fa4: it is for Hopper and Blackwell, not for sm_80"


@pytest.fixture(autouse=True)
def path() -> None:
    """No kernels of ours run: one path, on the CPU."""


@pytest.mark.parametrize(
    ("request_", "missing", "name", "why"),
    [
        (TRAINED, {}, "fa4", "the first choice on cuda"),
        (TRAINED, NO_FA4, "cudnn", "not fa4: flash-attn-4 is not installed: pip install"),
        ({**TRAINED, "window": True}, {}, "fa4", ""),
        ({**TRAINED, "window": True}, NO_FA4, "flash", "not cudnn: it has no sliding window"),
        ({**TRAINED, "layout": "sequences"}, NO_FA4, "flash", "it has no packed sequences"),
        ({**TRAINED, "softcap": True}, {}, "fa4", ""),
        ({**TRAINED, "softcap": True}, NO_FA4, "flex", "not flash: it has no softcap"),
        ({**TRAINED, "sinks": True}, {}, "fa4", ""),
        ({**TRAINED, "sinks": True}, NO_FA4, "flash", "not cudnn: it has no sinks"),
        ({**TRAINED, "sinks": True, "compiling": True}, {}, "flex", "does not trace its sinks"),
        ({**STEP, "sinks": True}, {}, "flash", "the first choice on cuda"),
        ({**STEP, "sinks": True, "layout": "no"}, {}, "reference", "it takes no dense mask"),
        (STEP, {}, "sdpa", "the first choice on cuda"),
        (
            {"longest": 100, "sinks": True, "device": "cpu"},
            {},
            "reference",
            "sdpa: it has no sinks",
        ),
        (GEMMA, {}, "cudnn", "the first choice on cuda"),
        ({**GEMMA, "window": True}, {}, "fa4", "not cudnn: it has no sliding window"),
        ({**GEMMA, "layout": "sequences"}, {}, "fa4", "not cudnn: it has no packed sequences"),
        ({**GEMMA, "sm": 100}, {}, "fa4", "the first choice on cuda"),
        ({**GEMMA, "sm": 100}, NO_FA4, "flash", "not cudnn: head_dim 256 needs sm_90, not sm_100"),
        ({**GEMMA, "sm": 100, "softcap": True}, {}, "flex", "backward pass on Blackwell has no so"),
        ({**GEMMA, "sm": 100, "softcap": True, "grad": False}, {}, "fa4", ""),
        (WIDE, {}, "triton", "not flash: head_dim 512 is above 256"),
        ({**WIDE, "longest": 100, "layout": "sequences"}, {}, "triton", ""),
        ({**WIDE, "window": True, "part": True, "compiling": True}, {}, "triton", ""),
        ({**WIDE, "cached": True}, {}, "triton", ""),
        ({**WIDE, "layout": "holes"}, {}, "sdpa", "do not fit into shared memory"),
        ({**WIDE, "softcap": True}, {}, "reference", "not triton: it has no softcap"),
        ({**WIDE, "sinks": True}, {}, "reference", "not triton: it has no sinks"),
        ({**WIDE, "sm": 80}, {}, "sdpa", "not triton: it is for Hopper, not for sm_80"),
        ({**WIDE, "dtype": torch.float32}, {}, "sdpa", "not triton: it takes bfloat16 and float16"),
        ({**WIDE, "head_dim": 520}, {}, "sdpa", "not triton: head_dim 520 is above 512"),
        ({**WIDE, "cached": True, "single": True}, {}, "sdpa", "the first choice on cuda"),
        (PHI, {}, "cudnn", "not fa4: its backward pass is wrong for head_dim 80, which is no mult"),
        ({**PHI, "window": True}, {}, "flash", "not fa4: its backward pass is wrong for head_dim"),
        ({**PHI, "grad": False}, {}, "fa4", "the first choice on cuda"),
        ({**PHI, "sm": 100}, {}, "fa4", "the first choice on cuda"),
        ({**TRAINED, "deterministic": True}, NO_FA4, "flash", "cudnn: its backward pass is not"),
        ({"longest": 4096, "deterministic": True}, NO_FA4, "cudnn", ""),
        ({**TRAINED, "head_dim": 20}, {}, "flex", "head_dim 20 is not a multiple of 8"),
        ({**TRAINED, "head_dim": 12}, {}, "sdpa", "not flex: head_dim 12 is below 16"),
        ({**TRAINED, "layout": "holes"}, {}, "flex", "not flash: it takes no dense mask, and hole"),
        ({**TRAINED, "sm": 100, "head_dim": 192}, {}, "flash", "head_dim 192 on Blackwell"),
        ({**TRAINED, "sm": 80}, {}, "cudnn", GPU),
        ({**TRAINED, "sm": 80, "head_dim": 256}, {}, "flash", "needs sm_90, not sm_80"),
        ({**TRAINED, "sm": 89, "head_dim": 256}, {}, "flash", ""),
        ({**TRAINED, "sm": 89, "head_dim": 224}, {}, "flex", "no backward pass on sm_89"),
        ({**TRAINED, "sm": 120, "head_dim": 192}, {}, "flash", ""),
        ({**TRAINED, "sm": 87, "head_dim": 200}, {}, "flex", "no backward pass on sm_87"),
        ({**TRAINED, "sm": 121, "head_dim": 200}, {}, "flex", "no backward pass on sm_121"),
        ({**TRAINED, "sm": 80, "head_dim": 224}, {}, "flash", ""),
        ({"sm": 89, "head_dim": 224, "longest": 4096}, {}, "flash", ""),
        ({**TRAINED, "sm": 75}, {}, "flex", "it needs sm_80 or newer, and this GPU is sm_75"),
        ({"longest": 1088}, NO_FA4, "flash", "every new length, and 1088 is no multiple of 256"),
        ({"longest": 1024}, NO_FA4, "cudnn", ""),
        ({"longest": 1024}, {}, "fa4", "the first choice on cuda"),
        ({"longest": 512}, {}, "cudnn", "the first choice on cuda"),
        ({"longest": 64}, {}, "cudnn", ""),
        ({"longest": 300}, {}, "fa4", "not cudnn: it prepares for every new length, and 300 is no"),
        ({"longest": 512, "layout": "sequences"}, {}, "fa4", "it has no packed sequences"),
        ({"longest": 512, "sm": 100}, {}, "fa4", "the first choice on cuda"),
        ({"longest": 100}, {}, "flash", "not fa4: 100 tokens are too few to compile for"),
        ({"longest": 100, "softcap": True}, {}, "reference", "not sdpa: it has no softcap"),
        ({"longest": 4096, "softcap": True}, NO_FA4, "flex", ""),
        ({"longest": 100, "layout": "holes"}, {}, "sdpa", "not flex: 100 tokens are too few"),
        ({**TRAINED, "dtype": torch.float32}, {}, "sdpa", "bfloat16 and float16, not float32"),
        ({"longest": 9, "cached": True, "single": True}, {}, "sdpa", "the first choice on cuda"),
        ({"longest": 4096, "cached": True}, NO_FA4, "flash", "not cudnn: it does not continue a"),
        ({"longest": 4096, "cached": True, "layout": "holes"}, {}, "sdpa", "not flex: it does not"),
        ({"compiling": True}, {}, "fa4", "the first choice on cuda"),
        ({**GEMMA, "longest": None, "compiling": True}, {}, "fa4", "calls it by way of sdpa"),
        ({"compiling": True}, NO_FA4, "flash", "not cudnn: torch.compile calls it by way of sdpa"),
        ({"compiling": True, "layout": "unknown"}, {}, "flex", "it takes no dense mask, and unkn"),
        ({"device": "cpu"}, {}, "sdpa", "the first choice on cpu"),
        ({"device": "cpu", "softcap": True}, {}, "reference", "not sdpa: it has no softcap"),
        ({"device": "mps"}, {}, "sdpa", "the first choice on mps"),
    ],
)
def test_what_auto_takes(request_: Any, missing: Any, name: str, why: str) -> None:
    choice = choose_backend(AttentionRequest(**request_), missing=missing)
    assert choice.name == name
    assert why in choice.why


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        ("fa4", {"sm": 80}, "'fa4' cannot do this: it is for Hopper and Blackwell, not for sm_80"),
        ("fa4", {"missing": NO_FA4}, "'fa4' cannot do this: flash-attn-4 is not installed"),
        ("cudnn", {"longest": 1}, "'cudnn' cannot do this: it takes no sequence of one token"),
        ("cudnn", {"head_dim": 264}, "'cudnn' cannot do this: head_dim 264 is above 256"),
        ("flash", {"device": "cpu"}, "'flash' cannot do this: it runs on CUDA GPUs, not on cpu"),
        ("flex", {"head_dim": 8}, "'flex' cannot do this: head_dim 8 is below 16"),
        ("flex", {"head_dim": 264}, "'flex' cannot do this: its blocks of head_dim 264 do not fit"),
        ("triton", {"sinks": True}, "'triton' cannot do this: it has no sinks"),
        ("sdpa", {"softcap": True}, "'sdpa' cannot do this: it has no softcap"),
        ("sdpa", {"sinks": True}, "'sdpa' cannot do this: it has no sinks"),
        ("eager", {}, "'eager' is not one of auto, fa4, cudnn, flash, triton, flex, sdpa, refer"),
    ],
)
def test_a_demand_that_cannot_be_met(name: str, request_: Any, message: str) -> None:
    request = {n: x for n, x in request_.items() if n != "missing"}
    with pytest.raises(ValueError, match=message):
        choose_backend(AttentionRequest(**request), name, request_.get("missing", {}))


@pytest.mark.parametrize("name", ["fa4", "cudnn", "flash", "triton", "flex", "sdpa", "reference"])
def test_demanded_backend_is_taken(name: str) -> None:
    assert choose_backend(AttentionRequest(longest=100), name) == (name, f"attention='{name}'")


def test_a_demand_is_about_whole_sequences() -> None:
    step = AttentionRequest(cached=True, single=True, layout="the cache holds padding")
    assert choose_backend(step, "fa4").name == "sdpa"


def test_plain_torch_alone() -> None:
    assert choose_backend(AttentionRequest(), plain=True).name == "sdpa"
    assert choose_backend(AttentionRequest(softcap=True), plain=True).name == "reference"


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flash_attn.cute", None)
    backends.flash_attn_4.cache_clear()
    with pytest.raises(ImportError, match=r"attention='fa4': .*pip install tigon\[fa4\]"):
        check_backend("fa4")
    backends.flash_attn_4.cache_clear()
    check_backend("flex")
    with pytest.raises(ValueError, match="attention='sdp' is not one of auto, fa4"):
        check_backend("sdp")


def test_a_run_is_checked_before_flash_attn_4_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a second, and the data are read meanwhile."""
    imported = []
    monkeypatch.setattr(backends, "flash_attn_4", lambda: imported.append(1) or NO_FA4["fa4"])
    monkeypatch.setattr(backends, "missing", backends.missing.__wrapped__)
    monkeypatch.setattr(backends, "capability", lambda _: 90)
    check_training("auto", torch.device("cuda"), torch.bfloat16, deterministic=True)
    assert not imported
    with pytest.raises(ImportError, match="not installed"):
        check_training("fa4", torch.device("cuda"), torch.bfloat16)
    assert imported


def test_a_choice_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "_logged", set())
    backends._select_backend.cache_clear()
    request = AttentionRequest("cpu", 0, torch.float32, 40, softcap=True)
    with caplog.at_level(logging.DEBUG, "tigon.attention"):
        for longest in (5, 6, 5):
            select_backend(request._replace(longest=longest), "auto", 0, False)
    assert caplog.messages == [
        "reference for float32, head_dim 40, rows, softcap (not sdpa: it has no softcap)"
    ]


def sequences(**given: Any) -> Sequences | str:
    shape = next(x for x in given.values() if isinstance(x, Tensor) and x.dim() == 2).shape
    return AttentionMask(shape[1], **given).sequences()


@pytest.mark.parametrize(
    ("segments", "real", "bounds"),
    [
        ([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]], None, [0, 2, 5, 9, 10]),
        ([[0, 0, 0], [0, 0, 0]], None, [0, 3, 6]),
        (None, [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]], [0, 3, 4, 8, 10, 12]),
        (None, [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]], [0, 1, 3, 5, 10]),
        ([[0, 0, 0, 1, 1, 1]], [[1, 1, 0, 1, 1, 1]], [0, 2, 3, 6]),
        ([[0, 0, 0, 0, 1, 1]], [[1, 1, 0, 0, 0, 1]], [0, 2, 4, 5, 6]),
        (None, [[1, 0, 1]], "padding inside a sequence"),
        ([[0, 0, 0, 0, 1]], [[1, 0, 0, 1, 1]], "padding inside a sequence"),
    ],
)
def test_sequences_of_a_batch(segments: Any, real: Any, bounds: Any) -> None:
    given = {} if segments is None else {"segment_ids": torch.tensor(segments)}
    given |= {} if real is None else {"key_mask": torch.tensor(real).bool()}
    found = sequences(**given)
    if isinstance(bounds, str):
        assert isinstance(found, str) and bounds in found
        return
    assert isinstance(found, Sequences) and found.cu.dtype == torch.int32
    assert found.cu.tolist() == bounds
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert found.longest == max(lengths)
    assert found.even(bounds[-1]) == (len(set(lengths)) == 1)


def test_bounds_that_were_given_are_taken() -> None:
    segments, cu = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    assert sequences(segment_ids=segments, cu_seq_lens=cu, longest=7)[:2] == (cu, 7)
    assert sequences(segment_ids=segments, cu_seq_lens=cu)[:2] == (cu, 3)
    mask = AttentionMask(1, past=4, key_mask=torch.ones(1, 5, dtype=torch.bool))
    assert mask.sequences() == "the cache holds padding"
    with pytest.raises(ValueError, match="cu_seq_lens without segment_ids: give both"):
        AttentionMask(5, cu_seq_lens=cu, longest=7)


def test_a_graph_needs_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    for given in ({}, {"cu_seq_lens": cu}):
        mask = AttentionMask(5, segment_ids=on_gpu, **given)
        with pytest.raises(
            ValueError, match=r"being captured.*: give cu_seq_lens and max_length_q"
        ):
            mask.sequences()
    mask = AttentionMask(5, segment_ids=on_gpu, cu_seq_lens=cu, longest=3)
    assert mask.sequences()[:2] == (cu, 3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", [None, [[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]]])
@pytest.mark.parametrize("real", [None, [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]])
def test_padding_behind_rows_is_not_seen(causal: bool, segments: Any, real: Any) -> None:
    given = {
        "segment_ids": None if segments is None else torch.tensor(segments),
        "key_mask": None if real is None else torch.tensor(real).bool(),
        "causal": causal,
    }
    mask, device = AttentionMask(5, **given), torch.device("cpu")
    wide = mask.pad(8, 8, 2, device).dense(None, device).expand(2, -1, -1, -1)
    assert torch.equal(wide[..., :5, :5], mask.dense(None, device).expand(2, -1, -1, -1))
    assert not wide[..., :5, 5:].any() and wide.any(-1).all()  # a row without keys would be NaN


BLOCKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "both sides": {"causal": False},
    "packed": {"segment_ids": torch.rand(2, 700).lt(0.01).cumsum(1)},
    "both sides, packed": {"segment_ids": torch.rand(2, 700).lt(0.01).cumsum(1), "causal": False},
    "padded": {"key_mask": torch.arange(700) >= torch.tensor([[300], [0]])},
    "holes": {
        "key_mask": torch.rand(2, 700) < 0.5,
        "segment_ids": torch.arange(700).expand(2, -1) // 300,
    },
    "all padding": {"key_mask": torch.zeros(1, 700, dtype=torch.bool)},
    "prefixes": {
        "segment_ids": torch.arange(6).repeat_interleave(torch.tensor([300, 260, 140] * 2))[None],
        "cu_seq_lens": torch.tensor([0, 300, 560, 700, 1000, 1260, 1400], dtype=torch.int32),
        "prefixes": torch.tensor([[0, 0], [0, 150], [0, 0], [0, 0], [710, 980], [710, 980]]),
    },
}
BLOCKS["prefixes"]["segment_ids"] = BLOCKS["prefixes"]["segment_ids"].view(2, 700)


def assert_same_mask(blocks: Any, dense: Tensor) -> tuple[Tensor, ...]:
    """[B, n, m] of blocks of queries and keys: read fully, partly; seen somewhere, everywhere."""
    missing = (-dense.shape[1] % BLOCK, -dense.shape[2] % BLOCK)
    padded = torch.nn.functional.pad(dense, (0, missing[1], 0, missing[0]))
    padded = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    some, every = padded.any(4).any(2), padded.all(4).all(2)

    def listed(counts: Tensor, indices: Tensor) -> Tensor:
        read = torch.arange(indices.shape[-1]) < counts[..., None]
        out = torch.zeros_like(read).scatter(-1, indices.long(), read)[:, 0]
        return out.expand_as(some)

    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    assert not (full & partial).any() and not (full & ~every).any()
    assert (full | partial | ~some).all()
    rows, query, key = (torch.arange(n) for n in dense.shape)
    rows = rows[:, None, None]
    assert torch.equal(blocks.mask_mod(rows, rows, query[:, None], key).expand_as(dense), dense)
    return full, partial, some, every


@pytest.mark.parametrize("window", [None, 1, 130, 300])
@pytest.mark.parametrize("filled", [False, True])  # up to whole blocks, as for the kernel
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_flex_attention(case: str, filled: bool, window: int | None) -> None:
    mask, device = AttentionMask(700, **BLOCKS[case]), torch.device("cpu")
    mask = mask.pad(768, 768, 2, device) if filled else mask
    dense, blocks = mask.dense(window, device)[:, 0], mask.blocks(window, device)
    full, partial, some, every = assert_same_mask(blocks, dense)
    if case not in ("holes", "prefixes"):  # where a block is read for nothing, sometimes
        assert torch.equal(full | partial, some) and torch.equal(full[:, :5], every[:, :5])


# Bounds of packed sequences with room for more: attention has the same bits and backends

T, D = 24, 16


def packed(*ends: int, backend: str = "auto") -> AttentionMask:
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    segments = torch.arange(len(ends)).repeat_interleave(cu.diff()).view(-1, T)
    longest = int(cu.diff().max())
    return AttentionMask(T, segment_ids=segments, cu_seq_lens=cu, longest=longest, backend=backend)


def results(mask: AttentionMask, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, T, heads, D, requires_grad=True) for heads in (4, 2, 2))
    out = attention(q, k, v, mask=mask, **options)
    (out * torch.randn_like(out)).sum().backward()
    return [out.detach(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("backend", ["sdpa", "reference", "flash", "fa4"])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_has_the_same_bits(played, backend, window):
    mask = packed(3, 13, 14, T, T + 6, 2 * T, backend=backend)
    wide = pad_cu_seqlens(mask, 2 * T, [5])
    assert len(wide.cu_seq_lens) == MIN_SEQUENCES + 1 and wide.cu_seq_lens.diff()[-2:].sum() == 0
    assert wide.longest == T > mask.longest == 18
    for found, expected in zip(
        results(wide, window=window), results(mask, window=window), strict=True
    ):
        assert torch.equal(found, expected)


def test_sequences_of_one_length_and_rows_stay(played):
    even = packed(12, 24, 36, 48)
    assert pad_cu_seqlens(even, 48, []) is even
    rows = AttentionMask(T)
    assert pad_cu_seqlens(rows, 48, []) is rows
    unknown = AttentionMask(T, segment_ids=even.segment_ids, cu_seq_lens=even.cu_seq_lens)
    assert pad_cu_seqlens(unknown, 48, []) is unknown


def test_room_is_of_few_sizes(monkeypatch):
    assert [padded_count(n) for n in (1, 8, 9, 16, 17, 100)] == [8, 8, 16, 16, 32, 128]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [padded_count(n) for n in (1, 8, 9)] == [1, 8, 9]


def test_rounding_takes_no_other_backend_or_window():
    """Of every length: each rule of the backends says the same of what it is rounded to."""
    tokens, windows = 5000, (100, 512, 1300)
    sizes = set()
    for longest in range(1, tokens + 1):
        size = round_max_seqlen(longest, tokens, windows)
        sizes.add(size)
        assert longest <= size <= tokens
        assert all((window >= longest) == (window >= size) for window in windows)
        if longest % 7 and longest not in (
            MIN_KERNEL_TOKENS - 1,
            MIN_KERNEL_TOKENS,
            CUDNN_MAX_TOKENS,
            CUDNN_MAX_TOKENS + 1,
        ):
            continue
        for head_dim in (64, 256):
            for more in ({}, {"window": True}, {"softcap": True}, {"deterministic": True}):
                request = AttentionRequest(layout="sequences", grad=True, head_dim=head_dim, **more)
                names = [choose_backend(request._replace(longest=n)).name for n in (longest, size)]
                assert names[0] == names[1], (longest, size, request)
    assert sizes == {100, 255, 256, 512, 1024, 1300, 2048, 4096, 5000}


def test_what_a_machine_without_flash_attn_4_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would be taken, and what was measured applies."""
    cuda = torch.device("cuda", 0)
    packed_rows = r"flash-attn-4 is not installed.*; with it .* packed rows was 1\.\d\d to"
    rows = r"with it attention over rows was 1\.\d\d to .* as fast on an NVIDIA"
    for sm, missing, head_dim, packed, said in (
        (90, NO_FA4, 128, True, packed_rows),
        (90, NO_FA4, 64, False, rows),
        (90, NO_FA4, 256, True, None),  # the record has none of these
        (90, {}, 128, True, None),
        (100, NO_FA4, 128, True, None),
        (80, {}, 128, True, None),
    ):
        monkeypatch.setattr(backends, "capability", lambda _, sm=sm: sm)
        monkeypatch.setattr(backends, "missing", lambda _, missing=missing: missing)
        found = backends.missed_speed(cuda, head_dim, packed=packed)
        assert (found is None) if said is None else re.search(said, found or "")
    assert backends.missed_speed(torch.device("cpu"), 128, packed=True) is None
