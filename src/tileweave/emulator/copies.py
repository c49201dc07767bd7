"""Copies of the copy engine: what a stream's host enqueues beside a kernel, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tileweave.emulator.agents import AsyncOp, Partition
from tileweave.emulator.clocks import ALIAS, GLOBAL, SHARED
from tileweave.emulator.regions import strided
from tileweave.emulator.views import region_of


class Copy(AsyncOp):
    """A copy from global to global memory: reads its source at one moment, and lands at a later one.

    Whoever waits for a word that a copy writes may rely on all copies ahead of it: int32 words land as signals do.
    """

    kind, steps = "copy-engine copy", 2
    __slots__ = ("ahead", "data", "source", "target")

    def __init__(self, host: Partition, target: torch.Tensor, source: torch.Tensor, ahead: Copy | None):
        self.target, self.source, self.ahead, self.data = target, source, ahead, source
        super().__init__(host, ahead)
        self.clock.fence(SHARED)
        self.clock.fence(GLOBAL)
        self.clock.fence(ALIAS)

    def run(self, n: int) -> None:
        """Read, then land."""
        world, target, source = self.world, self.target, self.source
        if n == 0:
            if self.ahead is not None:
                self.clock.join(self.ahead.clock)
                self.clock.see(self.ahead.lane, self.ahead.base + self.steps)
                self.ahead = None
            world.memory(source, "source of a copy").access("read", region_of(source), self, self.place)
            self.data = source.detach().clone()
        elif target.dtype is torch.int32:
            self._signal()
        else:
            world.memory(target, "target of a copy").access("write", region_of(target), self, self.place)
            target.copy_(self.data)

    def _signal(self) -> None:
        """Land word by word, each a release at system scope."""
        target, size = self.target, self.target.element_size()
        memory, flat = self.world.memory(target, "target of a copy"), target.view(-1)
        for i, value in enumerate(self.data.view(-1).tolist()):
            element = int(target.storage_offset()) + i
            memory.access("atomic", strided(element, (), (), size), self, self.place)
            memory.signal(element * size, int(flat[i]), value, self)
            flat[i] = value
            memory.changed(element * size)

    def tick(self) -> None:
        """Its events are counted by its steps."""


def start(host: Partition, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Copy]:
    """Let a rank's copies (target, source), contiguous and of one shape and dtype each, begin, one behind the other."""
    started: list[Copy] = []
    for target, source in copies:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"copies: a target and its source must be of one shape and dtype, got {list(target.shape)} of "
                f"{target.dtype} and {list(source.shape)} of {source.dtype}"
            )
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("copies: a target and its source must be contiguous, as a copy engine takes bytes")
        started.append(Copy(host, target, source, started[-1] if started else None))
    return started


def finish(copies: Sequence[Copy]) -> None:
    """By the rank's host: go on when all have landed."""
    for copy in copies:
        copy.wait(copy.steps)
