"""Runs whose ranks share rows, layers, experts or weights (gloo, FSDP2), against one process."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.support.small import EXPERTS, LLAMA, WORDS, write_model
from tests.train import preferences
from tests.train.layouts import ADAPTER, TOLERANCE, assert_same_run, assert_same_tensors, train_once
from tests.train.weights import write_weighted
from tigon.models import MODELS
from tigon.parallel import check_experts
from tigon.settings.config import Parallel
from tigon.train import checkpoint
from tigon.train.export import convert_checkpoint, load_checkpoint

SHARED = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}
EIGHT_EXPERTS = EXPERTS | {"num_experts": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 40},
    "qwen2_moe": EIGHT_EXPERTS | SHARED,
    "qwen3_moe": EIGHT_EXPERTS,
}
GROUPS = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENTS = GROUPS | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
RECURRENCES = EIGHT_EXPERTS | SHARED
RECURRENCES |= {
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 8,
}
# Keys and values of two layers, and a second embedding
SHARING: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": 7, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 300,
}  # fmt: skip
MODEL_CHANGES: dict[str, dict[str, Any]] = FAMILIES | {
    "gemma4": SHARING | {"model_type": "gemma4_text", "global_head_dim": 12},
    # A bound that half of the coefficients begin beyond
    "gemma3n": SHARING | {"model_type": "gemma3n_text", "altup_coef_clip": 0.07},
    "latents": LATENTS,
    "recurrences": RECURRENCES,
    "teacher": {"num_hidden_layers": 1},
    "few": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "eight heads": {"num_attention_heads": 8, "hidden_size": 48, "head_dim": 6},
    "wide": {"head_dim": 128, "intermediate_size": 512},
    "untied": {"tie_word_embeddings": False},
    "untied experts": EIGHT_EXPERTS | SHARED | {"tie_word_embeddings": False},
    "two heads": EXPERTS | {"num_attention_heads": 2},
    "five experts": EXPERTS,
    "windows": {"model_type": "gemma3_text", "num_key_value_heads": 1, "sliding_window": 7},
}
SAME = {"steps": 3, "seq_len": 67, "batch_size": 2, "max_grad_norm": 0.1}  # odd
# Adam divides a gradient by its size: where that is near eps, its rounding errors are as large as
# the step. They are not with a larger eps.
LONG = {"steps": 4, "warmup_steps": 2, "export": "true", "eps": 1e-6, "save_every": 2}
LONG |= {"keep_last": 0, "batch_size": 8}
MOE = {"batch_size": 8, "export": "true", "router_aux_loss_coef": 0.5, "ema_decay": 0.5}
MOE |= {"save_every": 2, "keep_last": 0, "model": "qwen3_moe"}
RECOMPUTED = {"activation_checkpointing": "true"}
# One micro-batch a step on each rank, whose rows `make` divides
IN_BACKWARD = {"optimizer_in_backward": "true", "max_grad_norm": 0, "batch_size": 2}
LINES = {"packing": "false", "logits_to_keep": 6, "loss_reduction": "sequence"}
# Masks are uneven, and answers and rows have weights
WEIGHTED = {"steps": 10, "batch_size": 4, "data": "weighted", "eval_data": "weighted held out"}
WEIGHTED |= {"label_smoothing": 0.1, "z_loss": 1e-3}
FROZEN = {"parameter_groups": "[{match: '*.layers.0.*', freeze: true}]", "micro_batch_size": 1}
BALANCED = {"task": "pretrain", "data": "text", "router_aux_loss_coef": 0.5}
LORA = ADAPTER | {"micro_batch_size": 1}
ON_EXPERTS = LORA | {"batch_size": 8, "router_aux_loss_coef": 0.5, "model": "untied experts"}
DORA, DROPOUT = {"lora.dora": "true"}, {"lora.dropout": 0.2}
ENDS = {"model": "untied", "lora.targets": "[embed_tokens, lm_head, v_proj]"}
DPO, REWARD = {"task": "dpo", "data": "pairs"}, {"task": "reward", "data": "pairs"}
DISTILLED = {"task": "distill", "teacher": "teacher"}
KINDS: dict[str, dict[str, Any]] = {
    "seen": {
        "steps": 2, "sample_tokens": 4, "sample_prompts": "[a model]", "metrics": "entropy",
        "predictions": "true", "eval_data": "held out",
    },
    "sft": {"steps": 5, "save_every": 2, "keep_last": 0} | RECOMPUTED,
    "lines": LINES,
    "weighted": WEIGHTED,
    "weighted lines": WEIGHTED | {"packing": "false", "logits_to_keep": 6},
    "weighted sequences": WEIGHTED | {"loss_reduction": "sequence"},
    "weighted sequence lines": WEIGHTED | LINES,
    "two heads": BALANCED | {"model": "two heads"},
    "five experts": BALANCED | {"model": "five experts"},
    "lora": {"packing": "false", "lr": 1e-2, "lora.rank": 3, "lora.dropout": 0.3} | RECOMPUTED,
    "dpo": DPO,
    "orpo": {"task": "orpo", "data": "pairs", "activation_checkpointing": 2},
    "kto": {"task": "kto", "data": "kto"},
    "grpo": {"task": "grpo", "data": "grpo", "beta": 0.1, "loss_type": "grpo"},
    "reward": REWARD,
    "reward-lora": REWARD | {"lora.rank": 3, "lora.merge": "true", "export": "true"},
    "distill": DISTILLED | {"cross_entropy_weight": 0.3},
    "zero": {"sharding": "gradients"},
    "dpo zero": DPO | {"sharding": "gradients", "reference": "teacher"},
    "kto zero": {"task": "kto", "data": "kto", "sharding": "gradients", "reference": "teacher"},
    "dpo stream": DPO
    | {"streaming": "true", "shuffle_window": 64, "reference": "teacher", "workers": 0},
    # A teacher whose heads are divided in another way
    "few heads": DISTILLED | {"model": "few"} | RECOMPUTED,
    "few heads dpo": DPO | {"model": "few", "reference": "one head"},
    "few heads self": DPO | {"model": "few"},
    "eight heads": {"model": "eight heads", "export": "true", "batch_size": 8},
    "adamw": LONG,
    "muon": LONG | {"optimizer": "muon"},
    "muon zero": LONG | {"optimizer": "muon", "sharding": "gradients"},
    "average zero": LONG | {"ema_decay": 0.5, "sharding": "gradients", "max_grad_norm": 0.1},
    "in backward": LONG | IN_BACKWARD,
    "lines in backward": LONG | IN_BACKWARD | LINES | {"ema_decay": 0.5},
    "windows": LONG | {"model": "windows", "ema_decay": 0.5, "activation_offload": "true"}
    | {"label_smoothing": 0.1, "z_loss": 1e-2},
    # Unscaled scores make rounding errors grow: after two steps they are those of other models
    "shared keys": LONG | {"model": "gemma4", "steps": 2} | RECOMPUTED,
    "shared keys zero": LONG | {"model": "gemma4", "steps": 2, "sharding": "gradients"},
    "streams": LONG | {"model": "gemma3n", "steps": 2, "activation_offload": "true"},
    "average": LONG | {"ema_decay": 0.5} | RECOMPUTED,
    "average of experts": LONG | {"ema_decay": 0.5, "router_aux_loss_coef": 0.5} | RECOMPUTED
    | {"model": "five experts"},
    "frozen": LONG | {"ema_decay": 0.5, "batch_size": 2} | FROZEN,
    "wide 8bit": LONG | {"optimizer": "adamw_8bit", "model": "wide"},
    "mixtral": MOE | {"model": "mixtral"},
    "qwen2_moe": MOE | {"model": "qwen2_moe", "eval_data": "held out"},
    "qwen3_moe": MOE,
    "moe of latents": LONG | {"ema_decay": 0.5, "model": "latents"} | RECOMPUTED,
    "lora of latents": LORA | DROPOUT | {"model": "latents", "batch_size": 8},
    "recurrences": LONG | {"ema_decay": 0.5, "model": "recurrences"} | RECOMPUTED,
    "lora of recurrences": LORA | DROPOUT | {"model": "recurrences", "batch_size": 8},
    "moe 8bit": MOE | {"optimizer": "adamw_8bit"},
    "moe muon": MOE | {"optimizer": "muon"},
    # A row on each of two ranks, or both on one: their micro-batches are not balanced alike
    "moe in backward": MOE | IN_BACKWARD | {"router_aux_loss_coef": 0},
    # Rows with padding on some ranks, and none on others
    "moe recomputed": MOE | {"packing": "false", "truncate": "true"} | RECOMPUTED,
    "moe dpo": MOE | DPO | {"reference": "qwen2_moe", "batch_size": 4},
    "lora dropout": LORA | DROPOUT,
    "lora dora": LORA | DROPOUT | DORA | RECOMPUTED,
    "lora ends": LORA | DORA | ENDS,
    "lora whole ends": LORA | ENDS
    | {"lora.targets": "[q_proj]", "lora.modules_to_save": "[embed_tokens, lm_head]"},
    "lora experts": ON_EXPERTS | {
        "lora.targets": "[experts.gate_up_proj, experts.down_proj, o_proj, shared_expert_gate]",
        "lora.rank_pattern": "{down_proj: 2}",
    },
    "lora dense experts": ON_EXPERTS | DROPOUT | RECOMPUTED,  # all that is dense
    "lora dora experts": ON_EXPERTS | DORA
    | {"lora.targets": "[q_proj]", "lora.modules_to_save": "[lm_head]"},
    "lora nf4 experts": ON_EXPERTS
    | {"lora.quantize": "nf4", "lora.targets": "[experts.down_proj, v_proj]"},
}  # fmt: skip
LOOSE = {  # tolerances of what is logged, and of weights
    # DPO's gradient is a small difference of two sums: on some CPUs 1.3e-5 is rounding
    **dict.fromkeys(("dpo", "dpo zero", "dpo stream"), (3 * TOLERANCE, 3 * TOLERANCE)),
    # Keys' biases have gradients of zero but for rounding: 1.1e-5 of AdamW's steps on a CPU
    "qwen2_moe": (TOLERANCE, 2 * TOLERANCE),
    # What is rounded the other way moves its weight a little
    "moe 8bit": (TOLERANCE, 1e-4),
    "wide 8bit": (1e-4, 1e-3),
}
OBJECTIVES = ["seen", "sft", "lines", "two heads", "lora", "dpo", "orpo", "kto", "grpo", "reward"]
OBJECTIVES += ["distill", "zero", "few heads", "few heads dpo"]
WAYS: dict[str, tuple[int, dict[str, int], list[str]]] = {  # ranks, what they share, kinds of runs
    "whole steps": (1, {}, ["weighted", "weighted sequence lines"]),  # in one micro-batch
    "context": (2, {"context": 2}, [*OBJECTIVES, "moe of latents"]),
    "two groups": (4, {"context": 2}, ["sft", "two heads", "dpo"]),
    "one row": (4, {"context": 4}, ["few heads", "few heads dpo", "two heads"]),
    "replicated rows": (4, {"replicate": 2, "context": 2}, ["lines"]),
    "tensor": (
        2, {"tensor": 2},
        ["seen", "lines", "five experts", "dpo", "kto", "distill", "reward", "reward-lora",
         "frozen", "wide 8bit", "lora dropout", "muon", "average zero"],
    ),
    # Of two kv heads each rank has one that another has, too
    "tensor of four": (4, {"tensor": 4}, ["muon", "in backward", "windows"]),
    "tensor of rows": (
        4, {"tensor": 2, "context": 2},
        ["lines", "five experts", "dpo", "reward", "few heads self", "windows"],
    ),
    "tensor replicas": (4, {"replicate": 2, "tensor": 2}, ["lines in backward"]),
    "fsdp": (
        2, {},
        ["sft", "seen", "dpo zero", "kto zero", "dpo stream", "shared keys", "shared keys zero",
         "streams", "weighted lines", "weighted sequences", "lora dropout", "lora ends",
         "lora nf4 experts", "reward-lora"],
    ),
    "fsdp of four": (4, {}, ["weighted", "weighted sequence lines"]),
    "replicas": (4, {"replicate": 2, "fsdp": 2}, ["adamw", "muon"]),
    "fsdp tensor": (
        4, {"fsdp": 2, "tensor": 2},
        ["average", "average of experts", "moe of latents", "recurrences", "lora of recurrences",
         "lora dropout", "lora dora", "lora ends", "lora whole ends", "muon", "muon zero",
         "average zero"],
    ),
    "expert": (
        2, {"expert": 2},
        [*FAMILIES, "moe 8bit", "moe dpo", "lora experts", "lora dense experts",
         "lora dora experts", "lora nf4 experts", "moe muon"],
    ),
    "expert of four": (4, {"expert": 2}, ["qwen3_moe"]),
    "expert all": (4, {"expert": 4}, ["qwen3_moe"]),
    "expert replicas": (4, {"replicate": 2, "expert": 2}, ["moe recomputed"]),
    "expert context": (4, {"context": 2, "expert": 2}, ["moe muon"]),
    "expert tensor": (
        4, {"tensor": 2, "expert": 4},
        ["qwen2_moe", "moe of latents", "moe dpo", "moe recomputed", "moe muon", "moe in backward",
         "lora experts", "lora of latents", "lora dense experts"],
    ),
    # Dense layers without FSDP, and experts that two ranks have
    "expert tensor alone": (4, {"tensor": 4, "expert": 2}, ["qwen2_moe", "lora experts"]),
    "eight all": (8, {"fsdp": 2, "context": 2, "tensor": 2}, ["eight heads"]),
    # Experts that two ranks of each replica have
    "eight every one": (
        8, {"replicate": 2, "context": 2, "tensor": 2, "expert": 2}, ["qwen3_moe"],
    ),
}  # fmt: skip
FAST = [
    ("fsdp", "sft"),
    ("fsdp", "weighted lines"),
    ("whole steps", "weighted"),
    ("context", "seen"),
    ("tensor", "seen"),
    ("tensor", "lora dropout"),
    ("fsdp", "shared keys"),
    ("expert", "qwen3_moe"),
    ("replicas", "adamw"),
]
CASES = FAST + [(w, k) for w, (*_, kinds) in WAYS.items() for k in kinds if (w, k) not in FAST]
RESUMED = [
    ("sft", "fsdp", "one"), ("sft", "one", "fsdp"), ("sft", "context", "one"),
    ("sft", "one", "one row"), ("adamw", "replicas", "fsdp"),
    ("muon", "replicas", "fsdp"), ("muon", "tensor of four", "one"),
    ("muon", "one", "fsdp tensor"), ("average zero", "fsdp tensor", "one"),
    ("average zero", "one", "fsdp tensor"),
    ("average of experts", "fsdp tensor", "one"), ("average of experts", "one", "tensor"),
    ("frozen", "tensor", "one"), ("frozen", "tensor", "tensor"), ("wide 8bit", "tensor", "one"),
    ("wide 8bit", "one", "fsdp tensor"), ("wide 8bit", "tensor", "tensor"),
    ("qwen2_moe", "expert tensor", "one"),
    ("qwen3_moe", "one", "expert"), ("qwen3_moe", "expert of four", "expert tensor"),
    ("moe 8bit", "expert", "one"), ("lora dropout", "one", "tensor"),
    ("lora dropout", "tensor", "one"), ("lora dora", "fsdp tensor", "one"),
    ("lora ends", "one", "tensor"), ("lora whole ends", "fsdp tensor", "one"),
    ("recurrences", "fsdp tensor", "one"),
    ("moe of latents", "one", "fsdp tensor"), ("moe of latents", "expert tensor", "one"),
    ("lora experts", "expert", "expert tensor"), ("lora experts", "expert tensor", "one"),
]  # fmt: skip


@pytest.fixture(scope="module")
def make(workspace) -> Any:
    """Trains a run in one of WAYS, or on one rank, unless a test has done it; returns its name."""
    root = workspace.root
    (root / "text.txt").write_text(" ".join(WORDS * 30))
    files = {
        "text": root / "text.txt",
        "pairs": preferences.write(root / "pairs.jsonl", preferences.pairs(9, 5)),
        "kto": preferences.write(root / "kto.jsonl", preferences.labeled(9, 5)),
        "grpo": preferences.write(root / "grpo.jsonl", preferences.rewarded(5)),
        "weighted": write_weighted(workspace.data),
        "weighted held out": write_weighted(workspace.held_out),
        "held out": f"[{{path: {workspace.held_out}, name: some}}]",
    }
    hooks = "[tests.train.watching:report, tests.train.watching:FirstAnswers]"
    watched = {"hooks": hooks, "return_logits": "true", "eval_return_logits": "false"}

    def resolve(name: str, value: Any) -> Any:
        if name in ("model", "reference", "teacher"):
            path = root / f"model {value}"
            return path if path.exists() else write_model(path, **MODEL_CHANGES[value])
        return files[value] if name in ("data", "eval_data") else value

    def run(way: str, kind: str, source: str | None = None) -> str:
        name = f"{kind}-{way}" if source is None else f"{source}-{way}"
        ranks, parallel, _ = WAYS.get(way, (1, {}, []))
        changes = {f"parallel.{dimension}": size for dimension, size in parallel.items()}
        if kind == "seen" and "tensor" not in parallel:
            changes |= watched
        if way == "whole steps":
            changes["micro_batch_size"] = 4
        if "in backward" in kind:
            shared = parallel.get("tensor", 1) * parallel.get("context", 1)
            changes["micro_batch_size"] = 2 * shared // ranks
        if source is not None:
            changes["resume"] = root / source / "checkpoints/step-00000002"
        values = SAME | {name: resolve(name, value) for name, value in KINDS[kind].items()}
        cache = {"TIGON_CACHE": f"{root}/cache-{way}"}  # references are computed anew
        report = {"REPORT": f"{root}/report-{way}"}
        return train_once(ranks, workspace.settings(name, **values | changes), **cache | report)

    return run


def assert_same(workspace, kind: str, one: str, other: str, first: int = 0) -> None:
    tolerance, weights = LOOSE.get(kind, (TOLERANCE, TOLERANCE))
    absolute = weights if LONG.items() <= KINDS[kind].items() or "moe" in kind else 0.0
    if LORA.items() <= KINDS[kind].items():
        weights, absolute = 10 * TOLERANCE, 1e-9  # relative to their size, or zeros
    keys = ("loss", "grad_norm") if kind == "moe in backward" else ()  # of other micro-batches
    assert_same_run(workspace, one, other, first, tolerance, weights, absolute, keys)


@pytest.mark.slow(first=len(FAST))
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("way", "kind"), CASES)
def test_ranks_match_one_process(workspace, make, way, kind):
    """Everything that is logged, and the weights of the run and of its exports."""
    assert_same(workspace, kind, make("one", kind), make(way, kind))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before", "after"), RESUMED)
def test_other_layouts_resume(workspace, make, kind, before, after):
    run = make(after, kind, make(before, kind))
    assert_same(workspace, kind, make("one", kind), run, 2)
    if before == after:
        assert_same_tensors(workspace.root / f"{kind}-{after}/hf", workspace.root / run / "hf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind"),
    [("fsdp", "shared keys"), ("expert tensor", "qwen2_moe"), ("expert tensor", "moe of latents"),
     ("fsdp tensor", "average"), ("fsdp tensor", "lora dora"), ("expert tensor", "lora experts")],
)  # fmt: skip
def test_converted_checkpoint_equals_export(workspace, make, way, kind, tmp_path):
    run = workspace.root / make(way, kind)
    merge, source = "lora" in kind, checkpoint.latest(run / "checkpoints")
    convert_checkpoint(source, str(tmp_path / "hf"), merge=merge)
    assert_same_tensors(run / "hf", tmp_path / "hf", atol=1e-6 * merge)
    if not merge:
        load_checkpoint(source)[0].save_pretrained(tmp_path / "loaded")
        assert_same_tensors(run / "hf", tmp_path / "loaded")


@pytest.mark.parametrize("way", ["context", "tensor", "fsdp"])
def test_evaluation_writes_the_same_files(workspace, make, way):
    runs = make("one", "seen"), make(way, "seen")
    for name in ("predictions-step-00000002.jsonl", "samples.jsonl"):
        expected, found = (
            [json.loads(line) for line in (workspace.root / run / name).read_text().splitlines()]
            for run in runs
        )
        assert len(expected) == len(found) > 0
        for old, new in zip(expected, found, strict=True):
            assert old.keys() == new.keys()
            assert {k: v for k, v in new.items() if k != "entropy"} == {
                k: v for k, v in old.items() if k != "entropy"
            }


def test_callbacks_of_each_rank_see_everything(workspace, make):
    """Where ranks have other rows, sums over ranks."""
    for way in ("one", "context", "fsdp"):
        make(way, "seen")
    expected = (workspace.root / "report-one-0").read_text()
    assert any(json.loads(line)["right"] for line in expected.splitlines())
    for rank in range(2):
        assert (workspace.root / f"report-context-{rank}").read_text() == expected
    sums = []
    for name in ("one-0", "fsdp-0", "fsdp-1"):
        sums.append(Counter())
        for line in (workspace.root / f"report-{name}").read_text().splitlines():
            row = json.loads(line)
            sums[-1][row["step"], row["training"]] += row["all"]
    assert sums[0] == sums[1] == sums[2]


def test_experts_that_ranks_cannot_share():
    said = r"expert=3 must divide .* 4 \(fsdp 2 x context 1 x tensor 2\)"
    with pytest.raises(ValueError, match=said):
        Parallel(tensor=2, expert=3).sizes(4)
    for config, said in (
        (EXPERTS, "2 ranks cannot share the 5 experts of a layer"),
        (LLAMA, "LlamaForCausalLM has no experts for 2 ranks"),
    ):
        model = MODELS[config["model_type"]].from_config(config, device="meta")
        with pytest.raises(ValueError, match=said):
            check_experts(model, 2)
