"""Peers have the shapes, weights and rows that Tigon has, and the fastest of their settings."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tigon
from bench import (
    generate,
    generate_cases,
    generate_families,
    layouts_side,
    neighbours,
    train_cases,
    train_peer,
    train_side,
    train_step,
)
from bench.generate_cases import OURS
from bench.harness import Record
from tests.bench.small import Patch
from tests.support.small import EXPERTS


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


def test_peers_have_what_tigon_has(monkeypatch: Patch) -> None:
    """CUDA graphs where Tigon has them, wider chunks where Liger's are short, and not spelled-out
    attention alone; the fastest one counts."""

    def turn(self: Any, side: str, options: train_peer.Options, _: Any) -> Record:
        if options.attention == "eager":
            raise torch.OutOfMemoryError("too many scores")
        slower = options.attention.startswith("flash") + 2 * (not options.compiled)
        return {"ms": 2.0 + slower - (options.chunks > 0)}

    monkeypatch.setattr(train_side.Sides, "turn", turn)
    chosen = {}
    for name in ("Llama-3.2-1B 1 x 512", "Qwen3-4B 2 x 8192", "gpt-oss-20b, 8 layers, 1 x 8192"):
        request = train_side.Request(name, 1, True)
        sides = train_side.Sides(request, train_cases.CASES[name], "cuda")
        chosen[name] = getattr(train_side.fastest(sides), "name", None)
    assert [*chosen.values()] == ["sdpa, chunk_mem_const=32, compiled", "sdpa", "flex_attention"]
    tokens = 8192, 4096  # of a rank, and of one of two that share a row
    chunks = [train_peer.head_chunks("llama", train_cases.LLAMA_8B, n) for n in tokens]
    assert chunks == [0, 32]
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
    (options,) = train_peer.options_of(case, "cpu")
    kind = train_cases.MODELS[model][1]
    peer = train_peer.peer_model(shape, kind, options, "cpu", False).float().eval()
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
    on_gpu = {o.attention: o.rows for o in train_peer.options_of(case, "cuda")}
    assert on_gpu["flash_attention_4"] == options.rows or model == "gpt-oss-20b"


def test_what_a_trial_has_found_is_kept(monkeypatch: Patch) -> None:
    """For another commit with the same libraries; and of trials cut off, those that are done."""
    name = "Qwen3-30B-A3B, 8 layers, 1 x 8192"
    known = {"name": name, "commit": "a", "libraries": {"Liger": "1"}, "options": {}}
    done = {f"{way}, grouped_mm experts": {"ms": 1.0} for way in ("flash_attention_4", "sdpa")}
    done |= {"sdpa, Liger experts, chunk_mem_const=32": {"ms": 1.0}}
    known |= {"tried": done}
    options = SimpleNamespace(tiny=False, again=False)
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
        assert ("options" in found, len(found["tried"])) == (kept, 3 * kept)
    # A setting that was not offered then is tried, and what is offered no more does not count
    options.again, known["tried"] = False, {"sdpa, grouped_mm experts": {"ms": 1.0}, "eager": {}}
    job = SimpleNamespace(options=options, record=record | {"libraries": {"Liger": "1"}})
    found = train_step.begun(name, train_cases.CASES[name], job)
    assert "options" not in found and [*found["tried"]] == ["sdpa, grouped_mm experts"]
    tried: list[str] = []

    def turn(self: Any, side: str, options: train_peer.Options, _: Any) -> Record:
        tried.append(options.name)
        return {"ms": 3.0}

    monkeypatch.setattr(train_side.Sides, "turn", turn)
    done = {"flash_attention_4, grouped_mm experts": {"ms": 2.0}}
    request = train_side.Request(name, 1, True, tried=done)
    best = train_side.fastest(train_side.Sides(request, train_cases.CASES[name], "cuda"))
    assert best == train_peer.Options("flash_attention_4", "grouped_mm")
    both = "sdpa, grouped_mm experts", "flash_attention_4, Liger experts"
    assert tried == [*both, "flash_attention_4, grouped_mm experts, chunk_mem_const=32"]


def test_ranks_have_the_weights_of_one_gpu() -> None:
    models = [tigon.Qwen3Moe.from_config(EXPERTS, dtype=torch.bfloat16) for _ in range(2)]
    layouts_side.fill(models[0])
    train_cases.fill_ours(models[1])
    for (name, found), expected in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(found, expected), name


def test_tokens_choose_many_experts() -> None:
    """As in trained models; after two layers of plain random weights, all tokens chose the same."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "num_experts": 32}
    model = tigon.Qwen3Moe.from_config(
        EXPERTS | sizes | {"num_experts_per_tok": 4, "tie_word_embeddings": False}
    )
    train_cases.fill_ours(model)
    ids = torch.randint(model.config.vocab_size, (1, 512))
    found = model(ids, labels=ids, metrics=("expert_load",))
    assert found.metrics["expert_load"].max() * 32 < 3  # 8 if all chose four
