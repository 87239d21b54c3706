"""`cuda_graphs`: the blocks of a training pass from CUDA graphs, in place of launches by Python.

Captured are the blocks and the last norm, forward and backward, for each kind of micro-batch. The
embedding before them and the head behind them are launched as ever: a few of a pass's kernels. So
the head computes the rows that are learned and no others, hooks see what they always see, and every
bit is that of the pass without graphs.

Gradients of blocks are in memory that stays. One graph of a kind writes them, for the first
micro-batch of a step, another adds to them; nothing is set to zero. What backward needs is in one
pool of memory, which all graphs share: only one pass is under way at a time.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.kernels.attention.api import AttentionMask
from tigon.kernels.attention.mask import with_room
from tigon.kernels.mlp.grouped_mlp import waits
from tigon.kernels.runtime import autocast_dtype
from tigon.layers import Attention
from tigon.layers.moe import Experts
from tigon.models import CausalLM
from tigon.parallel import find_zero
from tigon.train.captured import Captured, Gradients, Kind, Recompute, beside, inputs_of
from tigon.train.config import Config
from tigon.train.distributed import World
from tigon.train.graph_parts import Parts
from tigon.train.model import compute_dtype, is_sharded

MOST = 8  # kinds of micro-batches that have graphs


class Graphs:
    """Runs the blocks of a model: with gradients from graphs, and else as the model does.

    The first micro-batch of a kind compiles and sets up what a capture cannot, on the stream of
    captures; kinds beyond `MOST` have no graphs, which `say` tells once. From then on the model
    calls it in place of its decoder. Parameters stay where they are, and trained or frozen: a pass
    that finds them otherwise raises RuntimeError.
    """

    def __init__(self, model: CausalLM, say: Callable[[str], None] = print) -> None:
        check_model(model)
        self.decoder, self.device, self.say = model.model, model.device, say
        self.gradients = Gradients(model)
        blocks = self.decoder.modules()
        self.windows = {m.window for m in blocks if isinstance(m, Attention) and m.window}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.passes = 0  # that have begun
        self.learned: dict[Kind, set[int]] = {}  # outputs that got a gradient in the first pass
        self.captured: dict[tuple[Kind, bool], Captured] = {}
        self._said: set[str] = set()
        self._parts = Parts(model)
        self._places: list[Any] | None = None  # of parameters and buffers, in the first pass
        # The blocks learn, even where the embedding before them does not
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        model.graphs = self

    def __call__(
        self,
        x: Tensor,
        position_ids: Tensor,
        mask: AttentionMask,
        cache: Any,
        recompute: Recompute,
        routing: bool = False,
        offload: bool = False,
        dropout_keys: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """As Decoder.forward."""
        rest = cache, recompute, routing, offload, dropout_keys
        learns = torch.is_grad_enabled() and self.decoder.training and cache is None
        shares = mask.prefixes is not None
        if not learns or offload or shares or self._must_not() or not self.gradients.holders:
            return self.decoder(x, position_ids, mask, *rest)
        self._check_places()
        roomy = with_room(mask, x.shape[0] * x.shape[1], self.windows)
        kind = Kind.of(x, position_ids, roomy, recompute, routing, dropout_keys)
        if kind not in self.learned and not self._add(kind):
            return self.decoder(x, position_ids, mask, *rest)
        learned, adds = self.learned[kind], self.gradients.there()
        # The pass that decides where gradients stay is one that writes them
        if not learned or (adds and not self.gradients.memory):
            return self._first(learned, x, position_ids, roomy, *rest)
        key = kind, adds
        if key not in self.captured:
            made = Captured(self.decoder, self.gradients, kind, frozenset(learned))
            own = x, position_ids, roomy, dropout_keys
            self.captured[key] = made.capture(*own, self.pool, adds=adds)
        given = self._anchor, x, position_ids, roomy, dropout_keys
        hidden, *tallies = _Replayed.apply(self, self.captured[key], *given)
        return hidden, tallies

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model has weights of its own, and runs without

    def _must_not(self) -> bool:
        """Whether a replay would pass over what this pass does."""
        if torch.compiler.is_compiling():
            return True
        if autocast_dtype(self.device) is not None:  # casts of weights outlive the graph's memory
            self._say_once("under torch.autocast passes run without graphs: cast the model instead")
            return True
        if self._parts.have_hooks():
            self._say_once(
                "there are hooks on the blocks or on their parameters, which a replay would not "
                "call: passes run without graphs"
            )
            return True
        return False

    def _check_places(self) -> None:
        found = self._parts.places()
        if self._places is None:
            self._places = found
        elif found != self._places:
            raise RuntimeError(
                "cuda_graphs: parameters have been moved, replaced, frozen or unfrozen, or "
                "adapters switched, since the first pass, and graphs read those of then: make "
                "Graphs(model) anew"
            )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(f"note: cuda_graphs: {text}")

    def _add(self, kind: Kind) -> bool:
        """Whether there is room for one more."""
        if len(self.learned) < MOST:
            self.learned[kind] = set()
            return True
        self._say_once(
            f"there are graphs for {MOST} kinds of micro-batches; those of other shapes, or of "
            "other numbers and lengths of sequences, run without"
        )
        return False

    def _first(
        self, learned: set[int], x: Tensor, positions: Tensor, mask: AttentionMask, *rest: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Without a graph, noting what of the result gets gradients."""
        # With ZeRO, parts of it read gradients of blocks as soon as these are launched
        tensors = x, positions, *inputs_of(mask), rest[-1]
        aside = nullcontext() if self.gradients.zero else beside(self.device, *tensors)
        with aside:
            hidden, tallies = self.decoder(x, positions, mask, *rest)
        for i, out in enumerate((hidden, *tallies)):
            if out.requires_grad:
                out.register_hook(lambda _, i=i: learned.add(i))
        return hidden, tallies


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graphs: Graphs, captured: Captured, _: Tensor, *given: Any
    ) -> tuple[Tensor, ...]:
        graphs.passes += 1
        ctx.graphs, ctx.captured, ctx.number = graphs, captured, graphs.passes
        ctx.done = False
        ctx.set_materialize_grads(False)
        return tuple(captured.forward(*given))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if ctx.number != ctx.graphs.passes:
            raise RuntimeError(
                "cuda_graphs: another forward has taken the memory of this one: go back through "
                "each before the next, or train without"
            )
        if ctx.done:  # also where retain_graph asked for more
            raise RuntimeError(
                "cuda_graphs: this pass has gone back once, over the memory of its forward: go "
                "back through the sum of losses, or train without"
            )
        ctx.done = True
        return None, None, None, ctx.captured.backward(gradients), None, None, None


def check_run(config: Config, world: World) -> None:
    """Raises ValueError where a run with cuda_graphs cannot have any."""
    if not config.cuda_graphs:
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


def check_model(model: CausalLM) -> None:
    """Raises ValueError for a model whose passes cannot be captured."""
    if model.activation_offload:
        raise ValueError(
            "cuda_graphs with activation_offload, which copies beside the passes: leave one out"
        )
    zero = find_zero(model)
    if zero is None and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("cuda_graphs: the model is sharded by FSDP2, which gathers by Python")
    dtype = model.dtype if zero is None else zero.compute
    for name, module in model.named_modules():
        if isinstance(module, Experts) and waits(module.gate_up_proj.shape, dtype, model.device):
            raise ValueError(
                f"cuda_graphs: {name} asks the GPU how many tokens each expert has, except in "
                "bfloat16 from sm_90 on with sizes that 8 divides: cuda_graphs=false trains without"
            )
