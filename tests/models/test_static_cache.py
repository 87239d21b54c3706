"""Every family with memory allocated once: the same text, in any order of prompts and steps."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import CASES, EVERY, FIRST, IN_BF16, load_case, random_ids, reference
from tests.support.contract import tiny_llama, tokens
from tigon.layers import KVCache, StaticCache
from tigon.layers.kv_state import KVState
from tigon.models import CausalLM, from_pretrained

CHUNK, TOTAL = 4, 41  # far past the window of 7, and past max_position_embeddings of 24
CAUSAL = [row for row in EVERY if "use_bidirectional_attention" not in CASES[row[0]][row[1]]]
MOVING = [  # whose frequencies follow the longest position of a call
    (model_type, case)
    for model_type, case in CAUSAL
    if CASES[model_type][case].get("rope_parameters", {}).get("rope_type")
    in ("dynamic", "longrope")
]
FIXED = [row for row in CAUSAL if row not in MOVING]
WINDOWED = [row for row in FIXED if "sliding_window" in CASES[row[0]][row[1]]]
ONE_OF_EACH = [*FIRST, *(row for row in WINDOWED if row not in FIRST)]


def text(rows: int) -> Tensor:
    return random_ids(rows, TOTAL, seed=3)


def pack(ids: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    flat = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])
    return {"input_ids": flat[None], "cu_seq_lens": cu}


class Reader:
    """Feeds a cache pieces of a text, and compares with the logits of the whole."""

    def __init__(self, model: CausalLM, ids: Tensor, cache: StaticCache):
        self.model, self.ids, self.cache = model, ids, cache
        self.whole = model(ids).logits

    def prompts(self, lengths: list[int], **extra: Any) -> None:
        out = self.model(**pack(self.ids, lengths), past_key_values=self.cache, **extra)
        assert out.past_key_values is self.cache
        expected = [row[:n] for row, n in zip(self.whole, lengths, strict=True)]
        self.compare(out.logits[0], torch.cat(expected))

    def step(self, n: int, rows: slice = slice(None)) -> None:
        """The next n tokens of the rows."""
        cache = self.cache.rows(*rows.indices(len(self.ids))[:2])
        at = cache.lengths[:, None] + torch.arange(n)
        index = torch.arange(len(self.ids))[rows, None], at
        logits = self.model(self.ids[index], past_key_values=cache).logits
        self.compare(logits, self.whole[index])

    def compare(self, logits: Tensor, expected: Tensor) -> None:
        assert (logits - expected).abs().max() <= 1e-5 * self.whole.abs().max()


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("model_type", "case"), FIXED)
def test_packed_prompts_and_steps(model_type: str, case: str, tmp_path: Path) -> None:
    model = load_case(model_type, case, tmp_path)
    reader = Reader(model, text(3), model.static_cache(3, TOTAL, chunk=CHUNK))
    lengths = [5, 16, 1]
    reader.prompts(lengths)
    for n in (1, 4, 1, 3, 1, 4, 4, 4, 3):
        assert reader.cache.lengths.tolist() == lengths
        reader.step(n)
        lengths = [m + n for m in lengths]


@pytest.mark.parametrize(("model_type", "case"), MOVING)
def test_moving_frequencies_are_those_of_a_growing_cache(
    model_type: str, case: str, tmp_path: Path
) -> None:
    model, ids = load_case(model_type, case, tmp_path), text(2)
    growing, static = KVCache(), model.static_cache(2, TOTAL, chunk=CHUNK)
    for start, end in itertools.pairwise((0, 11, 12, 16, 20, 21, TOTAL)):
        expected, found = (
            model(ids[:, start:end], past_key_values=cache).logits for cache in (growing, static)
        )
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("model_type", "case"), ONE_OF_EACH)
def test_long_prompts_in_parts(model_type: str, case: str, tmp_path: Path) -> None:
    model = load_case(model_type, case, tmp_path)
    reader = Reader(model, text(2), model.static_cache(2, TOTAL, chunk=CHUNK))
    for n in (5, 12, 2, 9):
        reader.step(n, slice(0, 1))
    for n in (14, 6):
        reader.step(n, slice(1, 2))
    assert reader.cache.lengths.tolist() == [28, 20]
    for n in (1, 4):
        reader.step(n)
    reader.step(16, slice(1, 2))  # decoded before


KINDS_OF_STATES = ("mistral", "gemma3n_text", "llama4_text", "deepseek_v3", "qwen3_5_text", "lfm2")


@pytest.mark.parametrize("model_type", KINDS_OF_STATES)
def test_rows_come_and_go(model_type: str, tmp_path: Path) -> None:
    """A prompt comes in parts while steps run over all rows, into a row that was used before."""
    model, ids = load_case(model_type, next(iter(CASES[model_type])), tmp_path), text(3)
    cache, ends = model.static_cache(3, TOTAL, chunk=CHUNK), [0, 0, 0]
    cache.active = torch.zeros(3, dtype=torch.int32)
    expected = [model(row[None]).logits[0] for row in ids]

    def check(row: int, logits: Tensor) -> None:
        start, ends[row] = ends[row], ends[row] + len(logits)
        error = (logits - expected[row][start : ends[row]]).abs().max()
        assert error <= 1e-5 * expected[row].abs().max()

    def step() -> None:
        logits = model(ids[range(3), ends][:, None], past_key_values=cache).logits
        for row, active in enumerate(cache.active.tolist()):
            check(row, logits[row]) if active else None
        assert cache.lengths.tolist() == ends

    for row, parts in ((1, (9, 4)), (0, (7, 1, 12)), (1, (3, 14)), (2, (1, 2))):
        cache.active[row] = ends[row] = 0
        cache.reset(row, row + 1)
        view = cache.borrow(row, row + 1)
        for part in parts:
            tokens = ids[row : row + 1, ends[row] : ends[row] + part]
            check(row, model(tokens, past_key_values=view).logits[0])
            step()
        cache.give_back(view, row)
        cache.active[row] = 1
        step()
        step()
    assert ends == [30, 23, 5]


@pytest.mark.parametrize("model_type", KINDS_OF_STATES)
def test_steps_begin_a_row_anew(model_type: str, tmp_path: Path) -> None:
    """A row that was emptied takes its first tokens in steps beside the others."""
    model = load_case(model_type, next(iter(CASES[model_type])), tmp_path)
    reader = Reader(model, text(3), model.static_cache(3, TOTAL, chunk=CHUNK))
    reader.prompts([9, 3, 14])
    reader.cache.reset(1, 2)
    for n in (1, 3, 4):
        reader.step(n)
    assert reader.cache.lengths.tolist() == [17, 8, 22]


@pytest.mark.parametrize(("model_type", "case"), ONE_OF_EACH)
def test_crop_is_as_if_never_read(model_type: str, case: str, tmp_path: Path) -> None:
    model = load_case(model_type, case, tmp_path)
    reader = Reader(model, text(3), model.static_cache(3, TOTAL, chunk=CHUNK, rollback=CHUNK))
    reader.prompts([12, 3, 25])
    for kept in ([0, 3, 1], [4, 0, 2], [1, 1, 1], [2, 3, 4]):
        before = reader.cache.lengths + torch.tensor(kept, dtype=torch.int32)
        wrong = torch.randint(4, 211, (3, CHUNK))
        model(wrong, past_key_values=reader.cache)
        reader.cache.crop(before - torch.tensor(kept, dtype=torch.int32))
        reader.step(2)
    reader.step(4)


@pytest.mark.parametrize("made", ["inside", "outside", "int8"])
@pytest.mark.parametrize(
    ("model_type", "case"),
    [("mistral", "window"), ("ministral3", "queries grow")],  # whose scale makes queries fp32
)
def test_autocast_is_as_exact_as_with_a_growing_cache(
    model_type: str, case: str, made: str, tmp_path: Path
) -> None:
    model, ids = load_case(model_type, case, tmp_path), text(2)
    exact, outs = model(ids).logits, {}
    outside = model.static_cache(2, TOTAL, chunk=CHUNK)
    with torch.autocast("cpu", torch.bfloat16):
        inside = model.static_cache(
            2, TOTAL, chunk=CHUNK, quantize="int8" if made == "int8" else None
        )
        static = outside if made == "outside" else inside
        for name, cache in (("static", static), ("growing", KVCache())):
            parts = itertools.pairwise((0, 11, 12, 16, 17, 33, TOTAL))
            logits = [model(ids[:, a:b], past_key_values=cache).logits for a, b in parts]
            outs[name] = torch.cat(logits, 1).float()
    kept = {"inside": torch.bfloat16, "outside": torch.float32, "int8": torch.int8}
    assert static.states[0].buffers.keys.dtype == kept[made]
    errors = {name: (out - exact).norm() / exact.norm() for name, out in outs.items()}
    assert errors["static"] <= (2 if made == "int8" else 1.2) * errors["growing"]


@pytest.mark.parametrize(("model_type", "case"), ONE_OF_EACH)
def test_int8_is_close(model_type: str, case: str, tmp_path: Path) -> None:
    reference(model_type, CASES[model_type][case] | IN_BF16.get(model_type, {}), tmp_path)
    model = from_pretrained(tmp_path)
    cache = model.static_cache(3, TOTAL, chunk=CHUNK, quantize="int8")
    exact = model.static_cache(3, TOTAL, chunk=CHUNK)
    kept, whole = (
        sum(state.nbytes for state in c.states if isinstance(state, KVState))
        for c in (cache, exact)
    )
    assert kept < 0.32 * whole  # of fp32
    reader, differences = Reader(model, text(3), cache), []
    reader.prompts([5, 16, 1])  # exact, as prompts see each other's keys unrounded
    reader.compare = lambda out, whole: differences.append((out - whole).norm() / whole.norm())
    for n in (1, 4, 1, 3, 4):
        reader.step(n)
    reader.step(9, slice(1, 2))
    assert 1e-4 < max(differences) < 0.05


def test_rows_without_packing_and_empty_ones() -> None:
    model, ids = tiny_llama(), text(3) % 97
    reader = Reader(model, ids, model.static_cache(3, TOTAL))
    for n, length in ((3, 3), (20, 23), (1, 24), (16, 40)):
        reader.step(n)
        assert reader.cache.length == length
    reader = Reader(model, ids, model.static_cache(3, TOTAL))
    reader.prompts([5, 0, 8], max_length_q=8)
    reader.step(2)
    assert reader.cache.lengths.tolist() == [7, 2, 10]


@pytest.mark.parametrize("part", [3, 9], ids=["step", "long part"])
def test_losses_of_a_continued_text(part: int) -> None:
    model, (ids, labels) = tiny_llama(), tokens(batch=2, length=20)
    whole = model(ids, labels=labels, loss_reduction="none", metrics=("nll",))
    cache = model.static_cache(2, 20, chunk=CHUNK)
    losses = []
    for x, y in zip(ids.split(part, 1), labels.split(part, 1), strict=True):
        targets = torch.cat((y[:, 1:], y[:, :1] * 0 - 100), 1)
        out = model(x, past_key_values=cache, shift_labels=targets, loss_reduction="none")
        losses.append(out.loss)
    inner = [i for i in range(20) if (i + 1) % part]
    torch.testing.assert_close(torch.cat(losses, 1)[:, inner], whole.loss[:, inner])
    assert whole.loss[:, inner].count_nonzero() > 10


def test_own_positions_rotate_and_do_not_move_tokens() -> None:
    model, ids = tiny_llama(), text(1)[:, :12] % 97
    spread = torch.arange(12)[None] * 3
    expected = model(ids, position_ids=spread).logits
    cache, parts = model.static_cache(1, 12, chunk=CHUNK), []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        at = {"position_ids": spread[:, start:end]}
        parts.append(model(ids[:, start:end], past_key_values=cache, **at).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-5)


def test_experts_count_what_they_get(tmp_path: Path) -> None:
    model, ids = load_case("qwen3_moe", "plain", tmp_path), text(2)
    cache, growing = model.static_cache(2, TOTAL), KVCache()
    for part in ids[:, :20].split(6, 1):
        loads = [
            model(part, past_key_values=c, metrics=("expert_load",)).metrics["expert_load"]
            for c in (cache, growing)
        ]
        assert torch.equal(*loads)


@pytest.mark.parametrize(
    ("held", "call", "message"),
    [
        (
            0,
            {"attention_mask": torch.ones(2, 9).triu()},
            "rows hold no padding; pack .* cu_seq_lens",
        ),
        (0, {"attention_mask": torch.ones(1, 9)}, r"mask \(1, 9\) .* of ones \[2, 9\] on the CPU"),
        (0, {"cu_seq_lens": torch.tensor([0, 3, 9, 18])}, "has 3 sequences, but the cache 2 rows"),
        (0, {"cu_seq_lens": torch.tensor([0, 19])}, "run from 0 to 18"),
        (0, {"position_ids": torch.arange(9).repeat(2, 1) % 4}, "restart: .* with cu_seq_lens"),
        (0, {"input_ids": torch.ones(2, 31).long()}, "31 tokens of a row .* capacity=30"),
        (
            0,
            {"input_ids": torch.ones(1, 33).long(), "cu_seq_lens": torch.tensor([0, 31, 33])},
            "31 tokens of a row do not fit into the cache's capacity=30",
        ),
        ([5, 2], {"attention_mask": torch.ones(2, 15)}, r"mask \(2, 15\) .* \[2, 14\] on the CPU"),
        (5, {"input_ids": torch.ones(3, 9).long()}, "holds 2 rows, this batch has 3"),
        ([5, 2], {}, r"9 new tokens for rows that hold 2, 5 tokens: .* chunk=4 .*rows\(i, i \+ 1"),
        ([5, 2], {"cu_seq_lens": torch.tensor([0, 9, 18])}, "already holds 2, 5 tokens"),
        ([28, 2], {"input_ids": torch.ones(2, 3).long()}, "31 tokens of a row .* capacity=30"),
    ],
    ids=str,
)
def test_bad_input_changes_nothing(held: Any, call: dict[str, Any], message: str) -> None:
    model, ids = tiny_llama(), text(2) % 97
    reader = Reader(model, ids, model.static_cache(2, 30, chunk=CHUNK))
    lengths = held if isinstance(held, list) else [held, held]
    if held:
        reader.prompts(lengths)
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": ids[:, :9], **call}, past_key_values=reader.cache)
    assert reader.cache.lengths.tolist() == lengths
    if held:
        reader.step(2)
    else:
        reader.prompts([7, 2])


def test_a_mask_of_ones_on_the_host_says_nothing() -> None:
    model, ids = tiny_llama(), text(2) % 97
    reader = Reader(model, ids, model.static_cache(2, TOTAL, chunk=CHUNK))
    reader.prompts([5, 2], attention_mask=torch.ones(1, 7))
    for width in (3, 8):  # the new tokens; all of the longer row
        cache = model.static_cache(2, TOTAL, chunk=CHUNK)
        model(**pack(ids, [5, 2]), past_key_values=cache)
        new = torch.stack((ids[0, 5:8], ids[1, 2:5]))
        logits = model(new, past_key_values=cache, attention_mask=torch.ones(2, width)).logits
        reader.compare(logits, torch.stack((reader.whole[0, 5:8], reader.whole[1, 2:5])))
    long = model.static_cache(2, TOTAL, chunk=CHUNK)
    for start, stop in ((0, 9), (9, 20)):
        mask = torch.ones(2, stop, dtype=torch.bool)
        out = model(ids[:, start:stop], past_key_values=long, attention_mask=mask)
        reader.compare(out.logits, reader.whole[:, start:stop])


@pytest.mark.parametrize("kind", ["static", "growing"])
@pytest.mark.parametrize(
    ("changes", "spelled"),
    [
        ({"num_hidden_layers": 3}, "3 layers of 2 kv heads with head dim 20"),
        ({"num_hidden_layers": 1}, "1 layers of 2 kv heads with head dim 20"),
        ({"num_key_value_heads": 1}, "2 layers of 1 kv heads with head dim 20"),
        ({"head_dim": 16}, "2 layers of 2 kv heads with head dim 16"),
    ],
    ids=str,
)
def test_the_cache_of_another_model(changes: dict[str, int], spelled: str, kind: str) -> None:
    ids, other = text(2) % 97, tiny_llama(**changes)
    cache = other.static_cache(2, TOTAL) if kind == "static" else KVCache()
    other(ids[:, :9], past_key_values=cache)
    own = "this Llama 2 layers of 2 kv heads with head dim 20: give a cache of this model"
    with pytest.raises(ValueError, match=f"past_key_values has {spelled}, but {own}"):
        tiny_llama()(ids[:, 9:12], past_key_values=cache)
    assert cache.length == 9


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_step_in_a_cuda_graph(quantize: Any) -> None:
    model, ids = tiny_llama(head_dim=64).to("cuda", torch.bfloat16), (text(3) % 97).cuda()
    caches = [model.static_cache(3, 64, quantize=quantize) for _ in range(2)]
    given = ids.new_zeros(3, 1)
    prompts = {k: v.cuda() for k, v in pack(ids.cpu(), [5, 16, 1]).items()}
    for cache in caches:
        model(**prompts, past_key_values=cache, max_length_q=16)
        model(given, past_key_values=cache)  # compiles
    eager, graphed = caches
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    pairs: list[tuple[Tensor, Tensor]] = []
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph, stream=stream):
            out = model(given, past_key_values=graphed).logits
        for i in range(12):
            given.copy_(ids[:, i : i + 1])
            graph.replay()
            pairs.append((out.clone(), model(given, past_key_values=eager).logits))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for replayed, expected in pairs:
        torch.testing.assert_close(replayed, expected, rtol=0, atol=0)
    graphed.refresh()
    assert graphed.lengths.tolist() == eager.lengths.tolist() == [18, 29, 14]
