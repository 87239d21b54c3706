"""Benchmarks of generation and evaluation at tiny size.

A function makes each tiny and says with which arguments it runs; another checks its record.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tigon
from bench import cpu, evaluation, generate, generate_cases, generate_families, timing
from bench.compare_side import LLAMA_1B
from bench.generate_cases import OURS, Decode, Prefill, Size
from bench.harness import Record
from tests.bench.small import SMALL_LLAMA, TINY, Patch, Runs, pass_tiny


def tiny_cpu(patch: Patch, root: Path) -> list[str]:
    tigon.Llama.from_config(LLAMA_1B | TINY | {"vocab_size": 64}).save_pretrained(root / "tiny")
    patch.setattr(cpu, "DECODE", [(2, 5)])
    patch.setattr(cpu, "NEW_TOKENS", 3)
    patch.setattr(cpu, "NEVER", None)
    return [str(root / "tiny"), "--only", "float32", "--quick", "--threads", "1"]


def tiny_families(patch: Patch, root: Path) -> list[str]:
    return ["--tiny", "--only", "gpt-oss,35B"]


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


def check_cpu(record: Record) -> None:
    assert [row["what"] for row in record["results"]] == ["decoded token", "training step"]
    assert all(row["ours_ms"] > 0 < row["transformers_ms"] for row in record["results"])


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


RUNS: Runs = {
    cpu: (tiny_cpu, check_cpu),
    generate: (tiny_generate, check_generate),
    evaluation: (pass_tiny, check_evaluation),
    generate_families: (tiny_families, check_families),
}
