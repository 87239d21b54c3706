"""Parameter groups by name, and parameters that are frozen."""

import pytest
import torch

import tigon
from tests.support.small import EXPERTS, LLAMA, write_model
from tigon.models import MODELS
from tigon.train import load, main
from tigon.train.optim import build_optimizer

SETTINGS = ("run_dir=a", "model=m", "data=d", "lr=0.5", "optimizer=sgd", "weight_decay=0.25")
OTHERS = {
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "gemma3_text": {"query_pre_attn_scalar": 16, "head_dim": 16, "sliding_window": 8},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "olmo2": {"tie_word_embeddings": True},
}


def build(kind: str = "llama", **changes):
    torch.manual_seed(0)
    values = LLAMA | OTHERS[kind] | {"model_type": kind} | changes
    return MODELS[kind].from_config(values)


def optimizer_of(model, *groups: str) -> torch.optim.Optimizer:
    text = f"parameter_groups=[{', '.join(f'{{{group}}}' for group in groups)}]"
    return build_optimizer(model, load(None, [*SETTINGS, text]))


def test_stacked_biases_do_not_decay():
    model = build("gpt_oss")
    groups = optimizer_of(model).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        for p in group["params"]:
            matrix = p.dim() > 1 and "bias" not in names[id(p)]
            assert (group["weight_decay"] > 0) == matrix, names[id(p)]
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_the_first_group_that_matches_decides():
    """One step of SGD from a gradient of 1: w - lr (1 + decay w), seen for each parameter."""
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(
        model,
        "match: [model.embed_tokens.weight, lm_head.weight], weight_decay: 0",
        "match: 'model.layers.1.*.[qkv]_proj.*', lr: 2",
        "match: 'model.layers.1.*', lr: 0.25, weight_decay: 0.5",
        "match: '*.mlp.*', lr: 0",
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * group["lr_scale"]  # as the loop does at the peak
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        lr, decay = 0.5, 0.25
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            decay = 0.0
        elif name == "model.layers.1.self_attn.qkv_proj.weight":
            lr = 2.0
        elif "layers.1." in name:
            lr, decay = 0.25, 0.5
        elif ".mlp." in name:
            lr = 0.0
        decay = decay if p.dim() > 1 else 0.0
        torch.testing.assert_close(p.detach(), before[name] - lr * (1 + decay * before[name]))


@pytest.mark.parametrize(
    ("kind", "groups", "message"),
    [
        (
            "llama",
            ["match: '*.q_proj.*'"],
            r"groups\[0\]: '\*.q_proj.\*' matches model.layers.0.self_attn.q_proj.weight, "
            r"but not model.layers.0.self_attn.k_proj.weight, .*v_proj.weight, which is one "
            r"parameter with it: match all of it",
        ),
        (
            "llama",
            ["match: '*.norm.*'", "match: [model.norm.weight, '*.0.mlp.g*']"],
            r"parameter_groups\[1\]: .* matches model.layers.0.mlp.gate_proj.weight, but not "
            r"model.layers.0.mlp.up_proj.weight",
        ),
        (
            "qwen3_moe",
            ["match: '*.experts.[0-3].*'"],
            r"but not model.layers.1.mlp.experts.4.gate_proj.weight, "
            r"model.layers.1.mlp.experts.4.up_proj.weight, which",
        ),
        ("mixtral", ["match: '*.w1.*'"], r"but not .*\.w3\.weight"),
        (
            "llama",
            ["match: ['*.mlp.*', '*.down_prj.weight']"],
            r"'\*.down_prj.weight' matches no tensor; the nearest are model.layers.\*.mlp.down",
        ),
        ("llama", ["match: '*'", "match: '*.mlp.*'"], r"\[1\]: groups before it match all"),
        ("llama", ["match: '*', freeze: true"], "freeze all parameters: nothing is left to train"),
        (
            "llama",
            ["match: '*.mlp.*'", "match: '*norm*', weight_decay: 0.1"],
            r"groups\[1\]\.weight_decay=0.1 is for no matrix.*only model\.layers\.0\.inp",
        ),
        (
            "olmo2",
            ["match: lm_head.weight, freeze: true"],
            r"lm_head.weight is tied .*: name model.embed_tokens",
        ),
    ],
)
def test_patterns_that_cannot_be_followed(kind, groups, message):
    with pytest.raises(ValueError, match=message):
        optimizer_of(build(kind), *groups)


def test_experts_may_be_named_together_or_apart():
    for match in ("'*.mlp.experts.*'", "['*.experts.*.gate_proj.*', '*.experts.*.[ud]*_proj.*']"):
        model = build("qwen3_moe")
        optimizer_of(model, f"match: {match}, freeze: true")
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert frozen == [f"model.layers.1.mlp.experts.{n}_proj" for n in ("gate_up", "down")]
    stacked = build("qwen3_moe")
    optimizer_of(stacked, "match: '*.experts.gate_up_proj', freeze: true")
    assert [n for n, p in stacked.named_parameters() if not p.requires_grad] == frozen[:1]


def gradients(model, recompute: bool) -> dict[str, torch.Tensor | None]:
    model.train()
    model.activation_checkpointing = recompute
    torch.manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1, 8), device=model.device)
    model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


SMALL = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "tie_word_embeddings": False}


def assert_same_gradients(
    kind: str, recompute: bool, match: str, device: str = "cpu", tolerance: float = 0.0
) -> None:
    """Beside those of a model of which nothing is frozen."""
    expected = gradients(build(kind, **SMALL).to(device), recompute=False)
    model = build(kind, **SMALL).to(device)
    optimizer = optimizer_of(model, f"match: {match}, freeze: true")
    found = gradients(model, recompute)
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    assert 0 < len(left) < len(found)
    assert {name for name, g in found.items() if g is not None} == left
    for name in left:
        assert (found[name] - expected[name]).norm() <= tolerance * expected[name].norm(), name
    optimizer.step()


FROZEN_SETS = {
    "first": "['*embed_tokens*', 'model.layers.0.*']",
    "norms": "['*embed_tokens*', '*norm.weight']",
    "products": "['*_proj*', lm_head.weight]",
    "all but the ends": "['model.layers*', model.norm.weight]",
    "all but the head": "model.*",
}


def frozen_set(kind: str, which: str) -> str:
    if kind == "mixtral" and which == "products":  # w1, w2, w3
        return "['*_proj*', '*experts*', lm_head.weight]"
    return FROZEN_SETS[which]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("which", FROZEN_SETS)
@pytest.mark.parametrize("kind", [*OTHERS])
def test_frozen_parameters_change_no_other_gradient(kind, which, recompute):
    assert_same_gradients(kind, recompute, frozen_set(kind, which))


FROZEN = "{match: ['*embed_tokens*', 'model.layers.0.*'], freeze: true}"
RUN = {
    "optimizer": "muon",
    "adamw_lr": 3e-3,
    "lr": 0.02,
    "steps": 4,
    "save_every": 2,
    "keep_last": 0,
    "export": "true",
    "parameter_groups": f"[{FROZEN}, {{match: '*.experts.*', lr: 0.01, weight_decay: 0.1}}]",
}


def test_frozen_parameters_have_no_states(workspace, tmp_path):
    model = write_model(tmp_path / "experts", **EXPERTS)
    main(workspace.settings("frozen", model=model, **RUN))
    stored = workspace.tensors("frozen", 4, "optimizer")
    assert any(name.startswith("optimizer.momentum_buffer") for name in stored)
    assert not any(".layers.0." in name or "embed_tokens" in name for name in stored)
    before, after = (
        tigon.from_pretrained(path).state_dict() for path in (model, workspace.root / "frozen/hf")
    )
    assert after.keys() == before.keys()
    for name, weight in before.items():
        frozen = "layers.0." in name or "embed_tokens" in name or name == "lm_head.weight"
        assert torch.equal(after[name], weight) == frozen, name
