"""The memory estimate against what autograd saves and what is held, and `--dry-run`."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES, FIRST
from tests.support.saved import saved_storages
from tests.support.small import EXPERTS, LLAMA, write_model
from tigon.data.packing import MAX_KEY_COPIES
from tigon.kernels import runtime, use
from tigon.models import MODELS, CausalLM
from tigon.parallel import IN_FLIGHT
from tigon.settings.config import Config, Parallel, ParameterGroup, mesh_sizes
from tigon.train import dry_run, main
from tigon.train.build import build_run
from tigon.train.distributed import World
from tigon.train.memory import Estimate, estimate
from tigon.train.memory_tracker import FSDPTracker, model_tensors
from tigon.train.model import apply_model_settings, named_projections
from tigon.train.tasks import TASKS

WORLD = World(0, 1, torch.device("cpu"))
B, T = 2, 24
UNNORMED = "llama", "gpt_oss"  # queries and keys
SHORT = 4  # tokens that the interpreter of kernels computes


def settings(**changes: Any) -> Config:
    values = {"seq_len": T, "micro_batch_size": B, "batch_size": B, "param_dtype": "bfloat16"}
    values |= {"activation_checkpointing": False}
    given: Any = values | changes
    return Config(run_dir="run", data=("data",), model="model", task="pretrain", **given)


def tiny(model_type: str, case: str, **changes: Any) -> CausalLM:
    values = {"model_type": model_type} | SIZES | CASES[model_type][case] | changes
    return MODELS[model_type].from_config(values, device="meta").to("meta").train()


def planned(model: CausalLM, gpus: int = 1, compute: Any = torch.bfloat16, **changes: Any) -> Any:
    config = settings(**changes)
    model.activation_checkpointing = config.activation_checkpointing
    model.activation_offload = config.activation_offload
    objective = TASKS["pretrain"](config, WORLD)
    return estimate(model, objective, config, gpus, compute)


def saved_by(model: CausalLM, device: str) -> int:
    """Bytes of all tensors that autograd keeps after a forward, without those of the model."""
    ids = torch.zeros(1, SHORT, dtype=torch.int64, device=device)
    with use("triton"), saved_storages(*model_tensors(model)) as kept:
        model(ids, labels=ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.skipif(not runtime.INTERPRETED, reason="the interpreter is not on")
@pytest.mark.parametrize(
    ("model_type", "case"), [f for f in FIRST if f[0] in (*UNNORMED, "gemma3_text", "qwen3_moe")]
)
def test_meta_tensors_are_saved_as_by_kernels(model_type: str, case: str) -> None:
    """Attention apart, which no fused kernel computes on a CPU."""
    model = tiny(model_type, case, num_hidden_layers=2, layer_types=None)
    found = saved_by(model, "meta")
    real = MODELS[model_type].from_config(model.config).train()
    layers = len(real.model.layers)
    for layer in (*real.model.layers, *model.model.layers):
        layer.self_attn.forward = lambda x, *_: x  # type: ignore[method-assign]
    without = saved_by(model, "meta")
    assert saved_by(real, "cpu") == without
    c = model.config
    # out, and qkv, of which q, k and v are parts; q and k besides where they are normed; and lse
    heads, kv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    numbers = heads * d + (heads + 2 * kv) * d + heads
    if model_type not in UNNORMED:
        numbers += (heads + kv) * d
    kept = (found - without) / (layers * SHORT * 4)
    # And the angles, and the input of o_proj, which is out
    assert numbers <= kept <= numbers + 2 * d + 3 * c.hidden_size


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_memory_of_every_family(model_type: str, case: str) -> None:
    """Nothing remains when a step is over but its gradients, and more tokens need more."""
    model = tiny(model_type, case)
    found = planned(model)
    size = sum(p.numel() for p in model.parameters())
    assert found.kinds["parameters"] == pytest.approx(2 * size, rel=0.5)  # blocks of 512 bytes
    assert found.kinds["optimizer"] == 8 * size
    larger = planned(tiny(model_type, case), micro_batch_size=4 * B, batch_size=4 * B)
    assert larger.total > found.total


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_gate_up_of_experts_that_is_computed_again(model_type: str) -> None:
    """Its bytes are less in each layer: backward writes its gradient over what it computes."""
    inner, layers, tokens, totals = 128, 3, 2048, []
    sizes: Any = {"vocab_size": 32, "num_hidden_layers": layers, "layer_types": None}
    sizes["intermediate_size" if model_type == "gpt_oss" else "moe_intermediate_size"] = inner
    for setting in (False, "experts"):
        model = tiny(model_type, "plain", **sizes)
        totals.append(planned(model, activation_checkpointing=setting, seq_len=tokens).total)
    slots = B * tokens * model.config.num_experts_per_tok
    assert totals[0] - totals[1] == layers * slots * 2 * inner * 2


def test_one_micro_batch_reduces_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 is told to: half of the bytes."""
    made: list[FSDPTracker] = []
    begin = FSDPTracker.begin
    monkeypatch.setattr(
        FSDPTracker, "begin", lambda self, **given: (made.append(self), begin(self, **given))
    )

    def sums(gpus: int, rows: int, **changes: Any) -> set[torch.dtype]:
        planned(tiny("llama", "plain"), gpus, batch_size=rows, **changes)
        return {group.sums for group in made[-1].groups}

    assert sums(2, 2 * B) == {torch.bfloat16}
    assert sums(2, 4 * B) == sums(3, 3 * B) == {torch.float32}
    assert sums(2, 2 * B, param_dtype="float32") == {torch.float32}


def test_sharding_divides_weights_and_states() -> None:
    alone, pair = (planned(tiny("llama", "plain"), n, param_dtype="float32") for n in (1, 2))
    for kind in ("parameters", "optimizer"):
        assert pair.kinds[kind] == pytest.approx(alone.kinds[kind] / 2, rel=0.1)
    assert "gathered weights" in alone.kinds  # bfloat16 of float32 weights
    assert planned(tiny("llama", "plain")).kinds.get("gathered weights") is None
    assert pair.host < alone.host


def test_offloaded_states_are_in_host_memory() -> None:
    plain, few, host = (
        planned(tiny("llama", "plain"), ema_decay=0.9, **changes)
        for changes in ({}, {"optimizer": "adamw_bf16"}, {"optimizer_offload": True})
    )
    assert (
        few.kinds["optimizer"] == plain.kinds["optimizer"] // 2 == plain.kinds["average of weights"]
    )
    assert "optimizer" not in host.kinds and "average of weights" not in host.kinds
    states = plain.kinds["optimizer"] + plain.kinds["average of weights"]
    assert host.host == plain.host + states


def test_frozen_parameters_have_no_gradients() -> None:
    """Nor a state, and what only its gradient needs is not kept."""
    model = tiny("llama", "plain")
    config = settings(parameter_groups=(ParameterGroup(("*.layers.*",), freeze=True),))
    objective = TASKS["pretrain"](config, WORLD)
    found = estimate(model, objective, config, 1, torch.bfloat16)
    left = sum(p.numel() for n, p in model.named_parameters() if ".layers." not in n)
    assert found.kinds["optimizer"] == 8 * left
    assert found.total < planned(tiny("llama", "plain")).total


def test_micro_batches_accumulate_whole_gradients() -> None:
    """Every rank holds all of them in float32 until the last one is reduced."""
    models = [tiny("llama", "plain", num_hidden_layers=8) for _ in range(2)]
    size = sum(p.numel() for p in models[0].parameters())
    once, twice = (
        planned(model, 2, param_dtype="float32", batch_size=n * B * 2).kinds
        for n, model in enumerate(models, start=1)
    )
    assert twice["gradients"] - once.get("gradients", 0) > 0.5 * 4 * size


@pytest.mark.parametrize("summed", [False, True])
def test_graphs_keep_gradients_of_blocks(summed: bool) -> None:
    """From step to step, also with sharding=gradients, but not those of embedding and head."""
    model = tiny("llama", "plain", vocab_size=1024)
    size = sum(p.numel() for p in model.model.layers.parameters()) + model.config.hidden_size
    changes: Any = {"accumulate_fp32": True, "sharding": "gradients"} if summed else {}
    found = planned(model, seq_len=4096, cuda_graphs=True, **changes)
    assert found.kinds["gradients"] == pytest.approx((4 if summed else 2) * size, rel=0.05)


def test_sharded_gradients_by_hand() -> None:
    """With sharding=gradients, of a model of few bytes besides weights."""
    wide: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    changes: dict[str, Any] = {"sharding": "gradients", "param_dtype": "bfloat16"}
    found = planned(tiny("llama", "plain", **wide), 2, **changes).kinds
    model = tiny("llama", "plain", **wide)
    size = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    assert found["parameters"] == pytest.approx(2 * size, rel=0.01)
    assert found["optimizer"] == pytest.approx(8 * size / 2, rel=0.01)
    assert "gathered weights" not in found
    # Half of all at the end, and three blocks' whole ones on their way
    assert found["gradients"] <= 2 * (size / 2 + (IN_FLIGHT + 1) * block) * 1.01
    model = tiny("llama", "plain", **wide)
    exact = planned(model, 2, **changes, accumulate_fp32=True, batch_size=4 * B).kinds
    assert exact["gradients"] >= 4 * size  # of the first micro-batch
    model = tiny("llama", "plain", **wide)
    masters = planned(model, 2, sharding="gradients", param_dtype="float32").kinds
    assert masters["parameters"] == pytest.approx((2 + 4 / 2) * size, rel=0.01)
    model = tiny("llama", "plain", **wide)  # one rank's gradients are not copied to be reduced
    alone = planned(model, 1, sharding="gradients", param_dtype="float32").kinds
    assert 0.9 * 4 * size < alone["gradients"] <= 4 * size


def test_dry_run_describes_the_run(workspace, capsys) -> None:
    before = sorted(p for p in workspace.root.rglob("*"))
    given = workspace.settings("dry", device="auto", batch_size=8, optimizer="muon")
    main(["--dry-run", "--nproc", "2", *given])
    said = capsys.readouterr().out
    assert "not in the sum: what muon's update holds" in said
    assert "82,304 parameters, on 2 x cuda: fsdp 2" in said
    assert "8 rows of 128 tokens, 4 micro-batches of 1 on each of 2 ranks" in said
    assert "steps: 0 to 3, 3 an epoch" in said
    assert "sum" in said and "for weights and states" in said
    if not torch.cuda.is_available():
        assert said.endswith("time of a step: cannot be measured here: there is no GPU\n")
    assert sorted(p for p in workspace.root.rglob("*")) == before


LLAMA_8B = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**20,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("task", "context", "copies"), [("simpo", 1, 1), ("simpo", 4, 1), ("grpo", 1, MAX_KEY_COPIES)]
)
def test_shared_prompts_copy_keys(task: str, context: int, copies: int) -> None:
    """In each layer, of prompts that fill rows; also where two ranks compute a part of each query
    of a head."""
    tokens, heads = 256, {"num_attention_heads": 2, "num_key_value_heads": 2}
    found = {}
    for share in (False, True):
        given: Any = {"task": task, "seq_len": tokens, "parallel": Parallel(context=context)}
        config = replace(settings(), **given)
        objective = TASKS[task](config, WORLD)
        objective.share_prompts = share
        model = MODELS["llama"].from_config(LLAMA | heads, device="meta")
        found[share] = estimate(model, objective, config, context, torch.bfloat16).total
    keys = tokens + copies * (tokens - copies)
    copied = 4 * B * keys * 64 // min(context, 2) * 2  # of two layers, in bfloat16
    # Beside them, where they are from; on four ranks, each of two parts of rows has its copies
    assert copied <= found[True] - found[False] < (1.1 if context == 1 else 1.5) * copied


def test_million_tokens_on_eight_gpus(workspace, tmp_path: Path, capsys) -> None:
    """Of Llama-3.1-8B's shape, with every block computed again."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    more = {"init": config, "model": "", "tokenizer": workspace.model, "device": "auto"}
    more |= {"seq_len": 2**20, "batch_size": 1, "activation_checkpointing": "true"}
    given = workspace.settings("million", **more)
    main(["--dry-run", "--nproc", "8", *given, "parallel.context=8"])
    said = capsys.readouterr().out
    assert "1 rows of 1,048,576 tokens, 1 micro-batch of 1 on 1 group of 8 ranks" in said
    found = {
        name: float(size) for name, size in re.findall(r"^  ([a-z ]+?) +([\d.]+)$", said, re.M)
    }
    weights = 8_030_261_248 * 4 / 8 / 2**30
    assert found["parameters"] == pytest.approx(weights, abs=0.01)
    assert found["optimizer"] == pytest.approx(2 * weights, abs=0.01)
    inputs = 32 * 2**17 * 4096 * 2 / 2**30  # of blocks, in bfloat16
    assert inputs <= found["activations"] < 1.02 * inputs
    assert found["sum"] < 70


@pytest.mark.parametrize("parallel", [{"fsdp": 8}, {"tensor": 2, "expert": 4}], ids=str)
def test_dry_run_of_experts(workspace, capsys, parallel) -> None:
    """And recomputes no block that fits."""
    experts = workspace.root / "eight"
    if not experts.exists():
        write_model(experts, **EXPERTS | {"num_experts": 8})
    more = {"device": "auto", "model": experts, "batch_size": 8, "micro_batch_size": 1}
    given = workspace.settings("dry", **more, memory_budget=9, parallel=json.dumps(parallel))
    main(["--dry-run", "--nproc", "8", *given])
    said = capsys.readouterr().out
    assert "\n  sum  " in said and ", no block recomputed; " in said


def test_recomputed_experts_of_a_model_without(workspace) -> None:
    given = workspace.settings("dry", device="auto", activation_checkpointing="experts")
    with pytest.raises(SystemExit, match="=experts, but LlamaForCausalLM has no experts: give tr"):
        main(["--dry-run", "--nproc", "2", *given])


def test_indivisible_fp8_layers_stay_bfloat16() -> None:
    """Of 4 heads of 8 each of 4 ranks has one, and o_proj has 8 columns there."""
    model = MODELS["llama"].from_config(LLAMA | {"head_dim": 8}, device="meta")
    shares: dict[str, Any] = {"fp8": True, "parallel": Parallel(tensor=4)}
    apply_model_settings(model, settings(**shares))
    of = {name.rpartition(".")[2]: layer for name, layer in named_projections(model)}
    assert all(layer.fp8 for layer in of.values())
    assert planned(model, 4, **shares).total > 0
    assert [name for name, layer in of.items() if layer.fp8] == ["gate_up_proj", "down_proj"]


def test_dry_run_notes_apply_to_target_gpus(workspace, capsys, monkeypatch) -> None:
    """Of the GPUs that it is planned for, not of the CPU that it is planned on."""
    monkeypatch.setattr("tigon.train.model.supports_fp8", lambda _: False)
    settings = {"device": "cuda", "batch_size": 4, "activation_offload": "true", "fp8": "true"}
    main(["--dry-run", "--nproc", "2", *workspace.settings("dry", **settings)])
    said = capsys.readouterr().out
    assert "note: fp8=true leaves in bfloat16 what has sizes that 16 does not divide" in said
    assert "on a CPU" not in said


def test_dry_run_times_steps(workspace, capsys, monkeypatch) -> None:
    monkeypatch.setattr("tigon.models.pretrained.load.load_weights", pytest.fail)  # none are read
    monkeypatch.setattr("tigon.train.dry_run.peak_flops", lambda *_: 1e9)
    main(["--dry-run", *workspace.settings("dry")])
    said = capsys.readouterr().out
    assert "a step, measured: " in said and "all steps: about" in said
    # Of the sequences that there are, which are shorter than a row
    each = float(re.search(r"a token: ([\d.e-]+) GFLOP", said)[1])
    speed, mfu = re.search(r"([\d,]+) tokens/s, ([\d.]+)% MFU", said).groups()
    assert float(mfu) / 100 == pytest.approx(each * float(speed.replace(",", "")), rel=0.05)
    assert not (workspace.root / "dry").exists()


@pytest.mark.parametrize("graphs", [None, object()])
def test_runs_with_graphs_take_more_steps_in_a_dry_run(workspace, monkeypatch, graphs) -> None:
    """Of which the first decide on them."""
    counts = []

    def timed(run: Any, steps: int) -> dry_run.StepTiming:
        counts.append(steps)
        return dry_run.StepTiming(1, 1, 1, 0)

    def built(*args: Any) -> Any:
        run = build_run(*args)
        run.model.graphs = graphs
        return run

    monkeypatch.setattr("tigon.train.dry_run.time_steps", timed)
    monkeypatch.setattr("tigon.train.dry_run.build_run", built)
    main(["--dry-run", *workspace.settings("dry")])
    assert counts == [dry_run.STEPS if graphs is None else dry_run.MANY_STEPS]


def test_dry_run_says_how_many_steps_are_left(workspace, capsys) -> None:
    settings = workspace.settings("dry-left", steps=2)
    main(settings)
    main(["--dry-run", *settings, "resume=auto"])
    said = capsys.readouterr().out
    assert "dry-left is finished: it goes on with more steps, epochs or patience" in said
    assert "a step, measured: " not in said and "about" not in said
    main(["--dry-run", *settings, "resume=auto", "steps=5"])
    assert "\n3 more steps: about " in capsys.readouterr().out


def test_dry_run_checks_like_a_run(workspace, tmp_path: Path) -> None:
    for changes, message in (
        ({"data": tmp_path / "none.jsonl"}, "none.jsonl"),
        ({"seq_len": 4096}, "max_position_embeddings"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["--dry-run", *workspace.settings("dry", **changes)])
    with pytest.raises(SystemExit, match=r"must be a multiple of .*100 ranks .*: give 100"):
        main(["--dry-run", "--nproc", "100", *workspace.settings("dry", device="auto")])
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        main(["--dry-run", *workspace.settings("dry", run_dir=tmp_path / "used")])
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["file"]


def test_advice_for_context_parallel() -> None:
    """With twice the ranks for each, where there are so many."""
    config = settings(batch_size=8, parallel=Parallel(context=2))
    with pytest.MonkeyPatch.context() as patch:

        def total(c: Config, _: Any, gpus: int) -> Estimate:
            sizes = mesh_sizes(c, gpus)
            if sizes.context > 4:
                raise ValueError("ranks")
            return Estimate({"sum": 2**30 * 10 // sizes.context}, 0)

        patch.setattr(dry_run, "estimate_run", total)
        assert "      2.50 GiB with parallel.context=4" in dry_run.memory_advice(config, None, 8)
        for ranks, gpus in ((2, 2), (4, 8)):
            config = settings(batch_size=8, parallel=Parallel(context=ranks))
            assert not any("context" in line for line in dry_run.memory_advice(config, None, gpus))


@pytest.mark.parametrize("values", [LLAMA, EXPERTS], ids=["dense", "experts"])
def test_step_out_of_memory_gives_advice(workspace, monkeypatch, values) -> None:
    model = write_model(workspace.root / values["model_type"], **values)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More")
    monkeypatch.setattr("tigon.train.dry_run.time_steps", Mock(side_effect=full))
    with pytest.raises(SystemExit) as caught:
        given = {"model": model, "batch_size": 4, "micro_batch_size": 2}
        main(["--dry-run", *workspace.settings("dry", **given)])
    text = str(caught.value)
    assert "a step does not fit: CUDA out of memory" in text
    assert "GiB with micro_batch_size=1" in text
    assert "GiB with activation_checkpointing=true" in text
    assert ("GiB with activation_checkpointing=experts" in text) == (values is EXPERTS)
