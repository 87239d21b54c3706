"""What backward keeps of tokens that ranks gather, and when it exchanges them anew."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_rebuilt import make
from tests.parallel.ranks import run_on_ranks
from tests.parallel.test_tensor import TWO, random_model
from tests.support.contract import gradients
from tests.support.recompute import recompute_above
from tests.support.saved import saved_storages
from tigon.distributed import collectives
from tigon.distributed.sequence_parallel import SequenceParallelRegion
from tigon.kernels import use
from tigon.layers import GatedMLP, Linear
from tigon.models import CausalLM
from tigon.parallel import MeshSizes, keep_rank_zero, shard_model
from tigon.train.memory_tracker import model_tensors

R = 2
BIG: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 4096, "vocab_size": 256}
BIG |= {"max_position_embeddings": 4096, "num_hidden_layers": 2}
B, T = 2, 4096


def saved(model: CausalLM) -> int:
    """Bytes that a graph keeps, each memory once."""
    ids = torch.zeros(B, T, dtype=torch.int64, device="meta")
    with use("triton"), saved_storages(*model_tensors(model)) as kept:
        model(ids, labels=ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.fixture
def alone() -> Iterator[None]:
    """One process that is the first of two ranks; nothing is received."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=R)
    yield
    dist.destroy_process_group()


def on_meta(model_type: str, **changes: Any) -> CausalLM:
    model = make(model_type, "plain", "meta", **BIG, **changes).to("meta", torch.bfloat16)
    shard_model(model, init_device_mesh("cpu", (R,)))
    return model


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("llama", {}), ("qwen3_moe", {"moe_intermediate_size": 512}), ("olmo2", {})],
)
def test_no_gathered_input_is_kept(alone, model_type, changes):
    """Of two products in each block. With OLMo 2, whose stream is not normed before them, the
    rank's own tokens of the first are kept; those of the second are the sum behind a branch."""
    model = on_meta(model_type, **changes)
    found = saved(model)
    with recompute_above(math.inf):
        without = saved(model)
    c = model.config
    predicted = 2 * B * T * c.hidden_size * 2
    if model_type == "olmo2":
        predicted -= predicted // R // 2
    if model_type != "qwen3_moe":  # what goes into down_proj is computed again, too
        predicted += B * T * c.intermediate_size // R * 2
    small = 2**20  # 1 / rms, which autograd saves apart of where the stream is
    layers = c.num_hidden_layers
    assert layers * predicted - small <= without - found <= layers * predicted


@pytest.mark.parametrize("recomputed", [0, 1])
def test_a_part_without_other_ranks_keeps_as_much(alone, recomputed):
    """As estimates take it: of a model that is cut over a process group."""
    model, part = on_meta("llama"), make("llama", "plain", "meta", **BIG).to("meta", torch.bfloat16)
    keep_rank_zero(part, MeshSizes(tensor=R))
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (model, part)]
    assert shapes[0] == shapes[1] and not part.shard_specs.keys() ^ model.shard_specs.keys()
    for one in (model, part):
        one.activation_checkpointing = recomputed
    assert saved(part) == saved(model)


class Order(TorchDispatchMode):
    """The products and exchanges that are made, in their order."""

    NAMES = ("mm", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name.partition("::")[2]) in self.NAMES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fp8", [False, True])
def test_exchanges_run_beside_products(alone, fp8):
    """The gather beside the first product of backward, the sum beside the second."""
    stream = SequenceParallelRegion(collectives.Ranks.of(dist.group.WORLD), (1, 6), False)
    layer = Linear(16, 32, bias=False).bfloat16()
    layer.fp8 = fp8
    x = torch.randn(1, 3, 16, dtype=torch.bfloat16, requires_grad=True)
    with recompute_above(0):
        y = layer(stream.gather_from_region(x, single_reader=True))
    with Order() as order:
        y.sum().backward()
    assert order.found == [
        "all_gather_into_tensor", "mm", "reduce_scatter_tensor", "wait_tensor", "mm", "wait_tensor",
    ]  # fmt: skip


def test_exchanges_run_beside_an_mlp_in_fp8(alone):
    """The gather beside the first three products of backward, the sum beside the last."""
    stream = SequenceParallelRegion(collectives.Ranks.of(dist.group.WORLD), (1, 6), False)
    mlp = GatedMLP(16, 48, "silu").bfloat16()
    mlp.gate_up_proj.fp8 = mlp.down_proj.fp8 = True
    x = torch.randn(1, 3, 16, dtype=torch.bfloat16, requires_grad=True)
    with use("triton"), recompute_above(0):
        y = mlp(stream.gather_from_region(x, single_reader=True))
        with Order() as order:
            y.sum().backward()
    assert order.found == [
        "all_gather_into_tensor", "mm", "mm", "mm", "reduce_scatter_tensor", "wait_tensor", "mm",
        "wait_tensor",
    ]  # fmt: skip


def test_ranks_sum_embeddings_once(alone):
    model = random_model(*TWO["llama"])
    shard_model(model, init_device_mesh("cpu", (R,)))
    ids = torch.arange(4, 9)[None]
    with Order() as order:
        model(ids, labels=ids)
    found = [name for name in order.found if name not in ("mm", "wait_tensor")]
    assert found[:3] == ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"]


def test_several_readers_gather_once_and_reduce_once(alone):
    stream = SequenceParallelRegion(collectives.Ranks.of(dist.group.WORLD), (1, 6), False)
    one, other = Linear(4, 5, bias=False), Linear(4, 5, bias=False)
    x = torch.randn(1, 3, 4, requires_grad=True)
    with recompute_above(0):
        whole = stream.gather_from_region(x, single_reader=False)
        y = one(whole) + other(whole)
    with Order() as order:
        y.sum().backward()
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert order.found.count(name) == 1


@pytest.mark.slow
@pytest.mark.traced
def test_compiled_blocks_take_any_length(alone):
    model, counter = random_model(*TWO["llama"]).eval(), CompileCounter()
    shard_model(model, init_device_mesh("cpu", (R,)))
    torch._dynamo.reset()
    for block in model.model.layers:
        block.compile(backend=counter)
    lengths = range(20, 40, 2)
    for n in lengths:
        model(torch.arange(4, 4 + n)[None])
    assert 0 < counter.frame_count < len(lengths) / 2


def step(model: CausalLM, least: float, recompute: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.activation_checkpointing = recompute
    ids = torch.arange(4, 9)[None]  # of an odd number: the last rank's share has padding
    kernels = "triton" if model.config.model_type == "llama" else "auto"  # slow on a CPU
    with recompute_above(least), use(kernels):
        loss = model(ids, labels=ids).loss
        return loss.detach(), gradients(loss, model)


def compare() -> None:
    """With and without what is gathered anew, whose bits are to be the same."""
    for name in ("llama", "olmo2", "qwen2_moe"):
        model = random_model(*TWO[name])
        shard_model(model, init_device_mesh("cpu", (R,)))
        expected = step(model, math.inf, False)
        for recompute in (False, True):
            found = step(model, 0, recompute)
            assert torch.equal(found[0], expected[0])
            wrong = [n for n, g in expected[1].items() if not torch.equal(g, found[1][n])]
            assert not wrong, (name, recompute, wrong)
        ids = torch.arange(4, 9)[None]
        logits = model(inputs_embeds=model.model.embed_tokens(ids)).logits
        assert torch.equal(logits, model(ids).logits)
        if name == "llama":
            continue
        hooked = model.model.layers[0].mlp
        hooked.register_full_backward_hook(lambda _, came, __: (came[0] * 2,))
        twice = [step(model, least, False)[1] for least in (0, math.inf)]
        assert all(torch.equal(g, twice[1][n]) for n, g in twice[0].items()), name
        before = "model.layers.0.post_attention_layernorm.weight"
        assert not torch.equal(twice[0][before], expected[1][before])


@pytest.mark.slow
def test_no_bit_changes():
    """A hook that changes a gradient on its way is heard, too."""
    run_on_ranks(R, compare)
