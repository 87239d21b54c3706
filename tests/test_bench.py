"""Benchmarks without a GPU: each runs at tiny size, and what guards the numbers that are published.

A GPU's clock and memory are played. What a benchmark computes is compared with a truth or with its
peer; how its tables look is seen in docs/, which must show the newest records.
"""

import gc
import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tigon
from bench import (
    adapters,
    attention,
    checkpoint,
    choices,
    compare,
    cost_curves,
    cpu,
    distillation,
    distillation_side,
    end_to_end,
    end_to_end_side,
    epilogues,
    estimates,
    evaluation,
    fp8,
    fp8_curves,
    gated_delta,
    generate,
    generate_cases,
    generate_families,
    generate_multi,
    harness,
    kernels,
    killed_run,
    kinds_of_work,
    long_sums,
    measure,
    moe,
    neighbours,
    one_shot_sum,
    optimizers,
    padding,
    parallel,
    peers,
    preference,
    preference_side,
    processes,
    recipes,
    scaling,
    serve,
    several_gpus,
    timing,
    train_cases,
    train_curves,
    train_multi,
    train_multi_side,
    train_report,
    train_side,
    train_step,
    trainer,
)
from bench.__main__ import titles
from bench.attention_cases import CASES as ATTENTION_CASES
from bench.attention_cases import Case as AttentionCase
from bench.attention_cases import problem
from bench.compare_side import LLAMA_1B, QWEN3_MOE
from bench.generate_cases import LLAMA_8B, OURS, THEIRS, Decode, Prefill, Size
from bench.harness import RESULTS, ROOT, Record
from bench.train_cases import PEER
from tests.support.small import EXPERTS, write_chats, write_model
from tests.train import preferences
from tigon.kernels import AttentionMask, attention_ref

BENCHES = (kernels, moe, attention, padding, generate, cpu, compare, train_step, train_multi)
BENCHES += (train_curves, preference, distillation, recipes, checkpoint, parallel, adapters)
BENCHES += (generate_multi, one_shot_sum, long_sums, estimates, trainer, optimizers, scaling)
BENCHES += (gated_delta, neighbours, serve, evaluation, generate_families, choices, epilogues)
BENCHES += (fp8, fp8_curves, cost_curves, end_to_end, killed_run)
TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_LLAMA = LLAMA_8B | TINY | {"vocab_size": 1201, "head_dim": 16}
RAGGED_ATTENTION = AttentionCase("tiny", (5, 3, 1, 7), 8, (4, 2), 16, window=3)
SMALL_KERNELS = [
    kernels.streamed("rms_norm", 24, 64),
    kernels.streamed("rms_norm_residual", 24, 64),
    kernels.streamed("sandwich_norm", 24, 64),
    kernels.streamed("gated_act", 24, 32, variant="silu"),
    kernels.streamed("gated_act", 24, 32, variant="gelu_tanh"),
    kernels.streamed("sigmoid_gate", 24, 64),
    kernels.streamed("rope", 2, 7, 4, 2, 16),
    kernels.streamed("qk_norm_rope", 2, 7, 4, 2, 16),
    kernels.causal_conv_qkv(1, 7, 2, 3, 16),
    kernels.linear_attention("causal_conv", "B2 T7 24", 2, 7, 24, 3, elements=336),
    kernels.linear_attention("gated_norm", "24x16", 24, 16, elements=384, tensors=(3, 5)),
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
    for part in ("layer", "stack", "measure_parts"):
        patch.setattr(moe, part, partial(getattr(moe, part), device="cpu"))
    return ["--quick", "--only", f"{name},{moe.PARTS},{moe.STACK}"]


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
    ragged = ", Llama-3.1-8B, gpt-oss-20b"  # with the spaces of "ragged chats, NAME"
    only = f"1B 1 x 512{ragged},Qwen3-30B,E4B 1 x,35B,512 LoRA"
    return ["--tiny", "--rounds", "1", "--only", only]


def tiny_preference(patch: Patch, root: Path) -> list[str]:
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    way = preference_side.Way("sdpa", 2)
    patch.setattr(preference_side, "ways", lambda _, best=None: [way] * (not best))
    patch.setattr(processes, "spawn", in_process(patch, preference_side))
    return ["--tiny"]


def tiny_distillation(patch: Patch, root: Path) -> list[str]:
    patch.setattr(processes, "spawn", in_process(patch, distillation_side))
    return ["--tiny"]


def tiny_epilogues(patch: Patch, root: Path) -> list[str]:
    class Here(ThreadPoolExecutor):
        """Its processes are this one."""

        def __init__(self, *_: Any) -> None:
            super().__init__(1)

        def submit(self, run: Any, *given: Any) -> Any:
            return SimpleNamespace(result=partial(run, *given))

    patch.setattr(epilogues, "ProcessPoolExecutor", Here)
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


def tiny_evaluation(patch: Patch, root: Path) -> list[str]:
    return ["--tiny"]


def tiny_families(patch: Patch, root: Path) -> list[str]:
    return ["--tiny", "--only", "gpt-oss,35B"]


def tiny_cost_curves(patch: Patch, root: Path) -> list[str]:
    """The longest row does not fit the peer's memory."""
    measured = cost_curves.measure

    def measure(training: Any, point: Any, *how: Any) -> Record:
        if point.tokens == 2**17 and not isinstance(training.model, tigon.Llama):
            raise torch.OutOfMemoryError("tried to allocate")
        return measured(training, point, *how) | {"allocated_gib": 2.0}

    patch.setattr(cost_curves, "measure", measure)
    return ["--tiny", "--only", "1B 1 x 1024,1B 1 x 131072,3B"]


def tiny_generate(patch: Patch, root: Path) -> list[str]:
    """With a played clock: 7 ms a call, and 1 or 3 ms a token."""
    now = [0.0]

    def build(make: Any, ms: float, config: Record) -> Any:
        model = make(config, "cpu")
        generate_tokens = model.generate

        def play(ids: Any, *, max_new_tokens: int, **options: Any) -> Any:
            now[0] += 1e-3 * (7 + ms * max_new_tokens)
            return generate_tokens(ids, max_new_tokens=max_new_tokens, **options)

        model.generate = play
        return model

    one, many, prefill = generate_cases.CASES
    tiny = [Decode(c.name, b, 5, (2, 4), (2, 4), 1) for c, b in ((one, 1), (many, 3))]
    patch.setattr(generate, "LLAMA_8B", SMALL_LLAMA)
    patch.setattr(generate, "CASES", (*tiny, Prefill(prefill.name, 16)))
    for name, ms in (("ours", 1.0), ("theirs", 3.0)):
        patch.setattr(generate_cases, name, partial(build, getattr(generate_cases, name), ms))
    patch.setattr(generate_cases, "CACHES", {OURS: None})
    patch.setattr(generate_cases, "products", lambda *_: [("a", timing.nothing)])
    patch.setattr(generate_cases, "attentions", lambda *_: [("y", int)])
    patch.setattr(generate.time, "perf_counter", lambda: now[0])
    patch.setattr(timing, "peak_mib", lambda run: (run(), 3.0)[1])
    return []


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
    assert {row.get("bound") for row in record["parts"]["parts"]} == {None, "bytes", "dense GEMM"}
    for name in ("tigon", "transformers"):
        row = record["stack"]["providers"][name]
        assert row["tokens_per_second"] == 12e3 / row["ms"][1] and 3.0 < row["loss"] < 6.0
        assert row["host_ms"] > 0 and row["waits"] == {} and row["idle_ms"] == 0


def test_what_leaves_a_device_idle(monkeypatch: Patch) -> None:
    def event(name: str, start: float, end: float, gpu: bool = True) -> SimpleNamespace:
        kind = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=kind)

    events = [event("b", 3000, 7000), event("a", 1000, 6000), event("c", 9000, 9500)]
    events += [event("d", 9600, 9700), event(kinds_of_work.STEP, 0, 9900)]
    calls = ["cudaStreamSynchronize", "cudaLaunchKernel", "cudaDeviceSynchronize"]
    events += [event(name, i, i + 1, gpu=False) for i, name in enumerate(calls)]
    late = event("cudaStreamSynchronize", 12000, 12001, gpu=False)
    events += [late, event(kinds_of_work.STEP, 0, 10000, gpu=False)]
    monkeypatch.setattr(kinds_of_work, "profile_run", lambda _: events)
    monkeypatch.setattr(kinds_of_work, "GAPS", 1)
    found = kinds_of_work.measure_idle(timing.nothing)
    assert found["waits"] == {"cudaStreamSynchronize": 1}
    assert found["idle_ms"] == pytest.approx(2.1)
    assert found["gaps"] == [{"ms": 2.0, "after": "b", "before": "c"}]
    found |= {"name": "tigon", "host_ms": 3.0}
    said = "tigon: host 3.00 ms, device idle 2.10 ms; waits of the host: 1 x cudaStreamS"
    assert next(moe.idle_lines(found)).startswith(said)


def check_padding(record: Record) -> None:
    rows = record["providers"]
    assert record["real"] < math.prod(record["shape"])
    for row in (row for row in rows.values() if "error" not in row):
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
    assert record["complete"] is False and len(record["cases"]) == 7
    for case in record["cases"]:
        (theirs,), (ours,) = (case["rounds"][side] for side in (PEER, train_cases.OURS))
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-3)
        # Scores that are not scaled see one token, and rounding decides which; equal in fp32
        near(ours, theirs, 0.15 if "Gemma4" in case["name"] else 1e-2, "gradient_norm")
        assert train_report.disagreement(case) == "" and ours["left_mib"] == 0.0


@pytest.mark.parametrize("name", train_cases.MODELS)
def test_shapes_of_training_steps_are_those_of_both_sides(name: str, tmp_path: Path) -> None:
    """By the names and shapes of all parameters, on the meta device."""
    family, _, shape = train_cases.MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    ours = getattr(tigon, family).from_config(shape, device="meta")
    layout = ours.layout(stacked_experts=True)
    found = {part.name: part.shape for n, _ in ours.named_parameters() for part in layout[n]}
    assert found == {n: tuple(p.shape) for n, p in theirs.named_parameters()}


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


def check_epilogues(record: Record) -> None:
    for case, ways in record["cases"].items():
        for name, way in ways.items():
            assert "error" in way or max(way["errors"], default=0.0) < 1e-2, (case, name)
    assert epilogues.saved_ms(record, epilogues.PAIRS[:2], epilogues.ALONE) is not None


def check_fp8(record: Record) -> None:
    assert [row["name"] for row in record["products"]] == list(fp8.PRODUCTS)
    for row in record["products"]:
        for what in ("dx", "dw"):
            assert 0.02 < row[what]["errors"]["exact"] < 0.06 and row[what]["factor"] > 0.99
    assert len(record["passes"]) == 6
    assert all({*row["ms"]} >= {fp8.FUSED} for row in record["passes"])


def check_fp8_curves(record: Record) -> None:
    for seed in fp8_curves.SEEDS:
        plain, *others = (record["runs"][f"{kind}, seed {seed}"] for kind in fp8_curves.KINDS)
        for run in others:
            assert run["losses"] == pytest.approx(plain["losses"], rel=3e-3)
            assert 0 < abs(run["held_out"] - plain["held_out"]) < 0.05
    assert len({run["losses"][0] for run in record["runs"].values()}) > len(fp8_curves.SEEDS)


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


def check_generate(record: Record) -> None:
    one, many, prefill = record["cases"]
    assert [r["ms"] for r in one["providers"]] == [pytest.approx([n] * 3) for n in (1.0, 3.0, 3.0)]
    moved = 2 * Size(SMALL_LLAMA).parameters + 3 * 7.5 * Size(SMALL_LLAMA).cached()
    share = generate.share(record, many, many["providers"][0])
    assert share == pytest.approx(1e3 * moved / record["copy"]["bytes_per_second"])
    assert prefill["limit_ms"] == sum(prefill["parts_ms"].values())
    assert prefill["providers"][0]["first_token_ms"][1] == pytest.approx(8.0)


def check_evaluation(record: Record) -> None:
    *choices, text, answer = record["cases"]
    for case in choices:  # both know which choice is right
        assert all(side["acc,none"] == 1.0 for side in case["metrics"].values())
    assert all(case["apart"] < 0.01 for case in (*choices, text)) and answer["equal"] == 1.0
    assert evaluation.faster(record, *evaluation.WORKS) > 0


def check_families(record: Record) -> None:
    models = record["models"].values()
    assert [model["layers"] for model in models] == [4, 4]
    for case in (case for model in models for case in model["cases"]):
        assert all(row["mean_choice"] < 0.1 for row in case["providers"]), case["providers"]


def tiny_end_to_end(_: Patch, path: Path) -> list[str]:
    sides = f"{end_to_end.OURS};{end_to_end.TRL}"
    more = ["--only", "1B LoRA", "--sides", sides, "--steps", "3", "--root", str(path)]
    return ["--tiny", *more]


def check_end_to_end(record: Record) -> None:
    """Both train the same model on the same tokens, and learn those of answers."""
    ours, theirs = (record["cases"]["1B LoRA"][name] for name in (end_to_end.OURS, end_to_end.TRL))
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=3e-3)
    for found in (ours, theirs):
        assert found["steps"] == 3 and 1400 < found["tokens"] <= 3 * 2 * 256
        assert 0.4 < found["learned"] / found["tokens"] < 0.7
        parts = end_to_end.seconds_of(found)
        assert all(parts[name] > 0 for name in ("start", "data", "model", "steps", "evaluation"))
        assert sum(parts.values()) == pytest.approx(found["wall"]) and min(parts.values()) >= 0
        assert parts["start"] + parts["data"] < found["first_step"] < found["wall"]


def check_cost_curves(record: Record) -> None:
    rows = {(row["name"], row["side"]): row for row in record["points"]}
    assert len(rows) == 6
    short, long = "Llama-3.2-1B 1 x 1024", "Llama-3.2-1B 1 x 131072"
    near(*(dict(enumerate(rows[short, side]["losses"])) for side in (PEER, OURS)), 1e-3, 0)
    assert "ms" in rows[long, OURS] and "ms" not in rows[long, PEER]
    text = cost_curves.table(record)
    (line,) = (line for line in text.splitlines() if long in line)
    assert line.split(" | ")[1] == "out of memory" and ", 2.00 | " in line
    predicted = cost_curves.predict(cost_curves.POINTS[0])
    assert f"{1024e3 / predicted['ms']:,.0f}, {predicted['allocated_gib']:.1f}" in text


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
    epilogues: (tiny_epilogues, check_epilogues),
    fp8: (tiny_curves, check_fp8),
    fp8_curves: (tiny_curves, check_fp8_curves),
    recipes: (tiny_recipes, check_recipes),
    train_curves: (tiny_curves, check_curves),
    generate: (tiny_generate, check_generate),
    evaluation: (tiny_evaluation, check_evaluation),
    generate_families: (tiny_families, check_families),
    cost_curves: (tiny_cost_curves, check_cost_curves),
    end_to_end: (tiny_end_to_end, check_end_to_end),
}


SLOW = (compare, preference, recipes, train_curves, end_to_end)  # several processes, or whole runs


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
    expected = r"(ModuleNotFound|Import|OutOfMemory)Error"
    missing = [e for e in failures(record) if not re.match(expected, e)]
    assert not missing
    assert "abc1234" in bench.BENCH.show(record)
    check(record)


# What is counted: bytes, operations, targets


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    kernel_bytes = {case.name: tuple(case.bytes.values()) for case in kernels.CASES}
    expected = {
        # 67,108,864 elements: x, y; then x, dy, dx
        "rms_norm 16384x4096": (268_435_456, 671_088_640),
        # 234,881,024 elements: gate, up, y; then gate, up, dy, dgate, dup
        "gated_act silu 16384x14336": (1_409_286_144, 3_758_096_384),
        # 16384 tokens x 40 heads x 128, and 6 + 6 bytes there and back; dv in and out again is
        # 4 bytes of 16,777,216
        "qk_norm_rope B2 T8192 32/8x128": (335_544_320, 905_969_664),
        "cross_entropy 8192x128256": (4_202_692_608,),
    }
    assert expected.items() <= kernel_bytes.items()
    # 1 GiB of logits, dX of 64 MiB, dW of 1002 MiB, and that in fp32
    memory = {case.name: case.memory for case in kernels.CASES}
    assert memory["linear_cross_entropy dense 8192, 4096, 128256"] == 1024 + 64 + 3 * 1002
    # 5 tokens see 1 + 2 + 3 + 3 + 3, 3 see 1 + 2 + 3, 1 sees 1, 7 see 1 + 2 + 5 * 3
    assert RAGGED_ATTENTION.flops == 4 * (12 + 6 + 1 + 18) * 4 * 16
    full = next(case for case in ATTENTION_CASES if case.name == "rows 2 x 8192")
    assert full.flops == 4 * 2 * (8192 * 8193 // 2) * 32 * 128
    size, (_, many, _) = Size(LLAMA_8B), generate_cases.CASES
    # 32 layers x 8 heads x (key, value) of 128 elements
    assert size.cached() == 131_072 and size.step(many, OURS)["cache"] == 64 * 1151.5 * 131_072
    # 8192 tokens: 32768 for the stream, 10240 queries and keys, 43008 for the gate; embedding, head
    layers = 32 * 8192 * (32768 + 10240 + 43008)
    assert size.passes(8192) == 2 * (layers + 8192 * 8192 + 128256 * 4096)


@pytest.mark.parametrize("more", [{}, SMALL_LLAMA, SMALL_LLAMA | {"tie_word_embeddings": True}])
def test_generation_bytes_are_those_of_the_model(more: Record) -> None:
    config = LLAMA_8B | more
    model = tigon.Llama.from_config(config | {"model_type": "llama"}, device="meta")
    assert Size(config).parameters == sum(p.numel() for p in model.parameters())
    products = [p.shape for n, p in model.named_parameters() if "layers.0" in n and p.dim() == 2]
    assert sorted(Size(config).products) == sorted(map(tuple, products))


def test_bytes_of_a_step_of_experts_and_of_recurrent_states() -> None:
    shape = train_cases.MODELS["Qwen3.5-35B-A3B"][2]
    shape = shape | {k: v for k, v in generate_families.SMALL.items() if k in shape}
    model = tigon.Qwen3_5Moe.from_config(shape, dtype=torch.bfloat16, device="meta")
    case = replace(generate_families.decoding(3, tiny=True), context=100)
    bytes_read = generate_families.moved(model, case)
    # 4 layers of 8 experts, of which 3 rows choose 2 each: all but 0.75^3 of them
    experts = 4 * 8 * 3 * 64 * 32
    others = sum(p.nbytes for p in model.parameters()) - 2 * experts - 2 * 512 * 64  # embedding
    assert bytes_read["parameters"] == pytest.approx(others + 2 * experts * (1 - 0.75**3))
    # 1 layer of keys and values of 102 or 103 tokens; 3 of a state in fp32 of 32 heads of 128 by
    # 128, and 3 tokens of convolutions of 2 * 16 + 32 heads, there and back
    keys = 3 * round(case.held(OURS)) * 2 * 16 * 2
    state = 3 * 3 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)
    assert bytes_read["cache"] == pytest.approx(keys + 2 * state, rel=1e-3)


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


def test_each_second_belongs_to_the_innermost_phase(monkeypatch: Patch) -> None:
    now = itertools.count(1.0)
    monkeypatch.setattr(end_to_end_side.time, "monotonic", lambda: next(now))

    class Trainer:
        def load(self) -> str:
            return "loaded"

        def train(self) -> str:
            return self.load()

    module = ModuleType("a_library")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_library", module)
    clock = end_to_end_side.Clock(0.0)
    clock.watch("a_library:Trainer.load", end_to_end_side.MODEL)
    clock.watch("a_library:Trainer.train", end_to_end_side.STEPS)
    assert Trainer().train() == "loaded"  # enters at 1, loads from 2 to 3, leaves at 4
    clock.turn()
    assert clock.seconds == {"start": 1.0, "model": 1.0, "steps": 2.0, "other": 1.0}


def test_ends_beside_the_best_peer() -> None:
    """The fastest over all; a side that failed is none, and warm-up is beyond usual steps."""
    phases = dict.fromkeys(end_to_end_side.PHASES, 1.0) | {"steps": 9.0}
    side = {"wall": 20.0, "first_step": 6.0, "phases": phases, "steps": 4, "gaps": [2.0, 1.0, 1.0]}
    side |= {"tokens": 4000, "learned": 2000, "allocated_gib": 10.0, "asked": 4, "eval_loss": 9.0}
    parts = end_to_end.seconds_of(side)
    assert (parts["steps"], parts["warm-up"]) == (4.0, 6.0)
    assert parts["other"] == 20 - 3 - 10 - 2  # the rest of the process too
    peers = {"TRL": side | {"wall": 40.0}, end_to_end.TRL: side | {"allocated_gib": 20.0}}
    sides: Record = {end_to_end.OURS: side | {"wall": 10.0}, **peers, "other": {"error": "no"}}
    said = end_to_end.verdicts("8B LoRA", sides)
    assert [line.partition(":")[0] for line in said] == ["met"] * 3
    assert "2.000" in said[0] and "0.500" in said[1] and "6.000" in said[2]
    last = {"phases": {"start": 6.0, "data": 3.0}, "phase": "data", "steps": 0}
    late = {"error": "not done after 10 s"} | end_to_end.read_progress(last, 10.0)
    assert (
        end_to_end.row("c", "s", late)[2] == "not done after 10 s; start 6.00; data 4.00, 0 steps"
    )
    sides[end_to_end.TRL]["eval_loss"] = 9.5
    assert len(end_to_end.verdicts("8B LoRA", sides)) == 3
    sides[end_to_end.OURS]["eval_loss"] = 9.5
    assert end_to_end.verdicts("8B LoRA", sides)[3].startswith("WRONG")


def test_peers_have_what_tigon_has(monkeypatch: Patch) -> None:
    """CUDA graphs where Tigon has them, no spelled-out attention alone; the fastest one counts."""

    def turn(self: Any, side: str, options: train_cases.Options, _: Any) -> Record:
        if options.attention == "eager":
            raise torch.OutOfMemoryError("too many scores")
        return {"ms": 1.0 + options.attention.startswith("flash") + 2 * (not options.compiled)}

    monkeypatch.setattr(train_side.Sides, "turn", turn)
    chosen = {}
    for name in ("Llama-3.2-1B 1 x 512", "Qwen3-4B 2 x 8192", "gpt-oss-20b, 8 layers, 1 x 8192"):
        request = train_side.Request(name, 1, True)
        sides = train_side.Sides(request, train_cases.CASES[name], "cuda")
        chosen[name] = getattr(train_side.fastest(sides), "name", None)
    assert [*chosen.values()] == ["sdpa, compiled", "sdpa", "flex_attention"]
    static = {"name": generate_cases.STATIC, "ms": [5.0, 6.0, 7.0]}
    eager = {"name": generate_cases.THEIRS, "ms": [20.0, 21.0, 22.0]}
    ours = {"name": OURS, "ms": [3.0, 3.0, 3.0]}
    case = {"providers": [ours, eager, static, {"name": generate_cases.FLASH, "error": "no"}]}
    assert generate.times(case, ours) == 2.0
    for given, met in ([eager], 0), ([eager, static], 1):
        rows = [ours | {"ms": [1.0] * 3, "bytes": {"parameters": 0, "cache": 0}}, *given]
        case = {"name": "decode", "kind": "decode", "providers": rows}
        record = {"cases": [case], "copy": {"bytes_per_second": 1e12}}
        monkeypatch.setattr(generate, "TARGETS", [("decode", "times", 2.0)])
        assert [line[:3] for line in generate.verdicts(record)].count("met") == met
    case = {"providers": [ours, eager], "name": "c"}
    assert "N, c" in generate_families.eager([{"name": "N", "cases": [case]}])
    case = {"name": "c", "sides": {neighbours.OURS: [5.0, 6.0], neighbours.PEER: [4.0, 4.0]}}
    assert neighbours.ratio(case, neighbours.PEER) == 1.375
    assert neighbours.differing(case | {"losses": {"a": 11.8, "b": 11.9}})


@pytest.mark.parametrize("model", ["gpt-oss-20b", "Gemma4-E4B", "Qwen3.5-0.8B"])
def test_peers_get_packed_rows_where_chats_stay_apart(model: str) -> None:
    """And else a padded row for each."""
    cases = train_cases.CASES.values()
    case = next(case for case in cases if case.model == model and case.ragged)
    shape = train_cases.shape_of(case, tiny=True)
    (options,) = train_cases.options_of(case, "cpu")
    kind = train_cases.MODELS[model][1]
    peer = train_cases.peer_model(shape, kind, options, "cpu", False).float().eval()
    batch = train_cases.Batch.of(case, shape["vocab_size"], "cpu", tiny=True)
    assert batch.lengths is not None and len(batch.lengths) > 2
    with torch.no_grad():
        alone = torch.cat([peer(ids).logits for ids in batch.ids.split(batch.lengths, 1)], 1)
        packed = {k: v for k, v in batch.theirs(train_cases.PACKED).items() if k != "labels"}
        apart = torch.allclose(peer(**packed).logits, alone, atol=1e-4)
        given = batch.theirs(options.rows)
        logits = peer(**{k: v for k, v in given.items() if k != "labels"}).logits
    kept = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    torch.testing.assert_close(logits[kept], alone[0], atol=1e-4, rtol=1e-4)
    assert options.rows == (train_cases.PACKED if apart else train_cases.PADDED)
    on_gpu = {o.attention: o.rows for o in train_cases.options_of(case, "cuda")}
    assert on_gpu["flash_attention_4"] == options.rows or model == "gpt-oss-20b"


def test_a_ratio_over_less_than_the_best_peer_meets_no_target() -> None:
    record = harness.newest(harness.records("train_step"))
    case = next(case for case in record["cases"] if case["name"] == "Llama-3.2-1B 2 x 8192")
    case |= {"tried": {"sdpa": {"ms": 1.0}}, "settings": [*train_cases.IN_BACKWARD]}
    for row in case["rounds"][train_cases.OURS]:
        row |= {"ms": 1.0, "allocated_gib": 1.0}

    def met() -> list[str]:
        return [line.split(": ")[2] for line in train_report.verdicts(case) if line[:3] == "met"]

    assert train_report.lacks(case) == ["flash_attention_4"]
    assert met() == ["share of the composed limit"]
    first, second = train_report.notes([case])
    assert first.endswith("- Llama-3.2-1B 2 x 8192: flash_attention_4")
    assert "optimizer_in_backward=true" in second and second.endswith("Llama-3.2-1B 2 x 8192.")
    case["tried"]["flash_attention_4"] = {"ms": 1.0}
    assert len(met()) == 3


def test_what_a_trial_has_found_is_kept(monkeypatch: Patch) -> None:
    """For another commit with the same libraries; and of trials cut off, those that are done."""
    name = "Qwen3-30B-A3B, 8 layers, 1 x 8192"
    known = {"name": name, "commit": "a", "libraries": {"Liger": "1"}, "options": {}}
    done = {f"{way}, grouped_mm experts": {"ms": 1.0} for way in ("flash_attention_4", "sdpa")}
    known |= {"tried": done, "optimizer": "adamw_bf16"}
    options = SimpleNamespace(tiny=False, optimizer="adamw_bf16", again=False)
    record: Record = {"commit": "b", "date": "", "cases": [known]}
    for libraries, again, kept in (
        ({"Liger": "1", "FLA": None}, False, True),
        ({"Liger": "1", "FLA": "2"}, False, False),
        ({"Liger": "1"}, True, False),
        ({"Liger": "2"}, False, False),
    ):
        options.again, record["libraries"] = again, libraries
        job: Any = SimpleNamespace(options=options, record=record)
        found = train_step.begun(name, train_cases.CASES[name], job)
        assert ("options" in found, len(found["tried"])) == (kept, 2 * kept)
    # A setting that was not offered then is tried, and what is offered no more does not count
    options.again, known["tried"] = False, {"sdpa, grouped_mm experts": {"ms": 1.0}, "eager": {}}
    job = SimpleNamespace(options=options, record=record | {"libraries": {"Liger": "1"}})
    found = train_step.begun(name, train_cases.CASES[name], job)
    assert "options" not in found and [*found["tried"]] == ["sdpa, grouped_mm experts"]
    tried: list[str] = []

    def turn(self: Any, side: str, options: train_cases.Options, _: Any) -> Record:
        tried.append(options.name)
        return {"ms": 3.0}

    monkeypatch.setattr(train_side.Sides, "turn", turn)
    done = {"flash_attention_4, grouped_mm experts": {"ms": 2.0}}
    request = train_side.Request(name, 1, True, tried=done)
    best = train_side.fastest(train_side.Sides(request, train_cases.CASES[name], "cuda"))
    assert best == train_cases.Options("flash_attention_4", "grouped_mm")
    assert tried == ["sdpa, grouped_mm experts", "flash_attention_4, Liger experts"]


def test_families_go_on_where_they_were_cut_off(tmp_path: Path, monkeypatch: Patch) -> None:
    found = tmp_path / "out.json"

    def measured(commit: str, cut: str) -> list[str]:
        made: list[str] = []

        def in_turn(case: str, *_: Any) -> list[Record]:
            made.append(case)
            if case == cut:
                raise KeyboardInterrupt
            return []

        monkeypatch.setattr(generate_families, "in_turn", in_turn)
        with suppress(KeyboardInterrupt):
            arguments = ["--tiny", "--only", "E4B,oss", "--out", str(found), "--commit", commit]
            harness.main(generate_families.BENCH, arguments)
        return made

    config = SimpleNamespace(num_hidden_layers=2, vocab_size=9)
    model = SimpleNamespace(config=config, device="cpu")
    monkeypatch.setattr(generate_families, "build", lambda *_: dict.fromkeys((OURS, THEIRS), model))
    monkeypatch.setattr(generate_families, "distance", lambda *_: 0.0)
    for name in ("moved", "Decoding"):
        monkeypatch.setattr(generate_families, name, lambda *_: None)
    for name in ("rows", "missing"):
        monkeypatch.setattr(generate_families, name, lambda _: [])
    one, many = "1 x 5", "3 x 5"
    for commit, cut, made, kept in (
        ("a", f"Gemma4-E4B, {many}", [f"Gemma4-E4B, {one}", f"Gemma4-E4B, {many}"], "a"),
        ("a", "", [f"Gemma4-E4B, {many}", f"gpt-oss-20b, {one}", f"gpt-oss-20b, {many}"], "aa"),
        ("b", f"Gemma4-E4B, {one}", [f"Gemma4-E4B, {one}"], "aa"),
        ("b", f"gpt-oss-20b, {one}", [f"Gemma4-E4B, {x}" for x in (one, many)], "ba"),
    ):
        assert measured(commit, cut)[: len(made)] == made
        models = json.loads(found.read_text())["models"].values()
        assert "".join(model["commit"] for model in models) == kept


def test_wrong_token_is_noticed() -> None:
    model = generate_cases.ours(SMALL_LLAMA, "cpu")
    tokens = generate_cases.generating(model, OURS, torch.randint(1000, 1201, (2, 5)))(7)
    assert generate_cases.choice_gaps(model, tokens, 7).max() < 0.1
    tokens[1, 8] = (tokens[1, 8] + 1) % 1201
    assert generate_cases.choice_gaps(model, tokens, 7).max() > generate_cases.DOUBT


@pytest.mark.slow
def test_sides_that_end_badly_are_recorded(tmp_path: Path) -> None:
    step = next(name for name in compare.CASES if name.startswith("Llama"))
    found = compare.run_side(ROOT, [step], tiny=True, limit=0.05)
    assert found == {step: {"error": "not done after 0.05 s"}}
    side = tmp_path / "side.py"
    side.write_text('print(\'{"kind": "x"}\', flush=True)\nimport sys; sys.exit(3)\n')
    *_, last = processes.spawn(train_step.Request(step, 1, False, tiny=True), 60.0, side)
    assert last == {"kind": "ended", "error": "it ended with status 3"}
    # A rank that fails ends the others: they would wait for it to the limit
    side.write_text(
        "import os, time\nassert os.environ['RANK'] == '0', 'no memory'\ntime.sleep(60)"
    )
    began = time.monotonic()
    assert processes.run_ranks(side, 2, tmp_path, [], 50)["error"] == "AssertionError: no memory"
    assert time.monotonic() - began < 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for it")
def test_sides_end_with_their_benchmark(tmp_path: Path) -> None:
    """However it ends: a side that goes on would share the GPU with the next benchmark."""
    side = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"from bench.processes import lines; list(lines(['-c', {side!r}], 60, Path('log')))"
    command = [sys.executable, "-c", f"from pathlib import Path\n{code}"]
    parent = subprocess.Popen(command, cwd=tmp_path, env=processes.environment())
    log, until = tmp_path / "log", time.monotonic() + 120
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    status = Path("/proc", log.read_text().strip(), "status")
    while status.exists() and "Z (zombie)" not in status.read_text():
        assert time.monotonic() < until, "it runs on"
        time.sleep(0.05)


def test_ranks_import_this_checkout(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    side = tmp_path / "side.py"
    side.write_text(
        "import json, pathlib, sys\n"
        "import tigon\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'from': tigon.__file__}))\n"
    )
    assert processes.run_ranks(side, 1, tmp_path, [], 50) == {"from": tigon.__file__}


# What is published


@pytest.mark.slow
def test_serve(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every request is answered whole, and all figures are there."""
    harness.main(serve.BENCH, ["--tiny", "--out", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert [case["name"] for case in record["cases"]] == serve.BENCH.cases
    *many, first = record["cases"]
    for case in many:
        assert case["steps"] >= case["new"] - 1
        assert case["tokens_per_s"] * min(case["served_s"]) == pytest.approx(6 * 24)
    assert 0 < first["step_s"] < first["alone_s"]
    assert capfd.readouterr().out.count("share of generate's tokens/s") == 3


@pytest.mark.parametrize("bench", [b.BENCH for b in BENCHES], ids=lambda bench: bench.kind)
def test_docs_show_the_newest_runs(bench: harness.Bench) -> None:
    if not list(RESULTS.glob(f"{bench.kind}*.json")):
        pytest.skip(f"bench/{bench.kind}.py has not run yet")
    found = harness.records(bench.kind)
    for name, block in bench.documented(found).items():
        text = (ROOT / name).read_text(encoding="utf-8")
        command = f"run python -m bench {bench.kind} --write-docs"
        assert text == harness.between(text, block, name, bench.kind), command
    assert all(record["commit"] in bench.show(record) for record in found)


def test_records_name_files_from_the_root() -> None:
    for path in RESULTS.glob("*.json"):
        assert not re.search(r'File \\"/\S*/(tigon|bench|tests)/', path.read_text()), path


def test_each_script_has_a_command_line() -> None:
    """`python -m bench NAME`."""
    known = titles()
    for bench in BENCHES:
        assert bench.__file__ is not None
        assert bench.BENCH.kind == Path(bench.__file__).stem and bench.BENCH.kind in known
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


def test_cases_come_in_the_order_asked() -> None:
    cases = ["8B 1 x 8192", "8B 1 x 8192, fp8", "oss, 8 layers, 1 x 4096", "1B"]
    for only, expected in (
        ("1B,8B", (3, 0, 1)),
        ("8B 1 x 8192, fp8,8B 1 x 8192", (1, 0)),
        ("oss, 8 layers, 1 x 4096,fp8,oss", (2, 1)),
    ):
        found = harness.chosen(harness.split(only, cases), cases)
        assert found == [cases[i] for i in expected], only


def test_a_part_leaves_a_whole_record_alone(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    options = SimpleNamespace(out=tmp_path / "k.json", only=[], quick=False, commit="abc")

    for whole, kept in ((False, False), (True, True), (False, True)):
        job = harness.Job("k", "CPU", options, whole)
        job.add(machine="CPU")
        job.finish("")
        assert json.loads(options.out.read_text())["complete"] is kept
    assert json.loads((tmp_path / "bench/out/k.json").read_text())["complete"] is False
    job = harness.Job("k", "CPU", options, True)
    job.record["machine"] = "CPU"
    assert job.place != job.out
    assert job.resume()["complete"] and job.place == job.out  # goes on with what it has read


def test_newest_whole_record_is_shown() -> None:
    bench = harness.Bench(lambda _: "", lambda r: f"{r['machine']} {r['date']}", ())
    rows = [("A", "1", True), ("B", "9", False), ("A", "2", True), ("A", "3", False)]
    records = [{"machine": m, "date": d, "complete": c} for m, d, c in rows]
    one = replace(bench, document="d.md")
    assert one.documented(records) == {"d.md": "A 2"}
    assert replace(one, each_machine=True).documented(records) == {"d.md": "A 2\n\nB 9"}


def test_docs_are_written_between_markers_or_not(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    readme, other = tmp_path / "README.md", tmp_path / "other.md"
    readme.write_text("before\n<!-- k:begin -->\nstale\n<!-- k:end -->\nafter\n")
    other.write_text("no markers\n")
    with pytest.raises(ValueError, match=r"other\.md does not hold"):
        harness.write_docs({"README.md": "new", "other.md": "more"}, "k")
    assert "stale" in readme.read_text()
    harness.write_docs({"README.md": "new"}, "k")
    text = "before\n<!-- k:begin -->\nnew\n<!-- k:end -->\nafter\n"
    assert readme.read_text() == text


def test_gated_delta_is_beside_the_truth() -> None:
    found = gated_delta.check([5, 0, 66], (1, 2), 8, torch.float32)
    for errors in found.values():
        assert errors.keys() == {"o", "state", *(f"d{n}" for n in gated_delta.NAMES)}
        assert max(errors.values()) < 1e-5


def test_verdict_has_digits_enough() -> None:
    for reached, aim, most, text in (
        (0.886, 0.87, True, "MISSED: x: 0.886, target ≤ 0.87"),
        (1.35008, 1.35, False, "met: x: 1.350, target ≥ 1.35"),
        (1.0004, 1.0, True, "MISSED: x: 1.0004, target ≤ 1.00"),
    ):
        assert harness.verdict("x", reached, aim, most=most) == text


def test_gain_of_flash_attn_4_is_the_newest_record() -> None:
    """What a run without the package is told."""
    found = attention.gains(harness.newest(harness.records("attention")))
    assert json.loads(attention.GAINS.read_text()) == found
    least, most = found["packed"]
    assert 1 < least <= most


def test_ranks_have_the_weights_of_one_gpu() -> None:
    models = [tigon.Qwen3Moe.from_config(EXPERTS, dtype=torch.bfloat16) for _ in range(2)]
    train_multi_side.fill(models[0])
    train_cases.fill_ours(models[1])
    for (name, found), expected in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(found, expected), name


def test_scaling_judges_sides_of_one_record() -> None:
    times = {"one GPU": 730.0, "fsdp 4": 820.0, "sharding=gradients": 760.0}
    times |= {scaling.PEERS[0]: 840.0, scaling.PEERS[1]: 830.0, scaling.EXPERT: 100.0}
    times |= {
        scaling.PEER_EXPERTS[0]: 300.0,
        scaling.PEER_EXPERTS[1]: 250.0,
        "context 4, a row of 32,768": 800.0,
    }
    row = {"allocated_gib": 40.0, "attention": ["fa4"], "losses": [12.0], "commit": "0"}
    record = {"machine": "4 x H200", "libraries": {}, **harness.stamp("0"), "sides": {}}
    record["sides"] = {name: [row | {"ms": ms}] for name, ms in times.items()}
    record["sides"]["fsdp 4"][0] |= {"losses": [12.5]}
    shown = scaling.show(record)
    assert "MISSED: tok/s and GPU of sharding=gradients over " + scaling.PEERS[1] in shown
    assert "met: tok/s and GPU of sharding=gradients over one GPU: 0.961" in shown
    assert f"met: tok/s and GPU of {scaling.EXPERT} over {scaling.PEER_EXPERTS[1]}: 2.500" in shown
    assert "not measured: tok/s and GPU of tigon over one GPU, fp8" in shown
    assert scaling.speed(record, "context 4, a row of 32,768") == 8192 / 0.8
    (wrong,) = scaling.differences(record)
    assert wrong.keys() == {"fsdp 4", "sharding=gradients", *scaling.PEERS}


@pytest.mark.parametrize("gpus", [2, 4])
def test_steps_for_several_gpus_are_commands(gpus: int) -> None:
    steps = dict(several_gpus.steps(gpus, "abc1234", {"sides": {}}, tiny=True))
    assert ("scaling" in steps) == (gpus == 4) and ("generate_multi" in steps) == (gpus == 2)
    modules = {Path(bench.__file__).stem: bench for bench in BENCHES}
    for command in steps.values():
        if command[1] == "pytest":
            continue
        flag, package, name, *given = command
        assert (flag, package) == ("-m", "bench")
        options = harness.parser_of(modules[name].BENCH).parse_args(given)
        assert options.tiny and options.commit == "abc1234"


def test_a_killed_run_is_judged_by_steps_made_again() -> None:
    losses = {str(step): 10.0 - step / 10 for step in range(1, killed_run.KILLED + 1)}
    ended = {"ranks": 4, "status": 137, "seconds": 50.0, "losses": losses}
    after = losses | {"16": losses["16"] * 1.01, "30": 7.0}
    resumed = {"ranks": 2, "status": 0, "seconds": 60.0, "losses": after, "eval_loss": 7.0}
    resumed["start"] = killed_run.SAVED
    record = {"machine": "4 x H200", **harness.stamp("0"), "killed": ended, "resumed": resumed}
    shown = killed_run.show(record | {"reloaded": {"loss": 7.01}})
    assert "MISSED: losses of 6 steps made again with half the ranks: apart by at most, %" in shown
    assert "met: loss of the exported model" in shown
    whole = killed_run.show(record | {"resumed": resumed | {"start": killed_run.KILLED}})
    assert "not measured: losses of 0 steps" in whole  # rows of the killed run prove nothing
