"""Adapters: what is added, chosen, frozen and removed, and what is refused."""

import copy
import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tigon.kernels
from tests.models.adapters import adapted, near, trained
from tests.models.test_parity import tokens
from tests.models.tiny import CASES, reference
from tests.support.recompute import recompute_above
from tigon import LoraConfig, from_pretrained
from tigon.layers import Linear
from tigon.models import CausalLM
from tigon.models.adapters.lora import find_target_modules
from tigon.models.adapters.peft_config import match_patterns


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    reference("llama", CASES["llama"]["grouped"], directory)
    return directory


@pytest.fixture
def model(base: Path) -> CausalLM:
    return from_pretrained(base)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter") / "one"
    model = adapted(from_pretrained(base))
    model.save_adapter(directory)
    return directory


def test_base_paths_stay_and_only_the_adapter_trains(model: CausalLM) -> None:
    before = [name for name, _ in model.named_parameters()]
    adapted(model, targets=("q_proj", "gate_proj"))
    after = dict(model.named_parameters())
    assert [name for name in after if name in before] == before
    assert [name for name, p in after.items() if p.requires_grad] == [
        n for n in after if n not in before
    ]
    model(tokens(), labels=tokens()).loss.backward()
    assert {n for n, p in after.items() if p.grad is not None} == set(after) - set(before)
    model.delete_adapter("default")
    assert dict(model.named_parameters()).keys() == set(before)
    assert all(p.requires_grad for p in model.parameters())


def test_several_adapters(model: CausalLM, adapter: Path) -> None:
    plain = model(tokens()).logits
    model.load_adapter(adapter, "first")
    first = model(tokens()).logits
    model.add_adapter(LoraConfig(targets="o_proj"), "second")
    assert model.adapter_names == ["first", "second"]
    assert model.active_adapter == "second"
    assert torch.equal(model(tokens()).logits, plain)
    assert all(".second." in name for name in trained(model))
    model.set_adapter("first")
    assert torch.equal(model(tokens()).logits, first)
    with model.adapters_disabled():
        assert model.active_adapter is None
        assert torch.equal(model(tokens()).logits, plain)
        with pytest.raises(ValueError, match="no adapter is active"):
            model.save_adapter(adapter.parent / "none")
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, first)
    model.set_adapter(None)
    assert torch.equal(model(tokens()).logits, plain)
    model.merge_adapter("first")
    near(model(tokens()).logits, first)
    assert model.adapter_names == ["second"]


@pytest.mark.slow
@pytest.mark.kernel
def test_kernels_and_recomputation(base: Path) -> None:
    """On Triton's path inputs are computed again, and blocks: with the same bits."""
    found = []
    for recompute, least in ((False, math.inf), (False, 0), (True, 0), (2, math.inf)):
        model = adapted(from_pretrained(base))
        model.activation_checkpointing = recompute
        with tigon.kernels.use("triton"), recompute_above(least):
            found.append(gradients(model, tokens()[:1, :9]))
    for others in found[1:]:
        assert all(torch.equal(grad, found[0][name]) for name, grad in others.items())
    expected = gradients(adapted(from_pretrained(base)), tokens()[:1, :9])
    assert found[0].keys() == expected.keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def gradients(model: CausalLM, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    ids = tokens() if ids is None else ids
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.kernel
def test_the_base_may_learn_beside_its_adapter(base: Path) -> None:
    found = []
    for least in (math.inf, 0):
        with tigon.kernels.use("triton"), recompute_above(least):
            model = adapted(from_pretrained(base)).requires_grad_(True)
            found.append(gradients(model, tokens()[:1, :9]))
    for name, expected in found[0].items():
        near(found[1][name], expected, name)


def test_in_16_bits_adapters_are_fp32_and_merged_once(base: Path) -> None:
    model = adapted(from_pretrained(base, dtype="bfloat16"))
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    exact = adapted(from_pretrained(base, dtype="bfloat16").float())
    exact.merge_adapter()
    model.merge_adapter()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


def test_in_16_bits_lengths_are_not_rounded(base: Path) -> None:
    """Beside 1.01, bfloat16 has 1.0078 and 1.0156."""
    model = from_pretrained(base, dtype="bfloat16")
    model.add_adapter(LoraConfig(rank=4, dora=True))
    layer = model.get_submodule("model.layers.0.mlp.gate_up_proj")
    assert isinstance(layer, Linear)
    torch.manual_seed(0)
    x = torch.randn(256, layer.in_features, dtype=torch.bfloat16)
    with torch.no_grad():
        before = layer.product(x).float()
        for name, p in trained(model).items():
            if "magnitude" in name:
                p *= 1.01
        after = layer.product(x).float()
    assert ((after * before).sum() / before.square().sum()).item() == pytest.approx(1.01, abs=5e-4)


def test_a_model_with_adapters_is_not_exported_without_them(
    model: CausalLM, tmp_path: Path
) -> None:
    adapted(model)
    with pytest.raises(ValueError, match="merge_adapter"):
        model.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_replace_takes_adapters_alone(model: CausalLM, adapter: Path, tmp_path: Path) -> None:
    adapted(model)
    model.save_adapter(tmp_path / "it")
    with pytest.raises(FileExistsError, match="replace=True"):
        model.save_adapter(tmp_path / "it")
    model.save_adapter(tmp_path / "it", replace=True)
    (tmp_path / "it" / "model.safetensors").write_text("mine")
    model.save_adapter(tmp_path / "it", replace=True)
    assert (tmp_path / "it" / "model.safetensors").read_text() == "mine"
    (tmp_path / "it" / "adapter_config.json").unlink()
    with pytest.raises(FileExistsError, match=r"holds files and no adapter_config\.json"):
        model.save_adapter(tmp_path / "it", replace=True)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 0}, "rank=0"),
    "above every matrix": ({"rank": 10**8}, "rank=100000000 of an adapter is above 96, the rank"),
    "alpha": ({"alpha": math.nan}, "alpha=nan"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\]=0"),
    "target": ({"targets": ("q_proj", "query")}, "targets='query' matches no projection of Llama"),
    "no targets": ({"targets": ()}, "targets is empty"),
    "alpha pattern": ({"alpha_pattern": {"*.layers.9.*": 2}}, "alpha_pattern='*.layers.9"),
    "saved": ({"modules_to_save": "norm"}, "modules_to_save='norm'"),
    "negative dropout": ({"dropout": -0.1}, r"dropout=-0.1 is not in \[0, 1\)"),
    "a text for a flag": ({"dora": "false"}, "dora='false' is neither True nor False"),
    "both": (
        {"targets": ("lm_head", "q_proj"), "modules_to_save": "lm_head"},
        "lm_head is in targets and in modules_to_save",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(case: str, model: CausalLM) -> None:
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        model.add_adapter(LoraConfig(**options))
    assert not model.adapter_names
    assert all(p.requires_grad for p in model.parameters())


def test_all_linear_and_more(model: CausalLM) -> None:
    every = {place.name for place in find_target_modules(model) if place.linear}
    assert not every & {"model.embed_tokens", "lm_head"}
    for own, others in {"lm_head": every | {"lm_head"}, "q_proj": every}.items():
        model.add_adapter(LoraConfig(rank=2, targets=("all-linear", own)), own)
        stored = {part.name for n in trained(model) for part in model.layout()[n]}
        assert {name.partition(".lora_")[0] for name in stored} == others
        model.delete_adapter(own)


def test_a_rank_above_some_matrices(model: CausalLM) -> None:
    model.add_adapter(LoraConfig(rank=96, targets=("q_proj", "k_proj")))
    adapter = "model.layers.0.self_attn.qkv_proj.lora.default"
    assert model.get_parameter(f"{adapter}.lora_B_k_proj").shape == (40, 96)


def test_packed_families(tmp_path: Path) -> None:
    reference("phi3", CASES["phi3"]["plain"], tmp_path)
    message = "its projections are embed_tokens, qkv_proj, o_proj, gate_up_proj"
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path).add_adapter(LoraConfig(targets="q_proj"))


def test_wrong_names(model: CausalLM) -> None:
    for name in ("", "a.b", "train", "a/b", 3):
        with pytest.raises(ValueError, match="name"):
            model.add_adapter(name=name)  # type: ignore[arg-type]
    adapted(model)
    with pytest.raises(ValueError, match="delete_adapter"):
        adapted(model)
    wrong: dict[Any, str] = {"other": "there are default", ("a", "b"): "is not a name: give one of"}
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            model.set_adapter(name)
    assert model.active_adapter == "default"
    with pytest.raises(ValueError, match=r"a tuple of names, \('q_proj', 'v_proj'\)"):
        LoraConfig(targets="q_proj, v_proj")
    assert LoraConfig(targets="model.layers.[0,1].*").targets == ("model.layers.[0,1].*",)
    with pytest.raises(TypeError, match="LoraConfig"):
        model.add_adapter({"r": 8}, "two")  # type: ignore[arg-type]


def edit(adapter: Path, target: Path, **changes: Any) -> Path:
    """A copy with other settings; None takes one away."""
    target.mkdir()
    values = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (target / "adapter_config.json").write_text(json.dumps(values))
    (target / "adapter_model.safetensors").write_bytes(
        (adapter / "adapter_model.safetensors").read_bytes()
    )
    return target


FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "ADALORA"}, "peft_type 'ADALORA' is not LORA"),
    "qalora": ({"use_qalora": True}, "use_qalora=True is not supported"),
    "bias": ({"bias": "all"}, "bias='all'"),
    "experts": ({"target_parameters": ["mlp.experts.up"]}, "matches no experts of this Llama"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    "to come": ({"use_new_thing": 2}, "use_new_thing=2 is not supported"),
    "rank": ({"r": 3}, r"lora_A.weight is \[4, 96\], not \[3, 96\]"),
    "patterns": ({"rank_pattern": [1]}, "rank_pattern"),
    "no pattern": ({"alpha_pattern": {"(": 3}}, "not a regular expression"),
    "text for dora": ({"use_dora": "no"}, "use_dora='no' is neither true nor false"),
    "saved, not there": (
        {"modules_to_save": ["lm_head"]},
        "missing: base_model.model.lm_head.weight",
    ),
}


@pytest.mark.parametrize("case", FEATURES)
def test_what_files_ask_for_and_cannot_have(
    case: str, model: CausalLM, adapter: Path, tmp_path: Path
) -> None:
    changes, message = FEATURES[case]
    plain = model(tokens()).logits
    with pytest.raises(ValueError, match=message) as error:
        model.load_adapter(edit(adapter, tmp_path / "it", **changes))
    assert str(tmp_path / "it") in str(error.value)
    assert not model.adapter_names
    assert torch.equal(model(tokens()).logits, plain)
    assert all(p.requires_grad for p in model.parameters())


def test_tensors_that_do_not_fit(model: CausalLM, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.self_attn.v_proj.lora_"

    def refused(message: str, changed: dict[str, torch.Tensor]) -> None:
        target = edit(adapter, tmp_path / str(len(list(tmp_path.iterdir()))))
        save_file(changed, target / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            model.load_adapter(target)
        assert not model.adapter_names
        assert dict(model.named_parameters()).keys() == model.layout().keys()

    b = tensors[stem + "B.weight"]
    refused("NaN.*v_proj.lora_B", tensors | {stem + "B.weight": b.log()})
    refused(
        r"v_proj.lora_B.weight is \[39, 4\], not", tensors | {stem + "B.weight": b[:39].clone()}
    )
    refused(
        "1 missing: .*v_proj.lora_B", {n: t for n, t in tensors.items() if n != f"{stem}B.weight"}
    )
    refused("v_proj.lora_C", tensors | {stem + "C.weight": b.clone()})
    fewer = {n: t for n, t in tensors.items() if "layers.2" not in n}
    pattern = r".*\.(q|k|v|o|gate|up|down)_proj"
    target = edit(adapter, tmp_path / "pattern", target_modules=pattern)
    model.load_adapter(target)
    model.delete_adapter("default")
    save_file(fewer, target / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has none for 'model\.layers\.2"):
        model.load_adapter(target)
    deeper = {n.replace("layers.1", "layers.7"): t for n, t in tensors.items()}
    refused("is for 'model.layers.7.*its 3 layers", deeper)
    refused("no tensor of it is named lora_A", {"x": b})
    refused("has none for 'model.layers.2.self_attn.q_proj'", fewer)


def test_patterns_mean_what_they_mean_to_peft() -> None:
    """The first that fits, as a regular expression of all of a name or of what follows a dot."""
    names = [f"model.layers.{i}.{n}" for i in (1, 11) for n in ("attn.q_proj", "mlp.up", "q_proj")]
    for patterns in (
        ["q_proj", r"layers\.1\..*"],
        [r"layers\.1\..*", "q_proj", "attn.q_proj"],
        ["proj", "layers.1..mlp.up", "attn.q.proj", r"11\.mlp\.up"],
        [r"1\.q_proj", "1.q_proj", "model.layers.1.mlp.up", ".*up", "(?:11|1).q_proj"],
        [r"(?!.*attn)model\.layers\.\d+\.(?:q_proj|(mlp\.)+up)", "q_proj"],
    ):
        values = {pattern: i for i, pattern in enumerate(patterns)}
        found = match_patterns({"a": values}, "a", int, names)
        for name in names:
            fits = (i for p, i in values.items() if re.fullmatch(rf"(.*\.)?({p})", name))
            assert found.get(name, -1) == next(fits, -1), (name, patterns)


def test_an_adapter_of_another_base(adapter: Path, tmp_path: Path) -> None:
    reference("llama", CASES["llama"]["plain"], tmp_path)
    with pytest.raises(
        ValueError, match=r"does not fit an adapter of this Llama:\n  12 of .*q_proj.lora_B"
    ):
        from_pretrained(tmp_path).load_adapter(adapter)


@pytest.mark.parametrize(
    ("said", "warns"),
    [
        ("somebody/other-base", True),
        ("\0" + "x" * 9999, True),
        ("{base}-run/{name}", True),  # as runs/b/hf is another than runs/a/hf
        ("{base}", False),
        ("somebody/{name}", False),
        ("/hub/models--somebody--{name}/snapshots/0a1b", False),
        (None, False),
    ],
)
def test_the_name_of_another_base(
    said: str | None, warns: bool, base: Path, adapter: Path, tmp_path: Path
) -> None:
    Path(f"{base}-run/{base.name}").mkdir(parents=True, exist_ok=True)
    said = said and said.replace("{base}", str(base)).replace("{name}", base.name)
    it = edit(adapter, tmp_path / "it", base_model_name_or_path=said)
    known, unknown = from_pretrained(base), from_pretrained(base)
    unknown.config = replace(unknown.config, source=type(unknown.config.source)())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unknown.load_adapter(it)
        assert not caught
        known.load_adapter(it)
    assert len(caught) == warns
    assert torch.equal(known(tokens()).logits, unknown(tokens()).logits)
    if warns and said:
        text = str(caught[0].message)
        assert ascii(said)[1:80] in text and str(base) in text and str(it) in text
        assert caught[0].filename == __file__


def test_places_without_an_adapter(model: CausalLM, base: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no adapter"):
        model.load_adapter(base)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="can run code"):
        model.load_adapter(tmp_path)


def test_a_row_of_zeros_has_no_direction_for_dora(model: CausalLM) -> None:
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[3] = 0
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: a row of .* is all zeros"):
        model.add_adapter(LoraConfig(rank=2, dora=True))
    assert not model.adapters and all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 7] = 0
    with pytest.raises(ValueError, match=r"model\.embed_tokens: a column is all zeros"):
        model.add_adapter(LoraConfig(rank=2, dora=True, targets="embed_tokens"))
    model.add_adapter(LoraConfig(rank=2, dora=True, targets=("q_proj", "gate_proj")))
