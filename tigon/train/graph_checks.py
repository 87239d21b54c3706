"""Says where CUDA graphs can be used: for which runs and models, and which passes one serves."""

from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.mlp.grouped_product import training_syncs
from tigon.layers import Adapters
from tigon.layers.moe import Experts
from tigon.models import CausalLM
from tigon.models.decoder import Recompute
from tigon.settings.config import Config
from tigon.train.distributed import World
from tigon.train.model import compute_dtype, is_sharded

GraphKey: TypeAlias = tuple[Any, ...]


def check_run(config: Config, world: World) -> None:
    """Raises ValueError if the run's device, ranks or sharding do not allow cuda_graphs."""
    if config.cuda_graphs is not True:
        return
    if world.device.type != "cuda":
        raise ValueError(f"cuda_graphs=true needs a GPU, and device={config.device} is a CPU here")
    if world.size > 1:
        raise ValueError(
            f"cuda_graphs=true is for one GPU, and there are {world.size} ranks: messages between "
            "them are not captured; leave it out"
        )
    if config.sharding == "full" and is_sharded(config, 1, compute_dtype(config, world.device)):
        raise ValueError(
            f"cuda_graphs=true with sharding=full: FSDP2, which computes in another dtype than "
            f"param_dtype={config.param_dtype} or adds up in float32, gathers weights by Python; "
            "give sharding=gradients, or param_dtype=bfloat16 without accumulate_fp32"
        )


def uses_graphs(config: Config, world: World, model: CausalLM) -> bool:
    """Returns whether the run begins with `Graphs`: cuda_graphs=true, or auto where nothing is
    against it, which one GPU says."""
    if config.cuda_graphs != "auto":
        return config.cuda_graphs
    if world.size > 1 or world.device.type != "cuda":
        return False
    try:
        wanted = replace(config, cuda_graphs=True)
        check_run(wanted, world)
        check_model(model)
    except ValueError as error:
        reason = str(error).removeprefix("cuda_graphs=true ").removeprefix("cuda_graphs: ")
        world.log_rank0(f"cuda_graphs=auto: not used: {reason}")
        return False
    return True


def check_model(model: CausalLM) -> None:
    """Raises ValueError for a model whose passes cannot be captured."""
    if model.activation_offload:
        raise ValueError("cuda_graphs with activation_offload, which copies meanwhile: drop one")
    zero = model.zero2
    if zero is None and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("cuda_graphs: the model is sharded by FSDP2, which gathers by Python")
    dtype = model.dtype if zero is None else zero.compute
    for name, module in model.named_modules():
        if isinstance(module, Experts) and any(
            training_syncs(matrix.shape, dtype, model.device)
            for matrix in (module.gate_up_proj, module.down_proj)
        ):
            raise ValueError(
                f"cuda_graphs: {name} asks the GPU how many tokens each expert has, except in "
                "bfloat16 from sm_90 on with sizes that 8 divides: cuda_graphs=false trains without"
            )


class ReplayGuard:
    """Detects what a replay would ignore: hooks, moved parameters, another active adapter.

    It keeps the modules' dictionaries, as walking through the modules would take longer: a check
    of 16 blocks takes 0.2 ms.
    """

    def __init__(self, model: CausalLM) -> None:
        decoder, zero = model.model, model.zero2 is not None
        ends = *decoder.first_modules, *decoder.layers, *decoder.last_modules
        inner = dict.fromkeys(m for end in ends for m in end.modules())
        modules = decoder, *inner
        with_zero_hook = ends if zero else ()  # ZeRO has one hook on each
        self._zero_hooks = [m._forward_pre_hooks for m in with_zero_hook]
        self._hooks = [m._forward_pre_hooks for m in modules if m not in with_zero_hook]
        for m in modules:
            self._hooks += [m._forward_hooks, m._backward_hooks, m._backward_pre_hooks]
        self._num_zero_hooks = int(zero)  # on each parameter
        self._parameters = [m._parameters for m in inner if m._parameters]
        self._adapters = [m for m in inner if isinstance(m, Adapters)]
        parts = [part for part in decoder.children() if part not in decoder.embeddings]
        rest = [m for part in parts for m in part.modules()]
        self._tensors = [d for m in rest for d in (m._parameters, m._buffers) if d]

    def has_hooks(self) -> bool:
        """Returns whether there are hooks besides those of ZeRO."""
        if any(self._hooks) or any(len(hooks) > 1 for hooks in self._zero_hooks):
            return True
        if _has_any_global_hook():
            return True
        for parameter in (p for parameters in self._parameters for p in parameters.values()):
            if parameter is not None and parameter.requires_grad:
                hooks = parameter._post_accumulate_grad_hooks
                if parameter._backward_hooks or (hooks and len(hooks) > self._num_zero_hooks):
                    return True
        return False

    def fingerprint(self) -> list[object]:
        """Returns address and requires_grad of each parameter and buffer, and the chosen adapters,
        to compare with those of another pass."""
        tensors = (t for named in self._tensors for t in named.values())
        states: list[object] = [(t.data_ptr(), t.requires_grad) for t in tensors if t is not None]
        return states + [m.chosen for m in self._adapters]


class PassInputs(NamedTuple):
    """What the blocks of a pass read."""

    x: Tensor  # [B, T, C]
    positions: Tensor
    mask: AttentionMask
    dropout_keys: Tensor | None

    def optional(self) -> tuple[Tensor | None, ...]:
        """Returns cu_seq_lens, segment_ids and key_mask of the mask, and dropout_keys."""
        mask = self.mask
        return mask.cu_seq_lens, mask.segment_ids, mask.key_mask, self.dropout_keys


def graph_key(inputs: PassInputs, recompute: Recompute, routing: bool) -> GraphKey:
    """Returns a key that is equal for passes that one graph serves: it has shapes, and the host
    numbers that launches use."""
    x, mask = inputs.x, inputs.mask
    return (
        *(x.shape, x.dtype, x.requires_grad),  # the last: whether the embedding learns
        inputs.positions.shape,
        *(mask.longest, mask.causal, mask.backend),
        None if mask.cu_seq_lens is None else len(mask.cu_seq_lens),
        *(tensor is not None for tensor in inputs.optional()),
        recompute if isinstance(recompute, int | str) else tuple(sorted(recompute)),
        routing,
    )
