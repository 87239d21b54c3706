"""Hooks and calls of single modules see what they see in transformers' model."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization

from tests.integrations.transformers.peers import pair
from tigon.integrations.transformers import from_pretrained

IDS = torch.arange(4, 18).view(2, 7)
# Blocks with norms before, around and after the branches, of several streams, and with experts
FAMILIES = {
    "llama": "mlp_bias",
    "gemma3_text": "two ropes",
    "gemma3n_text": "shared",
    "gemma4_text": "shared",
    "olmo2": "plain",
    "qwen3_5_text": "plain",
    "qwen3_moe": "normed, biases",
}
NAMES = ("layers.1", "layers.1.input_layernorm", "layers.1.pre_feedforward_layernorm", "norm")


def watch(model: Any) -> dict[str, Tensor]:
    """What hooks before and after some modules see in passes from now on."""
    seen: dict[str, Tensor] = {}
    modules = {name: model.get_decoder().get_submodule(name) for name in NAMES if has(model, name)}
    for name, module in (modules | {"lm_head": model.lm_head}).items():

        def before(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
            seen[f"{name} before"] = (args or tuple(kwargs.values()))[0].detach().clone()

        def after(module: Any, args: Any, output: Tensor, name: str = name) -> None:
            seen[name] = output.detach().clone()

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    return seen


def has(model: Any, name: str) -> bool:
    return name in dict(model.get_decoder().named_modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_see_what_they_see_in_transformers(family: str) -> None:
    theirs, ours = pair(family, FAMILIES[family])
    expected, actual = watch(theirs), watch(ours)
    outputs = [model(IDS, labels=IDS, use_cache=False) for model in (theirs, ours)]
    assert actual.keys() == expected.keys() and len(actual) >= 6
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-4, msg=name)
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_hooks_change_the_stream(family: str) -> None:
    """Also where backward computes the block again, and in a copy."""
    gradients = []
    for model in pair(family):
        model.train()
        model.gradient_checkpointing_enable()
        block = model.model.layers[1]
        block.register_forward_hook(lambda module, args, stream: stream.mul(1.5))
        model.model.norm.register_forward_hook(lambda module, args, normed: normed + 0.1)
        model(IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2", "qwen3_moe"])
def test_hooks_see_gradients_of_the_stream(family: str) -> None:
    """Those set for backward alone, also where it computes the block again."""
    both = []
    for model in pair(family, FAMILIES[family]):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        seen: list[Tensor] = []

        def before(module: Any, gradients: Any, seen: list[Tensor] = seen) -> None:
            seen += gradients

        def after(module: Any, gradients: Any, outer: Any, seen: list[Tensor] = seen) -> None:
            seen += [*gradients[:1], *outer]

        for module in (model.model.layers[1], model.model.norm, model.lm_head):
            module.register_full_backward_pre_hook(before)
        for module in (model.model.layers[0], model.model.layers[1], model.model.norm):
            module.register_full_backward_hook(after)
        model(IDS, labels=IDS).loss.backward()
        both.append(seen)
    assert len(both[0]) == 9
    torch.testing.assert_close(both[1], both[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "llama4_text"])
def test_a_hook_alone_is_called_as_often_as_in_transformers(family: str) -> None:
    """Also where one operator computes what several modules are."""
    theirs, ours = (dict(m.named_modules()) for m in pair(family, FAMILIES.get(family, "plain")))
    names = [name for name in theirs if name in ours and ".layers.2" not in name]
    assert len(names) > 30
    calls = []
    for modules in (theirs, ours):
        for name in names:
            seen: list[str] = []
            hook = lambda *unused, seen=seen, name=name: seen.append(name)  # noqa: E731
            handle = modules[""].get_submodule(name).register_forward_hook(hook)
            modules[""](IDS, use_cache=False)
            handle.remove()
            calls.append((name, len(seen)))
    assert calls[len(names) :] == calls[: len(names)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_hidden_states_are_those_that_hooks_leave(family: str) -> None:
    outputs = []
    for model in pair(family):
        model.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] - 0.2,))
        model.model.layers[0].register_forward_hook(lambda module, args, stream: stream * 1.1)
        model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
        outputs.append(model(IDS, output_hidden_states=True, use_cache=False).hidden_states)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-4)


class Steered(nn.Module):
    """A block with a change of the stream before and after it."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self.factor = block, 1.2
        self.shift = nn.Parameter(torch.linspace(-1, 1, 96))

    def forward(self, stream: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return 1.5 * self.block(self.factor * stream + self.shift, *args, **kwargs)


def steer(model: Any) -> Any:
    """Wraps the second block of the model, and returns the wrapper."""
    model.model.layers[1] = Steered(model.model.layers[1])
    return model.model.layers[1]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_may_be_wrapped(family: str, recomputed: bool) -> None:
    """What is around a block gets and returns the stream, is called once in a step, and may be
    another in the next one before backward."""
    results = []
    for model in pair(family, FAMILIES[family]):
        wrapper = steer(model.train())
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(IDS, labels=IDS).loss
        wrapper.factor = 0.5
        (loss + model(IDS.flip(1), labels=IDS).loss).backward()
        results.append([loss, *(p.grad for _, p in sorted(model.named_parameters()))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_wrapped_blocks_have_caches_and_hidden_states(family: str) -> None:
    results = []
    for model in pair(family):
        steer(model)
        states = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
        tokens = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5)
        results.append([*states, tokens])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4)


def test_wrappers_may_leave_out_their_block_but_have_one() -> None:
    results = []
    for model in pair("llama"):
        steer(model).forward = lambda stream, *args, **kwargs: stream + 1
        results.append(model(IDS, use_cache=False).logits)
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)
    model.model.layers[1].block = nn.Identity()
    with pytest.raises(TypeError, match=r"Steered in model.layers has no block in it: wrap one"):
        model(IDS)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "shard": lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (1,))),
    "checkpoint": checkpoint_wrapper,
    "parametrize": lambda layer: register_parametrization(layer, "shift", nn.Identity()),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("change", CHANGES)
def test_torch_may_change_or_wrap_wrapped_blocks(change: str) -> None:
    """Whose class is then torch's, or is hidden in one of torch's."""
    _, model = pair("llama")
    steer(model)
    expected = model(IDS, use_cache=False).logits
    model.model.layers[1] = CHANGES[change](model.model.layers[1])
    torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("wrapped", [False, True])
def test_others_see_tokens_in_their_rows(wrapped: bool) -> None:
    """Where the model alone would leave padding out of its blocks."""
    _, model = pair("llama")
    model.native.drop_padding = True
    mask = torch.ones_like(IDS)
    mask[0, 4:] = 0
    shapes: list[Any] = []
    if wrapped:
        steer(model).forward = lambda stream, **kwargs: shapes.append(stream.shape) or stream
    else:
        see = lambda module, args: shapes.append(args[0].shape)  # noqa: E731
        model.model.layers[1].register_forward_pre_hook(see)
    model(IDS, attention_mask=mask, use_cache=False)
    assert shapes == [(2, 7, 96)]


def test_threads_share_a_model_with_hooks() -> None:
    _, model = pair("llama")
    started = threading.Barrier(2)  # both are within the block

    def wait(module: Any, args: Any, stream: Tensor) -> None:
        started.wait(60)

    model.model.layers[0].register_forward_hook(wait)
    with torch.no_grad(), ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(lambda: model(IDS).logits) for _ in range(2)]
    torch.testing.assert_close(runs[0].result(), runs[1].result())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_modules_are_called_alone(family: str) -> None:
    """As for the logits of each layer's stream."""
    hidden = torch.randn(2, 3, 96)
    results = [
        [m.lm_head(m.model.norm(hidden)), m.model.layers[0].input_layernorm(hidden)]
        for m in pair(family)
    ]
    torch.testing.assert_close(*results)


def test_classes_have_their_names() -> None:
    """By which accelerate finds the blocks that FSDP shards, also in copies."""
    theirs, ours = pair("qwen3")
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        for name in ("model", "model.layers.1", "model.norm"):
            kinds = [type(m.get_submodule(name)).__name__ for m in (model, theirs)]
            assert kinds[0] == kinds[1], name
        assert model._no_split_modules == {"Qwen3DecoderLayer"}


def test_layers_may_be_removed(tmp_path: Path) -> None:
    """Also the first of a model whose layers have different RoPEs and windows."""
    results = []
    for model in pair("gemma3_text"):
        del model.model.layers[0]
        model.config.num_hidden_layers = 2
        del model.config.layer_types[0]
        for i, block in enumerate(model.model.layers):
            block.self_attn.layer_idx = i
        tokens = model.generate(IDS, max_new_tokens=5, do_sample=False)
        results.append([model(IDS, use_cache=False).logits, tokens])
    torch.testing.assert_close(*results)
    ours = model
    ours.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).logits, results[1][0])
