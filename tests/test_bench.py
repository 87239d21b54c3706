"""Benchmarks without a GPU: each runs at tiny size, and what guards the numbers that are published.

A GPU's clock and memory are played. What a benchmark computes is compared with a truth or with its
peer; how its tables look is seen in docs/, which must show the newest records.
"""

import gc
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tigon
from bench import (
    adapters,
    attention,
    checkpoint,
    compare,
    cpu,
    distillation,
    distillation_side,
    estimates,
    generate,
    generate_cases,
    generate_multi,
    harness,
    kernels,
    kernels_report,
    layouts,
    long_sums,
    measure,
    moe,
    one_shot_sum,
    optimizers,
    padding,
    parallel,
    peers,
    preference,
    preference_side,
    recipes,
    timing,
    train_cases,
    train_curves,
    train_limit,
    train_multi,
    train_multi_side,
    train_report,
    train_side,
    train_step,
    trainer,
)
from bench.attention_cases import CASES as ATTENTION_CASES
from bench.attention_cases import Case as AttentionCase
from bench.attention_cases import lognormal, problem
from bench.compare_side import LLAMA_1B, QWEN3_MOE
from bench.generate_cases import INT8, LLAMA_8B, OURS, THEIRS, Decode, Prefill, Size
from bench.harness import RESULTS, ROOT, Record
from bench.train_cases import PEER, Batch
from tests.small import LLAMA, write_chats, write_model
from tests.train import preferences
from tigon.generation import steps
from tigon.kernels import AttentionMask, attention_ref

BENCHES = (kernels, moe, attention, padding, generate, cpu, compare, train_step, train_multi)
BENCHES += (train_curves, preference, distillation, recipes, checkpoint, parallel, adapters)
BENCHES += (generate_multi, one_shot_sum, long_sums, estimates, trainer, optimizers, layouts)
BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"
TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
RAGGED_ATTENTION = AttentionCase("tiny", (5, 3, 1, 7), 8, (4, 2), 16, window=3)
SMALL_KERNELS = [
    kernels.streamed("rms_norm", 24, 64),
    kernels.streamed("rms_norm_residual", 24, 64),
    kernels.streamed("sandwich_norm", 24, 64),
    kernels.streamed("gated_act", 24, 32, variant="silu"),
    kernels.streamed("gated_act", 24, 32, variant="gelu_tanh"),
    kernels.streamed("rope", 2, 7, 4, 2, 16),
    kernels.streamed("qk_norm_rope", 2, 7, 4, 2, 16),
    kernels.cross_entropy(24, 97),
    *kernels.linear_cross_entropy(48, 32, 97, 1.05),
]
Patch = pytest.MonkeyPatch
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gc, "collect", int)  # 0.2 s in a process this large


@pytest.fixture
def clock(monkeypatch: Patch) -> None:
    """Everything takes 2 ms and 2 MiB."""

    def times(run: timing.Run, before: Any = None, **_: Any) -> list[float]:
        if callable(before):
            before()
        run()
        return [3.0, 1.0, 2.0]

    stamp = harness.stamp
    monkeypatch.setattr(harness, "stamp", lambda commit: stamp(commit) | {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(timing, "wait", timing.nothing)
    monkeypatch.setattr(torch.cuda, "empty_cache", timing.nothing)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch, "set_default_device", lambda _: None)
    monkeypatch.setattr(timing, "milliseconds", times)
    monkeypatch.setattr(timing, "peak_mib", lambda *given: times(*given)[2])
    monkeypatch.setattr(timing, "host_microseconds", lambda run, *_, **__: times(run))
    monkeypatch.setattr(measure.Effort, "copy", lambda *_: [1.0, 2.0, 3.0])


def in_process(patch: Patch, side: ModuleType) -> Callable[..., Iterator[Record]]:
    """Processes are calls."""

    def spawn(request: Any, *_: Any) -> Iterator[Record]:
        lines: list[Record] = []
        patch.setattr(side, "say", lambda kind, **found: lines.append({"kind": kind, **found}))
        side.main(json.dumps(asdict(request)))
        yield from json.loads(json.dumps(lines))

    return spawn


# Each makes a benchmark tiny and says with which arguments it runs


def tiny_kernels(patch: Patch, root: Path) -> list[str]:
    build = kernels.build
    patch.setattr(kernels, "build", lambda case, _, libraries: build(case, "cpu", libraries))
    patch.setattr(peers, "compiled", lambda f: f)
    patch.setattr(kernels, "CASES", SMALL_KERNELS)
    patch.setattr(kernels, "HOST_SHAPE", (4, 8))
    patch.setattr(kernels, "installed", lambda _: None)
    return []


def tiny_adapters(patch: Patch, root: Path) -> list[str]:
    patch.setattr(adapters, "LINEARS", {"o": (64, (24,)), "qkv": (64, (16, 8, 8))})
    patch.setattr(adapters, "ROWS", 40)
    steps = {
        name: {"ms": [1.0, 4.0, 5.0], "peak_mib": 2.0, "loss": 3.0} for name in adapters.MODELS
    }
    patch.setattr(adapters, "training_steps", lambda *_: steps)
    return ["--only", "o,o with dropout,qkv,nf4,steps"]


def tiny_attention(patch: Patch, root: Path) -> list[str]:
    patch.setattr(attention, "CASES", (RAGGED_ATTENTION,))
    patch.setattr(attention, "measured", partial(attention.measured, device="cpu"))
    patch.setattr(attention, "on_the_host", dict)
    patch.setattr(attention, "verdicts", lambda _: [])
    return ["--quick"]


def tiny_moe(patch: Patch, root: Path) -> list[str]:
    name = next(iter(moe.SHAPES))
    more = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    patch.setattr(moe, "SHAPES", {name: (24, 16, 8, 4, 2)})
    ticks = itertools.count(1)  # forward takes 1 ms, both 2, and so on
    patch.setattr(timing, "milliseconds", lambda run, *_, **__: (run(), [next(ticks)])[1])
    patch.setattr(moe, "STACK_TOKENS", (1, 12))
    patch.setattr(moe, "QWEN3_MOE", QWEN3_MOE | TINY | more)
    for part in ("layer", "stack"):
        patch.setattr(moe, part, partial(getattr(moe, part), device="cpu"))
    return ["--quick", "--only", f"{name},{moe.STACK}"]


def tiny_padding(patch: Patch, root: Path) -> list[str]:
    patch.setattr(padding, "LLAMA_1B", LLAMA_1B | TINY)
    patch.setattr(padding, "ROWS", 3)
    patch.setattr(padding, "MEAN", 7)
    return ["--quick"]


def tiny_cpu(patch: Patch, root: Path) -> list[str]:
    tigon.Llama.from_config(LLAMA_1B | TINY | {"vocab_size": 64}).save_pretrained(root / "tiny")
    patch.setattr(cpu, "DECODE", [(2, 5)])
    patch.setattr(cpu, "NEW_TOKENS", 3)
    patch.setattr(cpu, "NEVER", None)
    return [str(root / "tiny"), "--only", "float32", "--quick", "--threads", "1"]


def tiny_compare(patch: Patch, root: Path) -> list[str]:
    patch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' own tests run them
    patch.setenv("OMP_NUM_THREADS", "1")
    return ["--base", str(ROOT), "--tiny", "--rounds", "1", "Llama", "decode 1 ", "host"]


def tiny_train_step(patch: Patch, root: Path) -> list[str]:
    patch.setattr(train_side.Training, "profiled", lambda self: {"attention": 1.0})
    patch.setattr(train_step, "spawn", in_process(patch, train_side))
    return ["--tiny", "--rounds", "1", "--only", "1B 1 x 512,ragged,Qwen3-30B,512 LoRA"]


def tiny_preference(patch: Patch, root: Path) -> list[str]:
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    way = preference_side.Way("sdpa", 2)
    patch.setattr(preference_side, "ways", lambda _, best=None: [way] * (not best))
    patch.setattr(preference, "spawn", in_process(patch, preference_side))
    return ["--tiny"]


def tiny_distillation(patch: Patch, root: Path) -> list[str]:
    patch.setattr(distillation, "spawn", in_process(patch, distillation_side))
    return ["--tiny"]


def tiny_recipes(patch: Patch, root: Path) -> list[str]:
    for folder in ("pairs", "chats"):
        (root / folder).mkdir()
    for name, count in (("train", 16), ("eval", 4)):
        rows = preferences.pairs(count, seed=count)
        preferences.write(root / f"pairs/{name}.jsonl", rows)
        write_chats(root / f"chats/{name}.jsonl", count)
    paths = {"model": write_model(root / "model"), "preferences": root / "pairs"}
    paths |= {"gsm8k": root / "chats", "runs": root / "runs"}
    changes = "epochs=null steps=2 seq_len=256 batch_size=2 micro_batch_size=2 device=cpu"
    options = [x for name, path in paths.items() for x in (f"--{name}", str(path))]
    for change in f"{changes} dtype=float32 eval_every=2".split():
        options += ["--set", change]
    return ["--tiny", "--quick", *options]


def tiny_curves(patch: Patch, root: Path) -> list[str]:
    return ["--tiny"]


# What holds of each record, beside that no side has failed


def near(a: Record, b: Record, within: float, *names: str) -> None:
    for name in names:
        assert a[name] == pytest.approx(b[name], rel=within), name


def check_providers(record: Record) -> None:
    for case in record["cases"]:
        *_, eager = case["providers"]
        for provider in case["providers"]:
            if "error" not in provider:
                errors = provider["errors"]
                assert set(errors) == set(eager["errors"]) and max(errors.values()) < 0.02, provider


def check_adapters(record: Record) -> None:
    found = json.dumps(record)
    assert '"other_share": 0' in found  # numbers of NF4 that are not the definition's
    for rows in re.findall(r'"errors": (\{[^}]*\})', found):
        assert 0 < max(json.loads(rows).values()) < 0.02


def check_moe(record: Record) -> None:
    (layer,) = record["layers"].values()
    assert layer["flops_forward"] == 6 * 24 * 2 * 16 * 8
    for name in ("tigon", "transformers eager"):
        assert 0 < max(layer["providers"][name]["errors"].values()) < 0.02
    for name in ("tigon", "transformers"):
        row = record["stack"]["providers"][name]
        assert row["tokens_per_second"] == 12e3 / row["ms"][1] and 3.0 < row["loss"] < 6.0


def check_padding(record: Record) -> None:
    rows = record["providers"]
    assert record["real"] < math.prod(record["shape"])
    for row in rows.values():
        near(row, rows[padding.WITH], 1e-3, "loss")
        assert row["gradient_off"] < 0.01


def check_cpu(record: Record) -> None:
    assert [row["what"] for row in record["results"]] == ["decoded token", "training step"]
    assert all(row["ours_ms"] > 0 < row["transformers_ms"] for row in record["results"])


def check_compare(record: Record) -> None:
    step, decode, _ = record["cases"]
    near(step["base"][0], step["new"][0], 0, "loss", "gradient_norm")
    assert decode["base"][0]["tokens_crc"] == decode["new"][0]["tokens_crc"]


def check_train_step(record: Record) -> None:
    assert record["complete"] is False and len(record["cases"]) == 4
    for case in record["cases"]:
        (theirs,), (ours,) = (case["rounds"][side] for side in (PEER, train_cases.OURS))
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-3)
        near(ours, theirs, 1e-2, "gradient_norm")
        assert train_report.disagreement(case) == "" and ours["left_mib"] == 0.0


def check_preference(record: Record) -> None:
    sides = {name: row["first"] for name, row in record["sides"].items()}
    ours, exact = sides[preference_side.OURS], sides[preference_side.EXACT]
    near(sides[preference_side.PEER], ours, 1e-2, "logps/chosen", "grad_norm")
    near(sides[preference_side.TWICE], ours, 1e-4, "logps/rejected")
    near(sides[preference_side.HALF], ours, 1e-2, "loss", "grad_norm", "logps/chosen")
    near(exact, ours, 1e-4, "logps/chosen")
    for side in (sides[preference_side.PEER], exact):
        assert side["rewards/margins"] == pytest.approx(ours["rewards/margins"], abs=1e-3)
    assert abs(ours["rewards/margins"]) > 3e-3


def check_distillation(record: Record) -> None:
    for kind, within in (("step", 1e-3), ("head", 1e-5)):
        for name, ours in record[kind][distillation_side.OURS].items():
            theirs = record[kind][distillation_side.FORMULA][name]
            near(ours, theirs, within, "loss")
            near(ours, theirs, 1e-2, "gradient_norm")
    assert list(distillation.disagreements(record)) == []


def check_recipes(record: Record) -> None:
    assert [row["part"] for row in record["dpo"]] == [0, 1]
    assert [row["kind"] for row in record["lora"]] == list(recipes.RATES)
    for row in [*record["dpo"], *record["lora"]]:
        assert row["steps"] == 2 and row["last"]["eval_loss"] < row["first"]["eval_loss"]


def check_curves(record: Record) -> None:
    curves = record["curves"]
    assert list(curves) == list(train_curves.SIDES)
    for side, losses in curves.items():
        fresh = side in (train_curves.LONG, train_curves.FP8, train_curves.FP8_APART)
        like = curves[train_curves.LONG if fresh else train_curves.TRUTH]
        assert losses[:4] == pytest.approx(like[:4], rel=3e-3) and losses[3] < losses[0]
    assert 0 < train_curves.distance(record, train_curves.OURS) < 0.01


SMOKE: dict[ModuleType, tuple[Callable[[Patch, Path], list[str]], Callable[[Record], None]]] = {
    kernels: (tiny_kernels, check_providers),
    adapters: (tiny_adapters, check_adapters),
    attention: (tiny_attention, check_providers),
    moe: (tiny_moe, check_moe),
    padding: (tiny_padding, check_padding),
    cpu: (tiny_cpu, check_cpu),
    compare: (tiny_compare, check_compare),
    train_step: (tiny_train_step, check_train_step),
    preference: (tiny_preference, check_preference),
    distillation: (tiny_distillation, check_distillation),
    recipes: (tiny_recipes, check_recipes),
    train_curves: (tiny_curves, check_curves),
}


SLOW = (compare, preference, recipes, train_curves)  # several processes, or whole runs


def failures(record: Any) -> list[str]:
    if isinstance(record, dict):
        own = [str(record["error"])] if "error" in record else []
        return own + [e for x in record.values() for e in failures(x)]
    return [e for x in record for e in failures(x)] if isinstance(record, list) else []


@on_cpu
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "bench",
    [pytest.param(b, marks=[pytest.mark.slow] * (b in SLOW), id=b.BENCH.kind) for b in SMOKE],
)
def test_benchmark_runs_at_tiny_size(bench: Any, monkeypatch: Patch, tmp_path: Path) -> None:
    make, check = SMOKE[bench]
    threads, out = torch.get_num_threads(), tmp_path / "record" / "out.json"
    arguments = [*make(monkeypatch, tmp_path), "--out", str(out), "--commit", "abc1234-dirty"]
    harness.main(replace(bench.BENCH, needs_gpu=False), arguments)
    torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    assert (record["commit"], record["uncommitted_changes"]) == ("abc1234", True)
    missing = [e for e in failures(record) if not re.match(r"(ModuleNotFound|Import)Error", e)]
    assert not missing
    assert "abc1234" in bench.BENCH.show(record)
    check(record)


@pytest.mark.usefixtures("clock")
def test_generation_is_timed_without_its_start(monkeypatch: Patch, tmp_path: Path) -> None:
    """A played clock: 7 ms a call, and 1 or 3 ms a token."""
    now = [0.0]

    def model(make: Any, ms: float) -> Any:
        def made(config: Record) -> Any:
            found = make(config, "cpu")
            generate_tokens = found.generate

            def played(ids: Any, *, max_new_tokens: int, **options: Any) -> Any:
                now[0] += 1e-3 * (7 + ms * max_new_tokens)
                return generate_tokens(ids, max_new_tokens=max_new_tokens, **options)

            found.generate = played
            return found

        return made

    one, many, prefill = generate_cases.CASES
    tiny = [Decode(c.name, b, 5, (2, 4), (2, 4), 1) for c, b in ((one, 1), (many, 3))]
    monkeypatch.setattr(generate, "LLAMA_8B", SMALL_LLAMA)
    monkeypatch.setattr(generate, "CASES", (*tiny, Prefill(prefill.name, 16)))
    monkeypatch.setattr(generate_cases, "ours", model(generate_cases.ours, 1.0))
    monkeypatch.setattr(generate_cases, "theirs", model(generate_cases.theirs, 3.0))
    monkeypatch.setattr(generate_cases, "CACHES", {OURS: None})
    monkeypatch.setattr(generate_cases, "products", lambda *_: [("a", timing.nothing)])
    monkeypatch.setattr(generate_cases, "attentions", lambda *_: [("y", int)])
    monkeypatch.setattr(generate.time, "perf_counter", lambda: now[0])
    out = tmp_path / "generate.json"
    monkeypatch.setattr(timing, "peak_mib", lambda run: (run(), 3.0)[1])
    bench = replace(generate.BENCH, needs_gpu=False)
    harness.main(bench, ["--commit", "abc1234", "--out", str(out)])
    record = json.loads(out.read_text())
    assert not failures(record)
    one, many, prefill = record["cases"]
    assert [r["ms"] for r in one["providers"]] == [pytest.approx([n] * 3) for n in (1.0, 3.0)]
    moved = 2 * Size(SMALL_LLAMA).parameters + 3 * 7.5 * Size(SMALL_LLAMA).cached()
    share = generate.share(record, many, many["providers"][0])
    assert share == pytest.approx(1e3 * moved / record["copy"]["bytes_per_second"])
    assert prefill["limit_ms"] == sum(prefill["parts_ms"].values())
    assert prefill["providers"][0]["first_token_ms"][1] == pytest.approx(8.0)


@on_cpu
def test_ranks_of_both_sides_compute_the_same(tmp_path: Path) -> None:
    """On one rank, where FSDP2 shards nothing: the same rows and weights, so the same loss."""
    train_multi.write_inputs(tmp_path, tiny=True)
    losses = []
    for kind in ("tigon", "peer-keep"):
        side, out = train_multi.Side(kind, gpus=1), tmp_path / f"{kind}.json"
        train_multi_side.main(str(out), kind, "sdpa", *train_multi.settings(tmp_path, side, True))
        losses.append(json.loads(out.read_text())["losses"])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
    assert len(losses[0]) == len(losses[1]) == train_multi_side.FIRST


@pytest.mark.parametrize("name", adapters.MODELS)
def test_adapter_models_train_the_adapter_alone(name: str, monkeypatch: Patch) -> None:
    small = {k: v for k, v in LLAMA.items() if k in adapters.LLAMA_8B}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kind, values, config, few = adapters.MODELS[name]
    values = values | {k: v for k, v in small.items() if k in values and k != "model_type"}
    monkeypatch.setitem(adapters.MODELS, name, (kind, values, config, few))
    made = adapters.model(name, 2, device="cpu")
    ids = torch.randint(0, 100, (1, 9))
    made.train()(ids, labels=ids).loss.backward()
    learned = {n: p for n, p in made.named_parameters() if p.requires_grad}
    assert learned and all(".lora" in n and p.grad.abs().sum() > 0 for n, p in learned.items())
    assert ("experts.lora" in str(list(learned))) == name.endswith("experts too")


# What is counted: bytes, operations, targets


def test_kernel_bytes_are_those_counted_by_hand() -> None:
    by_name = {case.name: case.bytes for case in kernels.CASES}
    expected = {
        # 67,108,864 elements: x, y; then x, dy, dx
        "rms_norm 16384x4096": (268_435_456, 671_088_640),
        "rms_norm 131072x128": (67_108_864, 167_772_160),
        "rms_norm_residual 16384x4096": (536_870_912, 1_073_741_824),
        "sandwich_norm 16384x4096": (536_870_912, 1_342_177_280),
        # 234,881,024 elements: gate, up, y; then gate, up, dy, dgate, dup
        "gated_act silu 16384x14336": (1_409_286_144, 3_758_096_384),
        "gated_act gelu_tanh 16384x6912": (679_477_248, 1_811_939_328),
        # 16384 tokens x 40 heads x 128
        "rope B2 T8192 32/8x128": (335_544_320, 671_088_640),
        # and 6 + 6 bytes there and back; dv in and out again is 4 bytes of 16,777,216
        "qk_norm_rope B2 T8192 32/8x128": (335_544_320, 905_969_664),
    }
    assert {name: tuple(by_name[name].values()) for name in expected} == expected
    assert by_name["cross_entropy 8192x128256"] == {"both": 4_202_692_608}
    counts = [sum(c.operator == o for c in kernels.CASES) for o in kernels.OPERATORS]
    assert counts == [4, 1, 2, 8, 1, 1, 3, 15, 0] and len(by_name) == len(kernels.CASES)
    aims = {case.name: case.targets.get("both") for case in kernels.CASES}
    assert aims["linear_cross_entropy dense 16384, 2048, 151936"] == 1.05
    assert aims["linear_cross_entropy 30 % valid 8192, 1024, 151936"] == 0.40
    # 1 GiB of logits, dX of 64 MiB, dW of 1002 MiB, and that in fp32
    memory = {case.name: case.memory for case in kernels.CASES}
    assert memory["linear_cross_entropy dense 8192, 4096, 128256"] == 1024 + 64 + 3 * 1002


def test_attention_operations_are_counted_by_hand() -> None:
    # 5 tokens see 1 + 2 + 3 + 3 + 3, 3 see 1 + 2 + 3, 1 sees 1, 7 see 1 + 2 + 5 * 3
    assert RAGGED_ATTENTION.pairs == 12 + 6 + 1 + 18
    assert RAGGED_ATTENTION.flops == 4 * 37 * 4 * 16
    full = next(case for case in ATTENTION_CASES if case.name == "rows 2 x 8192")
    assert full.flops == 4 * 2 * (8192 * 8193 // 2) * 32 * 128
    lengths = lognormal(32768, 700)
    assert lengths == lognormal(32768, 700) and sum(lengths) == 32768 and min(lengths) > 0
    for case in ATTENTION_CASES:  # no sequence spans two rows
        ends = torch.tensor(case.lengths).cumsum(0)
        assert set(range(case.row, sum(case.lengths) + 1, case.row)) <= set(ends.tolist())


SMALL_LLAMA = LLAMA_8B | TINY | {"vocab_size": 1201, "head_dim": 16}


@pytest.mark.parametrize("more", [{}, SMALL_LLAMA, SMALL_LLAMA | {"tie_word_embeddings": True}])
def test_generation_bytes_are_those_of_the_model(more: Record) -> None:
    config = LLAMA_8B | more
    model = tigon.Llama.from_config(config | {"model_type": "llama"}, device="meta")
    assert Size(config).parameters == sum(p.numel() for p in model.parameters())
    products = [p.shape for n, p in model.named_parameters() if "layers.0" in n and p.dim() == 2]
    assert sorted(Size(config).products) == sorted(map(tuple, products))


def test_generation_bytes_are_counted_by_hand() -> None:
    size, (one, many, _) = Size(LLAMA_8B), generate_cases.CASES
    # 32 layers x 8 heads x (key, value) of 128 elements; quantised, each with an fp32 scale
    assert (size.cached(), size.cached(True)) == (131_072, 67_584)
    # the 33rd to 224th token see 1024 + 32 to 1024 + 223 tokens
    assert one.held(OURS) == sum(range(1056, 1248)) / 192
    assert one.held(THEIRS) == sum(range(1028, 1048)) / 20
    step = size.step(many, OURS)
    assert step["parameters"] - step["read"] == 2 * 128256 * 4096
    assert step["cache"] == 64 * 1151.5 * 131_072
    assert size.step(many, INT8)["cache"] == 64 * 1151.5 * 67_584
    # 8192 tokens: 32768 for the stream, 10240 queries and keys, 43008 for the gate; embedding, head
    layers = 32 * 8192 * (32768 + 10240 + 43008)
    assert size.passes(8192) == 2 * (layers + 8192 * 8192 + 128256 * 4096)


def test_training_settings_of_a_case() -> None:
    case = train_cases.CASES["Llama-3.1-8B 2 x 8192, checkpointing"]
    chosen = train_cases.settings(case, train_cases.OURS, "adamw_bf16")
    assert chosen.activation_checkpointing is True and chosen.param_dtype == "bfloat16"
    assert (chosen.lr, chosen.beta2, chosen.weight_decay) == (1e-5, 0.999, 0.0)
    assert chosen.optimizer_in_backward and not chosen.max_grad_norm


RAGGED = "ragged chats, Llama-3.1-8B"


def test_batches_are_those_that_records_name() -> None:
    batch = Batch.of(train_cases.CASES[RAGGED], 512, "cpu", tiny=False)
    assert batch.lengths is not None and sum(batch.lengths) == 8192 == batch.ids.numel()
    assert 0.35 < batch.supervised / 8192 < 0.45
    starts = batch.bounds[:-1].long()
    assert (batch.positions[0, starts] == 0).all() and (batch.labels[0, starts] == -100).all()
    pairs = preference_side.lengths(False)
    rows = [n for prompt, *answers in pairs for n in (prompt + a for a in answers)]
    assert len(rows) == 2 * preference_side.PAIRS and max(rows) <= preference_side.LONGEST
    assert sum(rows) == preference.tokens(False) and max(rows) > 1.5 * min(rows)


def test_training_limit_counts_every_product_and_pass(monkeypatch: Patch) -> None:
    """Each run takes 1 ms, a copy moves 1 GB in it."""
    monkeypatch.setattr(train_limit, "took", lambda run: 1.0)
    monkeypatch.setattr(train_limit, "copy_bandwidth", lambda *_: 1e12)
    make = partial(train_cases.Case, "Llama-3.2-1B", 1, 48, 1.0)
    once, twice = (
        train_limit.composed(case, Batch.of(case, 512, "cpu", True), True)
        for case in (make(), make(checkpointing=True))
    )
    # Two blocks of qkv, o, gate and up, down, and the head: three products each
    assert once["milliseconds"]["matrix products"] == 3 * (2 * 4 + 1)
    assert twice["milliseconds"]["matrix products"] == 3 * (2 * 4 + 1) + 2 * 4
    assert once["milliseconds"]["attention"] == 2 and twice["milliseconds"]["attention"] == 4
    tokens, c = 48, 64
    moved = {
        "norms": 2 * 2 * 2 * 8 * tokens * c,  # bytes, blocks, norms, tensors
        "RoPE": 2 * 2 * 4 * tokens * (4 + 1) * 16,
        "activation": 2 * 2 * 8 * tokens * 96,
        "embedding": 2 * 4 * tokens * c,
        "head": 2 * 2 * tokens * 512,
    }
    assert once["bytes"] == moved
    assert twice["bytes"]["norms"] == moved["norms"] * 12 // 8
    assert once["milliseconds"]["optimizer"] == 14 * once["parameters"] / 1e9


def test_held_out_pairs_are_each_judged_once(tmp_path: Path) -> None:
    for name, numbers in (("train", range(17)), ("eval", range(17, 23))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{n}\n" for n in numbers))
    held_out: list[int] = []
    for train, part, count in recipes.write_parts(tmp_path, tmp_path / "parts"):
        sides = [[int(line) for line in path.read_text().split()] for path in (train, part)]
        assert sorted(sides[0] + sides[1]) == list(range(23)) and len(sides[1]) == count
        held_out += sides[1]
    assert sorted(held_out) == list(range(23))


# What is wrong is noticed


def test_truth_does_not_depend_on_the_chunk() -> None:
    x, w, dy = torch.randn(7, 5), torch.randn(5), torch.randn(7, 5)
    expected = {"y": x.sin() * w, "dx": dy * w * x.cos(), "dw": (dy * x.sin()).sum(0)}
    names = {"x": x, "row": torch.arange(7)}, {"w": w}, ("y",), (dy,)
    for step in (3, 7, 100):
        found = measure.truth(
            lambda x, row, w: x.sin() * w * (row[:, None] >= 0), *names, step=step
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_truth_is_the_definition(softcap: float | None) -> None:
    what, _ = problem(replace(RAGGED_ATTENTION, softcap=softcap))
    exact = what.truth()
    wide = [x.detach().double().requires_grad_() for x in what.leaves.values()]
    ids = torch.tensor([[0] * 5 + [1] * 3, [2] + [3] * 7])
    out = attention_ref(*wide, mask=AttentionMask(8, segment_ids=ids), window=3, softcap=softcap)
    grads = torch.autograd.grad(out, wide, what.upstream[0].double())
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(exact[name].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("clock")
def test_provider_that_raises_is_recorded_and_restored() -> None:
    made = kernels.build(SMALL_KERNELS[0], "cpu", {})
    (dy,) = made.upstream

    def broken() -> None:
        dy.zero_()
        raise RuntimeError("no kernel for this")

    made.providers[0] = measure.Provider("Liger", lambda: broken, overwrites=(dy,))
    del made.providers[2:]
    fresh = dy.clone()
    failed, eager = measure.measure("", made, measure.ONCE)["providers"]
    assert failed == {"name": "Liger", "error": "RuntimeError: no kernel for this"}
    assert eager["both_ms"] == [1.0, 2.0, 3.0] and torch.equal(dy, fresh)
    names = [p.name for p in kernels.build(SMALL_KERNELS[0], "cpu", {"Liger": None}).providers]
    assert "Liger" not in names and "QuACK" in names


@pytest.mark.usefixtures("clock")
def test_wrong_numbers_of_nf4_are_noticed(monkeypatch: Patch) -> None:
    right = adapters.quantized.dequantize_nf4
    monkeypatch.setattr(adapters.quantized, "dequantize_nf4", lambda *given: right(*given) * 1.01)
    (row,) = adapters.dequantising((8, 64), 1e9, measure.ONCE)["providers"]
    assert "differ from the definition" in row["error"]


def test_wrong_token_is_noticed() -> None:
    model = generate_cases.ours(SMALL_LLAMA, "cpu")
    ids = torch.randint(1000, 1201, (2, 5))
    tokens = generate_cases.generating(model, OURS, ids)(7)
    assert generate_cases.worst_choice(model, tokens, 7) < 0.1
    tokens[1, 8] = (tokens[1, 8] + 1) % 1201
    assert generate_cases.worst_choice(model, tokens, 7) > generate_cases.DOUBT
    model.generate = lambda *_, **__: tokens
    with pytest.raises(RuntimeError, match=r"9 tokens asked of \(2, 5\), not \(2, 12\)"):
        generate_cases.generating(model, OURS, ids)(9)
    seen: list[int] = []
    model.generate = lambda ids, **_: seen.append(steps.WARM_UP) or torch.cat((ids, ids[:, :2]), 1)
    for provider in (generate_cases.EAGER, OURS):
        generate_cases.generating(model, provider, ids)(2)
    assert seen[0] == sys.maxsize and seen[1] == steps.WARM_UP < 9


def test_errors_and_quantiles() -> None:
    assert timing.relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1
    assert timing.quantiles([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == [2.0, 3.5, 5.0]
    worst = kernels_report.gradient_error  # a NaN is worse than any number
    assert worst({"errors": {"y": "nan", "dx": 0.1, "dw": "inf"}}) == "inf"
    assert worst({"errors": {"y": 9.0, "dx": 0.1, "dw": 0.2}}) == 0.2
    with pytest.raises(TimeoutError, match=r"0\.01 s"), timing.deadline(0.01):
        time.sleep(5)


def train_case(ours: Record, left: float = 8.0) -> Record:
    def rounds(*rows: tuple[float, float], **more: Any) -> list[Record]:
        sizes = {"losses": [11.8, 11.7], "gradient_norm": 2.0, "attention": ["fa4"]}
        sizes |= {"left_mib": left, "gib": dict.fromkeys(train_report.MEMORY, 1.0)} | more
        return [{"ms": m, "allocated_gib": g, "reserved_gib": g} | sizes for m, g in rows]

    mine = rounds((700.0, 60.0), (710.0, 60.0), (690.0, 60.75))
    mine[0] |= ours
    theirs = rounds((800.0, 80.0), (820.0, 80.0), (780.0, 81.0))
    case = {"name": "Llama-3.1-8B 1 x 8192", "tokens": 8192, "limit": {"total": 656.0}}
    return case | {"rounds": {PEER: theirs, train_cases.OURS: mine}}


def test_training_is_judged_by_medians_and_agreement() -> None:
    first, memory, share = train_report.verdicts(train_case({}))
    assert first.startswith("met: ") and first.endswith(": 1.143, target ≥ 1.12")
    assert memory.endswith("0.750, target ≤ 0.87") and share.endswith("0.937, target ≥ 0.96")
    *_, said = train_report.verdicts(train_case({}, left=900.0))
    assert said.startswith("WRONG: ") and "900 MiB" in said
    *_, said = train_report.verdicts(train_case({"losses": [11.85], "gradient_norm": 2.1}))
    assert said.startswith("WRONG: ") and "11.8000 and 11.8500" in said and "2 and 2.1" in said
    case = train_case({})
    case["rounds"][train_cases.OURS] = [{"error": "OutOfMemoryError: no room"}] * 3
    assert next(train_report.verdicts(case)).startswith("not measured: ")
    assert train_report.failures(case) == [f"{train_cases.OURS}: OutOfMemoryError: no room"]


def test_records_keep_what_is_not_measured_again(monkeypatch: Patch, tmp_path: Path) -> None:
    asked: list[Any] = []
    row = train_case({})["rounds"][PEER][0]

    def spawn(request: Any, seconds: float) -> Any:
        asked.append(request)
        yield {"kind": "options", "attention": "sdpa", "experts": ""}
        for side in (PEER, train_cases.OURS) * request.rounds:
            yield {"kind": "round", "side": side, **row}
        for side in request.profile:
            yield {"kind": "profile", "side": side, "milliseconds": {"attention": 1.0}}

    monkeypatch.setattr(train_step, "spawn", spawn)
    out = tmp_path / "train_step.json"

    def measured(rounds: int, *only: str, commit: str = "abc1234") -> Record:
        options = ["--tiny", "--out", str(out), "--commit", commit, "--rounds", str(rounds)]
        harness.main(train_step.BENCH, [*options, *only])
        return json.loads(out.read_text())

    if torch.cuda.is_available():
        pytest.skip("tells of the CPU's run")
    record = measured(1, "1B 1 x 512", "ragged")
    record["cases"][0]["rounds"][train_cases.OURS].append({"error": "OutOfMemoryError"})
    out.write_text(json.dumps(record))
    again = measured(2, "1B 1 x 512")  # one round is missing
    assert (asked[-1].rounds, asked[-1].profile) == (1, ())
    assert [len(rows) for rows in again["cases"][0]["rounds"].values()] == [2, 2]
    assert again["cases"][1] == record["cases"][1]
    newest = measured(1, "1B 1 x 512", commit="def5678")["cases"]
    assert [case["commit"] for case in newest] == ["def5678", "abc1234"]


def test_preferences_that_disagree_are_said() -> None:
    first = {name: 1.0 for name in ("loss", "grad_norm", *preference_side.LOGGED)}
    ours, peer = preference_side.OURS, preference_side.PEER
    sides = {ours: {"ms": 100.0, "allocated_gib": 20.0, "first": first}}
    record: Record = {"sides": sides, "tokens": 4000, "tried": {}}
    sides[peer] = {"ms": 200.0, "allocated_gib": 25.0, "first": first}
    speed, memory, exact = preference.verdicts(record)
    assert "2.000, target ≥ 1.60" in speed and "0.800, target ≤ 0.70" in memory
    assert exact.startswith("not measured: ")
    sides[preference_side.EXACT] = {"first": first}
    # What bf16 does is seen in the peer's settings: here margins are up to 0.1 away, all else 0
    for m in (0.9, 1.05):
        record["tried"][str(m)] = {"ms": 200.0, "first": first | {"rewards/margins": m}}
    for changed, said in (
        ({"rewards/margins": 1.29}, ()),
        ({"rewards/margins": 1.31, "loss": 1.01}, ("loss is 1.01", "rewards/margins is 1.31")),
        ({"loss": float("nan")}, ("loss is nan",)),
    ):
        sides[ours] = sides[ours] | {"first": first | changed}
        found = preference.disagreement(record, ours)
        assert all(part in found for part in said) and bool(found) == bool(said)


def test_trl_is_measured_with_its_fastest_settings(monkeypatch: Patch) -> None:
    """Smaller micro-batches are tried with the attention that was faster."""
    times = {("flash_attention_4", 4): 90.0, ("flash_attention_4", 2): 70.0}
    way, ours, peer = preference_side.Way, preference_side.OURS, preference_side.PEER

    def alone(request: Any, device: str, way: Any) -> Record:
        if way == preference_side.Way("flash_attention_4", 1):
            raise RuntimeError("no")
        return {"ms": times.get((way.attention, way.pairs), 100.0) if way else 50.0}

    monkeypatch.setattr(preference_side, "alone", alone)
    monkeypatch.setattr(preference_side, "imported", lambda _: gc)
    monkeypatch.setattr(gc, "set_verbosity_error", int, raising=False)
    record: Record = {"tried": {}, "sides": {}}
    spawn = in_process(monkeypatch, preference_side)
    for side in (ours, peer):
        for line in spawn(preference_side.Request(side)):
            preference.add(record, side, line)
    fast = "flash_attention_4"
    tried = [(fast, 4), ("sdpa", 4), (fast, 2), (fast, 1)]
    assert list(record["tried"]) == [way(*settings).name for settings in tried]
    assert record["sides"][ours] == {"ms": 50.0} and record["sides"][peer]["ms"] == 70.0


def test_peer_has_its_kernels_on_a_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(train_step, "installed", lambda _: None)
    with pytest.raises(SystemExit, match="pip install transformers liger-kernel"):
        train_step.libraries(tiny=False)


@on_cpu
@pytest.mark.parametrize("side", [distillation_side.FORMULA, distillation_side.CHUNKED])
@pytest.mark.parametrize("beta", [*distillation_side.DIVERGENCES.values(), 0.3])
def test_heads_compute_the_same_divergence(side: str, beta: float) -> None:
    if side == distillation_side.CHUNKED:
        pytest.importorskip("liger_kernel")
    x, w = torch.randn(21, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    inputs = x, w, torch.randn(21, 6), torch.randn(50, 6), beta
    ours, theirs = (distillation_side.HEADS[n](*inputs) for n in (distillation_side.OURS, side))
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y, (x, w)) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_distillation_is_judged_by_the_fastest_peer() -> None:
    def rows(ms: float, **more: Any) -> Record:
        row = {"ms": ms, "loss": 1.0, "gradient_norm": 2.0} | more
        return {name: dict(row) for name in distillation_side.DIVERGENCES}

    side = distillation_side
    step = {side.OURS: rows(100.0), side.FORMULA: rows(150.0), side.FUSED: rows(120.0)}
    head = {side.OURS: rows(10.0, gib=0.25), side.FORMULA: rows(30.0), side.CHUNKED: rows(14.0)}
    record = {"step": step, "head": head, "ended": {}, "tokens": 2**14, "vocab": 2**15}
    found = list(distillation.verdicts(record))
    assert "MISSED: step, KL(teacher || student)" in found[0] and "1.200" in found[0]
    assert found[5].startswith("met: head alone, JSD") and "1.400" in found[5]
    step[side.FUSED]["JSD"]["loss"] = 1.1
    assert any(
        said.startswith(f"WRONG: step, JSD, {side.FUSED}") for said in distillation.verdicts(record)
    )


@pytest.mark.parametrize("wrong", [9.9, math.nan])
def test_losses_of_layouts_that_differ_are_said(wrong: float) -> None:
    """First losses of one run, and later ones of the same side."""

    def said(ours: list[float], run: str = "a") -> list[str]:
        rows = {parallel.ONE: [12.7, 1.9345], "tigon, tensor": ours, parallel.TORCH: [12.7, 9.04]}
        runs = {name: "a" for name in rows} | {"tigon, tensor": run}
        sides = {n: [{"ms": 1.0, "run": runs[n], "losses": x}] for n, x in rows.items()}
        return parallel.differences({"sides": sides})

    assert said([12.7, 1.9368]) == [] == said([12.9, 1.9345], run="b")
    assert said([12.9, 1.9345])[0].startswith("losses of step 1 differ")
    assert said([12.7, wrong])[0].startswith("losses of step 2 differ")


def test_tokens_that_differ_are_no_speed() -> None:
    sides = [{"ms": 2.0, "tokens": [1, 2]}, {"ms": 1.0, "tokens": [1, 3]}]
    record: Record = {"machine": "m", "torch": "1", "commit": "c", "date": "2026-11-28"}
    record |= {"uncommitted_changes": False, "cases": {"decode 1 x 1024": sides}}
    assert "met: decode 1 x 1024" in generate_multi.show(record)
    sides[1]["tokens"] = [3, 3]
    shown = generate_multi.show(record)
    assert "WRONG: decode 1 x 1024: no token is equal" in shown and "met" not in shown


def test_ranks_are_judged_by_the_better_peer() -> None:
    def row(ms: float, loss: float = 11.8) -> list[Record]:
        return [{"ms": ms, "allocated_gib": 60.0, "losses": [loss], "attention": ["fa4"]}]

    keeps, gradients = f"{PEER}, FSDP2 without resharding", "tigon, sharding=gradients"
    sides = {f"{PEER}, FSDP2": row(820.0), keeps: row(800.0), "tigon, FSDP2": row(790.0)}
    sides |= {gradients: row(720.0), train_multi.ONE: row(700.0, 9.0)}
    record: Record = {"sides": sides, "rounds": 1, "tokens": 8192}
    assert train_multi.verdicts(record)[0] == (
        f"met: tok/s/GPU of {gradients} over {keeps}: 1.111, target ≥ 1.09"
    )
    sides["tigon, FSDP2"] = row(790.0, 11.0)
    assert train_multi.verdicts(record)[-1].startswith("WRONG: the sides' first losses differ")
    record["sides"] = {keeps: [{"error": "RuntimeError: no"}]}
    assert all(said.startswith("not measured: ") for said in train_multi.verdicts(record))


def test_curves_are_judged_by_the_noise() -> None:
    curves = {train_curves.TRUTH: [5.0, 4.0], PEER: [5.01, 4.01], train_curves.OURS: [5.02, 3.98]}
    curves |= {train_curves.ROUNDED: [5.0, 4.018], train_curves.LONG: [5.0, 3.0]}
    curves |= {train_curves.FP8: [5.0, 2.92]}
    ours, rounded, fp8, *missing = train_curves.verdicts({"curves": curves})
    assert ours.startswith("MISSED: ") and "2.000, target ≤ 1.50" in ours
    assert rounded.startswith("met: ") and "0.200" in rounded
    assert fp8.startswith("MISSED: ") and "1.000, target ≤ 0.50" in fp8
    assert all(said.startswith("not measured: ") for said in missing)


def test_recipes_are_judged_by_all_held_out_pairs() -> None:
    def run(loss: float, **more: Any) -> Record:
        return {"first": {"eval_loss": 1.0}, "last": {"eval_loss": loss}, "lr": "1", **more}

    record: Record = {"dpo": []}
    for part, (right, pairs) in enumerate([(0.5, 60), (0.75, 60), (0.75, 60), (0.6, 60), (1, 20)]):
        record["dpo"].append(run(0.6, part=part, pairs=pairs, usual=True))
        record["dpo"][-1]["last"][recipes.ACCURACY] = right
    assert recipes.accuracy(record["dpo"]) == pytest.approx((2.6 * 60 + 20) / 260)
    both = {"LoRA": (0.5, 0.43), "all parameters": (0.4, 0.9)}
    record["lora"] = [run(x, kind=kind) for kind, losses in both.items() for x in losses]
    (said,) = recipes.verdicts(record, "lora")
    assert said.startswith("MISSED: ") and "1.030, target ≤ 1.02" in said
    del record["dpo"][0]
    assert list(recipes.verdicts(record, "dpo")) == ["not measured: held-out reward accuracy"]


def test_attention_is_judged_by_the_fastest_peer() -> None:
    ours = {name: 3.0 for name in (attention.OURS, attention.TORCH_ONLY, attention.VARLEN)}
    both = ours | {attention.FA4: 2.9}
    providers = [
        {"name": name, "forward_ms": [1.0] * 3, "both_ms": [ms] * 3} for name, ms in both.items()
    ]
    names = ("packed ragged", "Gemma 3, full", "Gemma 3, window 512")
    case = {"chosen": {attention.OURS: ["fa4", ""]}, "providers": providers}
    cases = [case | {"name": name} for name in names]
    found = list(attention.verdicts({"cases": cases}))
    assert found[0] == "met: packed ragged, time of flash-attn-4 over tigon's: 0.967, target ≥ 0.95"
    assert sum(said.startswith("MISSED: Gemma 3") for said in found) == 4


def test_checkpoints_are_judged_beside_transformers() -> None:
    rows = {"tigon": 2.0, "transformers": 8.0, "raw": 1.0}
    record = {name: {"seconds": s, "bytes": 4e9} for name, s in rows.items()}
    said = checkpoint.exports_of(record)[2]
    assert "met: " in said and "0.250" in said
    record["tigon"]["seconds"] = 4.0
    assert checkpoint.exports_of(record)[2].startswith("MISSED: ")


def test_comparison_says_what_differs() -> None:
    base = [{"ms": ms, "loss": 2.5, "gradient_norm": 1.0, "peak_mib": 64.0} for ms in (8, 10, 12)]
    new = [{"ms": ms, "loss": 2.5, "gradient_norm": 1.5, "peak_mib": 32.0} for ms in (4, 20, 12.5)]
    step = next(name for name in compare.CASES if name.startswith("Llama"))
    record = {"cases": [{"name": step, "kind": "step", "base": base, "new": new}]}
    shown = compare.table(record)
    assert (
        "| 10.00 | 12.50 | 0.8000 |" in shown and "same loss 2.5; gradient norm 1.0 -> 1.5" in shown
    )
    assert list(compare.verdicts(record)) == [f"MISSED: {step}, base / new: 0.800, target ≥ 0.99"]


@pytest.mark.slow
def test_sides_that_end_badly_are_said(monkeypatch: Patch, tmp_path: Path) -> None:
    step = next(name for name in compare.CASES if name.startswith("Llama"))
    found = compare.run_side(ROOT, [step], tiny=True, limit=0.05)
    assert found == {step: {"error": "not done after 0.05 s"}}
    with pytest.raises(RuntimeError, match="was to be measured, but"):
        compare.run_side(tmp_path, [], tiny=True, limit=100.0)
    side = tmp_path / "side.py"
    monkeypatch.setattr(train_step, "SIDE", side)
    for script, seconds, why in (
        ("import sys; sys.exit(3)", 60.0, "it ended with status 3"),
        ("import time; time.sleep(60)", 0.2, "not done after 0 s"),
    ):
        side.write_text(f'print(\'{{"kind": "x"}}\', flush=True)\n{script}\n')
        *_, last = train_step.spawn(train_step.Request(step, 1, False, tiny=True), seconds)
        assert last == {"kind": "ended", "error": why}
    # A rank that fails ends the others: they would wait for it to the limit
    lines = ("import os, time", "assert os.environ['RANK'] == '0', 'no memory'", "time.sleep(60)")
    side.write_text("\n".join(lines))
    began = time.monotonic()
    assert estimates.run_ranks(side, 2, tmp_path, [], 50)["error"] == "AssertionError: no memory"
    assert time.monotonic() - began < 20
    side.write_text(f"raise OSError('{ROOT}/tigon/cli.py')")
    assert estimates.run_ranks(side, 1, tmp_path, [], 60)["error"] == "OSError: tigon/cli.py"


# What is published


@pytest.mark.parametrize("bench", [b.BENCH for b in BENCHES], ids=lambda bench: bench.kind)
def test_docs_show_the_newest_runs(bench: harness.Bench) -> None:
    if not list(RESULTS.glob(f"{bench.kind}*.json")):
        pytest.skip(f"bench/{bench.kind}.py has not run yet")
    found = harness.records(bench.kind)
    for name, block in bench.documented(found).items():
        text = (ROOT / name).read_text(encoding="utf-8")
        command = f"run bench/{bench.kind}.py --write-docs"
        assert text == harness.between(text, block, name, bench.kind), command
    assert all(record["commit"] in bench.show(record) for record in found)


def test_records_name_files_from_the_root() -> None:
    for path in RESULTS.glob("*.json"):
        assert not re.search(r'File \\"/\S*/(tigon|bench|tests)/', path.read_text()), path


def test_each_script_has_a_command_line() -> None:
    """It starts where the package is not installed, from any folder."""
    for bench in BENCHES:
        assert bench.__file__ is not None
        text = Path(bench.__file__).read_text(encoding="utf-8")
        assert text.endswith('if __name__ == "__main__":\n    harness.main(BENCH)\n')
        assert "--only" in harness.parser_of(bench.BENCH).format_help()


@pytest.mark.parametrize(
    ("bench", "arguments", "message"),
    [
        (kernels, ["--only", "rmsnorm"], "no case rmsnorm; there are rms_norm"),
        (kernels, ["--only", "rms_norm"], "measuring needs a CUDA GPU"),
        (compare, ["--base", "/nowhere"], "/nowhere holds no tigon/"),
        (compare, ["--base", str(ROOT)], "measuring needs a CUDA GPU, or --tiny"),
    ],
)
def test_bad_arguments_are_named(bench, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        harness.main(bench.BENCH, arguments)
    assert message in capsys.readouterr().err


def test_newest_whole_record_is_shown(tmp_path: Path, monkeypatch: Patch) -> None:
    bench = harness.Bench("k", "", lambda _: "", lambda r: f"{r['machine']} {r['date']}", ())
    rows = [("A", "1", True), ("B", "9", False), ("A", "2", True), ("A", "3", False)]
    records = [{"machine": m, "date": d, "complete": c} for m, d, c in rows]
    one = replace(bench, document="d.md")
    assert one.documented(records) == {"d.md": "A 2"}
    assert replace(one, each_machine=True).documented(records) == {"d.md": "A 2\n\nB 9"}
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no k\*\.json in .*: run bench/k\.py"):
        harness.records("k")
    for name in ("k_export-cpu", "k-cpu", "k", "ks"):
        (tmp_path / f"{name}.json").write_text(json.dumps(name))
    assert harness.records("k") == ["k", "k-cpu"]


def test_docs_are_written_between_markers_or_not(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    readme, other = tmp_path / "README.md", tmp_path / "other.md"
    readme.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    other.write_text("no markers\n")
    blocks = {"README.md": "new", "other.md": "more"}
    with pytest.raises(ValueError, match=r"other\.md does not hold"):
        harness.write_docs(blocks, "kernels")
    assert "stale" in readme.read_text()
    other.write_text(f"{BEGIN}\n{END}\n")
    harness.write_docs(blocks, "kernels")
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\nnew") and text.endswith(f"{END}\nafter\n")
    assert "stale" not in text and "more" in other.read_text()


def test_verdict_has_digits_enough() -> None:
    for reached, aim, most, said in (
        (0.886, 0.87, True, "MISSED: x: 0.886, target ≤ 0.87"),
        (1.35008, 1.35, False, "met: x: 1.350, target ≥ 1.35"),
        (1.0004, 1.0, True, "MISSED: x: 1.0004, target ≤ 1.00"),
        (1.1199, 1.12, False, "MISSED: x: 1.1199, target ≥ 1.12"),
        (0.168, 1 / 6, True, "MISSED: x: 0.1680, target ≤ 0.167"),
        (1.0, 1.0, True, "met: x: 1.000, target ≤ 1.00"),
    ):
        assert harness.verdict("x", reached, aim, most=most) == said
