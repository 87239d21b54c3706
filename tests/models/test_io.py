"""Checkpoints in and out: the same tensors, bit for bit, as transformers sees them."""

import json
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

import tigon
from tests.models.sparse_cases import LATENTS, SHARED
from tests.models.tiny import CASES, FIRST, edit_config, load_reference, reference
from tigon.models import MODELS, CausalLM, from_pretrained

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARDED = "10KB"
IDS = torch.arange(80).view(2, 40)


def tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of all files, through the safetensors library."""
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(torch.uint8)

    assert a.keys() == b.keys()
    return all(a[k].dtype == b[k].dtype and torch.equal(bits(a[k]), bits(b[k])) for k in a)


def edit(directory: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> Path:
    """The checkpoint with other tensors and config keys."""
    content = tensors(directory)
    change(content)
    save_file({k: v.clone() for k, v in content.items()}, directory / "model.safetensors")
    edit_config(directory, **config)
    return directory


def tied(model: CausalLM) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


@torch.no_grad()
def assert_as_transformers(directory: Path, *, is_tied: bool) -> None:
    ours, theirs = from_pretrained(directory), load_reference(directory)
    assert tied(ours) == is_tied
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == is_tied
    expected = theirs(IDS).logits
    assert (ours(IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


ROUND_TRIPS = [
    *((model_type, case, torch.float32, "5GB") for model_type, case in FIRST),
    ("llama", "mlp_bias", torch.bfloat16, SHARDED),
    ("llama", "tied", torch.float16, "5GB"),
    ("llama", "pad row, tied", torch.bfloat16, SHARDED),
    ("llama", "one kv head", torch.float32, SHARDED),
]


@pytest.mark.parametrize(("model_type", "case", "dtype", "size"), ROUND_TRIPS)
def test_load_then_export(
    model_type: str, case: str, dtype: torch.dtype, size: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    theirs = reference(
        model_type, CASES[model_type][case], source, dtype=dtype, max_shard_size=size
    )
    ours = from_pretrained(source)
    assert ours.dtype == dtype
    ours.save_pretrained(target, max_shard_size=size)

    assert len(list(source.glob("*.safetensors"))) == len(list(target.glob("*.safetensors")))
    assert (target / "model.safetensors.index.json").exists() == (size == SHARDED)
    assert same(tensors(target), tensors(source))

    again, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert {key: len(found) for key, found in info.items()} == dict.fromkeys(
        ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"), 0
    )
    assert again.dtype == dtype
    assert same(again.state_dict(), theirs.state_dict())
    assert type(again) is type(theirs)
    reread = from_pretrained(target)
    assert same(reread.state_dict(), ours.state_dict())
    assert reread.config == ours.config
    for name in ("config.json", "model.safetensors"):
        if (path := target / name).exists():
            assert path.stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", ["auto", torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(source: torch.dtype, target: Any, tmp_path: Path) -> None:
    theirs = reference("llama", {"num_hidden_layers": 1}, tmp_path, dtype=source)
    dtype = source if target == "auto" else target
    expected = {name: t.to(dtype) for name, t in theirs.state_dict().items()}
    from_pretrained(tmp_path, dtype=target).save_pretrained(tmp_path / "out")
    assert same(tensors(tmp_path / "out"), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_a_dtype_may_be_a_text(tmp_path: Path) -> None:
    reference("llama", {"num_hidden_layers": 1}, tmp_path, dtype=torch.bfloat16)
    for text, dtype in (("float32", torch.float32), ("torch.float16", torch.float16)):
        assert from_pretrained(tmp_path, dtype=text).dtype == dtype
    for wrong in ("float8_e4m3fn", "save", "bf16", torch.int32, torch.int8, 32):
        with pytest.raises(TypeError, match=r"dtype must be .*bfloat16.*, not"):
            from_pretrained(tmp_path, dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(torch.nan, None), (-torch.inf, None), (7e4, torch.float16), (7e4, "float16")],
)
def test_weights_that_are_no_numbers_are_saved_with_a_warning(
    value: float, dtype: torch.dtype | str | None, tmp_path: Path
) -> None:
    reference("llama", {"num_hidden_layers": 1}, tmp_path / "source")
    model = from_pretrained(tmp_path / "source", dtype=torch.float32)
    with warnings.catch_warnings(action="error"):
        model.save_pretrained(tmp_path / "good", dtype=dtype)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = value
    expected = "torch.float16" if dtype else "torch.float32"
    with pytest.warns(UserWarning, match=rf"infinite in {expected} are saved: model.norm.weight$"):
        model.save_pretrained(tmp_path / "bad", dtype=dtype)
    stored = load_file(tmp_path / "bad/model.safetensors")["model.norm.weight"]
    assert not stored[3].isfinite() and stored[:3].isfinite().all()


def test_generation_config_travels(tmp_path: Path) -> None:
    reference("llama", {"eos_token_id": [2, 5]}, tmp_path / "a")
    content = {"eos_token_id": [2, 5], "top_p": 0.9, "do_sample": True}
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(content))
    from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == content
    (tmp_path / "a" / "generation_config.json").unlink()
    from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "c")
    read = load_reference(tmp_path / "c").generation_config
    assert (read.eos_token_id, read.bos_token_id) == ([2, 5], 1)


def test_an_object_of_transformers_is_written_as_what_it_sets(
    model: tigon.Llama, tmp_path: Path
) -> None:
    model.generation_config = GenerationConfig(top_k=7, eos_token_id=[5, 6])
    model.save_pretrained(tmp_path / "a")
    read = tigon.from_pretrained(tmp_path / "a").generation_config
    assert (read["top_k"], read["eos_token_id"]) == (7, [5, 6])


def without_prefix(content: dict[str, Tensor]) -> None:
    for name in list(content):
        content[name.removeprefix("model.")] = content.pop(name)


@pytest.mark.parametrize("change", [dict.keys, without_prefix])
def test_tie_with_another_head_in_the_file_is_no_tie(change: Any, tmp_path: Path) -> None:
    reference("llama", {}, tmp_path / "a")
    original = tensors(tmp_path / "a")
    edit(tmp_path / "a", change, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="is true, but lm_head and embed_tokens differ; they stay"):
        assert_as_transformers(tmp_path / "a", is_tied=False)
    with pytest.warns(UserWarning, match=f"{tmp_path / 'a'}: tie_word_embeddings"):
        from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert same(tensors(tmp_path / "b"), original)
    assert_as_transformers(tmp_path / "b", is_tied=False)


INV_FREQ = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(10) for i in (0, 1)}
FORMS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], bool]] = {
    "an equal head": (lambda content: content.update({HEAD: content[EMBEDDING]}), True),
    "only the head": (lambda content: content.update({HEAD: content.pop(EMBEDDING)}), True),
    "no prefix, tied": (without_prefix, True),
    "no prefix": (without_prefix, False),
    "rotary frequencies": (lambda content: content.update(INV_FREQ), False),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_files_that_transformers_reads_too(form: str, tmp_path: Path) -> None:
    change, tie = FORMS[form]
    reference("llama", {"tie_word_embeddings": tie}, tmp_path)
    assert_as_transformers(edit(tmp_path, change), is_tied=tie)


# Without a default in transformers, or for fewer layers than two
GIVEN = {"lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}}
DOUBLED = ("muse_glimmer_text",)  # transformers fills norms with ones that have 1 + weight


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("model_type", CASES)
def test_random_weights_are_transformers_own(model_type: str, tie: bool, tmp_path: Path) -> None:
    sizes = {"vocab_size": 999, "hidden_size": 120, "num_hidden_layers": 2, "head_dim": 20}
    sizes |= {"initializer_range": 0.05}
    known = {f.name for f in fields(MODELS[model_type].config_class)}
    sizes |= {key: True for key in ("attention_bias", "mlp_bias") if key in known}
    sizes |= {key: value for key, value in SHARED.items() if key in known}
    sizes |= LATENTS if "kv_lora_rank" in known else {}
    if "num_kv_shared_layers" in known:
        sizes["num_kv_shared_layers"] = 0
    overrides = sizes | {"tie_word_embeddings": tie, "pad_token_id": 7}
    overrides |= GIVEN.get(model_type, {})
    config = reference(model_type, overrides, tmp_path / "a").config
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(3)
    ours = MODELS[model_type].from_config(config.to_dict())
    embedding = ours.checkpoint_names.embedding
    assert tied(ours) == tie
    ours.save_pretrained(tmp_path / "b")
    theirs.save_pretrained(tmp_path / "c")
    found, wanted = tensors(tmp_path / "b"), tensors(tmp_path / "c")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if value.numel() == 1 or value.std() == 0:  # norms and biases
            value = value - 1 if model_type in DOUBLED and "layernorm" in name else value
            assert torch.equal(found[name], value), name
        else:
            slack = max(0.06, 3 * value.numel() ** -0.5)  # a shared expert's gate is one row
            x = found[name]
            if name.endswith("A_log"):  # of numbers from U(0.01, 16)
                x, value = x.exp() - 8, value.exp() - 8
            assert x.std().item() == pytest.approx(value.std().item(), rel=slack), name
            assert abs(x.mean()) < slack * value.std(), name
    assert not found[embedding][7].any()
    assert not wanted[embedding][7].any()
