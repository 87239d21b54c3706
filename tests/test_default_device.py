"""torch.set_default_device changes nothing: under "meta", whose tensors have no values, everything
gives the bits that it gives without."""

import ast
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten

import tigon
import tigon.kernels
from tests.generation.common import padded
from tests.models.adapters import trained
from tests.models.dense_cases import SIZES
from tests.models.fp8_checkpoints import DYNAMIC, to_fp8
from tests.models.mxfp4_checkpoints import to_mxfp4
from tests.models.test_quantized import EVEN
from tests.models.tiny import CASES, EVERY, FIRST, reference, their_config
from tests.support.contract import tiny_llama
from tests.support.small import write_chats, write_model
from tests.train import preferences
from tigon import LoraConfig
from tigon.eval import log_likelihoods, perplexity
from tigon.integrations import transformers as integration
from tigon.kernels import KL, CrossEntropy, LogProbs
from tigon.models import MODELS, CausalLM, build, from_pretrained, load_weights, materialize
from tigon.models.pretrained.load import parse_any_config
from tigon.tokenizer import Tokenizer
from tigon.train import load, main
from tigon.train.logging import read_metrics
from tigon.train.optim import OPTIMIZERS, Ema, InBackward, build_optimizer, clip_gradients
from tigon.weights import Repository

IDS, MASK = padded((12, 7), 97)
LABELS = IDS.masked_fill(MASK == 0, -100)
BOUNDS = torch.tensor([0, 5, 12], dtype=torch.int32)
POSITIONS = torch.cat((torch.arange(5), torch.arange(7)))[None]
KEEP = torch.tensor([2, 11])
TOP_LOGPROBS, TOPS = torch.randn(2, 12, 97).log_softmax(-1).topk(3)
WEIGHTS = torch.rand(97)
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": []}

ROOT = tempfile.TemporaryDirectory(prefix="tigon-default-device-")


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(dir=ROOT.name))


def leaves(result: Any) -> list[Any]:
    """What a run returned, tensors and others, of which all must be on the CPU."""
    found = tree_flatten(result)[0]
    assert all(x.device.type == "cpu" for x in found if isinstance(x, Tensor))
    return found


def assert_same_by_default(run: Callable[[], Iterable[Any]]) -> None:
    """`run` returns the same bits whatever the default device."""
    torch.manual_seed(0)
    expected = leaves([*run()])
    torch.manual_seed(0)
    with torch.device("meta"):
        actual = leaves([*run()])
    assert len(expected) == len(actual) > 0
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def gradients(model: CausalLM) -> list[Tensor | None]:
    """Of all parameters, which are forgotten."""
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def passes(model: CausalLM) -> Iterator[Any]:
    """Logits, losses and gradients of padded and packed rows."""
    batches: dict[str, dict[str, Any]] = {
        "padded": {"input_ids": IDS, "attention_mask": MASK},
        "packed": {"input_ids": IDS[:1], "cu_seq_lens": BOUNDS},
        "positions": {"input_ids": IDS[:1], "position_ids": POSITIONS},
        "last": {"input_ids": IDS, "attention_mask": MASK, "logits_to_keep": 3},
    }
    for batch in batches.values():
        labels = LABELS[: len(batch["input_ids"])]
        out = model(**batch, labels=labels, return_logits=True)
        out.loss.backward()
        yield out.loss.detach(), out.logits.detach(), gradients(model)


def texts(model: CausalLM) -> Iterator[Any]:
    """Greedy and random ones of padded prompts, with either cache."""
    for cached in ("dynamic", "static"):
        options = GREEDY | {"attention_mask": MASK, "cache_implementation": cached}
        yield model.generate(IDS, **options)
        yield model.generate(IDS, **options, do_sample=True, top_k=7, top_p=0.9, seed=1)


CHECKPOINTS = {
    "llama": CASES["llama"]["grouped"],
    "fp8": EVEN,
    "mxfp4": EVEN | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
FAST = ("llama", "qwen3_next", "gemma3n_text", "gemma4_text", "gpt_oss", "deepseek_v3", "lfm2")
ROPES = [(m, case) for m, case in EVERY if case.startswith("rope ")]
FAMILIES = [row for row in FIRST if row[0] in FAST] + [row for row in FIRST if row[0] not in FAST]


@pytest.mark.slow(first=len(FAST))
@pytest.mark.parametrize(("model_type", "case"), FAMILIES + ROPES)
def test_families(model_type: str, case: str) -> None:
    values = their_config(model_type, **SIZES | CASES[model_type][case]).to_dict()

    def run() -> tuple[Any, ...]:
        config = parse_any_config(values, MODELS)
        model = MODELS[config.model_type].from_config(config, dtype=torch.float32)
        return *model.state_dict().values(), *passes(model), *texts(model.eval())

    assert_same_by_default(run)


@cache
@torch.random.fork_rng()
def saved(kind: str = "llama") -> Path:
    """A checkpoint of a family, or of one that is quantized."""
    directory = new_directory()
    sizes = CHECKPOINTS[kind]
    model_type = {"fp8": "llama", "mxfp4": "gpt_oss"}.get(kind, kind)
    reference(model_type, sizes, directory, dtype=torch.bfloat16)
    if kind == "fp8":
        to_fp8(directory, (32, 16), DYNAMIC)
    elif kind == "mxfp4":
        to_mxfp4(directory)
    return directory


@cache
@torch.random.fork_rng()
def chat_model() -> Path:
    """A model with a tokenizer, and data beside it."""
    directory = write_model(new_directory() / "model")
    write_chats(directory / "chats.jsonl", 9)
    preferences.write(directory / "pairs.jsonl", preferences.pairs(9))
    preferences.write(directory / "labeled.jsonl", preferences.labeled(9))
    preferences.write(directory / "rewarded.jsonl", preferences.rewarded(9))
    return directory


def speculative() -> Iterator[Any]:
    model, draft = tiny_llama().eval(), tiny_llama(num_hidden_layers=1).eval()
    for options in ({}, {"do_sample": True, "seed": 2}):
        yield model.generate(IDS, attention_mask=MASK, **GREEDY, **options, assistant_model=draft)


def scored() -> Iterator[Any]:
    """Scores, logits, streams, stops, least lengths and penalties."""
    model, streamed = tiny_llama().eval(), []
    free = model.generate(IDS, attention_mask=MASK, max_new_tokens=12, eos_token_id=[])
    for cached in ("dynamic", "static"):
        found = model.generate(
            IDS,
            attention_mask=MASK,
            max_new_tokens=12,
            min_new_tokens=2,
            eos_token_id=free[0, 15:].tolist(),
            pad_token_id=0,
            repetition_penalty=1.2,
            num_return_sequences=2,
            do_sample=True,
            seed=3,
            streamer=streamed.append,
            stopping_criteria=[lambda ids, _: ids.shape[1] > 20],
            cache_implementation=cached,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        yield found.sequences, found.scores, found.logits
    yield streamed


def losses() -> Iterator[Any]:
    """What the head can be asked for."""
    model, teacher = tiny_llama(), tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        hidden = teacher(IDS, attention_mask=MASK, logits_to_keep=1, return_hidden=True).hidden
    kl = KL(teacher_hidden=hidden, teacher=teacher.lm_head)
    stored = KL(teacher_tokens=TOPS, teacher_logprobs=TOP_LOGPROBS)
    options: list[dict[str, Any]] = [
        {"labels": LABELS, "criteria": (CrossEntropy(), kl, LogProbs())},
        {"labels": LABELS, "criteria": (stored,), "logits_to_keep": 12},
        {"labels": LABELS, "loss_reduction": "sequence", "label_smoothing": 0.1, "z_loss": 0.1},
        {"labels": LABELS, "class_weights": WEIGHTS, "num_items_in_batch": 7, "logits_bytes": 999},
        {"labels": LABELS, "metrics": ("accuracy", "entropy", "nll", "max_logit")},
        {"logits_at": KEEP, "logits_to_keep": KEEP},
    ]
    for given in options:
        out = model(IDS, attention_mask=MASK, **given)
        if out.loss is not None:
            out.loss.backward()
        yield [x for x in (out.loss, out.logits, out.logprobs) if x is not None]
        yield out.metrics, gradients(model)


def resized() -> Iterator[Any]:
    for size, mean in ((103, True), (111, False), (50, True)):
        model = tiny_llama()
        model.resize_token_embeddings(size, mean_resizing=mean)
        yield model.lm_head.weight, model(IDS % 50).logits


def files() -> Iterator[Any]:
    """Checkpoints that are written, read, quantized, resized and given scores."""
    target = new_directory()
    model = from_pretrained(saved(), dtype="float32")
    model.save_pretrained(target)
    model.save_gguf(target / "model.gguf", dtype="q8_0")
    yield load_file(target / "model.safetensors", device="cpu")
    for path, options in (
        (target / "model.gguf", {}),
        (saved(), {"quantize": "nf4"}),
        (saved(), {"mmap": True}),
        (saved("fp8"), {}),
        (saved("fp8"), {"quantize": "keep"}),
        (saved("mxfp4"), {}),
    ):
        yield from_pretrained(path, **options)(IDS).logits
    changed, checkpoint = build(
        Repository(saved()), MODELS, labels=2, vocab_size=220, mean_rows=[5]
    )
    materialize(changed, torch.device("cpu"))
    load_weights(changed, checkpoint)
    yield changed(IDS, attention_mask=MASK).logits


def adapters() -> Iterator[Any]:
    """Adapters that are added, trained, saved, loaded, combined and merged."""
    target = new_directory()
    for dora in (False, True):
        model = from_pretrained(saved(), dtype="float32").train()
        model.add_adapter(LoraConfig(rank=4, dropout=0.1, dora=dora), "one")
        for p in trained(model).values():
            torch.nn.init.uniform_(p, 0.1, 0.2)
        model(IDS, attention_mask=MASK, labels=LABELS).loss.backward()
        yield gradients(model)
        model.save_adapter(target / f"{dora}")
        model.load_adapter(target / f"{dora}", "two")
        if not dora:
            model.add_weighted_adapter(["one", "two"], [0.5, 0.7], "both", "svd")
            model.set_adapter("both")
        model.eval().merge_adapter()
        yield model(IDS, attention_mask=MASK).logits


def optimizers() -> Iterator[Any]:
    """Three steps of each, after backward and in it."""
    for name in OPTIMIZERS:
        for inside in {False, name.startswith("adamw")}:
            settings = ["run_dir=x", "model=x", "data=x", "lr=0.01", f"optimizer={name}"]
            model = tiny_llama(hidden_size=64, intermediate_size=128).bfloat16()
            optimizer = build_optimizer(model, load(None, settings))
            backward = InBackward(model, optimizer) if inside else None
            ema = Ema(model, 0.9)
            for _ in range(3):
                loss = model(IDS, attention_mask=MASK, labels=LABELS).loss
                if backward is not None:
                    yield backward.backward(loss)
                else:
                    loss.backward()
                    yield clip_gradients(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                ema.update(model)
            yield [p.detach() for p in model.parameters()]


def evaluations() -> Iterator[Any]:
    model, tokenizer = from_pretrained(chat_model()), Tokenizer.from_pretrained(chat_model())
    yield perplexity(model, tokenizer, str(chat_model() / "chats.jsonl"))
    requests = [((1, 2, 3), (4, 5)), ((1, 2, 3), (6,)), ((7,), (8, 9, 10)), ((7, 8), (9,))]
    yield log_likelihoods(model, requests)
    yield tokenizer.pad([[1, 2], [3]])


def peers() -> Iterator[Any]:
    """A model in transformers' place."""
    model = integration.from_pretrained(saved()).train()
    model.activation_checkpointing_enable()
    out = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    out.loss.backward()
    yield out.loss, out.logits, [p.grad for p in model.parameters()]
    model.eval()
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}):
        yield model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=4, **options)
    yield model.state_dict()


def kernels() -> Iterator[Any]:
    """Through Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is a GPU")
    with tigon.kernels.use("triton"):
        model = tiny_llama(num_hidden_layers=1)
        loss = model(IDS, attention_mask=MASK, labels=LABELS).loss
        loss.backward()
        yield loss.detach(), gradients(model)
        options = GREEDY | {"max_new_tokens": 2, "cache_implementation": "static"}
        yield model.eval().generate(IDS, attention_mask=MASK, **options)


def training(**settings: Any) -> Callable[[], Iterable[Any]]:
    """Two steps of the trainer with these settings: curves and weights."""

    def run() -> Iterator[Any]:
        target = new_directory()
        data = chat_model() / settings.get("data", "chats.jsonl")
        given = {"model": chat_model(), "device": "cpu", "steps": 2, "lr": 0.01, "seq_len": 64}
        given |= {"batch_size": 4, "micro_batch_size": 2, "eval_every": 1}
        given |= settings | {"data": data, "eval_data": data}
        resume = f"resume={target}/run/checkpoints/step-00000001"
        for name, more in (("run", []), ("resumed", [resume])):
            if more and "save_every" not in settings:
                break
            main([*(f"{k}={v}" for k, v in given.items()), f"run_dir={target}/{name}", *more])
            rows = [*read_metrics(target / name / "metrics.jsonl")]
            yield [[row.get(key) for key in MEASURED] for row in rows]
            yield [load_file(path) for path in (target / name).glob("hf/*.safetensors")]

    return run


MEASURED = ("loss", "grad_norm", "eval_loss", "rewards/margins", "kl", "texts")
RUNS: dict[str, Callable[[], Iterable[Any]]] = {
    "speculative": speculative,
    "scored": scored,
    "losses": losses,
    "resized": resized,
    "files": files,
    "adapters": adapters,
    "optimizers": optimizers,
    "evaluations": evaluations,
    "peers": peers,
    "kernels": kernels,
    "sft": training(sample_prompts="[the model]", sample_tokens=3, save_every=1),
    "lora": training(lora="{rank: 4}", activation_checkpointing="true"),
    "dpo": training(task="dpo", data="pairs.jsonl"),
    "muon": training(optimizer="muon", ema_decay=0.9),
    "kto": training(task="kto", data="labeled.jsonl"),
    "grpo": training(task="grpo", data="rewarded.jsonl"),
}


@pytest.mark.slow(first=13)
@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tigon.report.page.charts", lambda _: iter(()))  # takes most of a second
    assert_same_by_default(RUNS[name])


MAKERS = {function.__name__ for function in _device_constructors()}
OF_MODULES = {"Parameter", "register_buffer"}  # whose tensors `build_on_meta` makes on meta


def calls_without_device(path: Path) -> Iterator[str]:
    """Each call in a file that makes a tensor and leaves its device to the default."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Attribute)]
    makers = [call for call in calls if call.func.attr in OF_MODULES]
    of_modules = {x for call in makers for argument in call.args for x in ast.walk(argument)}
    for call in calls:
        keywords = {keyword.arg for keyword in call.keywords}  # None: of a dict
        if call in of_modules or keywords & {"device", None} or call.func.attr not in MAKERS:
            continue
        if ast.unparse(call.func.value) == "torch":
            yield f"{path.name}:{call.lineno}: {ast.unparse(call)}"


def test_every_tensor_says_its_device() -> None:
    files = Path(tigon.__file__).parent.rglob("*.py")
    assert [call for path in files for call in calls_without_device(path)] == []
