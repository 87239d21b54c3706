"""The attention benchmark without a GPU: its lengths, its operations, its truth, its verdicts."""

import json
from typing import Any

import pytest
import torch

from bench import attention as bench
from bench import timing
from bench.attention_cases import CASES, FA4, OURS, TORCH_ONLY, VARLEN, Case, lognormal, problem
from bench.measure import ONCE, Effort, Operation
from tigon.kernels import AttentionMask, attention_ref

CASE = Case("tiny", (5, 3, 1, 7), 8, (4, 2), 16, window=3)


def test_ragged_lengths_are_those_of_the_target() -> None:
    lengths = lognormal(32768, 700)
    assert lengths == lognormal(32768, 700) and sum(lengths) == 32768 and min(lengths) > 0
    assert 500 < sum(lengths) / len(lengths) < 900
    assert {len(set(case.lengths)) > 1 for case in CASES} == {True, False}
    for case in CASES:  # no sequence spans two rows
        ends = torch.tensor(case.lengths).cumsum(0)
        assert set(range(case.row, sum(case.lengths) + 1, case.row)) <= set(ends.tolist())


def test_operations_counted_by_hand() -> None:
    # 5 tokens see 1 + 2 + 3 + 3 + 3, 3 see 1 + 2 + 3, 1 sees 1, 7 see 1 + 2 + 5 * 3
    assert CASE.pairs == 12 + 6 + 1 + 18
    assert CASE.flops == 4 * 37 * 4 * 16
    full = next(case for case in CASES if case.name == "rows 2 x 8192")
    assert full.flops == 4 * 2 * (8192 * 8193 // 2) * 32 * 128


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_truth_is_the_definition(softcap: float | None) -> None:
    case = Case("tiny", CASE.lengths, 8, (4, 2), 16, window=3, softcap=softcap)
    what, chosen = problem(case)
    exact = what.truth()
    wide = [x.detach().double().requires_grad_() for x in what.leaves.values()]
    ids = torch.tensor([[0] * 5 + [1] * 3, [2] + [3] * 7])
    out = attention_ref(*wide, mask=AttentionMask(8, segment_ids=ids), window=3, softcap=softcap)
    grads = torch.autograd.grad(out, wide, what.upstream[0].double())
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(exact[name].double(), value, rtol=1e-5, atol=1e-6)
    for provider in what.providers[:2]:
        attempt = Operation(provider, what, ONCE, ())
        attempt.exact = exact
        attempt.check()
        assert max(attempt.result["errors"].values()) < 1e-2
    assert {name: c.name for name, c in chosen.items()} == dict.fromkeys(
        (OURS, TORCH_ONLY), "reference" if softcap else "sdpa"
    )


def test_a_case_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "peak_mib", lambda run, before: 7.0)
    monkeypatch.setattr(timing, "milliseconds", lambda run, before, **_: [2.0])
    case = bench.measured(CASE, Effort(1, 1.0, 1, 1), "cpu")
    results = {p["name"]: p for p in case["providers"]}
    assert results[OURS]["both_ms"] == [2.0, 2.0, 2.0] and "error" in results[FA4]
    assert results["transformers, SDPA with a mask"]["errors"]["dk"] < 1e-2
    text = bench.table(json.loads(json.dumps(case)))
    assert "tigon: sdpa (the first choice on cpu)" in text and "| flash-attn-4 | " in text


def record(**both: float) -> dict[str, Any]:
    """Every provider takes 1 ms forward and 3 ms in all, but for those given."""
    both = {name: 3.0 for name in (OURS, TORCH_ONLY, FA4, VARLEN)} | both
    cases = [
        {
            "name": name,
            "chosen": {OURS: ["fa4", ""]},
            "providers": [
                {"name": n, "forward_ms": [1.0] * 3, "both_ms": [ms / (4 if w else 1)] * 3}
                for n, ms in both.items()
            ],
        }
        for name in ("packed ragged", "Gemma 3, full", "Gemma 3, window 512")
        for w in ["window" in name]
    ]
    return {"cases": cases}


def test_verdicts() -> None:
    found = list(bench.verdicts(record(**{FA4: 2.9, VARLEN: 4.7, TORCH_ONLY: 5.0})))
    assert found[0] == "met: packed ragged, time of flash-attn-4 over tigon's: 0.967, target ≥ 0.95"
    what = "packed ragged, time of transformers, varlen FA2 over tigon's"
    assert found[1] == f"MISSED: {what}: 1.567, target ≥ 1.60"
    what = "packed ragged, time of torch's fastest (transformers, varlen FA2)"
    assert found[2].startswith(f"MISSED: {what}")
    gemma = "Gemma 3, time of full attention over window 512, flash-attn-4"
    assert f"MISSED: {gemma}, forward: 1.000, target ≥ 4.00" in found
    assert sum(line.startswith(("met: Gemma", "MISSED: Gemma")) for line in found) == 4
