"""`tigon plan`: beside what was measured, its arithmetic by hand, and what it says."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small import EXPERTS, LLAMA
from tigon.cli import main
from tigon.plan import (
    Constants,
    Job,
    Layout,
    estimate_memory,
    estimate_step,
    find_gpu,
    format_plan,
    make_plan,
    read_job,
    search,
)
from tigon.plan.cost import CommGroup, Step, Work, compute_seconds
from tigon.plan.gpu import GPU, known_gpus
from tigon.plan.layout import divisors, enumerate_meshes
from tigon.plan.search import LayoutChoice, mesh_error, rank_ties, settings_error
from tigon.settings.config import ParameterGroup
from tigon.settings.plan import USED
from tigon.train.memory import Estimate

SIZE = {"hidden_size": 640, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 4096}
SIZE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SIZE |= {"max_position_embeddings": 2**20}


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(gpus: int, tokens: int = 1024, rows: int | None = None, **sizes: Any) -> Job:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(LLAMA | SIZE | sizes))
        batch = None if rows is None else rows * tokens
        return read_job(str(path), gpus, "h200", tokens, batch, ["param_dtype=bfloat16"])

    return make


def test_unmeasured_gpus_scale_by_data_sheet() -> None:
    (h200, measured), (h100, other) = (find_gpu(name) for name in ("h200", "H100"))
    assert other.products == measured.products and other.attention == measured.attention
    for name in ("passes", "optimizer", "product_bytes"):
        share = getattr(measured, name) / h200.bandwidth
        assert getattr(other, name) == pytest.approx(share * h100.bandwidth)
    with pytest.raises(ValueError, match="--gpu h2000 must be one of h100, h200; did you mean"):
        find_gpu("h2000")
    with pytest.raises(ValueError, match=r"--gpu a100 must be one of h100, h200$"):
        find_gpu("a100")
    assert all(gpu.source for gpu in known_gpus().values())


def test_work_of_a_block_by_hand(job: Callable[..., Job]) -> None:
    """T tokens, C wide: qkv, o, gate and up, down, and the head."""
    t, c, work = 1024, 640, job(1).shapes.work(2, 1024)
    shapes = {(1024, c): 4, (c, 512): 4, (8192, c): 4, (c, 4096): 4, (4096, c): 1}
    expected = {(2 * t, n, k): 3.0 * count for (n, k), count in shapes.items()}
    assert work.products == expected
    assert work.attention == {(64, (t + 1) / 2): 4 * 12 * 8 * 64 * 2 * (t * (t + 1) // 2)}
    assert work.moved["activation"] == 4 * 2 * (3 + 5) * 2 * t * 4096
    again = job(1).shapes.work(2, 1024, recomputed=1.0)
    assert again.products[2 * t, 8192, c] == 4 * 4
    assert again.products[2 * t, c, 4096] == 3 * 4  # its output is nothing's input in the block
    assert again.moved["norms"] > work.moved["norms"]


def test_time_of_attention_by_hand() -> None:
    """A query takes as long as with 100 more keys: few keys are slower, each."""
    k = replace(Constants.read(), attention={"64": 2e12}, attention_keys=100.0)
    for keys, seconds in ((50.0, 1.5), (100.0, 1.0), (1e9, 0.5)):
        times = compute_seconds(Work(attention={(64, keys): 1e12}), k)
        assert times["attention"] == pytest.approx(seconds)


def family(job: Callable[..., Job], model_type: str, **sizes: Any) -> Job:
    dropped = dict.fromkeys(("num_key_value_heads", "head_dim"))
    return job(1, **dropped | {"model_type": model_type, "pad_token_id": None} | sizes)


def test_work_of_gated_delta_net_by_hand(job: Callable[..., Job]) -> None:
    """Of two heads of keys and four of values, behind a convolution of all of them."""
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    delta |= {"linear_key_head_dim": 128, "linear_value_head_dim": 64, "head_dim": 64}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    shapes = family(job, "qwen3_5_text", layer_types=kinds, num_key_value_heads=4, **delta).shapes
    plain = family(job, "qwen3", head_dim=64, num_key_value_heads=4, num_hidden_layers=1).shapes
    t, channels, values = 2048, 2 * 2 * 128 + 4 * 64, 4 * 64
    work, recomputed = shapes.work(2, 1024), shapes.work(2, 1024, recomputed=1.0)
    forward = 4 * 64 * (128 + 64) + 6 * 128 * 64
    backward = 15 * 64 * (128 + 64) + 4 * 64**2 + 16 * 128 * 64
    assert work.recurrence == 3 * 4 * t * (forward + backward)
    assert recomputed.recurrence - work.recurrence == 3 * 4 * t * forward
    assert work.moved["convolution"] == 3 * 2 * (2 + 3) * t * channels
    # Two norms a layer, and the gated one
    norms = 4 * plain.work(2, 1024).moved["norms"] + 3 * 2 * (3 + 5) * t * values
    assert work.moved["norms"] == norms
    assert work.attention == {(64, 512.5): 12 * 8 * 64 * 2 * (1024 * 1025 // 2)}
    one = job(1)
    assert compute_seconds(work, one.constants)["delta rule"] == pytest.approx(
        work.recurrence / one.constants.recurrence
    )
    half = shapes.work(2, 1024, tensor=2)
    assert half.recurrence == work.recurrence / 2


def test_work_of_latents_by_hand(job: Callable[..., Job]) -> None:
    """Values are padded to the dims of keys, of which a part is rotated."""
    sizes = {"q_lora_rank": None, "kv_lora_rank": 96, "qk_nope_head_dim": 48, "v_head_dim": 40}
    sizes |= {"qk_rope_head_dim": 16, "first_k_dense_replace": 9}
    work = family(job, "deepseek_v3", num_key_value_heads=8, **sizes).shapes.work(1, 1024)
    assert work.attention == {(64, 512.5): 4 * 12 * 8 * 64 * (1024 * 1025 // 2)}
    assert work.moved["RoPE"] == 4 * 2 * (2 + 2) * 1024 * 9 * 16
    assert work.moved["latents"] == 4 * 2 * (2 + 2) * 1024 * 8 * 3 * 64


def test_work_before_the_blocks_by_hand(job: Callable[..., Job]) -> None:
    """Gemma 4's second embedding, and the projection into inputs of blocks."""
    inputs = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 4096}
    sizes: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 64, "num_kv_shared_layers": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes |= {"layer_types": kinds, "global_head_dim": 64, "tie_word_embeddings": True}
    with_inputs, without = (
        family(job, "gemma4_text", **sizes, **inputs | changes).shapes.work(1, 1024)
        for changes in ({}, {"hidden_size_per_layer_input": 0})
    )
    assert with_inputs.products[1024, 4 * 32, 640] == 3
    table = 4 * 1024 * 4 * 32 + 4096 * 4 * 32
    assert with_inputs.moved["embedding"] - without.moved["embedding"] == 2 * table
    q, kv, wide = 8 * 64, 2 * 4 * 64, 3.0
    assert without.products[1024, q + kv, 640] == without.products[1024, q, 640] == 2 * wide


def test_ranks_divide_the_work(job: Callable[..., Job]) -> None:
    one = job(4, rows=4)
    whole = compute_seconds(one.shapes.work(1, 1024), one.constants)
    for context, tensor in ((4, 1), (1, 4), (2, 2)):
        part = one.shapes.work(1, 1024, context=context, tensor=tensor)
        times = compute_seconds(part, one.constants)
        assert times["attention"] == pytest.approx(whole["attention"] / 4)
        # Small products are slower, and a pass over the embedding's gradient is not divided
        assert whole["GEMMs"] / 4 < times["GEMMs"] < whole["GEMMs"] / 2
        kind = "memory-bound kernels"
        assert times[kind] == pytest.approx(whole[kind] / 4, rel=0.25)


def test_memory_of_parts(job: Callable[..., Job]) -> None:
    """Weights, states and activations by half; and one gathered input of a product is there."""
    whole = estimate_memory(job(1, tokens=4096, rows=1), Layout(1, 1, 1, 1)).kinds
    one = job(2, tokens=4096, rows=2)
    half = estimate_memory(one, Layout(1, 1, 1, 2)).kinds
    for kind in ("parameters", "optimizer"):
        assert half[kind] == pytest.approx(whole[kind] / 2, rel=0.06), kind
    stream = 4096 * 640 * 2
    assert 0 < half["activations"] - whole["activations"] / 2 < 6 * stream
    short = estimate_memory(job(2, tokens=2048, rows=2), Layout(1, 2, 1, 1)).kinds
    shared = estimate_memory(one, Layout(1, 1, 2, 1)).kinds
    assert shared["parameters"] == short["parameters"]
    # As rows of half the length, and what is sent: heads in copies
    assert short["activations"] < shared["activations"] < 1.2 * short["activations"]


def test_indivisible_heads_are_one_reason(job: Callable[..., Job]) -> None:
    nine = job(8, num_attention_heads=9, num_key_value_heads=3)
    lines = [
        line for line in format_plan(make_plan(nine)).splitlines() if "ranks cannot share" in line
    ]
    assert len(lines) == 1 and "2, 4, 8 ranks cannot share 9 heads with 3 kv heads: " in lines[0]


def test_meshes_without_undivided_replicas() -> None:
    """Also groups of ranks that divide a row, and have all weights between them."""
    found = {mesh.mesh[:4] for mesh in enumerate_meshes(16)}
    sizes = product(divisors(16), repeat=4)
    assert found == {
        (replicate, fsdp, context, tensor)
        for replicate, fsdp, context, tensor in sizes
        if replicate * fsdp * context * tensor == 16 and (replicate == 1 or fsdp * context > 1)
    }
    assert (2, 1, 8, 1) in found


def test_parameters_are_counted_once(job: Callable[..., Job]) -> None:
    """By hand: those of a block that a rank has whole, a part of the experts, and the rest."""
    shapes = job(4, **(EXPERTS | {"num_experts": 8, "head_dim": 16})).shapes
    whole, shared = shapes.counts(), shapes.counts(expert=2)
    assert whole.shared == 0 and len(shared.mixtures) == 1
    assert whole.total == sum(p.numel() for p in shapes.shard().parameters())
    experts = 8 * 3 * 64 * 40
    assert shared.shared == experts // 2 and shared.total == whole.total - experts // 2
    owned = sum(count for _, count in shared.per_shard(4))
    assert owned == pytest.approx(whole.total / 4)
    hidden = sum(count for is_hidden, count in whole.per_shard(1) if is_hidden)
    assert hidden == experts + 2 * 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96


def test_expert_and_tensor_parallel_by_hand(job: Callable[..., Job]) -> None:
    """No tokens are gathered for them, and fewer are sent; each is whole, on fewer ranks."""
    sizes: Any = EXPERTS | {"num_experts": 8, "hidden_size": 256, "num_hidden_layers": 2}
    sizes |= {"moe_intermediate_size": 512, "mlp_only_layers": []}
    one = job(4, tokens=1024, rows=2, **sizes)
    without, layout = Layout(1, 2, 1, 2), Layout(1, 2, 1, 2, expert=4)
    tensor, shared = estimate_memory(one, without).kinds, estimate_memory(one, layout).kinds
    experts = 2 * 8 * 3 * 256 * 512
    for kind in ("parameters", "optimizer"):
        assert shared[kind] == pytest.approx(tensor[kind], rel=0.01), kind
    # Half of a block's in bfloat16 where two ranks gather what tensor parallelism leaves of them
    assert tensor["gathered weights"] - shared["gathered weights"] > 0.7 * experts * 2 / 2 / 4
    works = [one.shapes.work(1, 1024, tensor=2, expert=x.expert) for x in (without, layout)]
    assert works[0].grouped == works[1].grouped
    gates = [{p[0]: n for p, n in w.products.items() if p[1:] == (8, 256)} for w in works]
    assert gates == [{1024: 6}, {512: 6}]  # of its own tokens
    traffic = [estimate_step(one, x).traffic.nvlink_bytes for x in (without, layout)]
    # Of half of the experts' weights half: gathered twice, and gradients of two ranks in bfloat16
    weights = experts / 2 * (2 * 2 + 2) / 2
    stream = 2 * 5 * 1024 * 256 * 2 / 2  # the stream's halves, five times in either block
    tokens = 4 * 2 * round(512 * 13 / 28) * 4 * 256 * 2 * 3 / 4
    assert traffic[1] - traffic[0] == pytest.approx(tokens - weights - stream)
    # Without FSDP of anything but experts, of which two ranks have the same
    alone, pair = (estimate_memory(one, Layout(1, 1, 1, 4, expert=e)).kinds for e in (1, 2))
    assert pair["parameters"] == pytest.approx(alone["parameters"], rel=0.02)
    assert estimate_step(one, Layout(1, 1, 1, 4, expert=2)).kinds["FSDP over NVLink"] > 0


def test_time_of_repeated_products_by_hand(job: Callable[..., Job]) -> None:
    """Of gate and up: two thirds of the experts' forward pass."""
    sizes: Any = EXPERTS | {"num_experts": 8, "num_hidden_layers": 2, "moe_intermediate_size": 512}
    one = job(1, tokens=1024, rows=1, **sizes)
    plain, again = (
        estimate_step(one, Layout(checkpointing=setting)).kinds["GEMMs"]
        for setting in (False, "experts")
    )
    forward = one.shapes.work(1, 1024).grouped / 3
    assert again - plain == pytest.approx(2 / 3 * forward / one.constants.grouped)


def test_collectives_by_hand() -> None:
    gpu = GPU("x", 0, 0, 0, 400.0, 50.0, 8, "")
    k = replace(Constants.read(), nvlink=200.0, nvlink_many=100.0, latency=1.0, hop=0.5)
    k = replace(k, network_share=1.0)
    assert CommGroup(1, 1).gather(800.0, gpu, k).nvlink == 0
    inside = CommGroup(8, 1).gather(800.0, gpu, k)
    assert (inside.nvlink, inside.network) == (1 + 700 / 100, 0.0)
    assert CommGroup(2, 4).gather(800.0, gpu, k).nvlink == 1 + 400 / 200  # from one other
    # Four hosts: three quarters come from elsewhere, through eight adapters
    wide = CommGroup(32, 1).gather(3200.0, gpu, k)
    assert wide.network_bytes == 300 and wide.network == 300 / 50 + 3 * 0.5
    # One rank on each of four hosts
    apart = CommGroup(4, 8).gather(3200.0, gpu, k)
    assert apart.nvlink_bytes == 0 and apart.network_bytes == 2400
    swapped = CommGroup(16, 1).exchange(1600.0, gpu, k)
    assert (swapped.nvlink_bytes, swapped.network_bytes) == (700, 800)


def test_mesh_errors(job: Callable[..., Job]) -> None:
    one = job(64, rows=16)
    for layout, why in (
        (Layout(1, 4, 1, 16), "tensor is above 8, the number of GPUs"),
        (Layout(1, 32, 2, 1), "fsdp=32 is more than the 16 rows of a step (16,384 tokens): each"),
    ):
        assert why in (mesh_error(one, layout) or "")
    assert "4 ranks cannot share 6 heads" in (
        mesh_error(job(4, num_attention_heads=6, num_key_value_heads=2), Layout(1, 1, 1, 4)) or ""
    )
    assert "3 does not divide the 16 rows of a step" in (mesh_error(one, Layout(1, 3, 1, 1)) or "")
    assert mesh_error(one, Layout(1, 8, 1, 8)) is None  # two ranks share each kv head
    assert mesh_error(one, Layout(1, 4, 16, 1)) is None  # more than there are heads


def test_fastest_fitting_layout_is_first(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory as a function of the layout: what is weighed, and what is not."""
    one, asked = job(8, rows=8), []

    def heavy(_: Job, layout: Layout) -> Estimate:
        asked.append(layout)
        return Estimate({"sum": 10**15 if layout.tensor < 2 else 10**9}, 0)

    monkeypatch.setattr(search, "estimate_memory", heavy)
    plan = make_plan(one, limit=3)
    assert len(plan.choices) == 3 and all(c.layout.tensor >= 2 for c in plan.choices)
    times = [choice.step.seconds for choice in plan.choices]
    assert all(a <= b * 1.01 for a, b in pairwise(times)) and times[2] > times[0] * 1.01
    assert plan.reasons["memory"] > 0 and plan.lacking == 10**15
    assert len(asked) == len(set(asked))
    text = format_plan(plan)
    assert "too little memory: 931,323 GiB per GPU at least" in text
    rows = f"batch_size={one.batch_rows} seq_len={one.seq_len}"
    assert f"the first: {rows} {plan.choices[0].layout.settings}" in text
    monkeypatch.setattr(search, "estimate_memory", lambda *_: Estimate({"sum": 10**15}, 0))
    assert "no layout fits" in format_plan(make_plan(one))


def test_ties_are_ranked_by_memory() -> None:
    seconds = [1.0, 1.004, 1.009, 1.011, 1.02, 1.0212]
    sizes = [5, 3, 4, 2, 9, 1]
    choices = [
        LayoutChoice(Layout(), Step({"GEMMs": time}), Estimate({"sum": size}, 0))
        for time, size in zip(seconds, sizes, strict=True)
    ]
    # A tie reaches 1 % beyond its fastest, not beyond the one before
    assert [choice.memory.total for choice in rank_ties(choices)] == [3, 4, 5, 2, 9, 1]


def test_expert_parallel_costs_time_per_layer(job: Callable[..., Job]) -> None:
    sizes: Any = EXPERTS | {"num_experts": 8, "hidden_size": 256, "num_hidden_layers": 4}
    moe = job(8, **sizes)
    free = replace(moe, constants=replace(moe.constants, shared_experts=0.0))
    layers = len(moe.shapes.counts().mixtures)
    assert 0 < layers < 4  # and dense ones
    for layout, times in (
        (Layout(fsdp=8), 0),
        (Layout(fsdp=8, expert=2), layers),
        (Layout(fsdp=8, expert=2, micro_batches=3), 3 * layers),
    ):
        more = estimate_step(moe, layout).seconds - estimate_step(free, layout).seconds
        assert more == pytest.approx(times * moe.constants.shared_experts)


def test_two_ranks_reduce_in_bfloat16(job: Callable[..., Job]) -> None:
    """In bfloat16, where a step has one backward pass."""
    one = job(2)
    held = sum(p.numel() for p in one.shapes.shard(1).parameters())

    def received(layout: Layout, sums: Any = None) -> float:
        return estimate_step(one, layout, sums=sums).traffic.nvlink_bytes

    once, twice = Layout(fsdp=2), Layout(fsdp=2, micro_batches=2)
    more = received(once, torch.float32) - received(once)
    assert more == pytest.approx(2 * held / 2)
    assert received(twice) == received(twice, torch.float32) > received(twice, torch.bfloat16)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(EXPERTS))
    few = ["--gpus", "2", "--seq-len", "64"]
    assert main(["plan", str(path), *few, "--settings", "optimizer=adamw_bf16", "--most", "2"]) == 0
    said = capsys.readouterr().out
    assert "float32 weights, adamw_bf16" in said and "experts are assumed to be balanced" in said
    assert "step times within 1 % of each other are ties" in said
    assert "note: " not in said and "tok/s/GPU" in said and "micro_batch_size=" in said
    assert sorted(tmp_path.iterdir()) == [path]
    for wrong, why in (
        (["--gpus", "0", "--seq-len", "64"], "--gpus=0 must be at least 1"),
        (["--gpus", "1", "--seq-len", str(2**30)], "--seq-len=1073741824 must be at most 268435"),
        (["--gpus", "16384", "--seq-len", str(2**28)], f"={2**42} must be at most {2**40}"),
        (["--gpus", "2", "--seq-len", "1"], "--seq-len=1 must be at least 2"),
        ([*few, "--batch-tokens", "-64"], "--gpus x --seq-len)=-64 must be at least 1"),
        ([*few, "--most", "0"], "--most 0 must be at least 1"),
        ([*few, "--batch-tokens", "100"], "is no multiple of 64: give 64 or 128"),
        ([*few, "--settings", "sharding=full"], "sharding=full: a plan tries its values itself"),
        ([*few, "--settings", "batch_size=64"], "batch_size=64: give --batch-tokens N instead"),
        ([*few, "--settings", "lr=1", "--settings", "seq_len=8"], "lr=1: a plan does not use it"),
        ([*few, "--settings", "task=sft"], "task=sft: a plan does not use it; leave it out"),
        ([*few, "--settings", "tensor=2"], "(for `tigon train` it is parallel.tensor=2)"),
        ([*few, "--settings", "parallel.tensor=2"], "a plan tries every layout itself; leave it"),
        ([*few, "--settings", "fp8=true"], "fp8: its time is not modelled"),
        ([*few, "--gpu", "a"], "--gpu a must be one of h100, h200"),
    ):
        assert main(["plan", str(path), *wrong]) == 1
        assert why in capsys.readouterr().err
    for model, why in (
        ("nonsense/", "no directory nonsense/ (absolute: "),
        (str(tmp_path / "none.json"), f"no file {tmp_path / 'none.json'}"),
        (str(tmp_path / "empty"), f"{tmp_path / 'empty'} has no file config.json"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert main(["plan", model, *few]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"tigon plan: {why}") and said.count("\n") == 1


def test_used_settings_change_the_plan(job: Callable[..., Job]) -> None:
    """Each setting that is accepted changes memory or time, or what others are allowed to be."""
    base = job(2).config
    layouts = [Layout(1, 2, rows=2), Layout(1, 2, rows=2, sharding="gradients")]
    layouts += [replace(layout, rows=1, micro_batches=2) for layout in layouts]

    def found(**settings: Any) -> list[Any]:
        one = replace(job(2, rows=4, num_hidden_layers=1), config=replace(base, **settings))
        return [
            (estimate_memory(one, layout).kinds, estimate_step(one, layout).seconds)
            for layout in layouts
        ]

    values: dict[str, Any] = {
        "param_dtype": "float32", "cuda_graphs": True, "optimizer": "adamw_8bit",
        "accumulate_fp32": True, "loss_reduction": "sequence", "logits_bytes": 1000,
        "parameter_groups": (ParameterGroup(("*.mlp.*",), freeze=True),),
    }  # fmt: skip
    plain = found()
    for name, value in values.items():
        assert found(**{name: value}) != plain, name
    in_backward = replace(base, optimizer_in_backward=True, max_grad_norm=0.0)
    several = replace(job(2, rows=4), config=in_backward)
    assert "micro" in (settings_error(several, layouts[2]) or "")
    assert found(optimizer="sgd", momentum=0.9) != found(optimizer="sgd")
    # Of models with experts; of hub repositories; of what others need
    rest = {"router_aux_loss_coef", "revision", "dtype", "nesterov", "stochastic_rounding"}
    assert values.keys() | rest | {"momentum", "optimizer_in_backward", "max_grad_norm"} == {*USED}


def test_suggestions_if_nothing_fits(job: Callable[..., Job]) -> None:
    """What is set already is not proposed."""

    def said(**settings: Any) -> str:
        one = job(2, rows=4)
        one = replace(one, config=replace(one.config, **settings, memory_budget=1e-9))
        return format_plan(make_plan(one))

    plain = said(param_dtype="float32")
    assert "  --settings param_dtype=bfloat16 optimizer=adamw_8bit\n" in plain
    assert "--gpus above 2" in plain and "fewer rows in a step" in plain
    assert "activation_offload=true and optimizer_offload=true" in plain
    assert "  --settings optimizer=adamw_8bit\n" in said(optimizer="adamw_bf16")
    assert "  --settings" not in said(optimizer="adamw_8bit")
    assert "are ties" not in plain
