"""Models cut over ranks against whole ones: losses, norms of gradients, parameters, logits.

All families in one start of two ranks, and what four ranks have besides in another."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.models.tiny import UNSCALED
from tests.parallel.ranks import run_on_ranks, selected_cases
from tests.support.recompute import recompute_above
from tigon.distributed import collectives
from tigon.models import MODELS, CausalLM, LoraConfig
from tigon.models.pretrained.names import stored_tensors
from tigon.parallel import TensorParallel, shard_model, share_context
from tigon.parallel.tensor_parallel import check_tensor_ranks
from tigon.train.optim.clip import clip_gradients
from tigon.weights import ReplicaIndex

SIZES = {
    "vocab_size": 211,  # odd
    "hidden_size": 48,
    "intermediate_size": 52,  # 8 divides neither this nor its half
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 3,
}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 3}
MOE = {"num_experts": 5, "moe_intermediate_size": 22, **BALANCED}
WINDOW = {"sliding_window": 7}
CHUNKED = {"attention_chunk_size": 5, "floor_scale": 3, "num_local_experts": 4}
CHUNKED |= {"no_rope_layers": [1, 0], "num_experts_per_tok": 2, "intermediate_size_mlp": 52}
GROUPS = {
    "n_routed_experts": 6,
    "moe_intermediate_size": 22,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
LATENTS = GROUPS | {
    "num_key_value_heads": 8,
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
SHARED = {"shared_expert_intermediate_size": 28, **MOE}
DELTA = {
    "full_attention_interval": 2,
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 10,
}
GEMMA3N = {
    **WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA4 = GEMMA3N | {"global_head_dim": 12}
# By name, the model type and what differs
TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", WINDOW),
    "ministral": ("ministral", WINDOW),
    "ministral3": ("ministral3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", WINDOW),
    "gemma3": ("gemma3_text", WINDOW),
    "gemma3n": (
        "gemma3n_text",
        {
            **GEMMA3N,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 101,
            "laurel_rank": 7,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 101,
        },
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 5,
            "moe_intermediate_size": 22,
            "top_k_experts": 3,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4_unified": ("gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": True}),
    "muse_glimmer": ("muse_glimmer_text", WINDOW),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "exaone4": ("exaone4", {**WINDOW, "num_hidden_layers": 4}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"attention_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 5, **BALANCED, "clip_qkv": 0.9}),
    "llama4": ("llama4_text", {**CHUNKED, "interleave_moe_layer_step": 2}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "phi3": ("phi3", {"head_dim": 6}),  # packed in its files
    "seed_oss": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),  # norms over all heads together
    "olmo3": ("olmo3", WINDOW),
    "granite": ("granite", {"residual_multiplier": 0.7, "logits_scaling": 1.7}),
    "glm4": ("glm4", {}),
    "mixtral": ("mixtral", {"num_local_experts": 5, **BALANCED}),
    "qwen2_moe": ("qwen2_moe", SHARED),
    "qwen3_moe": ("qwen3_moe", {**MOE, "mlp_only_layers": [0]}),
    "granite_swa": ("granite_swa", WINDOW),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 5, "swiglu_limit": 0.5, **BALANCED, **WINDOW}),
    "deepseek_v3": ("deepseek_v3", LATENTS),
    "no latent of queries": ("deepseek_v3", LATENTS | {"q_lora_rank": None, "topk_group": 3}),
    "glm4_moe": ("glm4_moe", GROUPS | {"use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENTS),
    "mistral4": ("mistral4", LATENTS | {"attention_bias": True}),
    "qwen3_5": ("qwen3_5_text", {**DELTA, "attention_bias": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **SHARED}),
    "qwen3_next": ("qwen3_next", {**DELTA, **SHARED}),
}
CONV = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 6, "conv_bias": True}
TWO["lfm2"] = "lfm2", CONV
CONV_MOE = {"layer_types": CONV["layer_types"], "num_dense_layers": 1, "num_experts": 5}
CONV_MOE |= {"num_experts_per_tok": 3, "moe_intermediate_size": 22}
TWO["lfm2_moe"] = "lfm2_moe", CONV_MOE
FOUR = {
    "short convolutions": ("lfm2", CONV),
    "kv heads on two ranks each": ("llama", {"attention_bias": True}),
    "one kv head": ("qwen3", {"num_key_value_heads": 1}),
    "one norm of keys that two ranks have": ("olmo2", {}),
    "experts": ("qwen2_moe", SHARED),
    "one key head each": ("qwen3_next", {**DELTA, **SHARED}),
    "sinks and experts with biases": TWO["gpt_oss"],
}


def test_every_family_is_here():
    assert {model_type for model_type, _ in TWO.values()} == set(MODELS)


def random_model(model_type: str, changes: dict[str, Any]) -> CausalLM:
    """Its norms and biases are random, and its matrices large enough that no error hides."""
    torch.manual_seed(0)
    kind = MODELS[model_type]
    known = set(kind.config_class.__dataclass_fields__)
    values = {n: v for n, v in (SIZES | changes).items() if n in known}
    model = kind.from_config({"model_type": model_type, **values})
    with torch.no_grad():
        for name, p in stored_tensors(model).items():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.08))
            if model_type in UNSCALED and name.endswith("q_norm.weight"):
                p.mul_(0.2)
    return model.train()


def batches() -> list[dict[str, Tensor]]:
    """A padded batch, a packed row, and a padded one again; lengths that 2 does not divide."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for shape, packed in (((3, 9), False), ((1, 17), True), ((2, 7), False)):
        ids = torch.randint(4, SIZES["vocab_size"], shape, generator=draw)
        labels = ids.masked_fill(torch.rand(shape, generator=draw) < 0.3, -100)
        batch = {"input_ids": ids, "labels": labels}
        if packed:
            batch["position_ids"] = torch.cat([torch.arange(n) for n in (6, 1, 10)])[None]
        else:
            real = torch.arange(shape[1]) >= torch.tensor([[2], [0], [5]])[: shape[0]]
            batch |= {"attention_mask": real.long(), "labels": labels.masked_fill(~real, -100)}
        found.append(batch)
    return found


def compare(count: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, list[float]]:
    """Of each case, the largest differences."""
    mesh = init_device_mesh("cpu", (count,))
    found = {}
    for name, (model_type, changes) in cases.items():
        one = random_model(model_type, changes)
        cut = copy.deepcopy(one)
        shard_model(cut, mesh)
        own = torch.tensor(differences(one, cut))
        dist.all_reduce(own, dist.ReduceOp.MAX)
        found[name] = own.tolist()
    return found


def differences(one: CausalLM, cut: CausalLM) -> list[float]:
    """Of loss, gradients' norm and logits, relative where they exceed 1, and of parameters, over
    three steps."""
    tensor = cut.tensor_parallel
    models = {
        one: torch.optim.SGD(one.parameters(), 0.2),
        cut: torch.optim.SGD(cut.parameters(), 0.2),
    }
    worst = [0.0] * 4
    for step, batch in enumerate(batches()):
        loss, norm, logits = {}, {}, {}
        for model, optimizer in models.items():
            model.activation_checkpointing = step == 1
            with recompute_above(math.inf if step == 2 else 0):
                out = model(**batch, return_logits=step == 2)
                out.loss.backward()
            if model is cut:
                tensor.sum_gradients(cut)
                norm[model] = clip_gradients(cut, 0)
            else:
                given = [p.grad for p in one.parameters() if p.grad is not None]
                norm[model] = nn.utils.get_total_norm(given)
            loss[model] = out.loss.detach()
            with torch.no_grad():
                given = {n: x for n, x in batch.items() if n != "labels"}
                logits[model] = model(**given).logits if step < 2 else out.logits.detach()
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm[model])
            optimizer.step()
            optimizer.zero_grad()
        for i, values in enumerate((loss, norm, logits)):
            scale = max(1.0, float(values[one].abs().max()))
            worst[i] = max(worst[i], float((values[one] - values[cut]).abs().max()) / scale)
    whole = dict(one.named_parameters())
    for name, p in cut.named_parameters():
        worst[3] = max(
            worst[3],
            float((p.detach() - cut.shard_specs[name].take(whole[name].detach())).abs().max()),
        )
    return worst


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[float]]:
    results, names = {}, selected_cases(request, "case")
    for count, every in ((2, TWO), (4, FOUR)):
        cases = {name: every[name] for name in names if name in every}
        if cases:
            results |= run_on_ranks(count, compare, count, cases)[0]
    return results


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", [*TWO, *FOUR])
def test_a_cut_model_is_as_a_whole_one(found, case):
    loss, norm, logits, parameters = found[case]
    assert loss < 1e-5 and norm < 2e-5 and logits < 3e-5 and parameters < 1e-5, found[case]


def test_what_ranks_cannot_share_is_an_error():
    model = random_model("llama", {})
    with pytest.raises(ValueError, match="3 ranks cannot share 8 heads with 2 kv heads"):
        check_tensor_ranks(model, 3)
    sparse = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.5]}
    model = random_model("gemma3n_text", sparse | WINDOW)
    with pytest.raises(ValueError, match="2 ranks cannot share an MLP with activation_sparsity"):
        check_tensor_ranks(model, 2)
    delta = random_model("qwen3_5_text", {**DELTA, "num_attention_heads": 6})
    with pytest.raises(ValueError, match="3 ranks cannot share the 4 key heads of Gated DeltaNet"):
        check_tensor_ranks(delta, 3)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3}
    for model_type in ("llama", "qwen3_moe", "gpt_oss"):  # whose experts are transposed
        few = random_model(model_type, {"intermediate_size": 3, **sizes})
        with pytest.raises(ValueError, match="4 ranks cannot share the 3 units of an "):
            check_tensor_ranks(few, 4)


def test_a_cut_model_takes_no_new_adapter():
    """Its ranks would each begin with another one."""
    model = random_model("llama", {})
    model.tensor_ranks = collectives.Ranks("", 0, 2)
    with pytest.raises(ValueError, match="adapters cannot be added to a model loaded with mesh="):
        model.add_adapter(LoraConfig(rank=2))
    assert not model.adapters


class Others:
    """Ranks whose three gradients are small beside this one's."""

    def sum(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 2.0**-9
        return x


def test_sums_of_bfloat16_are_rounded_once():
    model = MODELS["llama"].from_config(SIZES, dtype=torch.bfloat16)
    tensor = object.__new__(TensorParallel)
    tensor.layout, tensor.replicated = model.layout(), {"model.norm.weight"}
    (part,) = tensor.layout["model.norm.weight"]
    tensor.layout["model.norm.weight"] = [replace(part, replica=ReplicaIndex(0, 4))]
    tensor.replica_groups = {4: Others()}  # type: ignore[dict-item]
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    tensor.sum_gradients(model)
    assert (model.model.norm.weight.grad == 1 + 2**-7).all()  # and not the 1 of three roundings


def errors() -> dict[str, str]:
    """What this rank raised."""
    mesh = init_device_mesh("cpu", (2,))
    cut = random_model("llama", {})
    shared = copy.deepcopy(cut)
    shard_model(cut, mesh)
    share_context(shared, mesh)
    found: dict[str, str] = {}
    for token in (SIZES["vocab_size"], -1):
        ids = torch.tensor([[5, token, 9, 7, 6, 8]])
        try:
            cut.model.embed_tokens(ids)  # behind the check of tokens on the host
        except IndexError:
            found[f"embedding of {token}"] = "IndexError"
        try:  # the second rank has no bad label
            shared(ids.clamp(5, 9), labels=ids)
        except ValueError as error:
            found[f"label {token}"] = str(error)
        dist.barrier()
    return found


def test_all_ranks_raise():
    first, second = run_on_ranks(2, errors)
    assert first == second
    assert first["embedding of 211"] == first["embedding of -1"] == "IndexError"
    for token in (211, -1):
        assert f"label {token} at [0, 0] is neither -100 nor in [0, 211)" in first[f"label {token}"]
