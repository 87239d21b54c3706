"""Continuous batching: one thread owns the model and writes the answers of all requests.

# R rows of the cache
"""

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.generation.loop import HostCopies
from tigon.generation.settings import GenerationSettings
from tigon.models import CausalLM
from tigon.serve.answer import Answer
from tigon.serve.batch import PREFILL, DecodeBatch, PromptReading, fit_capacity
from tigon.utils.json import escape

GPU_LAG = 1  # steps that the host may be behind the device: a new prompt waits for them
Written = Sequence[tuple[int, Answer]]  # rows of a step, with their answers


class QueueFullError(Exception):
    """Says that as many requests wait as may."""


@dataclass
class Counts:
    """What an engine has done since it began."""

    first_tokens: int = 0
    first_token_seconds: float = 0.0  # from their requests
    answers: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failures: int = 0


class Engine:
    """Writes answers in the R rows of a cache, each from its prompt on to its end.

    A free row takes the next prompt between two steps, at most PREFILL tokens at a time, and a step
    writes one token in every row. All rows are written by one adapter, or by none; answers of
    another wait until these have ended. `submit` and `close` may be called from any thread.
    """

    def __init__(
        self,
        model: CausalLM,
        max_rows: int,
        max_queue: int,
        default: GenerationSettings | None = None,  # of most requests, which come without a wait
    ):
        """Raises ValueError if the cache has no room for `max_rows` rows."""
        self.model, self.max_rows, self.max_queue = model, max_rows, max_queue
        self.capacity = fit_capacity(model, max_rows)  # tokens of a prompt and its answer
        self.counts, self._default = Counts(), default
        self._batch = DecodeBatch(model, max_rows, self.capacity)
        self._rows: list[Answer | None] = [None] * max_rows
        self._reading: tuple[PromptReading, list[Answer]] | None = None
        self._waiting: deque[Answer] = deque()
        self._changed = threading.Condition()
        self._closing = ""  # why no more answers are written
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._reset_copies()
        self._thread = threading.Thread(target=self._run, name="tigon-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, waits until it is ready, and raises the error that it met."""
        if not self._ready.is_set():
            self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread after its step; unfinished answers end by an error."""
        with self._changed:
            self._closing = self._closing or "the server is shutting down"
            self._changed.notify()
        self._thread.join()

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queues the answers of a request, all or none; raises QueueFullError."""
        with self._changed:
            waiting = sum(not answer.cancelled for answer in self._waiting)
            if waiting + len(answers) > self.max_queue + self._rows.count(None):
                raise QueueFullError(
                    f"{waiting} answers are waiting, and max_queue={self.max_queue}: try later"
                )
            if self._closing:
                raise QueueFullError(self._closing)
            self._waiting += answers
            self._changed.notify()

    @property
    def running(self) -> int:
        """Returns the number of answers that have a row."""
        return self.max_rows - self._rows.count(None)

    @property
    def waiting(self) -> int:
        """Returns the number of answers that wait for a row."""
        return sum(not answer.cancelled for answer in self._waiting.copy())

    @property
    def alive(self) -> bool:
        """Returns whether the thread runs."""
        return self._thread.is_alive()

    # On the engine's thread

    def _run(self) -> None:
        """Writes answers until `close`, or until no row can be freed after a failure; then ends
        all answers, without the device."""
        reason = ""
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.inference_mode())
                if self.model.device.type == "cuda":
                    stack.enter_context(torch.cuda.device(self.model.device))
                self._write()
        except Exception as error:
            traceback.print_exc()
            reason = f"{_describe(error)}: restart the server"
        finally:
            with self._changed:
                self._closing = self._closing or reason or "the engine has ended"
                self._fail_answers(self._closing, [*self._rows, *self._waiting])
                self._waiting.clear()
                self._rows = [None] * self.max_rows

    def _write(self) -> None:
        """Warms up, and writes answers until `close`; a failure ends those that have a row."""
        try:
            if self.model.device.type == "cuda":  # kernels and graphs, before the first request
                self._batch.warm_up(self._default)
        except Exception as error:
            self._error = error
            return
        finally:
            self._ready.set()
        while True:
            with self._changed:
                # Rows to write in, or a token on its way to the host
                while not (self._closing or self._waiting or self._sent or any(self._rows)):
                    self._changed.wait()
                if self._closing:
                    return
            try:
                self._drop_cancelled()
                self._read()
                if not self._step():
                    self._receive(everything=True)
            except Exception as error:
                traceback.print_exc()
                self._fail(_describe(error))

    def _drop_cancelled(self) -> None:
        """Frees the rows of answers that nobody reads."""
        if self._reading is not None and all(answer.cancelled for answer in self._reading[1]):
            self._reading = None
        reading = self._reading[1] if self._reading is not None else []
        for row, answer in enumerate(self._rows):
            if answer is not None and answer.cancelled and answer not in reading:
                self._free(row)

    def _read(self) -> None:
        """Gives waiting prompts free rows, and reads the next part of what is not read yet."""
        if self._reading is None:
            self._reading = self._begin()
        if self._reading is None:
            return
        reading, answers = self._reading
        settings = [(answer.settings, answer.max_tokens) for answer in answers]
        output = self._batch.read(reading, settings, any(a.logprobs for a in answers))
        if output is not None:
            self._reading = None
            self.counts.prompt_tokens += sum(len(answer.prompt) for answer in answers)
            self._send(output, list(enumerate(answers, reading.start)))

    def _begin(self) -> tuple[PromptReading, list[Answer]] | None:
        """Takes prompts for free neighbor rows: of at most PREFILL tokens, or a longer one."""
        with self._changed:
            while self._waiting and self._waiting[0].cancelled:
                self._waiting.popleft()
            if not self._waiting or None not in self._rows:
                return None
            adapter = self._waiting[0].adapter
            if adapter != self.model.active_adapter:
                if any(self._rows):  # of another one: it comes when they have ended
                    return None
                self.model.set_adapter(adapter)
            start, answers, tokens = self._rows.index(None), list[Answer](), 0
            for row in range(start, self.max_rows):
                if self._rows[row] is not None or not self._waiting:
                    break
                if self._waiting[0].adapter != adapter:
                    break
                tokens += len(self._waiting[0].prompt)
                if answers and tokens > PREFILL:
                    break
                self._rows[row] = answer = self._waiting.popleft()
                answers.append(answer)
        return self._batch.begin(start, [answer.prompt for answer in answers]), answers

    def _step(self) -> bool:
        """Writes the next token of every row whose prompt is read; returns whether there is one."""
        reading = self._reading[1] if self._reading is not None else []
        written = [
            (row, answer)
            for row, answer in enumerate(self._rows)
            if answer is not None and answer not in reading
        ]
        if not written:
            return False
        output = self._batch.step(written[-1][0] + 1, any(a.logprobs for _, a in written))
        self.counts.steps += 1
        self._send(output, written)
        return True

    def _send(self, output: Tensor, written: Written) -> None:
        """Sends a step's tokens to the host; an answer that has all it may have leaves its row."""
        self._copies.send(output)
        self._sent.append(written)
        for row, answer in written:
            answer.started += 1
            if answer.started == answer.max_tokens:
                self._free(row)
        self._receive()

    def _receive(self, everything: bool = False) -> None:
        """Hands tokens that have reached the host to their answers."""
        for output in self._copies.receive(everything):
            for row, answer in self._sent.popleft():
                if answer.ended or answer.cancelled:
                    continue
                self.counts.generated_tokens += 1
                if not answer.tokens:
                    self.counts.first_tokens += 1
                    self.counts.first_token_seconds += time.monotonic() - answer.created
                answer.append(output[row])
                self.counts.answers += answer.ended
                if answer.ended and self._rows[row] is answer:
                    self._free(row)

    def _free(self, row: int) -> None:
        """Takes an answer out of its row."""
        self._rows[row] = None
        self._batch.free(row)

    def _fail(self, error: str) -> None:
        """Ends all answers that have a row by an error, and frees the rows."""
        self._fail_answers(error, self._rows)
        self._reading = None
        self._reset_copies()
        for row in range(self.max_rows):
            if self._rows[row] is not None:
                self._free(row)

    def _fail_answers(self, error: str, answers: Sequence[Answer | None]) -> None:
        """Ends answers, and those with tokens on their way to the host, by an error."""
        sent = [answer for written in self._sent for _, answer in written]
        for answer in (*answers, *sent):
            if answer is not None:
                self.counts.failures += not answer.ended
                answer.fail(error)

    def _reset_copies(self) -> None:
        """Forgets the tokens on their way to the host."""
        self._copies = HostCopies(GPU_LAG if self.model.device.type == "cuda" else 0)
        self._sent: deque[Written] = deque()


def _describe(error: Exception) -> str:
    """Says that the model failed, and how."""
    return f"the model failed: {type(error).__name__}: {escape(error, 300)}"
