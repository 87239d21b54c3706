"""Steps over the rows of one static cache, which texts enter and leave one by one.

# R rows of the cache, b rows of a step, n rows of a reading, T prompt tokens, V vocab
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tigon.generation.loop import FEW_STEPS
from tigon.generation.row_sampling import RowSampling, SamplingNeeds
from tigon.generation.settings import GenerationSettings
from tigon.generation.steps import ROUND, GraphedStep
from tigon.layers import StateSpec, StaticCache
from tigon.models import CausalLM
from tigon.utils import memory
from tigon.utils.memory import format_gib

PREFILL = 4096  # prompt tokens between two steps: more would keep the texts being written waiting
# Prompt tokens that are read, by one text and by several, before there are requests: much and
# little, and one token, compile kernels of their own
WARM_READINGS = (PREFILL, 128, 64, 16, 1)
TOP = 20  # most alternatives to a token that a request can ask for
GPU_SHARE, HOST_SHARE = 0.85, 0.5  # of a GPU's free memory, or of all of a host's, for the cache


def fit_capacity(model: CausalLM, rows: int) -> int:
    """Returns how many tokens each of `rows` rows can hold: the model's context, or as many as fit
    into the device's memory, or as its RoPE leaves in place.

    Raises ValueError if there is no room for any.
    """
    device, longest = model.device, int(model.config.max_position_embeddings)
    if model.dynamic_rope is not None:  # beyond that all keys would have to be rotated anew
        longest = min(longest, int(model.dynamic_rope.original_length))
    if device.type == "cuda":
        budget = int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    else:
        budget = int(HOST_SHARE * memory.total_memory(device))
    sizes = [*range(ROUND, longest, ROUND), longest]

    def nbytes(tokens: int) -> int:
        make = model.model.make_states
        return StaticCache(make, StateSpec(rows, tokens, model.dtype, "meta")).nbytes

    fitting = bisect_right(sizes, budget, key=nbytes)
    if not fitting:
        raise ValueError(
            f"max_rows={rows}: a cache of {sizes[0]} tokens in each row takes "
            f"{format_gib(nbytes(sizes[0]))} GiB, and {device} has {format_gib(budget)} for it"
        )
    return sizes[fitting - 1]


class PromptReading:
    """Prompts on their way into the rows from `start` on: several in one pass, or one in parts."""

    def __init__(self, cache: StaticCache, start: int, prompts: Sequence[Sequence[int]]):
        stop = start + len(prompts)
        cache.reset(start, stop)
        self.start, self.view = start, cache.borrow(start, stop)
        device = cache.lengths.device
        self.prompts = [torch.tensor(ids, device=device) for ids in prompts]
        self.done = 0  # tokens of the first prompt that were read, if it is the only one

    def read(self, model: CausalLM) -> Tensor | None:
        """Reads up to PREFILL tokens of one prompt, or all of several; returns the logits [n, V]
        after the prompts once they are read."""
        if len(self.prompts) > 1:
            ends = torch.tensor([*accumulate(map(len, self.prompts), initial=0)], device="cpu")
            out = model(
                torch.cat(self.prompts)[None],
                past_key_values=self.view,
                cu_seq_lens=ends,
                max_length_q=max(map(len, self.prompts)),
                logits_to_keep=ends[1:] - 1,
            )
            return out.logits[0]
        (ids,) = self.prompts
        part = ids[None, self.done : self.done + PREFILL]
        out = model(part, past_key_values=self.view, logits_to_keep=1)
        self.done += part.shape[1]
        return out.logits[:, -1] if self.done == len(ids) else None


class DecodeBatch:
    """The texts in the R rows of a cache, and steps that write the next token of each.

    A step computes the first b rows, a power of two, and on a GPU replays a graph for them. What it
    returns is on the device; the host may be some steps behind.
    """

    def __init__(self, model: CausalLM, rows: int, capacity: int):
        device, vocab = model.device, model.config.vocab_size
        self.model, self.capacity = model, capacity
        self._cache = model.static_cache(rows, capacity)
        self._cache.active = self._active = torch.zeros(rows, dtype=torch.int32, device=device)
        self._sampling = RowSampling(rows, vocab, capacity, device)
        self._work = [SamplingNeeds()] * rows  # of the texts in the rows; idle ones need none
        self._last = torch.zeros(rows, 1, dtype=torch.long, device=device)
        # Token, its log-probability, then the TOP likeliest tokens and their log-probabilities
        self._output = torch.zeros(rows, 2 + 2 * TOP, dtype=torch.float64, device=device)
        self._top = min(TOP, vocab)
        self._replays: dict[Any, GraphedStep] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def warm_up(self, settings: GenerationSettings | None) -> None:
        """Runs what such requests need, which compiles kernels and captures graphs."""
        rows, work = len(self._work), SamplingNeeds()
        if settings is not None:
            work = self._sampling.set(0, settings, self._last[0], 1)
        most = self.capacity - 1
        for total in WARM_READINGS:
            part = min(max(total // 2, 1), most)
            for lengths in [min(total, most)], [part] * min(rows, total // part):
                PromptReading(self._cache, 0, [[0] * tokens for tokens in lengths]).read(self.model)
                self._cache.reset(0, len(lengths))
        for needs in {SamplingNeeds(), work}:
            for _ in range(3):
                for end in {1 << i for i in range(rows.bit_length())} | {rows}:
                    self._run(end, needs, False)

    def begin(self, start: int, prompts: Sequence[Sequence[int]]) -> PromptReading:
        """Empties the rows from `start` on for these prompts, of one token or more."""
        return PromptReading(self._cache, start, prompts)

    def read(
        self,
        reading: PromptReading,
        settings: Sequence[tuple[GenerationSettings, int]],
        logprobs: bool,
    ) -> Tensor | None:
        """Reads the next part of the prompts.

        After the last it chooses the first tokens, as `step` does, by the rows' `settings`, with
        the most tokens that each will get; steps then continue these rows.
        """
        logits = reading.read(self.model)
        if logits is None:
            return None
        self._cache.give_back(reading.view, reading.start)
        work = SamplingNeeds()
        for i, (prompt, row) in enumerate(zip(reading.prompts, settings, strict=True)):
            needed = self._sampling.set(reading.start + i, row[0], prompt, row[1])
            self._work[reading.start + i] = needed
            work |= needed
        self._active[reading.start : reading.start + len(logits)] = 1
        return self._choose(logits, reading.start, work, logprobs)

    def step(self, end: int, logprobs: bool) -> Tensor:
        """Writes the next token of each text in the rows [0, end).

        Returns [R, 2 + 2 * TOP] fp64, overwritten by the next call: the token, or NOT_FINITE, and
        with `logprobs` its log-probability, the likeliest tokens and theirs.
        """
        work = SamplingNeeds()
        for needs in self._work[:end]:
            work |= needs
        return self._run(min(1 << (end - 1).bit_length(), len(self._work)), work, logprobs)

    def free(self, row: int) -> None:
        """Takes a text out of its row, after the steps that were started."""
        self._work[row] = SamplingNeeds()
        self._active[row] = 0
        self._cache.lengths[row] = 0  # so that the steps of others do not read it

    def _run(self, rows: int, work: SamplingNeeds, logprobs: bool) -> Tensor:
        """Runs a step of this many rows, by its graph once it has been run twice."""
        step = rows, work, logprobs
        # A graph is that of the adapter it was captured with
        key = self.model.active_adapter, *step
        if key not in self._replays:
            self._replays[key] = GraphedStep(self.model, None, self._pool)
        return self._replays[key](lambda: self._step(*step), FEW_STEPS + 1)

    def _step(self, rows: int, work: SamplingNeeds, logprobs: bool) -> Tensor:
        """Runs the model on the last tokens of the first rows and chooses the next."""
        view = self._cache.rows(0, rows)
        out = self.model(self._last[:rows], past_key_values=view, logits_to_keep=1)
        return self._choose(out.logits[:, -1], 0, work, logprobs)

    def _choose(self, logits: Tensor, start: int, work: SamplingNeeds, logprobs: bool) -> Tensor:
        """Chooses the tokens of rows from `start` on and notes them; returns what `step` does."""
        token = self._sampling(logits, work, start)[:, None]
        rows, known = slice(start, start + len(logits)), token.clamp(min=0)
        self._last[rows] = known
        self._output[rows, :1] = token.double()
        if logprobs:
            scores = logits.float().log_softmax(-1)
            best = scores.topk(self._top)
            self._output[rows, 1:2] = scores.gather(1, known).double()
            self._output[rows, 2 : 2 + self._top] = best.indices.double()
            self._output[rows, 2 + TOP : 2 + TOP + self._top] = best.values.double()
        return self._output
