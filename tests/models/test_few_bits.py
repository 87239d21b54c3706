"""Models whose frozen weights are in few bits: what they compute, hold, train, save and refuse."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon.kernels
from tests.models.adapters import adapted
from tests.models.fp8_checkpoints import DYNAMIC, to_fp8
from tests.models.test_adapters import gradients
from tests.models.test_parity import tokens
from tests.models.test_quantized import DELTA, EVEN, EXPERTS
from tests.models.tiny import CASES, reference
from tigon import from_pretrained
from tigon.layers import Linear
from tigon.models.pretrained import quantization
from tigon.models.pretrained.quantization import count_parameters, quantize_model, quantized_bytes

FAMILIES = {
    "llama": CASES["llama"]["grouped"],
    "qwen2": EVEN,  # biases
    "phi3": EVEN | {"pad_token_id": None},  # stored packed
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": EVEN  # rows in another order
    | {n: DELTA[n] for n in DELTA.keys() - EXPERTS.keys() if "expert" not in n},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for family, sizes in FAMILIES.items():
        reference(family, sizes, root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def dense(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the bases are in 4 bits, saved in 32."""
    root = tmp_path_factory.mktemp("dense")
    for family, base in bases.items():
        from_pretrained(base, quantize="nf4").save_pretrained(root / family)
    return {family: root / family for family in bases}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_matrix_of_the_checkpoint_is_quantised_for_itself(
    family: str, bases: dict[str, Path], dense: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, found = (load_file(p[family] / "model.safetensors") for p in (bases, dense))
    assert plain.keys() == found.keys()
    for name, tensor in plain.items():
        inside = re.search(r"_proj(_\w+)?\.weight$", name) and ".experts." not in name
        if not inside:  # and shared experts' gates, of which there are none here
            assert torch.equal(found[name], tensor), name
            continue
        layer = Linear(tensor.shape[1], tensor.shape[0], bias=False)
        made = quantization.NF4Weight([tensor.shape[0]], tensor.shape[1], torch.float32)
        made.allocate(torch.device("cpu"))
        made.store(tensor)
        layer.quantize(made)
        if (family, name.rpartition(".q_proj.")[1]) != ("qwen3_5_text", ".q_proj."):
            assert torch.equal(layer.values(), found[name]), name  # else in other groups of rows
        assert 0.02 < (found[name] - tensor).std() / tensor.std() < 0.2
    model = from_pretrained(bases[family], quantize="nf4")
    assert torch.equal(model(tokens()).logits, from_pretrained(dense[family])(tokens()).logits)
    again = from_pretrained(bases[family])
    assert count_parameters(again) == count_parameters(model)
    quantize_model(again, "nf4")  # a model that has values
    assert torch.equal(model(tokens()).logits, again(tokens()).logits)
    monkeypatch.setattr(quantization, "BATCH_BYTES", 1)  # matrix by matrix
    one = from_pretrained(bases[family], quantize="nf4")
    assert torch.equal(model(tokens()).logits, one(tokens()).logits)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"targets": ("q_proj", "down_proj")}])
def test_adapters_train_on_it(
    options: dict[str, Any], bases: dict[str, Path], dense: dict[str, Path]
) -> None:
    """As on the same numbers in 32 bits; with recomputation and offload too."""
    for family in ("llama", "qwen2"):
        expected = gradients(adapted(from_pretrained(dense[family]), **options))
        for recompute, offload in ((False, False), (True, False), (True, True)):
            model = adapted(from_pretrained(bases[family], quantize="nf4"), **options)
            model.activation_checkpointing, model.activation_offload = recompute, offload
            found = gradients(model)
            assert found.keys() == expected.keys()
            for name, grad in found.items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.kernel
def test_on_kernels(tmp_path: Path) -> None:
    reference("llama", FAMILIES["llama"] | {"num_hidden_layers": 1}, tmp_path)
    ids, model = tokens()[:1, :9], adapted(from_pretrained(tmp_path, quantize="nf4"))
    expected = gradients(model, ids)
    with tigon.kernels.use("triton"):
        found = gradients(model, ids)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_merging_adds_to_the_dequantised_weight(bases: dict[str, Path], tmp_path: Path) -> None:
    for options in ({}, {"dora": True}):
        model = from_pretrained(bases["llama"], quantize="nf4")
        adapted(model, targets=("q_proj", "o_proj"), **options)
        before = model(tokens()).logits
        model.merge_adapter()
        torch.testing.assert_close(model(tokens()).logits, before, rtol=1e-4, atol=1e-5)
        layer = model.model.layers[0]
        assert layer.self_attn.qkv_proj.quantized is None and not layer.self_attn.o_proj.lora
        assert layer.mlp.down_proj.quantized is not None
        model.save_pretrained(tmp_path / str(len(options)))
        again = from_pretrained(tmp_path / str(len(options)))
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_what_it_holds(bases: dict[str, Path]) -> None:
    model = from_pretrained(bases["qwen2"], quantize="nf4", dtype=torch.bfloat16)
    few = [m for m in model.modules() if isinstance(m, Linear)]
    numbers = sum(math.prod(m.weight_meta.shape) for m in few)
    tables = sum(m.quantized.tables.nbytes + m.quantized.places.nbytes for m in few)  # type: ignore
    assert quantized_bytes(model) - tables < numbers * (0.5 + 1 / 64 + 0.01)
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert not any("proj.weight" in name for name, _ in model.named_parameters())
    model.to("cpu", torch.bfloat16)  # nothing changes
    assert {b.dtype for n, b in model.named_buffers() if "steps" in n} == {torch.float32}
    twin = from_pretrained(bases["qwen2"], quantize="nf4", dtype=torch.bfloat16)
    twin.load_state_dict(copy.deepcopy(model).state_dict())
    assert torch.equal(twin(tokens()).logits, model(tokens()).logits)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    kinds = ("dynamic", "static")
    texts = (model.generate(tokens()[:, :9], cache_implementation=k, **how) for k in kinds)
    assert torch.equal(*texts)


def test_other_fp8_forms_and_scales(tmp_path: Path) -> None:
    reference("qwen3", EVEN, tmp_path, dtype=torch.bfloat16)
    to_fp8(tmp_path, (32, 16), DYNAMIC)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    mixed = tensors | {name: tensors[name].float().to(torch.float8_e5m2)}
    save_file(mixed, path)
    kept = from_pretrained(tmp_path, quantize="keep")
    mlps = [layer.mlp for layer in kept.model.layers]
    assert mlps[1].gate_up_proj.quantized is None and mlps[0].gate_up_proj.quantized is not None
    assert torch.equal(kept(tokens()).logits, from_pretrained(tmp_path)(tokens()).logits)
    broken = tensors[f"{name}_scale_inv"].clone()
    broken[1, 1] = math.nan
    save_file(tensors | {f"{name}_scale_inv": broken}, path)
    with pytest.raises(ValueError, match=r"up_proj.weight_scale_inv is .* for block \[1, 1\]"):
        from_pretrained(tmp_path, quantize="keep")


def test_refusals(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    unknown: Any = "int4"
    with pytest.raises(ValueError, match="quantize='int4' is not known"):
        from_pretrained(base, quantize=unknown)
    with pytest.raises(ValueError, match=r'quantize="keep": .* has no projections in fp8'):
        from_pretrained(base, quantize="keep")
    model = from_pretrained(base, quantize="nf4")
    for convert in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(ValueError, match=r"quantized .nf4. and are used in torch.float32"):
            convert()
        assert model.dtype == torch.float32
    with pytest.raises(ValueError, match=r"quantized .nf4. and cannot be trained: add_adapter"):
        model.requires_grad_()
    model.requires_grad_(False)
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][3, 5] = math.inf
    reference("llama", FAMILIES["llama"], tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.1.self_attn.qkv_proj.weight has values that are"):
        from_pretrained(tmp_path, quantize="nf4")


def test_beside_peft_and_bitsandbytes(tmp_path: Path) -> None:
    """Of columns that 64 divides: of others, such as 96, its CPU library mistakes the blocks."""
    bnb = pytest.importorskip("bitsandbytes")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    reference("llama", EVEN | {"intermediate_size": 128}, tmp_path / "base")
    ours = adapted(from_pretrained(tmp_path / "base", quantize="nf4"))
    ours.save_adapter(tmp_path / "adapter")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=how, dtype=torch.float32
    )
    assert any(isinstance(m, bnb.nn.Linear4bit) for m in theirs.modules())
    theirs = PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    for module in theirs.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.train()  # or it multiplies in bfloat16 on CPUs that can
    with torch.no_grad():
        expected = theirs(tokens()).logits
    torch.testing.assert_close(
        ours.eval()(tokens()).logits.detach(), expected, rtol=1e-3, atol=1e-3
    )
