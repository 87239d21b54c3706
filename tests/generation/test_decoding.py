"""The loop: padding, the cache, ends of rows, streaming, and what it leaves behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, StopStringCriteria, TextStreamer

import tigon
from tests.generation.common import padded, some_ends
from tigon.generation import StopStrings

PROMPT = "The largest cat in the world is the"
STOPS = ["ou can", "\n\n", "tig", "é", "🐯", "a", "<|im_end|>"]
TEXT = """Tigers swim: ou caught, you can. Çafé au lait
and a café in Pérou — 老虎 🐯🐅 trust the tiger<|im_end|>

\t tigon"""


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[tigon.CausalLM, Any]:
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return tigon.from_pretrained(str(smollm2), dtype=torch.float32), theirs


PROMPTS = padded((3, 7, 5), 211)


def test_greedy_is_transformers_on_the_real_checkpoint(
    real: tuple[tigon.CausalLM, Any], smollm2: Path
) -> None:
    ours, theirs = real
    tokenizer = tigon.Tokenizer.from_pretrained(smollm2)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell me about tigers."}], add_generation_prompt=True
    )
    for prompt in (tokenizer.encode("Once upon a time, a tiger"), chat):
        ids = torch.tensor([prompt])
        tokens = ours.generate(ids, max_new_tokens=20)
        assert tokens.shape[1] == len(prompt) + 20
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )
        assert tokens.tolist() == expected.tolist()


def test_padded_rows_are_as_alone_and_as_in_transformers(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, theirs = pair
    ids, mask = PROMPTS
    tokens = ours.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=[])
    expected = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=12, eos_token_id=-1, pad_token_id=0
    )
    assert tokens.tolist() == expected.tolist()
    for row in range(3):
        alone = ours.generate(
            ids[row : row + 1, mask[row] == 1], max_new_tokens=12, eos_token_id=[]
        )
        assert alone[0, -12:].tolist() == tokens[row, -12:].tolist()
    other = ids.masked_fill(mask == 0, 100)
    again = ours.generate(other, attention_mask=mask.bool(), max_new_tokens=12, eos_token_id=[])
    assert again[:, 7:].tolist() == tokens[:, 7:].tolist()


def test_without_a_pad_token_the_first_eos_fills(pair: tuple[tigon.CausalLM, Any]) -> None:
    ids, mask = PROMPTS
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12}
    free = pair[0].generate(**call, eos_token_id=[])
    call["eos_token_id"] = ends = some_ends(free, 7, (2, 5, 8))
    tokens = pair[0].generate(**call)
    assert (tokens[:, -2:] == ends[0]).all(1).any()
    assert tokens.tolist() == pair[0].generate(**call, pad_token_id=ends[0]).tolist()


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("tokenizer_class", [tigon.Tokenizer, AutoTokenizer])
def test_stop_strings_are_found_where_transformers_finds_them(
    smollm2: Path, tokenizer_class: Any
) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2)
    for strings in (STOPS[:1], ["🐯"], STOPS):
        criterion = StopStringCriteria(theirs, strings)
        stop = StopStrings(strings, tokenizer_class.from_pretrained(smollm2))
        ids = torch.tensor([theirs(TEXT).input_ids])
        ends = range(1, ids.shape[1] + 1)
        found = [stop.completed(ids[0, :n][-stop.window :].tolist()) for n in ends]
        expected = [bool(criterion(ids[:, :n], None)) for n in ends]
        assert found == expected
        assert 0 < sum(found) < len(found) / 2


@pytest.mark.slow
def test_generation_stops_after_a_stop_string(
    real: tuple[tigon.CausalLM, Any], smollm2: Path
) -> None:
    ours, theirs = real
    tokenizer = tigon.Tokenizer.from_pretrained(smollm2)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    free = ours.generate(ids, max_new_tokens=16)[0].tolist()
    pieces = [tokenizer.decode(free[:n]) for n in range(len(free) + 1)]
    n = ids.shape[1] + 8
    # From inside one token to inside the next but one
    string = pieces[n + 2][len(pieces[n - 1]) + 2 : len(pieces[n + 1]) + 2]
    assert string not in pieces[n + 1]
    assert string in pieces[n + 2]
    tokens = ours.generate(ids, max_new_tokens=16, stop_strings=string, tokenizer=tokenizer)
    assert tokens[0].tolist() == free[: n + 2]
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=16,
        do_sample=False,
        stop_strings=[string],
        tokenizer=AutoTokenizer.from_pretrained(smollm2),
    )
    assert tokens.tolist() == expected.tolist()


def test_a_text_streamer_prints_the_text(
    real: tuple[tigon.CausalLM, Any], smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    tokens = real[0].generate(ids, max_new_tokens=8, streamer=streamer)
    text = tokenizer.decode(tokens[0, ids.shape[1] :])
    assert text.strip()
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_model_stays_trainable(model: tigon.Llama, cache: Any) -> None:
    ids = torch.randint(0, 97, (2, 5))
    expected = model.eval().generate(ids, max_new_tokens=6)
    tokens = model.train().generate(ids, max_new_tokens=6, cache_implementation=cache)
    assert model.training
    assert tokens.tolist() == expected.tolist()
    model(tokens, labels=tokens).loss.backward()
    grad = model.lm_head.weight.grad
    assert grad is not None
    assert grad.abs().max() > 0


def test_a_sharded_model_trains_after_it_generates(model: tigon.Llama) -> None:
    ids = torch.randint(0, 97, (2, 5))
    expected = model.generate(ids, max_new_tokens=6)
    model(ids, labels=ids).loss.backward()
    grad = model.lm_head.weight.grad
    assert grad is not None
    model.zero_grad()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        assert model.generate(ids, max_new_tokens=6).tolist() == expected.tolist()
        model(ids, labels=ids).loss.backward()
        sharded: Any = model.lm_head.weight.grad
        torch.testing.assert_close(sharded.full_tensor(), grad)
    finally:
        dist.destroy_process_group()
