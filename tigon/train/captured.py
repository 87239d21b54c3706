"""One pass of blocks as two CUDA graphs, forward and backward, and the gradients that they write.

# B rows, T tokens of a row, C model dim
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from tigon.generation.steps import side_stream
from tigon.kernels.attention.api import AttentionMask
from tigon.models import CausalLM
from tigon.models.decoder import Decoder
from tigon.parallel import find_zero

Recompute = int | Collection[int]
Replay = Callable[[], None]


class Kind(NamedTuple):
    """What a graph cannot change: shapes, and numbers that the host gives to launches."""

    shape: torch.Size  # [B, T, C]
    dtype: torch.dtype
    learns: bool  # the embedding
    positions: torch.Size
    bounds: int | None  # of packed sequences
    longest: int | None
    segments: bool
    padded: bool
    causal: bool
    backend: str
    recompute: Any
    routing: bool
    drops: bool  # whether there are keys of dropout

    @classmethod
    def of(
        cls,
        x: Tensor,
        positions: Tensor,
        mask: AttentionMask,
        recompute: Recompute,
        routing: bool,
        dropout_keys: Tensor | None = None,
    ) -> Self:
        cu = mask.cu_seq_lens
        return cls(
            x.shape,
            x.dtype,
            x.requires_grad,
            positions.shape,
            None if cu is None else len(cu),
            mask.longest,
            mask.segment_ids is not None,
            mask.key_mask is not None,
            mask.causal,
            mask.backend,
            recompute if isinstance(recompute, int) else tuple(sorted(recompute)),
            routing,
            dropout_keys is not None,
        )


class Gradients:
    """Those of blocks between the micro-batches of a step: who holds each, and memory that stays.

    A parameter holds its own; with sharding=gradients its sum may be held for it.
    """

    def __init__(self, model: CausalLM) -> None:
        self.zero, self._modules = find_zero(model), [*model.model.layers, model.model.norm]
        self._holders: list[tuple[nn.Parameter, Any, str]] = []
        self.memory: list[Tensor | None] = []  # of each holder, once a capture has made it

    @property
    def holders(self) -> list[tuple[nn.Parameter, Any, str]]:
        """Each trained parameter, with the object and the attribute that hold its gradient."""
        if not self._holders:  # in a pass, when parameters are whole
            for parameter in dict.fromkeys(p for m in self._modules for p in m.parameters()):
                if parameter.requires_grad:
                    place = parameter, "grad"
                    if self.zero is not None:
                        place = self.zero.holder(parameter)
                    self._holders.append((parameter, *place))
        return self._holders

    def read(self) -> list[Tensor | None]:
        return [getattr(owner, name) for _, owner, name in self.holders]

    def write(self, values: Sequence[Tensor | None]) -> None:
        for (_, owner, name), value in zip(self.holders, values, strict=True):
            setattr(owner, name, value)

    def there(self) -> bool:
        return any(value is not None for value in self.read())

    def adopt(self) -> None:
        """What a pass without graphs has left moves to the memory that stays."""
        with torch.no_grad():
            for kept, found in zip(self.memory, self.read(), strict=True):
                if kept is not None and found is None:
                    kept.zero_()  # it has those of the step before
                elif kept is not None and found is not None and found is not kept:
                    kept.copy_(found)
        self._give()

    @contextmanager
    def capturing(self, *, adds: bool) -> Iterator[None]:
        """Inside, a backward pass writes gradients to the memory that stays, or adds to it.

        The first one that writes decides where that is.
        """
        before, reduces, hooks = self.read(), self.zero is not None and self.zero.reduces, []
        if self.zero is not None:
            self.zero.reduces = False  # not in the graph, but behind it
        self.write(self.memory if adds else [None] * len(before))
        if self.memory and not adds:  # autograd makes a gradient elsewhere: it is copied at once
            for i, (parameter, _, _) in enumerate(self.holders):
                hooks.append(parameter.register_post_accumulate_grad_hook(self._copying(i)))
        try:
            yield
            if not self.memory:
                self.memory = self.read()
        finally:
            for hook in hooks:
                hook.remove()
            self.write(before)
            if self.zero is not None:
                self.zero.reduces = reduces

    def _give(self) -> None:
        """To the holders, but where no replay writes."""
        for (_, owner, name), kept in zip(self.holders, self.memory, strict=True):
            if kept is not None:
                setattr(owner, name, kept)

    def _copying(self, index: int) -> Callable[[Tensor], None]:
        _, owner, name = self.holders[index]

        def copy(_: Tensor) -> None:
            kept = self.memory[index]
            assert kept is not None
            kept.copy_(getattr(owner, name))
            setattr(owner, name, None)

        return copy

    def arrived(self) -> None:
        """In a backward pass, when a replay has left them in the memory that stays."""
        self._give()
        if self.zero is not None:
            self.zero.arrived()


class Captured:
    """A pass of one kind, forward and backward; the memory of what goes in and out stays."""

    def __init__(
        self, decoder: Decoder, gradients: Gradients, kind: Kind, learned: Collection[int]
    ) -> None:
        self.decoder, self.gradients = decoder, gradients
        self.kind, self.learned = kind, learned  # which outputs get a gradient
        self.outputs: list[Tensor] = []
        self.upstream: list[Tensor | None] = []
        self.dx: Tensor | None = None

    def capture(
        self,
        x: Tensor,
        positions: Tensor,
        mask: AttentionMask,
        dropout_keys: Tensor | None,
        pool: Any,
        *,
        adds: bool,
    ) -> Self:
        """`adds`: to gradients that are there. All captures of one pool share its memory."""
        self.adds = adds
        self.x = x.detach().clone().requires_grad_(x.requires_grad)
        self.positions = positions.clone()
        self.bounds, self.segments, self.real, self.keys = (
            None if t is None else t.clone() for t in (*inputs_of(mask), dropout_keys)
        )
        device = x.device
        self._forward = capture(self._run_forward, device, pool)
        self.upstream = [
            torch.empty_like(out) if i in self.learned else None
            for i, out in enumerate(self.outputs)
        ]
        with self.gradients.capturing(adds=adds):
            self._backward = capture(self._run_backward, device, pool)
        return self

    def _run_forward(self) -> None:
        kind = self.kind
        mask = AttentionMask(
            self.x.shape[1],
            segment_ids=self.segments,
            key_mask=self.real,
            causal=kind.causal,
            cu_seq_lens=self.bounds,
            longest=kind.longest,
            backend=kind.backend,
        )
        with torch.enable_grad():
            hidden, tallies = self.decoder(
                *(self.x, self.positions, mask, None, kind.recompute, kind.routing),
                dropout_keys=self.keys,
            )
        self.outputs = [hidden, *tallies]

    def _run_backward(self) -> None:
        self.x.grad = None
        given = [u for u in self.upstream if u is not None]
        torch.autograd.backward([self.outputs[i] for i in sorted(self.learned)], given)
        self.dx, self.x.grad = self.x.grad, None
        self.outputs = [out.detach() for out in self.outputs]

    def forward(
        self, x: Tensor, positions: Tensor, mask: AttentionMask, dropout_keys: Tensor | None
    ) -> list[Tensor]:
        with torch.no_grad():
            self.x.copy_(x)
        self.positions.copy_(positions)
        mine = self.bounds, self.segments, self.real, self.keys
        for kept, given in zip(mine, (*inputs_of(mask), dropout_keys), strict=True):
            if kept is not None and given is not None:
                kept.copy_(given)
        self._forward()
        return [out.detach() for out in self.outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Of x; those of parameters are where `Gradients` has them."""
        for kept, given in zip(self.upstream, gradients, strict=True):
            if kept is not None:
                kept.zero_() if given is None else kept.copy_(given)
            elif given is not None:
                raise RuntimeError("cuda_graphs: a later pass learns more of the blocks")
        own = self.gradients
        if self.adds != own.there():
            raise RuntimeError("cuda_graphs: gradients have come or gone since this pass's forward")
        if self.adds:
            own.adopt()
        self._backward()
        own.arrived()
        return self.dx


def inputs_of(mask: AttentionMask) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return mask.cu_seq_lens, mask.segment_ids, mask.key_mask


def capture(run: Callable[[], None], device: torch.device, pool: Any) -> Replay:
    """What launches again all that `run` does. It raises RuntimeError for what cannot be."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads allocate and copy the next micro-batches meanwhile
        how = {"pool": pool, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, stream=side_stream(device), **how):
            run()
    except Exception as error:
        first: BaseException = error
        while first.__context__ is not None:  # the end of a capture that failed fails too
            first = first.__context__
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        raise RuntimeError(
            f"cuda_graphs=true: the step cannot be captured ({type(first).__name__}: {first}); "
            "cuda_graphs=false trains without"
        ) from first
    return graph.replay


@contextmanager
def beside(device: torch.device, *tensors: Tensor | None) -> Iterator[None]:
    """On the stream of captures, whose workspaces must not come from a graph's memory; `tensors`
    are from the current one."""
    if device.type != "cuda":
        yield
        return
    here, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(here)
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)
