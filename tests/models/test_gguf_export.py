"""GGUF files of models: byte for byte the converter's, read again, and run by llama.cpp."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import tigon
from tests.models.dense_cases import WINDOW, YARN
from tests.models.gguf_files import write_gguf
from tests.models.sparse_cases import EXPERTS, SHARED
from tests.models.test_gguf import IDS, MODELS, SCALE
from tests.models.tiny import reference
from tests.tokenizer.conftest import byte_fallback, byte_level
from tigon.models import MODELS as ZOO
from tigon.models.pretrained.convert import convert_pretrained
from tigon.tokenizer import Tokenizer
from tigon.weights import Repository, entries, gguf_write
from tigon.weights.entries import row_chunks

__all__ = ["byte_fallback", "byte_level"]
# llama.cpp wants heads of hidden_size together in these
SQUARE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2}
CASES = {
    name: (kind, sizes | SQUARE if kind in ("qwen2", "qwen2_moe") else sizes)
    for name, (kind, sizes, _) in MODELS.items()
}
# Rows of whole blocks of 32 values, and one size that is none
BLOCKS = {
    "llama": SQUARE | {"intermediate_size": 72},
    "qwen2_moe": SHARED | SQUARE | {"moe_intermediate_size": 32},
}


def tensors(path: Path) -> dict[str, tuple[Kind, list[int], bytes]]:
    """Type, shape and bytes of every tensor of a file."""
    found = gguf.GGUFReader(path).tensors
    return {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in found}


def metadata(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields.items()
    return {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    reference("llama", {"num_hidden_layers": 1}, directory)
    return directory


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_as_the_converter_writes_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "CHUNK", 5_000)  # pieces of few rows
    model_type, sizes = CASES[case]
    reference(model_type, sizes, tmp_path)
    model = tigon.from_pretrained(tmp_path)
    model.save_gguf(tmp_path / "ours.gguf")
    write_gguf(tmp_path, tmp_path / "theirs.gguf")
    ours, theirs = tensors(tmp_path / "ours.gguf"), tensors(tmp_path / "theirs.gguf")
    ours_freqs, freqs = (
        np.frombuffer(t.pop("rope_freqs.weight", (0, [], b""))[2], dtype=np.float32)
        for t in (ours, theirs)
    )
    assert ours == theirs
    np.testing.assert_allclose(ours_freqs, freqs, rtol=1e-6)  # the converter computes in fp32
    again = tigon.from_pretrained(tmp_path / "ours.gguf")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    convert_pretrained(Repository(tmp_path), tmp_path / "copied.gguf", ZOO, gguf="auto")
    assert (tmp_path / "copied.gguf").read_bytes() == (tmp_path / "ours.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("model_type", BLOCKS)
def test_types(model_type: str, kind: str, tmp_path: Path) -> None:
    """Values are rounded once; rows of no whole blocks, vectors and routers are not quantized."""
    reference(model_type, BLOCKS[model_type], tmp_path)
    model = tigon.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_gguf(tmp_path / "m.gguf", dtype=kind)
    model.save_pretrained(tmp_path / "bfloat16")
    plain = {"float16": Kind.F16, "bfloat16": Kind.BF16, "q8_0": Kind.Q8_0}[kind]
    write_gguf(tmp_path / "bfloat16", tmp_path / "exact.gguf")
    exact, found = tensors(tmp_path / "exact.gguf"), tensors(tmp_path / "m.gguf")
    kinds = set()
    for name, (_, shape, content) in exact.items():
        values = np.frombuffer(content, dtype=np.float32).reshape(shape[::-1])
        expected = plain if len(shape) > 1 and "gate_inp" not in name else Kind.F32
        expected = Kind.F16 if expected == Kind.Q8_0 and shape[0] % 32 else expected
        kinds.add(expected)
        assert found[name] == (expected, shape, gguf.quants.quantize(values, expected).tobytes())
    uneven = {Kind.F16} if kind == "q8_0" else set()
    assert kinds == {plain, Kind.F32} | uneven
    file_type = gguf.LlamaFileType[f"MOSTLY_{plain.name}"]
    assert metadata(tmp_path / "m.gguf")["general.file_type"] == file_type
    if kind == "bfloat16":
        again = tigon.from_pretrained(tmp_path / "m.gguf")
        assert again.dtype == torch.bfloat16
        own = model.state_dict()
        assert all(torch.equal(t, own[name]) for name, t in again.state_dict().items())


@torch.no_grad()
def test_a_context_no_longer_than_a_window_that_the_format_lacks(tmp_path: Path) -> None:
    reference("mistral", {"sliding_window": 9}, tmp_path)
    model = tigon.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="context_length is 9 in the file, not 24"):
        model.save_gguf(tmp_path / "m.gguf")
    again = tigon.from_pretrained(tmp_path / "m.gguf")
    assert again.config.max_position_embeddings == 9
    assert torch.equal(again(IDS[:, :9]).logits, model(IDS[:, :9]).logits)


LONG = {"short_factor": [1.0] * 10, "long_factor": [2.0] * 10, "factor": 4.0}
LONG |= {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": ("olmo2", {}, "'olmo2' cannot be exported to GGUF, only language models of type"),
    "untied": (
        "gemma2",
        {"tie_word_embeddings": False},
        "has a head that is the embedding: tie_word",
    ),
    "tied": ("qwen2_moe", SQUARE | {"tie_word_embeddings": True}, "has a head of its own: tie_wo"),
    "output bias": ("qwen3", {"attention_bias": True}, "self_attn.o_proj.bias has no place in ll"),
    "heads": ("qwen2", {"head_dim": 20}, "wants heads of hidden_size=96 dims together"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' has no place"),
    "routing": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}, "norm_topk_prob=False has no"),
    "dense layers": ("qwen2_moe", SQUARE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    "scale": ("gemma2", WINDOW | {"query_pre_attn_scalar": 31}, "query_pre_attn_scalar=31"),
    "softcap": ("gemma2", SCALE | {"attn_logit_softcapping": None}, "attn_logit_softcapping=None"),
    "windows": (
        "gemma3_text",
        WINDOW | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
        "sliding window of layer 0 is None, where llama.cpp has 7",
    ),
    "biases": ("gemma", {"attention_bias": True}, "self_attn.o_proj.bias has no place in llama"),
    "longrope": ("llama", {"rope_parameters": LONG}, "rope_type 'longrope', whose parameters"),
    "betas": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}},
        "rope_type 'yarn', whose parameters.*'beta_fast': 16.0",
    ),
    "attention factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.5}},
        "rope_type 'yarn', whose parameters.*'attention_factor'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_format_has_no_place_for(case: str, tmp_path: Path) -> None:
    model_type, sizes, message = REFUSED[case]
    tiny = {"num_hidden_layers": 1} if case != "windows" else {}
    reference(model_type, tiny | sizes, tmp_path / "a")
    model = tigon.from_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match=message) as error:
        model.save_gguf(tmp_path / "m.gguf")
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["a"]


def test_calls_that_are_refused(small: Path, tmp_path: Path) -> None:
    model = tigon.from_pretrained(small)
    (tmp_path / "a.gguf").touch()
    for name, options, message in (
        ("a.gguf", {}, "a.gguf exists: remove it"),
        ("", {}, "is a directory: name a file"),
        ("b.gguf", {"dtype": "int8"}, "dtype='int8' is not written to GGUF files: use float32"),
        ("b.gguf", {"dtype": torch.float64}, "torch.float64 is not written"),
    ):
        with pytest.raises((ValueError, FileExistsError), match=message):
            model.save_gguf(tmp_path / name, **options)
    model.add_adapter(tigon.LoraConfig(rank=2))
    with pytest.raises(
        ValueError, match=r"has adapters \(default\), which .* merge_adapter adds one to"
    ):
        model.save_gguf(tmp_path / "b.gguf")
    model.delete_adapter("default")
    model.model.norm.weight.data[3] = 1e6
    model.save_gguf(tmp_path / "a.gguf", dtype="float16", replace=True)  # vectors are fp32
    before = (tmp_path / "a.gguf").read_bytes()
    for bad, kind in ((1e6, "F16"), (torch.nan, "Q8_0"), (1e7, "Q8_0"), (torch.inf, "BF16")):
        model.lm_head.weight.data[5, 7] = bad
        dtype = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "q8_0")
        with pytest.raises(ValueError, match=rf"output.weight has values that .* in {kind}"):
            model.save_gguf(tmp_path / "a.gguf", dtype=dtype, replace=True)
    assert (tmp_path / "a.gguf").read_bytes() == before and os.listdir(tmp_path) == ["a.gguf"]


def test_a_sequence_classifier_is_refused(tmp_path: Path, small: Path) -> None:
    edit = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 2}
    config = tigon.from_pretrained(small).config.to_dict() | edit
    model = tigon.Llama.from_config(config)
    with pytest.raises(ValueError, match="models that score sequences cannot be exported"):
        model.save_gguf(tmp_path / "m.gguf")


def test_pieces_are_small(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a matrix: the model is not in memory twice."""
    sizes = []

    def chunks(units: int, unit_bytes: int) -> Any:
        pieces = list(row_chunks(units, unit_bytes))
        sizes.extend(rows * unit_bytes for _, rows in pieces)
        return pieces

    monkeypatch.setattr(entries, "CHUNK", 10_000)
    monkeypatch.setattr(gguf_write, "row_chunks", chunks)
    tigon.from_pretrained(small).save_gguf(tmp_path / "m.gguf")
    assert max(sizes) <= 10_000 < 211 * 96 * 4


# Tokenizers

TEXTS = (
    "the capital of the country",
    "def answer(question: str) -> str:\n    return 1",
    "naïve 🦙 你好",
    "The assistant's question\n\n\nthinks ",
)


def exported(tokenizer: Tokenizer, root: Path, **sizes: Any) -> Path:
    """The GGUF file of a tiny model with this tokenizer and some unused rows."""
    reference("llama", {"vocab_size": len(tokenizer) + 7, "num_hidden_layers": 1} | sizes, root)
    tigon.from_pretrained(root).save_gguf(root / "m.gguf", tokenizer=tokenizer)
    return root / "m.gguf"


def test_a_byte_level_tokenizer(byte_level: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(byte_level)
    tokenizer.add_tokens(["<|tool|>", " spaced"])
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer.use_chat_template(template)
    found = metadata(exported(tokenizer, tmp_path, eos_token_id=[9, 2, 5]))
    key = "tokenizer.ggml."
    tokens, kinds = found[f"{key}tokens"], found[f"{key}token_type"]
    backend = tokenizer.backend
    assert tokens[: len(tokenizer)] == [backend.id_to_token(i) for i in range(len(tokenizer))]
    assert tokens[len(tokenizer)] == f"[PAD{len(tokenizer)}]" and len(tokens) == len(tokenizer) + 7
    special = backend.get_added_tokens_decoder()
    assert [kinds[i] for i in (5, 20)] == [3, 1] and kinds[-7:] == [5] * 7
    assert [kinds[i] for i in special] == [3 if t.special else 4 for t in special.values()]
    assert found[f"{key}model"] == "gpt2" and found[f"{key}pre"] == "gpt-2"
    assert found["tokenizer.chat_template"] == template.read_text()
    ends = [found[f"{key}{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert ends == [2, 9, 5]  # the tokenizer's own first
    assert (found[f"{key}bos_token_id"], found[f"{key}padding_token_id"]) == (1, 3)
    assert found[f"{key}add_bos_token"] and found[f"{key}add_eos_token"]
    merges = backend.to_str()
    assert len(found[f"{key}merges"]) > 50 and all(
        len(m.split()) == 2 for m in found[f"{key}merges"]
    )
    assert merges
    again = tigon.from_pretrained(tmp_path / "m.gguf").config
    assert (again.eos_token_id, again.bos_token_id, again.pad_token_id) == ([2, 9, 5], 1, 3)


def test_special_tokens_without_a_place(byte_level: Path, tmp_path: Path) -> None:
    """A kind of token that the format lacks is left out; of ends that it lacks, a line tells."""
    shutil.copytree(byte_level, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    tokens = {"cls_token": "<s>", "mask_token": "<pad>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | tokens))
    tokenizer = Tokenizer.from_pretrained(tmp_path / "tokenizer")
    with pytest.warns(UserWarning, match=r"3 tokens that end a text, .* leaves out 7, 8$") as told:
        found = metadata(exported(tokenizer, tmp_path, eos_token_id=[9, 2, 5, 7, 8]))
    assert told[0].filename == __file__
    names = ("bos", "eos", "eot", "eom", "mask", "padding")
    assert [found[f"tokenizer.ggml.{name}_token_id"] for name in names] == [1, 2, 9, 5, 3, 3]


def test_a_byte_fallback_tokenizer(byte_fallback: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(byte_fallback)
    found = metadata(exported(tokenizer, tmp_path))
    key = "tokenizer.ggml."
    tokens, kinds, scores = (found[f"{key}{name}"] for name in ("tokens", "token_type", "scores"))
    assert found[f"{key}model"] == "llama" and found[f"{key}add_space_prefix"]
    assert kinds[tokens.index("<0x41>")] == 6 and kinds[0] == 2 and kinds[1] == 3
    merges = json.loads(tokenizer.backend.to_str())["model"]["merges"]
    merged = [scores[tokens.index("".join(pair))] for pair in merges]
    assert merged == sorted(merged, reverse=True) and merged[-1] > min(scores)


BAD_TOKENIZERS: dict[str, tuple[Any, str]] = {
    "size": (None, "a token with id 399, and the model 211 tokens"),
    "model": (("model", {"type": "WordPiece"}), "of type 'WordPiece' is not exported"),
    "words": (("pre_tokenizer", {"type": "Whitespace"}), r"splits words by \['Whitespace'\]"),
}


@pytest.mark.parametrize("case", BAD_TOKENIZERS)
def test_tokenizers_that_are_refused(
    case: str, byte_level: Path, small: Path, tmp_path: Path
) -> None:
    changes, message = BAD_TOKENIZERS[case]
    model = tigon.from_pretrained(small)  # 211 tokens
    content = json.loads((byte_level / "tokenizer.json").read_text())
    if changes:
        key, values = changes
        content[key] |= values
        model.resize_token_embeddings(400)

    class Files:
        def save_pretrained(self, directory: Any) -> None:
            Path(directory, "tokenizer.json").write_text(json.dumps(content))

    with pytest.raises(ValueError, match=message):
        model.save_gguf(tmp_path / "m.gguf", tokenizer=Files())
    assert not list(tmp_path.iterdir())


# llama.cpp itself, where its Python binding is installed


def close(path: Path, model: Any, *, tolerance: float) -> None:
    """llama.cpp's logits of a file beside the model's, and its greedy text."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options = {"verbose": False, "logits_all": True, "type_k": 0, "type_v": 0, "n_threads": 1}
    theirs = llama_cpp.Llama(str(path), n_ctx=64, n_batch=32, flash_attn=False, **options)
    try:
        ids = torch.randint(3, 200, (1, 20), generator=torch.Generator().manual_seed(0))
        theirs.eval(ids[0].tolist())
        logits = torch.from_numpy(theirs.scores[:20].copy())
        with torch.no_grad():
            expected = model(ids).logits[0]
        assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
        theirs.reset()
        text = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        tokens = zip(range(4), theirs.generate(ids[0].tolist(), temp=0.0, top_k=1), strict=False)
        assert [token for _, token in tokens] == text[0, 20:].tolist()
    finally:
        theirs.close()


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    model_type, sizes = CASES[case]
    reference(model_type, sizes, tmp_path)
    model = tigon.from_pretrained(tmp_path)
    model.save_gguf(tmp_path / "m.gguf")
    gelu = model_type.startswith("gemma")  # which llama.cpp looks up in a table of fp16
    close(tmp_path / "m.gguf", model, tolerance=1e-3 if gelu else 1e-5)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_llama_cpp_reads_the_same_tokens(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = Tokenizer.from_pretrained(request.getfixturevalue(kind))
    theirs = llama_cpp.Llama(str(exported(tokenizer, tmp_path)), n_ctx=64, verbose=False)
    for text in TEXTS:
        assert theirs.tokenize(text.encode(), special=True) == tokenizer.encode(text), text
    theirs.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "q8_0"])
def test_llama_cpp_answers_as_smollm2(smollm2: Path, kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = Tokenizer.from_pretrained(smollm2)
    tigon.from_pretrained(smollm2).save_gguf(tmp_path / "m.gguf", tokenizer=tokenizer, dtype=kind)
    model = tigon.from_pretrained(tmp_path / "m.gguf", dtype=torch.float32)
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=256, verbose=False)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True)])
    said = model.generate(ids, max_new_tokens=24)[0, ids.shape[1] :]
    text = tokenizer.decode(said, skip_special_tokens=True)
    answer = theirs.create_chat_completion(chat, temperature=0, max_tokens=24)
    assert answer["choices"][0]["message"]["content"] == text
    for text in (*TEXTS, "In 2024 we've 12345\r\n\r\n x<|im_end|>"):
        assert theirs.tokenize(text.encode(), special=True) == tokenizer.encode(text), text
    theirs.close()
