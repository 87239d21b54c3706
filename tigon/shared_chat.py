"""A chat over ranks that share the model: the first one talks, the others make its calls."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.chat import Chat, talk
from tigon.models import CausalLM
from tigon.train.distributed import NO_TIMEOUT, World
from tigon.train.launch import LAUNCHED

INTERRUPTED = 130  # exit code, as in cli.py


def talk_on_ranks(chat: Chat, name: str, world: World) -> None:
    """As `tigon.chat.talk`, on the first rank; all ranks call this, and return when it ends.

    The first one alone has the conversation. Ctrl-C stops an answer after the same token on all
    ranks; under torchrun, which ends with its ranks at Ctrl-C, it ends the chat.
    """
    calls = Calls(chat.model, world)
    if world.main:
        chat.generate = calls.generate
        calls.lead(lambda: talk(chat, name))
    else:
        calls.follow()


class Stopped(Exception):
    """After a step of an answer, on all ranks."""


class Calls:
    """Of model.generate: on the first rank, and so on all."""

    def __init__(self, model: CausalLM, world: World) -> None:
        """All ranks call this, at the same time."""
        self.model, self.progress = model, world.progress
        # A collective of the default group may last some minutes; a person may take longer to type
        self.group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        self.interrupted = False

    def lead(self, talk: Callable[[], None]) -> None:
        """On the first rank: what `talk` calls is called on all ranks, until it ends."""
        if LAUNCHED not in os.environ:
            signal.signal(signal.SIGINT, end)
        try:
            talk()
        except (KeyboardInterrupt, BrokenPipeError, SystemExit):  # never amid a step
            self._tell(None)
            raise
        self._tell(None)

    def follow(self) -> None:
        """On every other rank: make the first one's calls until it ends."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one says what it stops
        while (call := self._tell(None)) is not None:
            ids, settings = call
            self.progress.step += 1
            with suppress(Stopped, ValueError):  # on all ranks: the first one says it
                self.model.generate(ids, streamer=self._follow_step, **settings)

    def generate(
        self, ids: Tensor, *, streamer: Callable[[Tensor], object], **settings: Any
    ) -> None:
        """As the model's. A KeyboardInterrupt, and what `streamer` raises, comes after a step that
        all ranks have made."""
        self.interrupted = False
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self._tell((ids, settings))
            self.progress.step += 1
            with suppress(Stopped):
                self.model.generate(
                    ids, streamer=lambda new: self._lead_step(new, streamer), **settings
                )
        finally:
            signal.signal(signal.SIGINT, before)
        if self.interrupted:
            signal.raise_signal(signal.SIGINT)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True

    def _lead_step(self, new: Tensor, streamer: Callable[[Tensor], object]) -> None:
        self.progress.step += 1
        stop = True
        try:
            streamer(new)
            stop = self.interrupted
        finally:
            self._stops(stop)
        if stop:
            raise Stopped

    def _follow_step(self, new: Tensor) -> None:
        self.progress.step += 1
        if self._stops():
            raise Stopped

    def _stops(self, own: bool = False) -> bool:
        """What the first rank says."""
        word = torch.tensor([int(own)])
        dist.broadcast(word, 0, group=self.group)
        return bool(word)

    def _tell(self, call: tuple[Tensor, dict[str, Any]] | None) -> Any:
        """What the first rank says."""
        said = [call]
        dist.broadcast_object_list(said, 0, group=self.group)
        return said[0]


def end(number: int, frame: FrameType | None) -> None:
    sys.exit(INTERRUPTED)
