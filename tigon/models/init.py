"""Random initialization of weights, as transformers has it."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import torch
from torch import Tensor, nn

from tigon.layers import NF4Weight
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import module_buffers, stored_buffers
from tigon.models.pretrained.quantization import quantized_layers, store_nf4
from tigon.utils.memory import count_rank_cpus
from tigon.weights import ShardSpec, local_rows

# The version of what a seed draws: raise it with each change that makes other weights of a seed
DRAWS = 2
CHUNK = 1 << 20  # values that are drawn from a seed of their own


@torch.no_grad()
def init_weights(model: LanguageModel) -> None:
    """Initialize all weights in place: a module's own `init_weights` is called if it has one; else
    its matrices are drawn from normal(0, initializer_range), and biases (or what its `zero_init`
    names), stored buffers and the padding row are zeros."""
    seeds = _draw_seeds()
    for module in model.modules():
        _init(module, model, seeds, {})


@torch.no_grad()
def init_sharded_weights(model: LanguageModel, full_model: LanguageModel) -> None:
    """Gives a sharded model the weights that `init_weights` draws for the unsharded one.

    `full_model` is the unsharded model on the meta device. Every rank draws on the CPU, one module
    after the other, so that memory for one module is enough, and only chunks that have rows which
    it keeps. 4-bit weights of `model` are quantized from them.
    """
    parameters, shard_specs = dict(model.named_parameters()), model.shard_specs
    buffers, seeds = stored_buffers(model), _draw_seeds()
    quantized = {name: weight for name, _, weight in quantized_layers(model)}
    for path, module in full_model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)) and not module_buffers(module):
            continue
        marks = {}
        for kind, values in module.named_parameters(recurse=False):
            if (name := f"{path}.{kind}") in parameters:
                marks[kind] = _mark_rows(name, parameters[name], shard_specs.get(name), values)
        module.to_empty(device="cpu", recurse=False)
        _init(module, full_model, seeds, marks)
        for kind, values in module.named_parameters(recurse=False):
            name = f"{path}.{kind}"
            if (weight := quantized.get(name)) is not None:
                assert isinstance(weight, NF4Weight)  # fp8 weights come from a checkpoint alone
                store_nf4(weight, name, values.detach())
            elif name in parameters:  # a tied head is not
                copy_local(name, parameters[name], shard_specs.get(name), values.detach())
        for kind, values in module_buffers(module).items():
            buffers[f"{path}.{kind}"].copy_(values)
        del values  # before the next module is allocated
        module.to_empty(device="meta", recurse=False)


def copy_local(name: str, parameter: Tensor, spec: ShardSpec | None, values: Tensor) -> None:
    """Copies this rank's shard of the values into the parameter."""
    shard = values if spec is None else spec.take(values)
    rows, first = local_rows(name, parameter)
    rows.copy_(shard[first : first + len(rows)])


def _mark_rows(name: str, parameter: Tensor, spec: ShardSpec | None, values: Tensor) -> Tensor:
    """Marks the rows of the values of which `copy_local` takes any."""
    every_row = torch.arange(len(values), device="cpu")
    rows = spec.take(every_row) if spec is not None and spec.dim == 0 else every_row
    local, first = local_rows(name, parameter)
    return torch.isin(every_row, rows[first : first + len(local)])


def _init(
    module: nn.Module, model: LanguageModel, seeds: Iterator[int], marks: Mapping[str, Tensor]
) -> None:
    """Initializes the parameters of one module, without submodules and a tied head. Of those in
    `marks` rows without a mark may stay as they are."""
    init: Callable[[], None] | None = getattr(module, "init_weights", None)
    if init is not None:
        init()
        return
    zeros = getattr(module, "zero_init", ("bias",))
    ones = getattr(module, "one_init", ())
    for name, p in module.named_parameters(recurse=False):
        if name in zeros:
            nn.init.zeros_(p)
        elif name in ones:
            nn.init.ones_(p)
        elif not (module is model.lm_head and model.ties_head):
            _draw_normal(p, model.config.initializer_range, seeds, marks.get(name))
    for buffer in module_buffers(module).values():
        buffer.zero_()
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        module.weight[module.padding_idx].zero_()


def _draw_seeds() -> Iterator[int]:
    """Yields the seeds of a model's chunks, from one that torch's generator draws.

    They are consecutive, since a generator of the CPU takes 32 bits of its seed: if each were
    drawn, two of the 67,000 chunks of 70B weights would be equal in two models of five.
    """
    yield from count(int(torch.randint(1 << 32, (), device="cpu")))


def _draw_normal(weight: Tensor, std: float, seeds: Iterator[int], marks: Tensor | None) -> None:
    """Fills a weight from Normal(0, std). On the CPU, where torch draws with one thread, several
    draw chunks of rows: the same values, however many threads there are. Chunks without a row in
    `marks`, if any are given, stay as they are."""
    if weight.device.type != "cpu":
        weight.normal_(std=std)
        return
    rows = max(1, CHUNK * len(weight) // weight.numel())
    if marks is None:
        marks = torch.ones(len(weight), dtype=torch.bool, device="cpu")

    @torch.inference_mode()  # a thread has a mode of its own, and this one may write to any tensor
    def draw(chunk: Tensor, mark: Tensor, seed: int) -> None:
        if mark.any():
            chunk.normal_(std=std, generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(count_rank_cpus()) as pool:
        list(pool.map(draw, weight.split(rows), marks.split(rows), seeds))
