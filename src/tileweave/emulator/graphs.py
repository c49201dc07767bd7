"""Graphs: what a rank's host did once, to be done again with the same arguments on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from tileweave.emulator.hosts import Host


_T = torch.Tensor
_READS = {
    _T.item,
    _T.tolist,
    _T.numpy,
    _T.__bool__,
    _T.__int__,
    _T.__float__,
    _T.__index__,
    torch.equal,
    torch.allclose,
}


class Graph(TorchFunctionMode):
    """The launches of a rank, and its tensor operations between them, in order. An operator of PyTorch's dispatcher is
    one operation: what it launches is not noted besides, and its host code runs again in a replay.

    RuntimeError where the host looks at a tensor's values: a replay would do what the values said then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], Any]] = []
        self._within = False  # an operation

    def launched(self, work: Callable[[], Any]) -> None:
        """A launch of the rank."""
        if not self._within:
            self.work.append(work)

    def replay(self) -> None:
        """Inside fn, by the rank that made it: do all again. Numbers that a kernel was given are what they were then,
        and results lie where they lay."""
        for again in self.work:
            again()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _READS:
            raise RuntimeError(
                f"{func.__name__}: the host must not look at the values of a tensor while a graph is made of what it "
                "does, as a replay would go on with the old ones"
            )
        self._within = True
        try:
            made = func(*args, **kwargs)
        finally:
            self._within = False
        if made is None or any(isinstance(each, torch.Tensor) for each in tree_leaves(made)):
            self.work.append(partial(_again, func, args, kwargs, made))
        return made


def _again(func, args: tuple, kwargs: dict, made: Any) -> None:
    for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


@contextmanager
def capturing(host: Host) -> Iterator[Graph]:
    """Within it, what the host does is done, and noted in the graph. RuntimeError where it is noted already."""
    if host.graph is not None:
        raise RuntimeError("World.capture: this rank is making a graph already, and graphs do not nest")
    host.graph = Graph()
    try:
        with host.graph:
            yield host.graph
    finally:
        host.graph = None
