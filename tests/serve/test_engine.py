"""The engine alone: its answers are those that a row gets alone, whatever else runs."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.models.dense_cases import ROPES
from tests.models.tiny import CASES, reference
from tests.serve.server import wait
from tigon.generation.loop import HostCopies
from tigon.generation.settings import GenerationSettings
from tigon.serve import Answer, Engine, QueueFullError, batch, engine
from tigon.tokenizer import Tokenizer

TEXT = "division by zero"
GREEDY = GenerationSettings(eos_token_id=(0,))
SAMPLED = GenerationSettings(eos_token_id=(0,), do_sample=True, top_k=0)


class Recorded(Answer):
    """An answer that keeps its tokens."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.written: list[int] = []

    def append(self, output: Any) -> None:
        if not self.ended:
            self.written.append(int(output[0]))
        super().append(output)


class Writer:
    """An engine whose answers can be asked for by tokens."""

    def __init__(self, model: tigon.CausalLM, tokenizer: Tokenizer, rows: int, queue: int = 500):
        self.engine, self.tokenizer = Engine(model, rows, queue), tokenizer

    def __enter__(self) -> "Writer":
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def submit(
        self,
        prompt: list[int],
        most: int,
        settings: GenerationSettings = GREEDY,
        adapter: str | None = None,
    ) -> Recorded:
        answer = Recorded(prompt, settings, most, self.tokenizer, adapter=adapter)
        self.engine.submit([answer])
        return answer

    def write(self, *asked: Any) -> list[int]:
        answer = self.submit(*asked)
        wait(lambda: answer.ended)
        return answer.written


def greedy(model: tigon.CausalLM, prompt: list[int], most: int) -> list[int]:
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=most, eos_token_id=0)
    return ids[0, len(prompt) :].tolist()


def random_prompts(count: int, seed: int, longest: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, 211) for _ in range(draw.randint(1, longest))] for _ in range(count)]


# Windows, scores with caps, states for all tokens of a row, experts
KINDS = ["window", "small caps", None, None, None]
KINDS = list(zip(("mistral", "gemma2", "qwen3_5_text", "lfm2", "mixtral"), KINDS, strict=True))


@pytest.mark.parametrize(("model_type", "case"), KINDS)
def test_kinds_of_layers(
    model_type: str, case: str | None, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: Any
) -> None:
    """Long prompts come in parts between steps of others, and rows are used again."""
    monkeypatch.setattr(batch, "PREFILL", 7)
    monkeypatch.setattr(engine, "PREFILL", 7)
    changes = CASES[model_type][case or next(iter(CASES[model_type]))]
    reference(model_type, changes | {"max_position_embeddings": 64}, tmp_path)
    model = tigon.from_pretrained(tmp_path)
    prompts = random_prompts(10, 0, 40)
    with Writer(model, tokenizer, rows=3) as writer:
        answers = [writer.submit(prompt, 15) for prompt in prompts]
        wait(lambda: all(answer.ended for answer in answers))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.written == greedy(model, prompt, 15)


@pytest.fixture(scope="module")
def writer(model: tigon.CausalLM, tokenizer: Tokenizer) -> Iterator[Writer]:
    with Writer(model, tokenizer, rows=5) as writer:
        yield writer


def test_a_text_fills_the_cache(writer: Writer, model: tigon.CausalLM) -> None:
    (prompt,) = random_prompts(1, 2, 5)
    room = writer.engine.capacity - len(prompt)
    assert writer.engine.capacity == 256
    others = [writer.submit(p, 40) for p in random_prompts(9, 3, 200)]
    expected = greedy(model, prompt, room)
    assert writer.write(prompt, room) == expected
    assert writer.write(prompt, room) == expected  # where a full row was
    wait(lambda: all(answer.ended for answer in others))


def test_a_seed_repeats_whatever_else_runs(writer: Writer) -> None:
    prompt = [5, 6, 7]
    settings = [
        replace(SAMPLED, seed=11),
        replace(SAMPLED, seed=2**64 - 1, temperature=0.7, top_p=0.9),
        replace(SAMPLED, seed=-3, top_k=7, repetition_penalty=1.3, min_new_tokens=20),
        replace(GREEDY, repetition_penalty=1.5),
    ]
    alone = [writer.write(prompt, 40, s) for s in settings]
    assert len(set(map(tuple, alone))) == 4
    kinds = [GREEDY, replace(SAMPLED, top_p=0.5), replace(SAMPLED, min_p=0.2, temperature=3.0)]
    rest = [writer.submit(p, 30, kinds[i % 3]) for i, p in enumerate(random_prompts(12, 5, 60))]
    together = [writer.submit(prompt, 40, s) for s in settings]
    wait(lambda: all(answer.ended for answer in [*rest, *together]))
    assert [answer.written for answer in together] == alone


class Behind(HostCopies):
    """Copies that the host reads some steps later, as from a GPU."""

    def __init__(self, lag: int):
        super().__init__(lag=3, in_step=True)

    def send(self, tokens: torch.Tensor) -> None:
        super().send(tokens.clone())


def test_a_host_behind_the_device(
    model: tigon.CausalLM, tokenizer: Tokenizer, monkeypatch: Any
) -> None:
    """No row goes on past its last token, and nobody is told what comes after an end."""
    monkeypatch.setattr(engine, "HostCopies", Behind)
    prompts = [*random_prompts(12, 7, 30), [5] * 240]
    most = [*random.Random(0).choices(range(1, 30), k=12), 16]
    with Writer(model, tokenizer, rows=3) as writer:
        answers = [writer.submit(*each) for each in zip(prompts, most, strict=True)]
        answers[3].cancel()
        wait(lambda: all(answer.ended for answer in answers if not answer.cancelled))
        assert writer.engine.counts.failures == 0
    for prompt, count, answer in zip(prompts, most, answers, strict=True):
        assert answer.cancelled or answer.written == greedy(model, prompt, count)


def test_adapters_by_request(adapted: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    prompts, names = random_prompts(16, 8, 20), [None, "one", "two"]
    with Writer(adapted, tokenizer, rows=3) as writer:
        chosen = [names[i % 7 % 3] for i in range(16)]
        answers = [
            writer.submit(prompt, 12, GREEDY, name)
            for prompt, name in zip(prompts, chosen, strict=True)
        ]
        wait(lambda: all(answer.ended for answer in answers))
    for name in names:
        adapted.set_adapter(name)
        for prompt, adapter, answer in zip(prompts, chosen, answers, strict=True):
            same = answer.written == greedy(adapted, prompt, 12)
            assert same if adapter == name else not same or len(answer.written) < 3


def test_unseeded_answers_differ(writer: Writer) -> None:
    assert writer.write([5, 6], 30, SAMPLED) != writer.write([5, 6], 30, SAMPLED)


def test_rows_of_readers_that_leave_are_free(writer: Writer, model: tigon.CausalLM) -> None:
    answers = [writer.submit(p, 200) for p in random_prompts(20, 6, 20)]
    wait(lambda: answers[0].tokens > 3)
    steps = writer.engine.counts.steps
    for answer in answers:
        answer.cancel()
    wait(lambda: not writer.engine.running and not writer.engine.waiting)
    assert writer.engine.counts.steps <= steps + 3
    assert writer.write([9, 8, 7], 20) == greedy(model, [9, 8, 7], 20)


def test_a_full_queue_takes_no_more(model: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    with Writer(model, tokenizer, rows=2, queue=3) as writer:
        answers = [writer.submit([5] * 9, 200) for _ in range(5)]
        with pytest.raises(QueueFullError, match="max_queue=3"):
            writer.submit([5], 3)
        answers[-1].cancel()
        assert len(writer.write([5], 3)) == 3
        for answer in answers:
            answer.cancel()


def test_scores_that_are_not_finite_end_their_answer(directory: Path, tokenizer: Tokenizer) -> None:
    model = tigon.from_pretrained(directory)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = float("nan")
    with Writer(model, tokenizer, rows=2) as writer:
        answer = writer.submit([7, 50, 7], 5)
        wait(lambda: answer.ended)
        assert "token 0 after the prompt are not finite" in answer.take().error


def test_a_failing_model_fails_its_answers_alone(
    directory: Path, tokenizer: Tokenizer, monkeypatch: Any, capsys: Any
) -> None:
    model = tigon.from_pretrained(directory)
    with Writer(model, tokenizer, rows=2) as writer:
        expected = writer.write([7, 8], 5)
        step = writer.engine._batch.step
        monkeypatch.setattr(writer.engine._batch, "step", lambda *_: 1 / 0)
        answers = [writer.submit([7, 8], 5) for _ in range(2)]
        wait(lambda: all(answer.ended for answer in answers))
        assert [a.take().error for a in answers] == [
            "the model failed: ZeroDivisionError: " + TEXT
        ] * 2
        assert "Traceback" in capsys.readouterr().err
        monkeypatch.setattr(writer.engine._batch, "step", step)
        assert writer.write([7, 8], 5) == expected


def test_a_broken_device_leaves_nobody_waiting(
    model: tigon.CausalLM, tokenizer: Tokenizer, monkeypatch: Any, capsys: Any
) -> None:
    """Where rows cannot even be freed, answers that wait end too, and no more are taken."""
    with Writer(model, tokenizer, rows=2) as writer:
        for name in ("read", "step", "free"):
            monkeypatch.setattr(writer.engine._batch, name, lambda *_: 1 / 0)
        with writer.engine._changed:
            answers = [writer.submit([7, 8], 5) for _ in range(5)]
        wait(lambda: not writer.engine.alive)
        assert all(TEXT in answer.take().error for answer in answers)
        assert not (writer.engine.running or writer.engine.waiting)
        assert writer.engine.counts.failures == 5
        assert "Traceback" in capsys.readouterr().err
        with pytest.raises(QueueFullError, match=r"the model failed: .* restart the server"):
            writer.submit([5], 3)


def test_an_engine_that_ends_ends_its_answers(model: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    with Writer(model, tokenizer, rows=1) as writer:
        answers = [writer.submit([5], 250) for _ in range(3)]
    assert all(answer.ended for answer in answers)
    assert "shutting down" in answers[-1].take().error


def test_capacity(model: tigon.CausalLM, monkeypatch: Any) -> None:
    row = model.static_cache(1, 256).nbytes
    for memory_size, rows, expected in ((2**40, 3, 256), (2 * row * 3, 3, 256)):
        monkeypatch.setattr(batch.memory, "total_memory", lambda _, size=memory_size: size)
        assert batch.fit_capacity(model, rows) == expected
    with pytest.raises(ValueError, match=r"max_rows=4: a cache of 256 tokens in each row takes"):
        batch.fit_capacity(model, 4)
    longer = tigon.Llama.from_config(model.config.to_dict() | {"max_position_embeddings": 4000})
    assert batch.fit_capacity(longer, 1) == 768


def test_a_dynamic_rope_ends_the_context(tmp_path: Path) -> None:
    reference("llama", {"rope_parameters": ROPES["dynamic"]}, tmp_path)
    model = tigon.from_pretrained(tmp_path)
    assert model.dynamic_rope is not None
    assert batch.fit_capacity(model, 2) == model.dynamic_rope.original_length
