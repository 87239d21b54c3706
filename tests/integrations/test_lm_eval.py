"""TigonLM beside lm-eval's own hf, on the same tasks and weights."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

import tigon
from tests.support.benchmarks import TASKS, write_tasks
from tests.support.small import TEXT, add_bos, write_model
from tigon.integrations import lm_eval
from tigon.integrations.lm_eval import Prompt, TigonLM
from tigon.integrations.tasks import evaluate_tasks, flatten_metrics, load_tasks
from tigon.integrations.transformers import as_transformers
from tigon.models import MODELS, build
from tigon.weights import Repository

TOLERANCE = 1e-6  # relative
CHAT = {"apply_chat_template": True, "system_instruction": "words, few"}
FLOAT: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lm-eval")
    model = tigon.from_pretrained(str(write_model(root / "random"))).train()
    tokenizer = tigon.Tokenizer.from_pretrained(root / "random")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids = torch.tensor([tokenizer.encode(f" {TEXT}" * 4)])
    for _ in range(30):  # so that it says words, some of which end an answer
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(root / "model", tokenizer=tokenizer)
    write_tasks(root / "tasks")
    return root


@pytest.fixture(scope="module")
def ours(root: Path) -> TigonLM:
    return TigonLM(root / "model", **FLOAT)


@pytest.fixture(scope="module")
def theirs(root: Path) -> Iterator[HFLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.models.huggingface.tqdm", Silent)
        yield HFLM(str(root / "model"), batch_size=2, **FLOAT)


class Silent:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from tqdm import tqdm

        return tqdm(*args, **kwargs | {"disable": True})


def ask(lm: Any, root: Path, *names: str, num_fewshot: int = 0, **options: Any) -> dict[str, Any]:
    """lm-eval's results, with what it was asked and answered."""
    manager = TaskManager(include_path=str(root / "tasks"), include_defaults=False)
    tasks = manager.load(list(names or TASKS))
    for task in tasks["tasks"].values():
        task.set_config("num_fewshot", num_fewshot)
        task.set_fewshot_seed(1234)
    return dict(evaluate(lm, tasks, bootstrap_iters=0, **options) or {})


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> list[Any]:
    """Each request and its answer, and the metrics; the answers of the first."""
    answers = []
    assert one["samples"].keys() == other["samples"].keys()
    for name, samples in one["samples"].items():
        for a, b in zip(samples, other["samples"][name], strict=True):
            assert a["arguments"] == b["arguments"]
            for x, y in zip(a["resps"], b["resps"], strict=True):
                answers.append(x[0])
                (logprob, *greedy), (expected, *same) = (
                    r if isinstance(r, tuple) else (r,) for r in (x[0], y[0])
                )
                near = expected if isinstance(expected, str) else pytest.approx(expected, TOLERANCE)
                assert logprob == near and greedy == same
    expected = flatten_metrics(other)
    assert flatten_metrics(one) == pytest.approx(expected, rel=1e-5) and expected
    return answers


CASES: dict[str, dict[str, Any]] = {
    "questions alone": {},
    "examples": {"num_fewshot": 2},
    "chat": {**CHAT, "num_fewshot": 2, "fewshot_as_multiturn": True},
    "chat in one turn": {**CHAT, "num_fewshot": 2, "fewshot_as_multiturn": False},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_hf(ours: TigonLM, theirs: HFLM, root: Path, case: str) -> None:
    answers = assert_same(ask(ours, root, **CASES[case]), ask(theirs, root, **CASES[case]))
    assert len({a for a in answers if isinstance(a, str)}) > 2


@pytest.mark.parametrize("case", ["questions alone", "chat"])
def test_tokenizers_that_add_bos(root: Path, tmp_path: Path, case: str) -> None:
    """Once: also where the chat template has written it, or a text begins with it."""
    directory = str(add_bos(root / "model", tmp_path / "model"))
    one, other = TigonLM(directory, **FLOAT), HFLM(directory, batch_size=4, **FLOAT)
    assert_same(ask(one, root, **CASES[case]), ask(other, root, **CASES[case]))
    assert one.tok_encode("<|endoftext|>the") == one.tok_encode("the") != [0]
    assert answer(one, "<|endoftext|>a few") == answer(one, "a few") == answer(other, "a few")


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


LONG = " ".join([TEXT] * 9)
PAIRS = [
    ("", "the model"),
    ("", "<|endoftext|>the"),  # the token that stands before a text
    ("the model ", "reads"),  # a space at the end goes to the answer
    ("the model\n\n", " reads\n"),
    ("<|endoftext|>the", " few others"),
    (LONG, " back to"),  # too long: cut from the left
    (LONG[:300], LONG[:900]),
    ("Grüße, 東京 🙂", " é"),
    ("the model", " reads some of these words and says a few others"),
    ("the", " model reads"),
]


def test_pairs_of_text(ours: TigonLM, theirs: HFLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # With it hf takes other logits for ("the model", " reads") if ("the", " model reads") is asked
    monkeypatch.setattr(theirs, "logits_cache", False)
    asked = [("a few others", generated) for generated in answer(theirs, "a few others")] + PAIRS
    found = ours.loglikelihood(requests("loglikelihood", *asked))
    expected = theirs.loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}
    # abs: one ulp of the logits, whose difference is a small number where the answer is likely
    near = pytest.approx([x for x, _ in expected], rel=TOLERANCE, abs=1e-6)
    assert [x for x, _ in found] == near


def answer(lm: Any, *prompts: str, **asked: Any) -> list[str]:
    limit = {} if "max_new_tokens" in asked else {"max_gen_toks": 6}
    asked = {"until": ["\n"]} | limit | asked
    return lm.generate_until(requests("generate_until", *((p, asked) for p in prompts)), True)


def test_texts_longer_than_the_model_reads(ours: TigonLM, theirs: HFLM) -> None:
    asked = requests("loglikelihood_rolling", *((text,) for text in (LONG * 3, "", "the", LONG)))
    expected = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    "asked",
    [
        {"until": []},
        {"until": "w"},
        {"until": ["ever asked", " few"], "max_gen_toks": 30},
        {"do_sample": False, "temperature": 0.0, "repetition_penalty": 1.3},
        {"max_new_tokens": 9},
    ],
    ids=str,
)
def test_answers_to_prompts(ours: TigonLM, theirs: HFLM, asked: dict[str, Any]) -> None:
    prompts = ["the model", "a few", LONG, "<|endoftext|>who asked", "reads some of"]
    found, expected = (answer(lm, *prompts, **asked) for lm in (ours, theirs))
    assert found == expected and len(set(found)) > 1


def test_a_model_without_an_end(ours: TigonLM, root: Path, tmp_path: Path) -> None:
    """Some base models have no eos_token_id; a text that ends answers ends them all the same."""
    folder = shutil.copytree(root / "model", tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        if (path := folder / name).exists():
            values = json.loads(path.read_text())
            path.write_text(json.dumps(values | {"eos_token_id": None, "pad_token_id": None}))
    prompts, asked = ["the model", "a few", "who asked"], {"until": [" ever", " w"]}
    lm, theirs = TigonLM(folder, **FLOAT), HFLM(str(folder), batch_size=3, **FLOAT)
    found = answer(lm, *prompts, **asked)
    assert found == answer(theirs, *prompts, **asked) and len(set(map(len, found))) > 1


@pytest.mark.parametrize("size", [1, "3", 100, "auto:4"])
def test_batches_move_nothing(ours: TigonLM, root: Path, size: int | str) -> None:
    lm = TigonLM(ours.model, ours.tokenizer, batch_size=size)
    one, other = (ask(x, root, num_fewshot=1) for x in (lm, ours))
    assert_same(one, other)


def test_batches_grow_with_the_memory_of_a_gpu(ours: TigonLM, monkeypatch: Any) -> None:
    lm, found = TigonLM(ours.model, ours.tokenizer), list[int]()

    def scored(_: Any, pairs: Any, *, tokens_per_batch: int) -> list[Any]:
        found.append(tokens_per_batch)
        return [SimpleNamespace(logprob=0.0, greedy=True) for _ in pairs]

    monkeypatch.setattr(lm_eval, "log_likelihoods", scored)
    pairs = [([5] * 100, [5])]  # the last one is not read
    asked = {"until": ["x"], "max_gen_toks": 100}
    prompts = [Prompt(i, "", [5] * 60, asked) for i in range(3000)]
    # Two layers of keys and values of 2 heads of 16 numbers in fp32: 512 bytes of a token
    sizes = ("cpu", 9, 8192, 204), ("cuda", 0, 8192, 204), ("cuda", 0.15, 9830, 245)
    for device, gib, read, rows in (*sizes, ("cuda", 9, 32768, 256)):
        lm._device = torch.device(device)
        monkeypatch.setattr(lm_eval, "total_memory", lambda _, gib=gib: int(gib * 2**30))
        lm._score(pairs)
        assert found[-1] == read
        assert len(next(iter(lm._batches(prompts)))) == rows
    lm.rows = 7
    lm._score(pairs)
    assert found[-1] == 700 and len(next(iter(lm._batches(prompts)))) == 7


def test_contexts_are_cut_as_in_hf(ours: TigonLM, root: Path) -> None:
    lm = TigonLM(root / "model", max_length=96, **FLOAT)
    theirs = HFLM(str(root / "model"), batch_size=3, max_length=96, **FLOAT)
    one, other = (ask(x, root, num_fewshot=3) for x in (lm, theirs))
    assert_same(one, other)
    assert flatten_metrics(one) != flatten_metrics(ask(ours, root, num_fewshot=3))
    cut, expected, whole = (answer(x, LONG, max_gen_toks=80) for x in (lm, theirs, ours))
    assert cut == expected != whole


def test_half_the_tokens_of_hf(
    ours: TigonLM, theirs: HFLM, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for lm in (ours, theirs):
        read: list[int] = []
        hook = lm.model.register_forward_pre_hook(lambda _, args, r=read: r.append(args[0].numel()))
        ask(lm, root, "choices", num_fewshot=3)
        hook.remove()
        counts.append(sum(read))
    assert counts[0] <= counts[1] / 2, counts


def test_a_model_in_training_is_left_as_it_was(ours: TigonLM, root: Path) -> None:
    model = tigon.from_pretrained(str(root / "model"), dtype=torch.float32).train()
    model.model.layers[1].eval()  # as of a frozen part
    modes = [module.training for module in model.modules()]
    random.seed(5), np.random.seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    tasks = load_tasks(["choices", "texts,answers"], str(root / "tasks"))
    lm = TigonLM(model, AutoTokenizer.from_pretrained(root / "model"))
    found = evaluate_tasks(lm, tasks, num_fewshot=2, apply_chat_template=True)
    assert [module.training for module in model.modules()] == modes
    assert states == (
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert evaluate_tasks(lm, tasks, num_fewshot=2)["results"] != found["results"]
    with torch.no_grad():
        model.lm_head.weight.div_(1.5)
    again = evaluate_tasks(ours, tasks, num_fewshot=2, apply_chat_template=True)
    assert flatten_metrics(again) == pytest.approx(flatten_metrics(found), rel=TOLERANCE)


def test_sampled_answers_repeat(ours: TigonLM, root: Path) -> None:
    tasks = load_tasks(["answers"], str(root / "tasks"))
    (task,) = tasks["tasks"].values()
    task.set_config("generation_kwargs", {"do_sample": True, "temperature": 1.5}, update=True)
    said = []
    for _ in range(2):
        evaluate_tasks(ours, tasks)
        said.append([instance.resps for instance in task.instances])
        torch.rand(3)
    assert said[0] == said[1]


def test_a_task_that_fixes_its_examples(ours: TigonLM, root: Path) -> None:
    """At 0 it keeps them, as in lm-eval; without a number there are none."""
    for own, given, expected in ((0, 2, 0), (1, None, 1), (1, 2, 2), (None, None, 0)):
        tasks = load_tasks(["choices"], str(root / "tasks"))
        (task,) = tasks["tasks"].values()
        task.set_config("num_fewshot", own)
        results = evaluate_tasks(ours, tasks, num_fewshot=given, limit=1)
        assert results["n-shot"] == {"choices": expected}


def test_a_wrapper_for_transformers(ours: TigonLM, root: Path) -> None:
    wrapper = as_transformers(tigon.from_pretrained(str(root / "model"), dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    lms = TigonLM(wrapper, tokenizer), HFLM(wrapper, tokenizer=tokenizer, batch_size=4), ours
    one, two, three = (ask(lm, root, num_fewshot=1) for lm in lms)
    assert_same(one, two)
    assert_same(one, three)


def test_every_evaluation_has_the_same_examples(ours: TigonLM, root: Path) -> None:
    tasks = load_tasks(["choices"], str(root / "tasks"))
    (task,) = tasks["tasks"].values()
    asked = []
    for _ in range(2):
        evaluate_tasks(ours, tasks, num_fewshot=2, limit=0.5)
        asked.append([instance.args for instance in task.instances])
    assert asked[0] == asked[1] and len(asked[0]) == 3 * 4


IMPORTS = """
import sys, tigon
assert not {"lm_eval", "datasets", "transformers"} & {*sys.modules}
import tigon.integrations.lm_eval
from lm_eval.api.registry import get_model
print(get_model("tigon").__name__, get_model("hf").__name__, get_model("dummy").__name__)
"""


def test_the_other_models_of_lm_eval_stay() -> None:
    """Registered before they are, ours would hide them; and nobody who has no use for it waits."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("TigonLM HFLM DummyLM\n", "")


@pytest.mark.slow
def test_the_command_line_of_lm_eval(ours: TigonLM, root: Path) -> None:
    command = [sys.executable, "-m", "tigon.integrations.lm_eval", "run", "--model", "tigon"]
    command += ["--model_args", f"pretrained={root / 'model'},dtype=float32", "--tasks", "texts"]
    command += ["--include_path", str(root / "tasks"), "--output_path", str(root / "written")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (root / "written").rglob("results*.json")
    found = flatten_metrics(json.loads(file.read_text()))
    expected = evaluate_tasks(ours, load_tasks(["texts"], str(root / "tasks")))
    assert found == pytest.approx(flatten_metrics(expected), rel=TOLERANCE)


def test_a_gpu_that_is_not_there(root: Path, recwarn: pytest.WarningsRecorder) -> None:
    """lm-eval's command line asks for cuda:0 on every machine."""
    TigonLM(str(root / "model"))
    assert not len(recwarn)
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="device=cuda:0: torch sees no CUDA device here"):
            assert TigonLM(str(root / "model"), device="cuda:0").model.device.type == "cpu"


def test_bad_input(ours: TigonLM, root: Path) -> None:
    model, tokenizer = ours.model, ours.tokenizer
    scorer, _ = build(Repository(root / "model"), MODELS, labels=1)
    long = [(None, [1], [2] * 513)]
    for error, message, call in (
        (ValueError, "a model in memory needs its tokenizer", lambda: TigonLM(model)),
        (TypeError, "pretrained is a Linear: give", lambda: TigonLM(torch.nn.Linear(1, 1), "x")),
        (ValueError, "this Llama predicts no next token", lambda: TigonLM(scorer, tokenizer)),
        (ValueError, "batch_size='many'", lambda: TigonLM(model, tokenizer, batch_size="many")),
        (
            TypeError,
            "dtype must be .*, not 'half4'",
            lambda: TigonLM(root / "model", dtype="half4"),
        ),
        (ValueError, "the answer '' has 0", lambda: ours.loglikelihood(requests("", ("a", "")))),
        (ValueError, "has 513 tokens: the model", lambda: ours._loglikelihood_tokens(long)),
        (ValueError, "max_gen_toks=512 leaves", lambda: answer(ours, "a", max_gen_toks=512)),
        (ValueError, "num_beams", lambda: answer(ours, "a", num_beams=2)),
    ):
        with pytest.raises(error, match=message):
            call()


def test_unknown_tasks(root: Path) -> None:
    """The names of lm-eval's own are read for it, in seconds."""
    with pytest.raises(ValueError, match="no task is named"):
        load_tasks([","])
    with pytest.raises(ValueError, match="lm-eval has no task") as caught:
        load_tasks(["choises,texts", "arc_eazy,xqzzvkw"], str(root / "tasks"))
    hints = (
        "'choises' (did you mean 'choices'?), 'arc_eazy' (did you mean 'arc_easy'?), 'xqzzvkw' ("
    )
    assert hints.replace("'", '"') in str(caught.value).replace("'", '"')


def test_tasks_that_cannot_be_loaded(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none: there is no such folder"):
        load_tasks(["choices"], str(tmp_path / "none"))
    (tmp_path / "a.yaml").write_text("task: a\ndataset_path: json\noutput_type: unknown\n")
    with pytest.raises(ValueError, match="a task of a cannot be loaded"):
        load_tasks(["a"], str(tmp_path))


def test_groups_patterns_and_files(root: Path) -> None:
    for names in ("pair", "cho*,texts", str(root / "tasks/choices.yaml") + ", texts"):
        assert {*load_tasks([names], str(root / "tasks"))["tasks"]} == {"choices", "texts"}
