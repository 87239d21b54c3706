"""cuda_graphs on the GPU: the bits of steps without, and a host that waits for nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.gpu.support import no_waiting
from tests.support.small import EXPERTS, LLAMA, write_model
from tests.train import watching
from tests.train.conftest import workspace
from tests.train.test_graphs import GEMMA3
from tigon.train import load, main, prepare, start, train
from tigon.train.cuda_graphs import Graphs
from tigon.train.trainer import forward_backward, update_weights

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
STEPS = 6
HEADS = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
QWEN3 = LLAMA | HEADS | {"model_type": "qwen3"}
MOE = EXPERTS | HEADS | {"num_hidden_layers": 3}
# Sequences of at most 128 tokens: their gradients are sums of two blocks of keys at most, which no
# order of additions changes
HALF = {"param_dtype": "bfloat16", "optimizer": "adamw_bf16"}
WIDE = {"dtype": "bfloat16", "sharding": "gradients"}  # over float32 weights
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": HALF,
    "bfloat16 over float32": WIDE,
    "float32": {"dtype": "float32"},
    "sums in float32": HALF | {"accumulate_fp32": "true", "sharding": "gradients"},
    "one micro-batch": HALF | {"micro_batch_size": 3},
    "checkpointing": HALF | {"activation_checkpointing": "true"},
    "checkpointing, float32": WIDE | {"activation_checkpointing": 2},
    "Gemma 3": HALF | {"model": GEMMA3 | HEADS},
    "Qwen3": WIDE | {"model": QWEN3},
    "experts": HALF | {"model": MOE, "router_aux_loss_coef": 0.5},
    "experts, float32": WIDE | {"model": MOE},
    "flash": HALF | {"attention": "flash"},
    "flex": HALF | {"attention": "flex"},
    "sdpa": HALF | {"attention": "sdpa"},
    "adapter with dropout": {"dtype": "bfloat16", "lora.rank": 4, "lora.dropout": 0.1},
    "deterministic": HALF | {"deterministic": "true"},
    "fp8": HALF | {"fp8": "true"},
    "8 bits of states": HALF | {"optimizer": "adamw_8bit", "ema_decay": 0.9},
    "muon": WIDE | {"optimizer": "muon"},
    "evaluations": HALF | {"eval_every": 2, "predictions": "true"},
    "hooks": HALF | {"hooks": f"{watching.__file__}:FirstAnswers", "hook_every": 2},
    "states in host memory": HALF | {"optimizer_offload": "true"},
    "profiled": HALF | {"profile": "{start: 3, steps: 3}"},
}


def arguments(workspace, name: str, case: dict[str, Any], **changes: Any) -> list[str]:
    shape = {"model_type": "llama", **case.get("model", LLAMA | HEADS)}
    key = f"model-{abs(hash(json.dumps(shape, sort_keys=True)))}"
    if not (workspace.root / key).exists():
        write_model(workspace.root / key, **shape)
    same = {
        "device": "cuda", "steps": STEPS, "batch_size": 3, "seq_len": 128, "save_every": 3,
        "eval_data": workspace.held_out, "keep_last": 0,
    }  # fmt: skip
    given = same | case | {"model": workspace.root / key} | changes
    return workspace.settings(name, **given)


def assert_same_bits(workspace, found: str, expected: str) -> None:
    for key in ("loss", "grad_norm", "accuracy", "eval_loss", "expert_imbalance"):
        ours, theirs = workspace.metrics(found, key), workspace.metrics(expected, key)
        assert ours == theirs and (len(ours) >= 1 or key == "expert_imbalance"), key
    last = workspace.root / expected / f"checkpoints/step-{STEPS:08d}"
    files = sorted(last.glob("*.safetensors"))
    assert len(files) >= 2
    for path in files:
        other = workspace.root / found / path.relative_to(workspace.root / expected)
        assert other.read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", CASES)
def test_runs_have_the_same_bits(workspace, monkeypatch, name):
    """With packed rows of sequences of many lengths, three micro-batches a step."""
    case, made = CASES[name], []
    install = Graphs.__init__

    def noting(self, *given, **options):
        install(self, *given, **options)
        made.append(self)

    monkeypatch.setattr(Graphs, "__init__", noting)
    runs = [f"{name}-{on}" for on in ("false", "true")]
    for run in runs:
        main(arguments(workspace, run, case, cuda_graphs=run.rpartition("-")[2]))
    assert_same_bits(workspace, runs[1], runs[0])
    (graphs,) = made
    assert graphs.captured and graphs.passes > STEPS / 3
    assert {adds for _, adds in graphs.captured} == {False, name != "one micro-batch"}


def test_a_step_of_replays_waits_once(workspace):
    """For its numbers; what a feed makes ready meanwhile does not disturb the captures."""
    settings = arguments(workspace, "waits", HALF, cuda_graphs="true", steps=40)
    with start("cuda") as world:
        run = prepare(load(None, settings), world)
        graphs = run.model.graphs
        assert isinstance(graphs, Graphs)
        with run.prefetcher:
            for step in range(20):
                _, scale = forward_backward(run, step)
                update_weights(run, step, scale)
                run.optimizer.zero_grad()
            batch = run.prefetcher(20)[0]
            inputs = run.task.resolve(run.model, batch)
            sums = run.task.sums(run.model, inputs)

            def one() -> None:
                run.task.loss(run.model, inputs, sums).loss.backward()
                run.optimizer.zero_grad()

            one(), one()  # the kind may be new
            before = graphs.passes
            with no_waiting():
                one(), one()
            assert graphs.passes == before + 2


def test_an_uneven_end_of_passes(workspace):
    """Gradients of a pass without a graph move to the memory of graphs, and back and forth."""
    torch.manual_seed(0)
    shape = LLAMA | HEADS
    models = [
        tigon.Llama.from_config(shape, dtype=torch.bfloat16, device="cuda").train()
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    Graphs(models[1])
    draw = torch.Generator().manual_seed(1)
    # Lengths of micro-batches: kinds come for the first time in any place
    for lengths in ((64,), (64, 64), (64, 64), (32, 64), (32, 64), (64, 32, 16), (16, 64, 32)):
        batches = [torch.randint(321, (2, n), generator=draw).cuda() for n in lengths]
        found = []
        for model in models:
            losses = []
            for ids in batches:
                loss = model(ids, labels=ids).loss
                loss.backward()
                losses.append(loss.detach())
                del loss
            gradients = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            found.append([*losses, *gradients])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs), lengths
    assert len(models[1].graphs.captured) >= 5


NOT_CAPTURED = """
import torch, tigon
from tests.gpu.test_graphs_cuda import HEADS
from tests.support.small import LLAMA
from tigon.train.cuda_graphs import Graphs

model = tigon.Llama.from_config(LLAMA | HEADS, dtype=torch.bfloat16, device="cuda").train()
Graphs(model)
ids = torch.randint(321, (2, 64), device="cuda")
model(ids, labels=ids).loss.backward()
model.zero_grad()
norm = model.model.norm.forward
model.model.norm.forward = lambda *x: (norm(*x), x[0].sum().item())[0]
model(ids, labels=ids)
"""


def test_a_pass_that_cannot_be_captured_says_so():
    """In one line, though the reason that torch gives has many."""
    command = [sys.executable, "-c", NOT_CAPTURED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "CaptureError: cuda_graphs=true: the step cannot be captured (AcceleratorError" in last
    assert last.endswith("; cuda_graphs=false trains without")


def test_auto_measures_and_goes_on_after_a_capture_that_fails(workspace, capsys):
    """A tiny model waits for launches; a block that asks the GPU for a number has no graph,
    after which random numbers, streams and memory of the GPU are what they were."""
    many = {"cuda_graphs": "auto", "steps": 12}
    main(arguments(workspace, "auto-plain", HALF, steps=12))
    main(arguments(workspace, "auto", HALF, **many))
    assert "cuda_graphs=auto: used: launching kernels takes" in capsys.readouterr().out
    assert workspace.metrics("auto", "loss") == workspace.metrics("auto-plain", "loss")
    config = load(None, arguments(workspace, "asks", HALF, **many))
    with start("cuda") as world:
        run = prepare(config, world)
        mlp = run.model.model.layers[0].mlp
        forward = mlp.forward
        mlp.forward = lambda x, *rest: forward(x, *rest) if float(x.sum()) < 1e9 else x
        assert train(run) == 0
        assert torch.rand(4, device="cuda").isfinite().all()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        held, size = torch.cuda.memory_reserved(), 64 << 20
        for _ in range(4):
            shared = torch.empty(size, dtype=torch.uint8, device="cuda")
            shared.record_stream(torch.cuda.Stream())
            del shared
            torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() <= held + size
    assert "cuda_graphs=auto: not used: the step cannot be captured" in capsys.readouterr().out
    assert workspace.metrics("asks", "loss") == workspace.metrics("auto-plain", "loss")
