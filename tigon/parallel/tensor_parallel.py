"""Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism between blocks (Korthikanti
et al., 2022): a model's shard, and the sums of its gradients."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tigon.distributed.collectives import Ranks
from tigon.kernels.loss.vocab_parallel import VocabularyShard
from tigon.layers import (
    Attention,
    Embedding,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    LatentAttention,
    Linear,
    LMHead,
    ShortConv,
    SoftmaxAttention,
    SparseMoE,
)
from tigon.layers.mlp import TopKMLP
from tigon.models import CausalLM
from tigon.models.decoder import PreNormBlock
from tigon.parallel.context_parallel import share_context
from tigon.parallel.expert_parallel import shard_experts
from tigon.parallel.mesh import as_ranks
from tigon.parallel.tensor_modules import (
    ColumnParallelGatedLinear,
    ColumnParallelLinear,
    DispatchedExperts,
    DispatchedMoE,
    FlatParallelNorm,
    ReplicatedLinear,
    RowParallelLinear,
    TensorParallelDecoder,
    TensorParallelExperts,
    TensorParallelLatentAttention,
    TensorParallelMoE,
    TensorParallelNorm,
    TensorPass,
)
from tigon.parallel.tensor_plan import (
    adapter_specs,
    check_adapter_dropout,
    set_local_adapters,
    shard_specs,
    share_vocabulary,
)
from tigon.settings.mesh import MeshSizes
from tigon.weights import ReplicaIndex, local_blocks, local_rows


def keep_rank_zero(model: CausalLM, sizes: MeshSizes) -> None:
    """Keeps rank 0's shard of a model on the meta device, without process groups, before FSDP.

    Collectives return meta tensors of the right size, and experts get equally many tokens. Raises
    ValueError for a model that the sizes do not divide.
    """
    if sizes.expert > 1:
        shard_experts(model, Ranks("", 0, sizes.expert))
    if sizes.tensor > 1:
        shard_model(model, Ranks("", 0, sizes.tensor))
    if sizes.context > 1:
        share_context(model, Ranks("", 0, sizes.context))


# Gradients of replicated parameters (norms, routers, kv heads) are partial on each rank, and are
# summed once a step


class TensorParallel:
    """The tensor ranks of a sharded model, and the groups of ranks with equal rows, by size."""

    def __init__(self, model: CausalLM, mesh: DeviceMesh) -> None:
        self.ranks = Ranks.of(mesh.get_group())
        self.layout = model.layout(stacked_experts=True)
        counts_of = {
            name: {part.replica.total for part in parts if part.replica} - {1}
            for name, parts in self.layout.items()
        }
        # Parameters with rows that several ranks have
        self.replicated = {name for name, counts in counts_of.items() if counts}
        counts: set[int] = set().union(*counts_of.values())
        self.members: list[int] = mesh.mesh.tolist()  # global ranks
        self.replica_groups = {self.ranks.size: self.ranks}
        for count in sorted(counts - {self.ranks.size}):
            self.replica_groups[count] = self._neighbor_group(count)

    def _neighbor_group(self, count: int) -> Ranks:
        """Returns a new group: the block of `count` consecutive ranks that this rank is in."""
        first = self.ranks.rank // count * count
        members = self.members[first : first + count]
        group = dist.new_group(members, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Ranks.of(group)

    def use_separate_group(self) -> None:
        """All-reduces gradients in a separate process group, so that they do not queue with the
        collectives of backward. Every rank calls this."""
        self.replica_groups[self.ranks.size] = self._neighbor_group(self.ranks.size)

    def sum_gradients(self, model: nn.Module) -> None:
        """All-reduces partial gradients, once a step after its last backward pass and before
        clipping. Every rank calls this."""
        self.all_reduce_grads(model.named_parameters())

    @torch.no_grad()
    def all_reduce_grads(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Sums partial gradients over the ranks with the same rows, in float32 and in place.

        `named` are name and parameter of the same parameters on all ranks; others stay as they are.
        """
        blocks: dict[int, list[Tensor]] = {count: [] for count in self.replica_groups}
        for replica, _, block in self._gradient_blocks(named):
            if replica.total > 1:
                blocks[replica.total].append(block)
        for count, ranks in self.replica_groups.items():
            if group := blocks[count]:
                # In float32, so that a sum of bfloat16 is rounded once
                total = ranks.sum(torch.cat([block.flatten() for block in group]).float())
                sums = total.split([block.numel() for block in group])
                sums = [x.view_as(block) for block, x in zip(group, sums, strict=True)]
                torch._foreach_copy_(group, sums)

    def unique_gradients(
        self, named: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (parameter, gradient) so that over all ranks each gradient occurs once: rows that
        an earlier rank has too are left out. A parameter may occur several times."""
        for replica, p, block in self._gradient_blocks(named):
            if not replica.number and block.numel():
                yield p, block

    def _gradient_blocks(
        self, named: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[ReplicaIndex, Tensor, Tensor]]:
        """Yields the blocks of each local gradient, with their place among the ranks that hold them
        too, and their parameter; a gradient that no other rank holds is one block."""
        for name, p in named:
            if p.grad is None:
                continue
            gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            if name not in self.replicated:
                yield ReplicaIndex(), p, gradient
                continue
            _, first = local_rows(name, p)
            for part in self.layout[name]:
                for _, block in local_blocks(part, p.shape, gradient, first):
                    yield part.replica or ReplicaIndex(), p, block


def shard_model(model: CausalLM, mesh: DeviceMesh | Ranks) -> None:
    """Keeps only this rank's shard of each layer; on the meta device, before the weights are read.

    With expert parallelism call `shard_experts` first: experts that are already distributed stay as
    they are. With `Ranks` there are no process groups for gradients. Raises ValueError for a model
    that cannot be sharded over so many ranks.
    """
    ranks = as_ranks(mesh)
    check_tensor_ranks(model, ranks.size)
    tied, before = model.ties_head, set(model.shard_specs)
    excluded = _expert_parallel_modules(model)
    specs = dict(shard_specs(model, ranks, excluded))
    specs |= adapter_specs(model, specs)
    model.shard_specs = {
        name: spec for name, spec in specs.items() if not (tied and name == "lm_head.weight")
    }
    for name, spec in model.shard_specs.items():
        if name in before:
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        whole: Tensor = module.get_parameter(leaf)
        if len(spec.pieces) > 1 or spec.length != whole.shape[spec.dim]:
            setattr(module, leaf, nn.Parameter(spec.take(whole.detach()), whole.requires_grad))
    set_local_adapters(model, specs, ranks)
    size = model.config.vocab_size
    for module in model.modules():
        if isinstance(module, SoftmaxAttention):
            _set_local_heads(module, ranks)
        elif isinstance(module, GatedDeltaNet):
            module.key_heads //= ranks.size
            module.value_heads //= ranks.size
        elif isinstance(module, LMHead) and model.config.labels:
            module.scorers = ranks
        elif isinstance(module, Embedding | LMHead):
            rows = module.num_embeddings if isinstance(module, Embedding) else size
            first, length, _ = share_vocabulary(rows, ranks)
            module.vocabulary = VocabularyShard.build(ranks.group, ranks.size, first, length, rows)
    if tied:
        model.lm_head.weight = cast(nn.Parameter, model.model.embed_tokens.weight)
    model.tensor_ranks = ranks
    install_modules(model, TensorPass(ranks))
    model.model.set_state_kinds()
    if isinstance(mesh, DeviceMesh):
        model.tensor_parallel = TensorParallel(model, mesh)


def install_modules(model: CausalLM, tensor: TensorPass) -> None:
    """Puts the modules of `tensor_modules` in place of the model's; parameters and hooks stay."""
    _install(model.model, TensorParallelDecoder, tensor=tensor)
    moes = [module for module in model.modules() if isinstance(module, SparseMoE)]
    inside = {module for moe in moes for module in moe.modules()}
    for moe in moes:
        _install(moe, DispatchedMoE if moe.divided else TensorParallelMoE, tensor=tensor)
        experts = DispatchedExperts if moe.divided else TensorParallelExperts
        _install(moe.experts, experts, tensor=tensor)
    for block in model.model.layers:
        for module in block.modules():
            if isinstance(module, LatentAttention):
                _install(module, TensorParallelLatentAttention, tensor=tensor)
                _install(module.o_proj, RowParallelLinear, tensor=tensor)
            elif isinstance(module, Attention):
                for projection in filter(None, (module.qkv_proj, module.gate_proj)):
                    _install(projection, ColumnParallelLinear, tensor=tensor)
                _install(module.o_proj, RowParallelLinear, tensor=tensor)
            elif isinstance(module, GatedDeltaNet | ShortConv):
                _install(module.in_proj, ColumnParallelLinear, tensor=tensor)
                _install(module.out_proj, RowParallelLinear, tensor=tensor)
            elif isinstance(module, GatedMLP) and module not in inside:  # a shared expert's
                _install(module.gate_up_proj, ColumnParallelGatedLinear, tensor=tensor)
                _install(module.down_proj, RowParallelLinear, tensor=tensor)
        if isinstance(block, PreNormBlock):
            tensor.norms += [block.input_layernorm, block.post_attention_layernorm]
    tensor.norms.append(model.model.norm)
    for place, norm in enumerate(tensor.norms):
        _install(norm, TensorParallelNorm, tensor=tensor, place=place)
    for path, module in model.named_modules():
        spec = model.shard_specs.get(f"{path}.weight")
        is_whole = spec and len(spec.pieces) == 1 and spec.length == spec.shape[spec.dim]
        if type(module) is Linear and module not in inside and is_whole:
            _install(module, ReplicatedLinear, tensor=tensor)


def _install(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Change the module's class to `kind` and set the attributes on it; of a class that `kind` does
    not know, to a subclass of both."""
    own = type(module)
    module.__class__ = kind if issubclass(kind, own) else type(kind.__name__, (kind, own), {})
    for name, value in attributes.items():
        setattr(module, name, value)


def check_tensor_ranks(model: CausalLM, ranks: int) -> None:
    """Raises ValueError for a model that cannot be sharded over this number of ranks."""
    excluded = _expert_parallel_modules(model)
    for module in model.modules():
        if isinstance(module, Embedding):
            size = module.num_embeddings
            if (ranks - 1) * -(-size // ranks) >= size:
                raise ValueError(f"{ranks} ranks cannot share a vocabulary of {size} tokens")
        if isinstance(module, Linear) and module.quantized is not None:
            raise ValueError("tensor parallelism does not work with quantized weights")
        if isinstance(module, TopKMLP):
            raise ValueError(
                f"{ranks} ranks cannot share an MLP with activation_sparsity_pattern: its cutoff "
                "needs the gates of all ranks; give parallel.tensor=1"
            )
        units = ranks
        if isinstance(module, GatedMLP):
            units = module.down_proj.in_features
        elif isinstance(module, Experts):
            units = module.down_proj.shape[1 if module.transposed else 2]
        if units < ranks and module not in excluded:
            kind = "an MLP" if isinstance(module, GatedMLP) else "an expert"
            raise ValueError(
                f"{ranks} ranks cannot share the {units} units of {kind}: give fewer ranks "
                "(parallel.tensor, --tp, mesh)"
            )
        if isinstance(module, SoftmaxAttention):
            q, kv = module.heads, module.kv_heads
            if q % ranks or (kv % ranks and ranks % kv):
                raise ValueError(
                    f"{ranks} ranks cannot share {q} heads with {kv} kv heads: the number of ranks "
                    "(parallel.tensor, --tp, mesh) must divide the heads, and divide the kv heads "
                    "or be a multiple of them"
                )
        if isinstance(module, GatedDeltaNet) and module.key_heads % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share the {module.key_heads} key heads of Gated DeltaNet "
                "(linear_num_key_heads): the number of ranks (parallel.tensor, --tp, mesh) must "
                "divide them"
            )
    if any(config.dropout for config in model.adapters.values()):
        every_rank = (Ranks("", rank, ranks) for rank in range(ranks))
        check_adapter_dropout(model, (dict(shard_specs(model, r, excluded)) for r in every_rank))


def _expert_parallel_modules(model: CausalLM) -> set[nn.Module]:
    """MoE layers whose experts are distributed whole, and their submodules."""
    moes = [m for m in model.modules() if isinstance(m, SparseMoE) and m.divided]
    return {inner for moe in moes for inner in moe.modules()}


def _set_local_heads(module: SoftmaxAttention, ranks: Ranks) -> None:
    """Sets the numbers of local heads, and makes norms over all heads take the ranks' mean."""
    if isinstance(module, Attention) and module.flat_qk_norm:
        copies = max(1, ranks.size // module.kv_heads)
        for norm, heads in (module.q_norm, module.heads), (module.k_norm, module.kv_heads * copies):
            assert norm is not None
            _install(norm, FlatParallelNorm, ranks=ranks, elements=heads * module.head_dim)
    module.heads //= ranks.size
    module.kv_heads = max(1, module.kv_heads // ranks.size)
