"""Dropout of adapters: PEFT's formula, alike however tokens lie, and only in training."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tests.models.adapters import adapted, check_same, gradients, near, theirs_of, trained
from tests.models.test_parity import tokens
from tests.models.tiny import CASES, reference
from tests.support.recompute import recompute_above
from tigon import LoraConfig, from_pretrained
from tigon.kernels.linear.dropout import Dropout, keep_mask_ref
from tigon.layers import LowRank
from tigon.layers.lora import dropout_seed
from tigon.models import CausalLM
from tigon.utils.random import as_int64, mix

P = 0.3


def keys(*shape: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(5))


class Given(nn.Module):
    """PEFT's dropout, of a given mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.view(x.shape) / (1 - Dropout(self.mask, 0, P).share)


def drop_alike(ours: CausalLM, model: Any, drawn: Tensor) -> None:
    """Give PEFT's projections the masks of ours."""
    modules, seen = dict(model.named_modules()), []
    for path, low in ours.named_modules():
        if not isinstance(low, LowRank):
            continue
        layer = path.removesuffix(".lora.default")
        parent = layer.rpartition(".")[0]
        block = re.match(r"model\.layers\.(\d+)", layer)
        added = as_int64(mix(int(block[1]))) if block else 0
        of_block = drawn + added
        mask = keep_mask_ref(Dropout(of_block, dropout_seed(layer), P), low.lora_A.shape[1])
        seen.append((added + dropout_seed(layer)) % 2**64)
        for part in low.parts:
            theirs = modules[f"base_model.model.{parent}.{part.name}"]
            theirs.lora_dropout["default"] = Given(mask)
    assert len(set(seen)) == len(seen) > 0  # no layer's is another's


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("model_type", "case"),
    [
        *(("llama", "grouped"), ("qwen2_moe", "plain"), ("gemma3_text", "two ropes")),
        ("gemma3n_text", "shared"),
    ],
)
def test_as_theirs(model_type: str, case: str, again: bool, tmp_path: Path) -> None:
    """Of the same mask, which q, k and v share here; also in blocks that are computed again."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if model_type == "qwen2_moe":
        targets = ["q_proj", "o_proj", "shared_expert.up_proj", "shared_expert_gate"]
    if model_type == "gemma3n_text":  # also before and behind the blocks
        targets = ["q_proj", "linear_left", "per_layer_model_projection"]
        targets += ["altup_projections.0", "altup_unembed_projections.1"]
    theirs = theirs_of(tmp_path, model_type, case, target_modules=targets, lora_dropout=P)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = from_pretrained(tmp_path)
    ours.load_adapter(tmp_path / "adapter", trainable=True)
    ours.activation_checkpointing = again
    drawn = keys(*tokens().shape)
    drop_alike(ours, theirs, drawn)
    for model in (ours, theirs):
        model.train()
    with recompute_above(0):
        check_same(ours, theirs, dropout_keys=drawn)
    assert not torch.allclose(
        ours(tokens()).logits, theirs(tokens()).logits, atol=1e-3
    )  # other keys
    ours.save_adapter(tmp_path / "again")
    assert f'"lora_dropout": {P}' in (tmp_path / "again/adapter_config.json").read_text()


@pytest.fixture
def model(tmp_path: Path) -> CausalLM:
    reference("llama", CASES["llama"]["grouped"], tmp_path)
    return adapted(from_pretrained(tmp_path), dropout=P).train()


def test_packed_and_padded(model: CausalLM) -> None:
    """Of the same keys: losses and gradients of a row are those of its sequences apart."""
    model.double()
    lengths = 7, 4, 9
    ids, drawn = tokens().flatten()[:20], keys(20)
    labels, parts = ids.clone(), ids.split(lengths)
    found = []
    for layout in ("packed", "padded", "dropped"):
        model.zero_grad()
        model.drop_padding = layout == "dropped"
        if layout == "packed":
            cu = torch.tensor([0, 7, 11, 20], dtype=torch.int32)
            given = {"cu_seq_lens": cu, "dropout_keys": drawn[None], "labels": labels[None]}
            out = model(ids[None], **given)
        else:
            padded, mask, own = (
                nn.utils.rnn.pad_sequence(list(x), batch_first=True)
                for x in (parts, [torch.ones_like(p) for p in parts], drawn.split(lengths))
            )
            given = {"labels": padded.masked_fill(mask == 0, -100), "attention_mask": mask}
            out = model(padded, **given, dropout_keys=own)
        out.loss.backward()
        found.append({"loss": out.loss.detach()} | gradients(model))
    assert found[0].keys() == found[1].keys()
    for other in found[1:]:
        for name, value in other.items():
            near(value, found[0][name], name)


def test_only_in_training(model: CausalLM) -> None:
    ids = tokens()
    given = {"dropout_keys": keys(*ids.shape)}
    model.eval()
    plain = model(ids).logits
    assert torch.equal(model(ids, **given).logits, plain)
    model.train()
    assert not torch.allclose(model(ids, **given).logits, plain, atol=1e-3)
    with model.adapters_disabled():  # as references are
        trained_base = model(ids, **given).logits
        model.eval()
        assert torch.equal(model(ids).logits, trained_base)
        model.train()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=True).logits, plain)
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.eval()
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    model.merge_adapter()
    near(model.train()(ids).logits, plain)


def test_without_keys_they_are_drawn_by_torch_s_generator(model: CausalLM) -> None:
    ids = tokens()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(ids).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-3)
    before = torch.get_rng_state()
    model.eval()(ids)
    assert torch.equal(torch.get_rng_state(), before)


def test_of_dora_and_a_base_that_is_quantised(tmp_path: Path) -> None:
    """The mean over many keys is nearly what is computed without dropout."""
    reference("llama", CASES["llama"]["grouped"], tmp_path)
    for options, more in (({"dora": True}, {}), ({}, {"quantize": "nf4"})):
        model = from_pretrained(tmp_path, **more)
        adapted(model, dropout=0.2, targets="down_proj", **options)
        ids = tokens()[:1, :4]
        expected = model.eval()(ids, return_hidden=True).hidden.detach()
        with torch.no_grad():
            each = [model.train()(ids, return_hidden=True).hidden for _ in range(64)]
        spread = torch.stack(each).std(0).mean()
        assert spread > 1e-3
        assert (torch.stack(each).mean(0) - expected).abs().mean() < 0.4 * spread
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in trained(model).values())


def test_what_is_not_trained_with_dropout(tmp_path: Path) -> None:
    """It can still be loaded; PEFT drops nothing of embeddings either."""
    reference("qwen3_moe", CASES["qwen3_moe"]["plain"], tmp_path)
    moe = from_pretrained(tmp_path)
    for target in ("lm_head", "experts.down_proj"):
        with pytest.raises(ValueError, match=f"dropout=0.3 with targets='{target.split('.')[-1]}'"):
            moe.add_adapter(LoraConfig(targets=("q_proj", target), dropout=P))
        assert not moe.adapter_names
    moe.add_adapter(LoraConfig(targets=("embed_tokens", "q_proj"), dropout=P))
    moe.delete_adapter("default")
    moe.add_adapter(LoraConfig(targets="lm_head"))
    moe.save_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.3'))
    again = from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"dropout=0\.3 with targets='lm_head'"):
        again.load_adapter(tmp_path / "adapter", trainable=True)
    again.load_adapter(tmp_path / "adapter")


def test_wrong_keys(model: CausalLM) -> None:
    ids = tokens()
    for wrong in (keys(1, ids.shape[1]), keys(*ids.shape).int()):
        with pytest.raises(ValueError, match=r"are not int64 \[batch, tokens\]"):
            model(ids, dropout_keys=wrong)
    with pytest.raises(TypeError, match="dropout_keys must be a tensor"):
        model(ids, dropout_keys=3)


@pytest.mark.traced
def test_compiled_blocks_are_compiled_once(model: CausalLM) -> None:
    """A layer's number is none of a block's."""
    ids = tokens()
    given = {"labels": ids, "dropout_keys": keys(*ids.shape)}
    expected = model(ids, **given).loss
    torch._dynamo.reset()
    counter = CompileCounter()
    for block in model.model.layers:
        block.compile(backend=counter)
    near(model(ids, **given).loss, expected)
    assert counter.frame_count <= 2  # the first block has no residual yet
