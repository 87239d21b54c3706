"""lm-eval's tasks answered by TigonLM and by lm-eval's own `hf`, in turn on one GPU.

A checkpoint of the shape of Llama-3.2-1B in bf16, whose weights are random but for the head: there
a word's row is the embedding of the word before it, so that both sides know which answer is right
and say the same words. TigonLM has its default, batch_size=auto; `hf` has batches of `Work.size`,
and flash-attn-4, where it is installed, if that is faster. A time is that of lm_eval.evaluate with
the model loaded, from requests to metrics; ours of the first run, which compiles, is shown apart.

    python -m bench evaluation                  # all tasks
    python -m bench evaluation --write-docs     # of docs/evaluation.md; needs no GPU
"""

import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tigon
from bench import harness
from bench.compare_side import LLAMA_1B
from bench.harness import Bench, Job, Record, figure, markdown, progress, report, verdict
from bench.peers import imported
from tests.support.benchmarks import DATA
from tests.support.small import LLAMA, write_tokenizer

OURS, PEER = "tigon", "hf"
FASTER, FASTER_CHOICES = 1.5, 2.0  # times as fast over all, and on multiple choice
WITHIN, EQUAL = 0.05, 0.95  # of log-likelihoods of logits in bf16; at least this share of answers
CONFIDENCE = 40.0  # the logit of the next word, were the blocks to change nothing
WORDS = ["".join(sounds) for sounds in product("bdgklmnprstv", "aeio", "n")]
LIBRARIES = {"lm-eval": "lm_eval", "transformers": "transformers", "datasets": "datasets"}
LIBRARIES["flash-attn-4"] = "flash-attn-4"
SDPA, FLASH = "sdpa", "flash_attention_4"  # attentions of hf, of which the faster one is shown
CHOICES = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]
"""
TEXTS = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""
ANSWERS = f"""
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: " "
generation_kwargs: {{until: [" {WORDS[0]}"], max_gen_toks: 64}}
metric_list: [{{metric: exact_match}}]
"""


@dataclass(frozen=True)
class Work:
    """A task: so many rows, with contexts of so many words and choices of so many."""

    what: str
    task: str
    rows: int
    words: tuple[int, int]
    choice: tuple[int, int]
    size: (
        int  # of a batch of hf, which also tries four times as many rows; smaller ones were slower
    )

    def row(self, draw: random.Random) -> Record:
        """A question, and four choices that go on with it, of which the right one does so in the
        words' order."""
        place, count = draw.randrange(len(WORDS)), draw.randint(*self.words)
        spoken = [*draw.choices(WORDS, k=count - 1), WORDS[place]]
        after = [WORDS[(place + 1 + i) % len(WORDS)] for i in range(draw.randint(*self.choice))]
        wrong = [draw.choices(WORDS, k=draw.randint(*self.choice)) for _ in range(3)]
        answer = draw.randrange(4)
        wrong.insert(answer, after)
        choices = [" ".join(words) for words in wrong]
        return {"question": " ".join(spoken), "choices": choices, "answer": answer}


WORKS = {
    "word": Work("choices of a word, as MMLU", CHOICES, 100, (400, 700), (1, 1), 64),
    "ending": Work("choices of endings, as HellaSwag", CHOICES, 80, (150, 400), (8, 24), 64),
    "text": Work("rolling log-likelihoods", TEXTS, 16, (1000, 5000), (1, 1), 8),
    "answer": Work("answers of 1 to 48 words", ANSWERS, 32, (300, 700), (1, 1), 32),
}  # fmt: skip
MULTIPLE_CHOICE = ("word", "ending")
WARM_ROWS = 8  # of hf, which compiles nothing for a shape


def small(work: Work) -> Work:
    """The same with sizes for a CPU."""
    return replace(work, rows=3, words=(4, 12), choice=(1, 3), size=2)


def write_model(directory: Path, tiny: bool) -> None:
    """A checkpoint with its tokenizer, to which each of WORDS is a token."""
    source = write_tokenizer(directory.with_name("tokenizer"), " ".join(["", *WORDS]), 1000)
    tokenizer = tigon.Tokenizer.from_pretrained(source)
    shape = LLAMA | {"vocab_size": 1000} if tiny else LLAMA_1B
    shape = shape | {"tie_word_embeddings": False, "initializer_range": 0.02}
    torch.manual_seed(0)
    device = "cpu" if tiny else "cuda"
    model = tigon.Llama.from_config(shape, dtype=torch.bfloat16, device=device)
    ids = [tokenizer.encode(f" {word}") for word in WORDS]
    if any(len(tokens) != 1 for tokens in ids):
        raise RuntimeError("a word is more than one token")
    spoken = torch.tensor(ids, device=device)[:, 0]
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.normal_()
        head = model.lm_head.weight.normal_()
        head[spoken.roll(-1)] = embedding[spoken]
        head *= CONFIDENCE / shape["hidden_size"]
    model.save_pretrained(directory, tokenizer=tokenizer)


def write_tasks(directory: Path, works: dict[str, Work]) -> dict[str, Any]:
    """lm-eval's tasks of these names."""
    for name, work in works.items():
        folder = directory / name
        folder.mkdir()
        draw = random.Random(name)
        rows = [json.dumps(work.row(draw)) + "\n" for _ in range(work.rows)]
        for part in ("rows", "shots"):
            (folder / f"{part}.jsonl").write_text("".join(rows))
        (directory / f"{name}.yaml").write_text(f"task: {name}{DATA.format(folder)}{work.task}")
    manager: Any = imported("lm_eval.tasks:TaskManager")
    return dict(manager(include_path=str(directory), include_defaults=False).load(list(works)))


class Sides:
    """Both models, which answer a task of lm-eval."""

    def __init__(self, directory: Path, tasks: dict[str, Any], tiny: bool) -> None:
        ours: Any = imported("tigon.integrations.lm_eval:TigonLM")
        theirs: Any = imported("lm_eval.models.huggingface:HFLM")
        given = {"dtype": "bfloat16", "device": "cpu" if tiny else "cuda", "batch_size": "auto"}
        self.models = {OURS: ours(str(directory), **given), PEER: theirs(str(directory), **given)}
        self.tasks, self.evaluate = tasks, imported("lm_eval.evaluator:evaluate")

    def answer(self, side: str, name: str, size: int | str, limit: int | None = None) -> Any:
        """Seconds, lm-eval's metrics, and the answers in the order of the rows."""
        model = self.models[side]
        if side == PEER:
            model.batch_size_per_gpu = size
        tasks = self.tasks | {"tasks": {name: self.tasks["tasks"][name]}}
        began = time.perf_counter()
        results = self.evaluate(model, tasks, limit=limit, bootstrap_iters=0)
        took = time.perf_counter() - began
        answers = [x for row in results["samples"][name] for x in row["filtered_resps"]]
        metrics = results["results"][name].items()
        return took, {k: v for k, v in metrics if isinstance(v, float)}, answers


def try_peer(sides: Sides, name: str, size: int, attention: str) -> float | str:
    """Seconds of hf with this attention, or why there are none."""
    progress(f"{name}: {PEER} with {attention}")
    try:
        sides.models[PEER].model.set_attn_implementation(attention)
        sides.answer(PEER, name, size, WARM_ROWS)
        return sides.answer(PEER, name, size)[0]
    except Exception as error:
        torch.cuda.empty_cache()
        memory = isinstance(error, torch.OutOfMemoryError)
        return "out of memory" if memory else f"{type(error).__name__}: {error}"[:200]


def measure(sides: Sides, name: str, work: Work) -> Record:
    """Rounds of both sides; the first of hf is that in which it tried its attention."""
    ways = [SDPA, FLASH] if harness.installed("flash-attn-4") else [SDPA]
    sizes = work.size, 4 * work.size
    tried = {f"{n}, {way}": try_peer(sides, name, n, way) for way in ways for n in sizes}
    taken = min(tried, key=lambda way: (isinstance(tried[way], str), tried[way]))
    size, _, attention = taken.partition(", ")
    sides.models[PEER].model.set_attn_implementation(attention)
    progress(f"{name}: {OURS}")
    found: Record = {"name": name, "what": work.what, "rows": work.rows, "tried": tried}
    found |= {"batch_size": taken, "first_s": sides.answer(OURS, name, "auto")[0]}
    seconds: dict[str, list[float]] = {OURS: [], PEER: [tried[taken]]}
    metrics, answers = {}, {}
    for side in (OURS, PEER, OURS):
        each, metrics[side], answers[side] = sides.answer(side, name, int(size))
        seconds[side].append(each)
    return found | {
        **{"seconds": seconds, "metrics": metrics},
        **difference(answers[PEER], answers[OURS]),
    }


def difference(theirs: list[Any], ours: list[Any]) -> Record:
    """The share of answers that are equal texts, or how far log-likelihoods are apart, as a share
    of theirs or of 1 nat."""
    pairs = list(zip(theirs, ours, strict=True))
    if isinstance(theirs[0], str):
        return {"equal": sum(a == b for a, b in pairs) / len(pairs)}
    values = [[x[0] if isinstance(x, tuple | list) else x for x in pair] for pair in pairs]
    apart = [abs(b - a) / max(1.0, abs(a)) for a, b in values]
    return {"apart": max(x if math.isfinite(x) else math.inf for x in apart)}


def seconds(record: Record, side: str, names: tuple[str, ...]) -> float | None:
    """Of all these tasks, each in the median over the rounds."""
    rows = [case["seconds"][side] for case in record["cases"] if case["name"] in names]
    return sum(map(median, rows)) if len(rows) == len(names) else None


def faster(record: Record, *names: str) -> float | None:
    """How many times as fast ours is as hf."""
    ours, theirs = (seconds(record, side, names) for side in (OURS, PEER))
    return theirs / ours if theirs and ours else None


def verdicts(record: Record) -> Iterator[str]:
    yield verdict(
        f"multiple choice, speed over {PEER}", faster(record, *MULTIPLE_CHOICE), FASTER_CHOICES
    )
    yield verdict(f"all tasks, speed over {PEER}", faster(record, *WORKS), FASTER)
    for case in record["cases"]:
        if "equal" in case:
            yield verdict(f"{case['name']}, share of equal answers", case["equal"], EQUAL)
        else:
            said = f"{case['name']}, largest difference of a log-likelihood"
            yield verdict(said, case["apart"], WITHIN, most=True)


def show(record: Record) -> str:
    head = ["task", "rows", "`hf`: s (batch size, attention)", "`hf`, others", "TigonLM: s"]
    head += ["TigonLM, first: s", "speed over `hf`"]
    rows = []
    for case in record["cases"]:
        name, best = case["name"], case["batch_size"]
        theirs, ours = (seconds(record, side, (name,)) for side in (PEER, OURS))
        tried = case["tried"].items()
        others = [
            f"{k}: {v if isinstance(v, str) else figure(v)}" for k, v in tried if k != str(best)
        ]
        cells = [case["what"], str(case["rows"]), f"{figure(theirs)} ({best})", ", ".join(others)]
        cells += [figure(ours), figure(case.get("first_s")), figure(faster(record, name))]
        rows.append(cells)
    there = {case["name"] for case in record["cases"]}
    missing = [work.what for name, work in WORKS.items() if name not in there]
    note = f"Not measured: {'; '.join(missing)}." if missing else ""
    return report(record, markdown(head, rows), note, (f"- {line}" for line in verdicts(record)))


def run(job: Job) -> None:
    tiny = job.options.tiny
    job.record |= {"cases": []}
    works = {name: small(work) if tiny else work for name, work in WORKS.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tasks").mkdir()
        write_model(Path(folder) / "model", tiny)
        tasks = write_tasks(Path(folder) / "tasks", {name: works[name] for name in job.only})
        sides = Sides(Path(folder) / "model", tasks, tiny)
        for name in job.only:
            job.append("cases", measure(sides, name, works[name]))


BENCH = Bench(run, show, list(WORKS), "docs/evaluation.md", libraries=LIBRARIES, tiny=True)
