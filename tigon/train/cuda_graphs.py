"""Runs the blocks of a training pass from CUDA graphs (`cuda_graphs`), not launched by Python.

The blocks and the last norm are captured, forward and backward, for each kind of micro-batch. The
embedding before them and the head behind them, a few of a pass's kernels, are launched as ever: so
the head computes only the rows that are learned, callbacks see what they always see, and every bit
is that of the pass without graphs.

Gradients of blocks stay at fixed addresses. For each kind one graph writes them, for the first
micro-batch of a step, and another adds to them; nothing is set to zero. What backward needs is in
one memory pool for all graphs: only one pass is under way at a time.

# B rows, T tokens of a row, C model dim
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tigon.kernels.attention.mask import AttentionMask, pad_cu_seqlens
from tigon.kernels.runtime import autocast_dtype
from tigon.layers import Attention
from tigon.models import CausalLM
from tigon.models.decoder import Decoder, Recompute
from tigon.train.graph_checks import GraphKey, PassInputs, ReplayGuard, check_model, graph_key
from tigon.train.launch_meter import LaunchMeter
from tigon.utils.graph_capture import capture_graph, on_capture_stream
from tigon.utils.memory import is_out_of_memory

MAX_GRAPHS = 8  # kinds of micro-batches that have graphs


class CaptureError(RuntimeError):
    """Says for which `reason` a step cannot be captured."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"cuda_graphs=true: {reason}; cuda_graphs=false trains without")
        self.reason = reason


class GradientBuffers:
    """Keeps the gradients of blocks at fixed addresses between the micro-batches of a step.

    A gradient is at `parameter.grad`, or where ZeRO (sharding=gradients) keeps its sum.
    """

    def __init__(self, model: CausalLM) -> None:
        decoder = model.model
        self.zero = model.zero2
        self._modules = [*decoder.first_modules, *decoder.layers, *decoder.last_modules]
        self._holders: list[tuple[nn.Parameter, Any, str]] = []
        self.memory: list[Tensor | None] = []  # one for each holder, made by a capture

    @property
    def holders(self) -> list[tuple[nn.Parameter, Any, str]]:
        """Returns each trained parameter with the object and attribute that hold its gradient."""
        if not self._holders:  # in a pass, when parameters are whole
            for parameter in dict.fromkeys(p for m in self._modules for p in m.parameters()):
                if parameter.requires_grad:
                    place = parameter, "grad"
                    if self.zero is not None:
                        place = self.zero.gradient_holder(parameter)
                    self._holders.append((parameter, *place))
        return self._holders

    def read(self) -> list[Tensor | None]:
        """Returns the present gradient of each parameter of `holders`, None where there is none."""
        return [getattr(owner, name) for _, owner, name in self.holders]

    def write(self, values: Sequence[Tensor | None]) -> None:
        """Sets the gradient of each parameter of `holders`."""
        for (_, owner, name), value in zip(self.holders, values, strict=True):
            setattr(owner, name, value)

    def exist(self) -> bool:
        """Returns whether any gradient has been written since zero_grad."""
        return any(value is not None for value in self.read())

    def copy_eager(self) -> None:
        """Copies the gradients of a pass without graphs to the fixed memory, zeros where it has
        none, and makes that memory the gradients."""
        with torch.no_grad():
            for buffer, grad in zip(self.memory, self.read(), strict=True):
                if buffer is not None and grad is None:
                    buffer.zero_()  # it has those of the step before
                elif buffer is not None and grad is not None and grad is not buffer:
                    buffer.copy_(grad)
        self.assign()

    @contextmanager
    def capturing(self, *, adds: bool) -> Iterator[None]:
        """Makes the backward pass in the `with` block write gradients to the fixed memory, or add
        to it, as it is captured; restores the parameters' gradients.

        The first one that writes decides where that memory is.
        """
        before, reduces, hooks = self.read(), self.zero is not None and self.zero.reduces, []
        if self.zero is not None:
            self.zero.reduces = False  # ZeRO reduces after the graph
        self.write(self.memory if adds else [None] * len(before))
        if self.memory and not adds:  # autograd allocates new gradients: hooks copy them
            for i, (parameter, _, _) in enumerate(self.holders):
                copy = partial(self._copy_gradient, i)
                hooks.append(parameter.register_post_accumulate_grad_hook(copy))
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

    def assign(self) -> None:
        """Makes the fixed memory the gradients, except where no replay writes."""
        for (_, owner, name), buffer in zip(self.holders, self.memory, strict=True):
            if buffer is not None:
                setattr(owner, name, buffer)

    def _copy_gradient(self, index: int, parameter: Tensor) -> None:
        """Moves a parameter's new gradient into its buffer."""
        (_, owner, name), buffer = self.holders[index], self.memory[index]
        assert buffer is not None
        buffer.copy_(getattr(owner, name))
        setattr(owner, name, None)


class CapturedGraph:
    """Holds the forward and backward graphs of one kind of pass, with static inputs and outputs.

    `options` are the decoder's recompute and routing, `pool` the memory that all graphs share,
    `learned` says which outputs get a gradient, and `adds` whether backward adds to gradients.
    """

    def __init__(
        self,
        decoder: Decoder,
        gradients: GradientBuffers,
        inputs: PassInputs,
        options: tuple[Recompute, bool],
        pool: Any,
        *,
        learned: Collection[int],
        adds: bool,
    ) -> None:
        self.decoder, self.gradients, self.options = decoder, gradients, options
        self.learned, self.adds = learned, adds
        self.dx: Tensor | None = None
        x, mask, device = inputs.x, inputs.mask, inputs.x.device
        self.causal, self.longest, self.backend = mask.causal, mask.longest, mask.backend
        self.x = x.detach().clone().requires_grad_(x.requires_grad)
        self.positions = inputs.positions.clone()
        self.optional = [None if t is None else t.clone() for t in inputs.optional()]
        self._forward = capture(self._run_forward, device, pool)
        self.upstream = [
            torch.empty_like(out) if i in self.learned else None
            for i, out in enumerate(self.outputs)
        ]
        with self.gradients.capturing(adds=adds):
            self._backward = capture(self._run_backward, device, pool)

    def _run_forward(self) -> None:
        """Runs the blocks on the graph's static inputs; sets `outputs`."""
        bounds, segments, real, keys = self.optional
        mask = AttentionMask(
            self.x.shape[1],
            segment_ids=segments,
            key_mask=real,
            causal=self.causal,
            cu_seq_lens=bounds,
            longest=self.longest,
            backend=self.backend,
        )
        with torch.enable_grad():
            hidden, tallies = self.decoder(
                *(self.x, self.positions, mask, None, *self.options), dropout_keys=keys
            )
        self.outputs = [hidden, *tallies]

    def _run_backward(self) -> None:
        """Runs backward from the outputs' gradients in `upstream`; sets `dx`, the gradient of x."""
        self.x.grad = None
        upstream = [u for u in self.upstream if u is not None]
        torch.autograd.backward([self.outputs[i] for i in sorted(self.learned)], upstream)
        self.dx, self.x.grad = self.x.grad, None
        self.outputs = [out.detach() for out in self.outputs]

    def forward(self, inputs: PassInputs) -> list[Tensor]:
        """Returns hidden states and routers' tallies for these inputs, by a replay, in memory that
        the next one overwrites."""
        with torch.no_grad():
            self.x.copy_(inputs.x)
        self.positions.copy_(inputs.positions)
        for static, new in zip(self.optional, inputs.optional(), strict=True):
            if static is not None and new is not None:
                static.copy_(new)
        self._forward()
        return [out.detach() for out in self.outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Returns the gradient of x; those of parameters are in `GradientBuffers`."""
        for static, new in zip(self.upstream, gradients, strict=True):
            if static is not None:
                static.zero_() if new is None else static.copy_(new)
            elif new is not None:
                raise RuntimeError("cuda_graphs: a later pass learns more of the blocks")
        buffers = self.gradients
        if self.adds != buffers.exist():
            raise RuntimeError(
                "cuda_graphs: gradients have come or gone since this pass's forward: call "
                "zero_grad before the forward pass"
            )
        if self.adds:
            buffers.copy_eager()
        self._backward()
        buffers.assign()
        if buffers.zero is not None:
            buffers.zero.prepare_reduction()
        return self.dx


def capture(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """Captures what `run` launches; returns its replay, or raises RuntimeError."""
    graph = torch.cuda.CUDAGraph()
    try:
        with capture_graph(graph, device, pool):
            run()
    except Exception as error:
        first: BaseException = error
        while first.__context__ is not None:  # the end of a capture that failed fails too
            first = first.__context__
        if is_out_of_memory(first):
            raise first from None
        why = str(first).split("\n")[0]  # of CUDA's errors more lines follow
        reason = f"the step cannot be captured ({type(first).__name__}: {why})"
        raise CaptureError(reason) from first
    return graph.replay


class Graphs:
    """Runs a model's blocks from graphs in training; the model calls it in place of its decoder.

    The first micro-batch of a kind runs without a graph, on the capture stream: it compiles and
    allocates what a capture cannot. Kinds beyond MAX_GRAPHS have no graphs, which `say` tells once.
    A pass raises RuntimeError if parameters have been moved, frozen or unfrozen since the first.
    With `auto` there are graphs only once passes were measured to wait for launches, and none after
    a capture that fails: `say` tells what was found.
    """

    def __init__(
        self, model: CausalLM, say: Callable[[str], None] = print, *, auto: bool = False
    ) -> None:
        check_model(model)
        self.decoder, self.device, self.say = model.model, model.device, say
        self.gradients = GradientBuffers(model)
        blocks = self.decoder.modules()
        self.windows = {m.window for m in blocks if isinstance(m, Attention) and m.window}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.passes = 0  # that have begun
        self.learned: dict[GraphKey, set[int]] = {}  # outputs that got a gradient in the first pass
        self.captured: dict[tuple[GraphKey, bool], CapturedGraph] = {}
        self.meter = LaunchMeter() if auto else None  # until it has measured enough
        self.auto, self.off = auto, False
        self._said: set[str] = set()
        self._guard = ReplayGuard(model)
        self._fingerprint: list[Any] | None = None  # of parameters and buffers, in the first pass
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
        """Returns what Decoder.forward, whose arguments these are, returns: by a replay, or from
        the decoder where a pass cannot be replayed or is the first of its kind."""
        rest = cache, recompute, routing, offload, dropout_keys
        learns = torch.is_grad_enabled() and self.decoder.training and cache is None
        if self.off or not learns or offload or self._needs_eager(mask):
            return self.decoder(x, position_ids, mask, *rest)
        if self.meter is not None and not self._decide(self.meter):
            # Before later micro-batches of a step the GPU's queue may be full, where launches wait
            first = not self.gradients.exist()
            with self.meter.measuring() if first else nullcontext():
                return self.decoder(x, position_ids, mask, *rest)
        if self.off or not self.gradients.holders:
            return self.decoder(x, position_ids, mask, *rest)
        self._check_fingerprint()
        roomy = pad_cu_seqlens(mask, x.shape[0] * x.shape[1], self.windows)
        inputs = PassInputs(x, position_ids, roomy, dropout_keys)
        kind = graph_key(inputs, recompute, routing)
        if kind not in self.learned and not self._add(kind):
            return self.decoder(x, position_ids, mask, *rest)
        learned, adds = self.learned[kind], self.gradients.exist()
        # The pass that decides where gradients stay is one that writes them
        if not learned or (adds and not self.gradients.memory):
            return self._first(learned, inputs, *rest)
        key = kind, adds
        if key not in self.captured:
            self._capture(key, inputs, (recompute, routing))
            if self.off:
                return self.decoder(x, position_ids, mask, *rest)
        captured = self.captured[key]
        hidden, *tallies = _ReplayFunction.apply(self, captured, self._anchor, *inputs)
        return hidden, tallies

    def _capture(
        self, key: tuple[GraphKey, bool], inputs: PassInputs, options: tuple[Recompute, bool]
    ) -> None:
        """Captures the graph of a kind of pass; where auto cannot, turns graphs off."""
        learned, adds = frozenset(self.learned[key[0]]), key[1]
        given = self.decoder, self.gradients, inputs, options, self.pool
        try:
            self.captured[key] = CapturedGraph(*given, learned=learned, adds=adds)
        except CaptureError as error:
            if not self.auto:
                raise
            self.turn_off(error.reason)
        except RuntimeError as error:
            if not (self.auto and is_out_of_memory(error)):
                raise
            self.turn_off("its graph has no room in memory")

    def turn_off(self, why: str) -> None:
        """Lets all further passes run without graphs, and frees those that there are."""
        self.off, self.meter = True, None
        self.captured.clear()
        self.gradients.memory = []
        self.say(f"cuda_graphs=auto: not used: {why}")

    def _decide(self, meter: LaunchMeter) -> bool:
        """Returns whether it is known if passes wait for launches; turns graphs off if not."""
        bound = meter.is_launch_bound()
        if bound is None:
            return False
        self.meter = None
        times = f"{1e3 * meter.host:.3g} of the {1e3 * meter.device:.3g} ms of a forward pass"
        if bound:
            self.say(f"cuda_graphs=auto: used: launching kernels takes {times}")
        else:
            self.turn_off(f"launching kernels takes {times}")
        return True

    def __reduce__(self) -> Any:
        """Makes None of a copy, or of what is unpickled."""
        return type(None), ()  # a copy of the model has weights of its own, and runs without

    def _needs_eager(self, mask: AttentionMask) -> bool:
        """Returns whether this pass must run without graphs: under torch.compile or autocast, with
        prefixes, which are on the host, or with hooks, which a replay would ignore."""
        if torch.compiler.is_compiling():
            return True
        if mask.prefixes is not None:
            self._say_once("passes in which sequences share a prompt run without graphs")
            return True
        if autocast_dtype(self.device) is not None:  # casts of weights outlive the graph's memory
            self._say_once("under torch.autocast passes run without graphs: cast the model instead")
            return True
        if self._guard.has_hooks():
            self._say_once(
                "there are hooks on the blocks or on their parameters, which a replay would not "
                "call: passes run without graphs"
            )
            return True
        return False

    def _check_fingerprint(self) -> None:
        """Raises RuntimeError if parameters have been moved or frozen since the first pass."""
        fingerprint = self._guard.fingerprint()
        if self._fingerprint is None:
            self._fingerprint = fingerprint
        elif fingerprint != self._fingerprint:
            raise RuntimeError(
                "cuda_graphs: parameters have been moved, replaced, frozen or unfrozen, or "
                "adapters switched, since the first pass, and graphs read those of then: make "
                "Graphs(model) anew"
            )

    def _say_once(self, text: str) -> None:
        """Logs a text the first time."""
        if text not in self._said:
            self._said.add(text)
            self.say(f"note: cuda_graphs: {text}")

    def _add(self, kind: GraphKey) -> bool:
        """Adds a kind of micro-batch and returns True; False with MAX_GRAPHS already."""
        if len(self.learned) < MAX_GRAPHS:
            self.learned[kind] = set()
            return True
        self._say_once(
            f"there are graphs for {MAX_GRAPHS} kinds of micro-batches; those of other shapes, or "
            "of other numbers and lengths of sequences, run without"
        )
        return False

    def _first(
        self, learned: set[int], inputs: PassInputs, *rest: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs without a graph and returns hidden states and tallies; backward will add to
        `learned` the indices of those that get gradients."""
        # With ZeRO, parts of it read gradients of blocks as soon as these are launched
        tensors = inputs.x, inputs.positions, *inputs.optional()
        zero, adds = self.gradients.zero, self.gradients.exist()

        def learn(index: int) -> None:
            learned.add(index)
            if adds and not self.gradients.exist():
                self._say_once(
                    "passes run without graphs, as their gradients were removed after the forward "
                    "pass: call zero_grad before the forward pass"
                )

        with nullcontext() if zero else on_capture_stream(self.device, *tensors):
            hidden, tallies = self.decoder(*inputs[:3], *rest)
        for i, out in enumerate((hidden, *tallies)):
            if out.requires_grad:
                out.register_hook(lambda _, i=i: learn(i))
        return hidden, tallies


class _ReplayFunction(torch.autograd.Function):
    """Replays a captured forward, and its backward when autograd asks for it."""

    @staticmethod
    def forward(
        ctx: Any, graphs: Graphs, captured: CapturedGraph, _: Tensor, *args: Any
    ) -> tuple[Tensor, ...]:
        graphs.passes += 1
        ctx.graphs, ctx.captured, ctx.number = graphs, captured, graphs.passes
        ctx.done = False
        ctx.set_materialize_grads(False)
        return tuple(captured.forward(PassInputs(*args)))

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
