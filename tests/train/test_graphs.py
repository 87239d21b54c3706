"""Passes from graphs have the bits of passes without.

There is no GPU here: each replay repeats the operators that the capture has recorded, on the same
memory. test_graphs_families.py does so for every family, and tests/gpu/test_graphs_cuda.py has the
graphs themselves.
"""

import copy
import gc
import importlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tigon
from tests.support import graph_operators
from tests.support.graph_tape import record
from tests.support.small import EXPERTS, LLAMA, write_model
from tests.train import watching
from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.mlp.grouped_product import training_syncs
from tigon.layers import KVCache, gated_delta_net
from tigon.train import load, prepare, train
from tigon.train.cuda_graphs import Graphs
from tigon.train.distributed import local
from tigon.train.graph_checks import check_run
from tigon.utils import graph_capture

graphs = importlib.import_module("tigon.train.cuda_graphs")
grouped_mlp = importlib.import_module("tigon.kernels.mlp.grouped_mlp")

GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
}
# Four micro-batches of a packed row each
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one micro-batch": {"micro_batch_size": 4},
    "checkpointing": {"activation_checkpointing": 2},
    "windows": {"model": GEMMA3},
    "experts": {"model": EXPERTS, "router_aux_loss_coef": 0.5},
    "experts, unbalanced": {"model": EXPERTS, "router_aux_loss_coef": 0},
    "experts again": {"model": EXPERTS, "activation_checkpointing": "experts"},
    "bfloat16 over float32": {"dtype": "bfloat16", "sharding": "gradients"},
    "sums in float32": {
        "param_dtype": "bfloat16", "accumulate_fp32": "true", "sharding": "gradients",
    },
    "bfloat16": {"param_dtype": "bfloat16", "optimizer": "adamw_bf16"},
    "fp8": {"param_dtype": "bfloat16", "fp8": "true"},
    "frozen embedding": {"parameter_groups": "[{match: '*embed_tokens*', freeze: true}]"},
    "frozen block and head": {
        "model": LLAMA | {"tie_word_embeddings": False}, "sharding": "gradients",
        "dtype": "bfloat16",
        "parameter_groups": "[{match: ['*.layers.0.*', '*embed*', 'lm_head*'], freeze: true}]",
    },
    "adapter": {"lora.rank": 4, "lora.merge": "true", "export": "true"},
    "adapter in float32 over bfloat16": {"lora.rank": 4, "dtype": "bfloat16"},
    "adapter, checkpointing, dora": {
        "lora.targets": "[q_proj, down_proj]", "lora.dora": "true", "activation_checkpointing": 2,
    },
    "adapter, dropout, recomputation": {
        "lora.rank": 4, "lora.dropout": 0.3, "activation_checkpointing": 2,
    },
    "deterministic": {"deterministic": "true"},
    "watched": {"hooks": f"{watching.__file__}:keep", "hook_every": 2, "eval_every": 2},
}  # fmt: skip
STEPS = 4


def again(run, device, pool):
    """In place of a capture, which computes nothing and changes no memory."""
    gradients = run.__self__.gradients
    before = [None if t is None else t.clone() for t in gradients.memory]
    replay = record(run)
    with torch.no_grad():
        for kept, was in zip(gradients.memory if before else [], before, strict=True):
            if kept is not None:
                kept.copy_(was)
    return replay


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(graphs, "capture", again)
    # On a CPU it reads lengths on the host
    monkeypatch.setattr(AttentionMask, "split_sequences", lambda *_: [])
    monkeypatch.setattr("tigon.train.graph_checks.training_syncs", lambda *_: False)
    monkeypatch.setattr(grouped_mlp, "grouped_mlp_ref", graph_operators.grouped_mlp)
    monkeypatch.setattr(gated_delta_net, "gated_delta_rule", graph_operators.gated_delta_rule)


def trained(workspace, world, run_dir, case, *, with_graphs: bool):
    """The run, its metrics, and its graphs."""
    model = case.get("model", LLAMA)
    if not (workspace.root / f"model of {run_dir}").exists():
        write_model(workspace.root / f"model of {run_dir}", **model)
    given = {"steps": STEPS, "eval_data": workspace.held_out, **case}
    given["model"] = workspace.root / f"model of {run_dir}"
    name = f"{run_dir}-{with_graphs}"
    torch.manual_seed(0)
    run = prepare(load(None, workspace.settings(name, **given)), world)
    made = Graphs(run.model, lambda text: said.append(text)) if with_graphs else None
    assert train(run) == 0
    keys = "loss", "grad_norm", "accuracy", "eval_loss", "expert_imbalance", "aux_loss"
    return run, {key: workspace.metrics(name, key) for key in keys}, made


said: list[str] = []


@pytest.mark.slow(first=9)
@pytest.mark.parametrize("name", CASES)
def test_runs_have_the_same_bits(workspace, world, played, name):
    said.clear()
    watching.SEEN.clear()
    case, directory = CASES[name], name.replace(",", "")
    plain, expected, _ = trained(workspace, world, directory, case, with_graphs=False)
    seen = len(watching.SEEN)
    run, found, made = trained(workspace, world, directory, case, with_graphs=True)
    assert found == expected and len(found["loss"]) == STEPS
    for (key, p), q in zip(run.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(local(p), local(q)), key
    assert len(watching.SEEN) == 2 * seen
    # Both graphs of a kind were at work: most passes are replays
    assert {adds for _, adds in made.captured} == {False, name != "one micro-batch"}
    micro_batches = 1 if name == "one micro-batch" else 4
    assert made.passes > STEPS * micro_batches / 3
    assert len(made.learned) < 8 and not said


def test_kinds_beyond_the_most_run_without(workspace, world, played, monkeypatch):
    said.clear()
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    case = {"batch_size": 6, "seq_len": 64}
    _, expected, _ = trained(workspace, world, "most", case, with_graphs=False)
    _, found, made = trained(workspace, world, "most", case, with_graphs=True)
    assert found == expected
    assert len(made.learned) == 1 and 0 < made.passes < 6 * STEPS
    assert len(said) == 1 and "graphs for 1 kinds of micro-batches" in said[0]


@pytest.mark.parametrize("name", ["plain", "bfloat16 over float32"])
def test_a_run_that_nobody_keeps_is_freed(workspace, world, played, name):
    run, _, made = trained(workspace, world, f"freed {name}", CASES[name], with_graphs=True)
    weights = [weakref.ref(p) for p in run.model.parameters()]
    if run.model.zero2 is not None:
        weights += [weakref.ref(whole) for whole in run.model.zero2.weights]
    del run, made
    gc.collect()
    assert weights and all(weight() is None for weight in weights)


def test_no_pass_is_alive_as_the_next_begins(workspace, world, monkeypatch):
    """On a GPU a capture fails while nodes of a pass without graphs are alive."""
    run = prepare(load(None, workspace.settings("alive", steps=2)), world)
    loss_of, passes = run.task.loss, []

    def loss(*given):
        assert all(earlier() is None for earlier in passes)
        result = loss_of(*given)
        passes.append(weakref.ref(result.loss))
        return result

    monkeypatch.setattr(run.task, "loss", loss)
    assert train(run) == 0
    assert len(passes) == 8


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tigon.Llama.from_config(LLAMA).train()


def inputs(tokens: int = 20, **more: Any) -> dict[str, Any]:
    ids = torch.arange(2 * tokens).view(2, tokens) % LLAMA["vocab_size"]
    return {"input_ids": ids, "labels": ids, **more}


def test_what_is_a_kind(model, played):
    made = Graphs(model)

    def kinds(*given: dict[str, Any]) -> int:
        made.learned.clear()
        for one in given:
            model(**one)
        return len(made.learned)

    def packed(*ends: int) -> dict[str, Any]:
        cu = torch.tensor(sorted([0, *ends, 20, 40]), dtype=torch.int32)
        return inputs(cu_seq_lens=cu, max_length_q=int(cu.diff().max()))

    assert kinds(inputs(), inputs(), inputs(21)) == 2
    assert kinds(packed(3), packed(5, 7), packed(1, 2, 3, 30, 31)) == 1
    assert kinds(packed(3), packed(1, 2, 3, 4, 30, 31, 32, 33)) == 2  # more than there is room for
    assert kinds(packed(3), packed(10, 30)) == 2  # of one length, computed as rows
    with torch.no_grad():
        assert kinds(inputs()) == 0
    assert kinds(inputs(past_key_values=KVCache())) == 0
    model.eval()
    assert kinds(inputs()) == 0


@pytest.mark.parametrize("taken", [False, True])
def test_gradients_without_a_graph_are_added_to(played, taken):
    """Those of passes with and without move to and fro; kinds come in any place of a step.

    Where somebody takes a gradient away, what was there a step before is gone.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(tigon.Llama.from_config(LLAMA).train())
    made = Graphs(models[1])
    for lengths in ((20,), (20, 20), (20, 20), (9, 20), (9, 20), (20, 9, 5), (5, 20, 9)):
        found = []
        for model in models:
            losses = []
            for i, tokens in enumerate(lengths):
                loss = model(**inputs(tokens)).loss
                loss.backward()
                losses.append(loss.detach())
                if taken and i == 0:
                    model.model.layers[1].mlp.down_proj.weight.grad = None
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            found.append([*losses, *gradients])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs), lengths
    assert len(made.captured) == 5


def test_overwritten_pass_is_an_error(model, played):
    Graphs(model)
    model(**inputs()).loss.backward()
    model.zero_grad()
    first, second = model(**inputs()).loss, model(**inputs()).loss
    second.backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="another forward has taken the memory of this one"):
        first.backward()


def test_a_pass_goes_back_once(model, played):
    Graphs(model)
    for _ in range(3):
        for _ in range(2):
            loss = model(**inputs()).loss
            loss.backward(retain_graph=True)
        model.zero_grad()
    model(**inputs()).loss.backward()
    loss = model(**inputs()).loss  # which adds
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="this pass has gone back once"):
        loss.backward()


HOOKS: dict[str, Any] = {
    "module": lambda model, hook: model.model.layers[1].mlp.register_forward_hook(hook),
    "decoder": lambda model, hook: model.model.register_forward_pre_hook(hook),
    "parameter": lambda model, hook: model.model.norm.weight.register_post_accumulate_grad_hook(
        hook
    ),
    "gradient": lambda model, hook: model.model.norm.weight.register_hook(hook),
    "all modules": lambda _, hook: torch.nn.modules.module.register_module_forward_pre_hook(hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_are_called_in_every_pass(model, played, register):
    said.clear()
    made = Graphs(model, said.append)
    for _ in range(3):
        model(**inputs()).loss.backward()
        model.zero_grad()
    assert made.passes == 2 and not said
    calls: list[int] = []
    handle = register(model, lambda *_: calls.append(made.passes))
    for _ in range(2):
        before = len(calls)
        model(**inputs()).loss.backward()
        model.zero_grad()
        assert len(calls) > before
    assert set(calls) == {2} and len(said) == 1 and "passes run without graphs" in said[0]
    handle.remove()
    model(**inputs()).loss.backward()
    assert made.passes == 3


def test_autocast_runs_without(model, played):
    said.clear()
    made = Graphs(model, said.append)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs()).loss.backward()
    assert not made.learned and len(said) == 1 and "torch.autocast" in said[0]


def copies(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


CHANGES: dict[str, Any] = {
    "replace": lambda model: setattr(
        model.model.norm, "weight", torch.nn.Parameter(model.model.norm.weight.detach().clone())
    ),
    "move": lambda model: model.double().float(),
    "assign": lambda model: model.load_state_dict(copies(model.state_dict()), assign=True),
    "freeze": lambda model: model.model.layers[1].requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_parameters_are_an_error(model, played, change):
    Graphs(model)
    for _ in range(2):
        model(**inputs()).loss.backward()
        model.zero_grad()
    model.load_state_dict(model.state_dict())  # in place
    model(**inputs()).loss.backward()
    model.zero_grad()
    change(model)
    with pytest.raises(RuntimeError, match=r"parameters have been .*: make Graphs\(model\) anew"):
        model(**inputs())
    with torch.no_grad():
        model(**inputs())
    Graphs(model)
    model(**inputs()).loss.backward()


def test_graphs_have_the_adapter_of_then(model, played):
    model.add_adapter()
    Graphs(model)
    for _ in range(2):
        model(**inputs()).loss.backward()
    with model.adapters_disabled():
        with pytest.raises(RuntimeError, match="adapters switched"):
            model(**inputs())
        with torch.no_grad():
            model(**inputs())
    model(**inputs()).loss.backward()


def test_a_copy_of_a_model_runs_without(model, played):
    made = Graphs(model)
    model(**inputs()).loss.backward()
    assert copy.deepcopy(model).graphs is None and model.graphs is made


def test_gradients_that_come_between_are_an_error(model, played):
    Graphs(model)
    model(**inputs()).loss.backward()
    model.zero_grad()
    loss = model(**inputs()).loss
    model.model.norm.weight.grad = torch.zeros_like(model.model.norm.weight)
    with pytest.raises(RuntimeError, match="gradients have come or gone"):
        loss.backward()


def test_zero_grad_between_the_passes_is_noted(model, played):
    """Each forward pass then finds the gradients of the step before."""
    said.clear()
    made, passes = Graphs(model, said.append), []
    for _ in range(4):
        loss = model(**inputs()).loss
        model.zero_grad()
        loss.backward()
        passes.append(made.passes)
    assert passes == [0] * 4 and len(said) == 1
    assert "call zero_grad before the forward pass" in said[0]
    for _ in range(2):
        model.zero_grad()
        model(**inputs()).loss.backward()
    assert made.passes == 2


def test_shared_prompts_are_noted(model, played):
    said.clear()
    made = Graphs(model, said.append)
    prefixes = torch.tensor([[0, 0], [0, 10], [0, 0], [0, 0]])
    more = {
        "cu_seq_lens": torch.tensor([0, 10, 20, 30, 40], dtype=torch.int32),
        "max_length_q": 10,
        "position_ids": torch.stack([torch.arange(20), torch.arange(20) % 10]),
    }
    for _ in range(2):
        model(**inputs(prefixes=prefixes, **more)).loss.backward()
    assert not made.learned and len(said) == 1 and "share a prompt" in said[0]


def test_hidden_states_are_of_the_last_pass(model, played):
    Graphs(model)
    hidden = []
    for first in range(4):
        model.zero_grad()
        ids = inputs()["input_ids"].roll(first, 1)
        out = model(ids, labels=ids, return_hidden=True)
        out.loss.backward()
        hidden.append(out.hidden.detach())
    assert torch.equal(hidden[1], hidden[3]) and not torch.equal(hidden[0], hidden[3])


SHARED = {"device": "auto", "sharding": "full"}


def test_settings_that_do_not_fit(workspace):
    def settings(**changes: Any) -> list[str]:
        return workspace.settings("x", cuda_graphs="true", **SHARED | changes)

    one = SimpleNamespace(device=torch.device("cuda"), size=1)
    for world, changes, why in (
        (SimpleNamespace(device=torch.device("cpu"), size=1), {}, "needs a GPU, and device=auto"),
        (SimpleNamespace(device=one.device, size=2), {}, "for one GPU, and there are 2 ranks"),
        (one, {}, "with sharding=full: .*param_dtype=float32 .*; give sharding=gradients"),
        (one, {"param_dtype": "bfloat16", "accumulate_fp32": "true"}, "with sharding=full"),
    ):
        with pytest.raises(ValueError, match=why):
            check_run(load(None, settings(**changes)), world)  # type: ignore[arg-type]
    for changes in (
        {"sharding": "gradients"},
        {"param_dtype": "bfloat16"},
        {"dtype": "float32"},
        {"param_dtype": "bfloat16", "accumulate_fp32": "true", "sharding": "gradients"},
    ):
        check_run(load(None, settings(**changes)), one)  # type: ignore[arg-type]


def test_models_that_do_not_fit(model, monkeypatch):
    model.activation_offload = True
    with pytest.raises(ValueError, match="activation_offload"):
        Graphs(model)
    experts = tigon.Qwen3Moe.from_config(EXPERTS)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts asks the GPU"):
        Graphs(experts)
    gemm = importlib.import_module("tigon.kernels.mlp.grouped_product")
    for hopper, columns, dtype, device, syncs in (
        (True, 64, torch.bfloat16, "cuda:0", False),
        (True, 64, torch.float32, "cuda:0", True),
        (True, 64, torch.bfloat16, "cpu", True),
        (True, 60, torch.bfloat16, "cuda:0", True),
        (False, 64, torch.bfloat16, "cuda:0", True),
    ):
        monkeypatch.setattr(gemm, "is_hopper", lambda _, yes=hopper: yes)
        shape = torch.Size((5, 80, columns))
        assert training_syncs(shape, dtype, torch.device(device)) == syncs
    half = {"moe_intermediate_size": 44}  # 88 rows of gate_up, and 44 columns of down
    experts = tigon.Qwen3Moe.from_config(EXPERTS | half)
    checks = importlib.import_module("tigon.train.graph_checks")
    monkeypatch.setattr(checks, "training_syncs", lambda shape, *_: shape[2] % 8 > 0)
    with pytest.raises(ValueError, match=r"mlp\.experts asks the GPU .* sizes that 8 divides"):
        Graphs(experts)


def test_a_capture_that_fails_says_the_way_out(monkeypatch):
    class Broken:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    monkeypatch.setattr(graph_capture, "capture_stream", lambda _: None)
    left: list[Any] = []
    monkeypatch.setattr(graph_capture, "_leave_failed_capture", lambda *given: left.append(given))

    def fail(error: Exception) -> None:
        def run() -> None:
            raise error

        graphs.capture(run, torch.device("cuda"), None)

    with pytest.raises(RuntimeError, match=r"\(ValueError: no\); cuda_graphs=false trains without"):
        fail(ValueError("no"))
    with pytest.raises(torch.OutOfMemoryError, match="room"):
        fail(torch.OutOfMemoryError("room"))
    assert left == 2 * [(torch.device("cuda"), None)]
