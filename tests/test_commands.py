import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.gguf_files import write_gguf
from tests.support.benchmarks import write_tasks
from tests.support.commands import tigon
from tests.support.hub_server import HubServer, hub
from tests.support.small import CHATML, write_chats, write_model
from tigon import from_pretrained
from tigon.cli import main
from tigon.eval import perplexity
from tigon.tokenizer import Tokenizer
from tigon.train import main as train

__all__ = ["hub", "tigon"]

QUESTION = "the model reads these words"
CHAT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
SAMPLE = ("--temperature", "1.5", "--top-p", "0.95", "--max-new-tokens", "24")
SEED = ("--seed", "1")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("cli") / "model", eos_token_id=None, tie_word_embeddings=False
    )


def continuation(directory: Path, prompt: str, new_tokens: int, **options: Any) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    ids = AutoTokenizer.from_pretrained(directory)(prompt, return_tensors="pt").input_ids
    options |= {"do_sample": False, "max_new_tokens": new_tokens}
    return model.generate(ids, **options)[0, ids.shape[1] :].tolist()


def text_of(directory: Path, ids: list[int]) -> str:
    return AutoTokenizer.from_pretrained(directory).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ((QUESTION,), CHAT),
        ((QUESTION, "--raw"), QUESTION),
        (("-", "--system", "says words"), f"<|im_start|>system\nsays words<|im_end|>\n{CHAT}"),
        ((QUESTION, "--temperature", "0", "--repetition-penalty", "1.0"), CHAT),
    ],
)
def test_generate_says_what_transformers_says(directory, tigon, arguments, prompt, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION + "\n"))
    expected = text_of(directory, continuation(directory, prompt, 24))
    assert tigon("generate", directory, *arguments, "--max-new-tokens", 24) == expected + "\n"


def test_chat_template_variables(directory, tigon, tmp_path):
    model = shutil.copytree(directory, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ mood }}" + CHATML)
    options = ("--max-new-tokens", 8, "--chat-template-kwargs", '{"mood": "who"}')
    expected = text_of(directory, continuation(directory, f"who{CHAT}", 8))
    assert tigon("generate", model, QUESTION, *options) == expected + "\n"


def test_generate_samples_anew_unless_seeded(directory: Path, tigon: Any) -> None:
    greedy = tigon("generate", directory, QUESTION, "--max-new-tokens", 24)
    seeded = [tigon("generate", directory, QUESTION, *SAMPLE, "--seed", s) for s in (1, 1, 2)]
    assert seeded[0] == seeded[1]
    free = []
    for _ in range(2):
        torch.manual_seed(0)  # as every process begins
        free.append(tigon("generate", directory, QUESTION, *SAMPLE))
    assert len({greedy, seeded[0], seeded[2], *free}) == 5


def test_caches_and_assistant_change_nothing(directory, tigon, tmp_path):
    command = ("generate", directory, QUESTION, "--max-new-tokens", 24)
    expected = tigon(*command)
    draft = write_model(tmp_path / "draft", num_hidden_layers=1)
    for arguments in (("--cache", "dynamic"), ("--cache", "static"), ("--assistant", draft)):
        assert tigon(*command, *arguments) == expected


def test_generate_ends_after_a_text(directory: Path, tigon: Any) -> None:
    command = ("generate", directory, QUESTION, "--max-new-tokens", 24)
    text = tigon(*command)[:-1]
    first, second = text[2:4], text[12:14]
    assert text.find(second) > text.find(first) >= 0
    for stops in ([first, second], [second, first], [second]):
        out = tigon(*command, *(word for stop in stops for word in ("--stop", stop)))[:-1]
        assert text.startswith(out)
        end = min(text.find(stop) + len(stop) for stop in stops)
        assert end <= len(out) < end + 12  # a token may go on


@pytest.mark.parametrize("keeper", ["generation_config", "tokenizer"])
def test_generate_stops_at_every_end(directory, tigon, tmp_path, keeper):
    """The ends of generation_config, of which the tokenizer knows one, and the tokenizer's own."""
    ids = continuation(directory, CHAT, 24)
    end = next(i for i in ids[4:] if ids.index(i) >= 4)
    copy = tmp_path / "copy"
    tigon("export", directory, copy)
    if keeper == "tokenizer":
        config = json.loads((copy / "tokenizer_config.json").read_text())
        token = AutoTokenizer.from_pretrained(directory).convert_ids_to_tokens(end)
        config["eos_token"] = token
        (copy / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, end]}))
    out = tigon("generate", copy, QUESTION, "--max-new-tokens", 24)
    kept = ids[: ids.index(end) + (keeper == "generation_config")]
    assert out == text_of(directory, kept) + "\n"


def test_generate_ends_with_the_context(directory: Path, tigon: Any) -> None:
    prompt = QUESTION + " the" * 490
    taken = len(AutoTokenizer.from_pretrained(directory)(prompt).input_ids)
    expected = text_of(directory, continuation(directory, prompt, 512 - taken))
    assert 0 < 512 - taken < 256
    assert tigon("generate", directory, prompt, "--raw") == expected + "\n"


def test_perplexity(directory: Path, tigon: Any, tmp_path: Path) -> None:

    file = write_chats(tmp_path / "chats.jsonl", 6)
    result = perplexity(
        from_pretrained(str(directory)),
        Tokenizer.from_pretrained(directory),
        str(file),
        context=32,
        stride=8,
    )
    assert tigon("eval", "perplexity", directory, file, "--context", 32, "--stride", 8) == (
        f"perplexity {result.perplexity:.4f}  loss {result.loss:.6f}  accuracy "
        f"{result.accuracy:.4f}  tokens {result.tokens}  bits/byte {result.bits_per_byte:.4f}\n"
    )
    (tmp_path / "text.txt").write_text("the model reads these words, and says others\n")
    both = tigon("eval", "perplexity", directory, file, tmp_path / "text.txt").splitlines()
    assert [line.partition(": perplexity")[0] for line in both[1:]] == [
        f"  {file}", f"  {tmp_path / 'text.txt'}"
    ]  # fmt: skip
    tokens = [int(line.split("tokens ")[1].split()[0]) for line in both]
    assert tokens[0] == sum(tokens[1:]) and all(tokens)


def test_tasks(directory: Path, tigon: Any, tmp_path: Path, capfd: Any) -> None:
    """The numbers of lm-eval's hf with the same options, in its table and in its file."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder, out = write_tasks(tmp_path / "tasks"), tmp_path / "results.json"
    options = {"num_fewshot": 1, "limit": 5, "apply_chat_template": True}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    theirs: Any = lm_eval.simple_evaluate(
        "hf", f"pretrained={directory},dtype=float32", ["choices", "texts"], task_manager=manager,
        device="cpu", batch_size=2, **options,
    )  # fmt: skip
    command = ("eval", "tasks", directory, "--include-path", folder, "--tasks", "choices,texts")
    chat = ("--num-fewshot", 1, "--apply-chat-template", "--limit", 5)
    shown = tigon(*command, *chat, "--dtype", "float32", "--out", out)
    rows = [[cell.strip() for cell in line.split("|")] for line in shown.splitlines()]
    table = {row[5]: row[7] for row in rows if len(row) > 7}
    found = json.loads(out.read_text())
    for task in ("choices", "texts"):
        numbers = {k: v for k, v in theirs["results"][task].items() if isinstance(v, float)}
        assert {k: found["results"][task][k] for k in numbers} == pytest.approx(numbers, rel=1e-6)
    assert table["bits_per_byte"] == f"{theirs['results']['texts']['bits_per_byte,none']:.4f}"
    assert found["n-shot"] == theirs["n-shot"] and found["config"]["limit"] == 5
    for wrong, message in (
        (["--limit", "0"], "limit=0 must be above 0"),
        (["--num-fewshot", "-1"], "num_fewshot=-1 must be at least 0"),
        (["--include-path", "none"], "include_path=none: there is no such folder"),
        (["--out", str(tmp_path)], "give a file, in a folder that there is"),
        (["--out", "/proc/x.json"], "--out /proc/x.json cannot be written"),
    ):
        assert main([*map(str, command), *wrong]) == 1
        assert message in capfd.readouterr().err


def test_what_extras_bring_is_named() -> None:
    script = (
        "import sys; sys.modules |= dict.fromkeys(['lm_eval', 'starlette'])\n"
        "from tigon.cli import main\n"
        "main(['eval', 'tasks', 'none', '--tasks', 'capitals']); main(['serve', 'none'])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "tigon eval: tasks need lm-eval: pip install 'tigon[eval]'",
        "tigon serve: the server needs Starlette and uvicorn: pip install 'tigon[serve]'",
    ]


def test_parity(directory: Path, tigon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tigon("eval", "parity", directory, "--new-tokens", 4)
    assert "greedy tokens equal                4           4\n" in out
    assert out.endswith("parity with transformers: holds\n")
    monkeypatch.setattr(sys.modules["tigon.eval.parity"], "LOSS_TOLERANCE", -1)
    assert main(["eval", "parity", str(directory), "--new-tokens", "4"]) == 1


def test_info(directory: Path, tigon: Any) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    size = sum(p.numel() for p in theirs.parameters()) * 4
    assert (
        tigon("info", directory)
        == f"""{directory}
  architecture  LlamaForCausalLM (llama)
  parameters    {sum(p.numel() for p in theirs.parameters()):,}
  embeddings    {theirs.get_input_embeddings().weight.numel():,}, and as many in the head
  layers        2
  model dim     64
  heads         4 query, 2 key/value, 16 dims each
  MLP dim       96, silu
  vocabulary    {theirs.vocab_size}
  context       512 tokens
  RoPE          default, rope_theta 10000.0
  files         1 of weights, {size:,} bytes
  tensors       21 float32, {size / 2**20:.1f} MiB
  loads         as tigon.Llama in float32, {size / 2**20:.1f} MiB; --check tries it
"""
    )
    said = tigon("info", directory).replace("; --check tries it", "")
    assert tigon("info", directory, "--check") == said


def test_export_in_another_dtype_and_sharding(directory: Path, tigon: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tigon("export", directory, out, "--dtype", "bfloat16", "--max-shard-size", "50KB")
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2
    written = {name: t for shard in shards for name, t in load_file(shard).items()}
    source = load_file(directory / "model.safetensors")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], t.bfloat16()) for name, t in source.items())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (directory / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16


def test_export_of_a_run(directory, tigon, tmp_path, capfd):
    data, run = write_chats(tmp_path / "chats.jsonl", 12), tmp_path / "run"
    settings = "seq_len=64 lr=1e-2 batch_size=2 steps=2 save_every=1 keep_last=0"
    train([f"run_dir={run}", f"model={directory}", f"data={data}", *settings.split()])
    tigon("export", run, tmp_path / "last")
    tigon("export", run / "checkpoints" / "step-00000001", tmp_path / "first")
    last, end, first, start = (
        load_file(d / "model.safetensors")
        for d in (tmp_path / "last", run / "hf", tmp_path / "first", directory)
    )
    assert last.keys() == end.keys()
    assert all(torch.equal(last[name], end[name]) for name in end)
    tigon("export", run, tmp_path / "last.gguf")
    loaded = from_pretrained(tmp_path / "last.gguf").state_dict()
    exported = from_pretrained(tmp_path / "last").state_dict()
    assert all(torch.equal(t, loaded[name]) for name, t in exported.items())
    # AdamW's first step moves every weight with a gradient by the learning rate
    largest = max((first[name] - t).abs().max().item() for name, t in start.items())
    assert largest == pytest.approx(1e-2, rel=1e-3)


def test_from_the_hub(directory: Path, tigon: Any, hub: HubServer) -> None:
    hub.push("org/words", directory)
    assert "context       512 tokens\n" in tigon("info", "org/words")
    needed = ("config.json", "model.safetensors")
    assert hub.gets.keys() == {f"org/words/{name}" for name in needed}
    said = tigon("generate", "org/words", QUESTION, *SAMPLE, *SEED)
    assert said == tigon("generate", directory, QUESTION, *SAMPLE, *SEED)
    assert hub.gets["org/words/model.safetensors"] == 3  # its header, by way of the CDN, and all


def test_gguf_file(directory: Path, tigon: Any, tmp_path: Path) -> None:
    """Its own tokenizer is not read: the one beside it is."""
    file, new = tmp_path / "a.gguf", tmp_path / "new"
    write_gguf(directory, file)
    shutil.copy(directory / "tokenizer.json", tmp_path)
    assert tigon("export", file, new) == f"{file} -> {new}, float32\n"
    ours, theirs = load_file(new / "model.safetensors"), load_file(directory / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    small = tmp_path / "q8_0.gguf"
    assert tigon("export", file, small, "--dtype", "q8_0") == f"{file} -> {small}, q8_0\n"
    assert small.stat().st_size < 0.7 * file.stat().st_size
    few = ("words", "--raw", "--max-new-tokens", "4")
    assert tigon("generate", file, *few) == tigon("generate", directory, *few)
