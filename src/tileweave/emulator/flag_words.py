"""Flags: words by which ranks tell each other, with the bounds of their blocks checked."""

from __future__ import annotations

from greenlet import getcurrent

from tileweave import lang
from tileweave.emulator.errors import ProtocolError
from tileweave.emulator.places import Place
from tileweave.emulator.regions import strided
from tileweave.emulator.tiles import wrapped
from tileweave.emulator.views import Pointer


def _value(word) -> int:
    return getattr(word, "value", word)


ABORT, RECORD, HEADER_WORDS = (_value(word) for word in (lang.ABORT, lang.RECORD, lang.HEADER_WORDS))
_WORD_BYTES = 4
_LEAST, _END = -(1 << 31), 1 << 32  # what 32 bits can say, with a sign or without
_LEAD = 1 << 16  # a flag that is further ahead of what is waited for has been left behind long ago


def _reached(value: int, expected: int) -> bool:
    """Whether a flag has come as far as `expected`, or up to _LEAD beyond."""
    return (value - expected) % _END < _LEAD


def _refuse(old: int, value: int, place: Place) -> None:
    """Raise ProtocolError for a signal of a value that no monotonic 32-bit counter takes."""
    if _LEAST <= value < _END:
        raise ProtocolError(
            f"flag overflow: {value} is signalled to a flag that is at {old} already. A flag never goes back (it may "
            f"wrap; one that is {_LEAD} or more ahead is taken to be left behind): {place}"
        )
    raise ProtocolError(
        f"flag overflow: the value {value} does not fit into the 32 bits of a flag, whose epochs must wrap: {place}"
    )


class Flags:
    """The flag blocks of all ranks: `[world, stride]` int32, the first HEADER_WORDS of a block reserved."""

    __slots__ = ("ptr", "rank", "stride", "timeout_us", "world")

    def __init__(self, ptr: Pointer, stride: int, rank: int, world: int, timeout_us: int):
        self.ptr, self.stride, self.rank, self.world, self.timeout_us = ptr, stride, rank, world, timeout_us

    def element(self, rank: int, index: int, what: str) -> int:
        """The element of the storage that holds flag `index` of `rank`; ProtocolError outside of the block."""
        flags = self.stride - HEADER_WORDS
        if not (0 <= index < flags and 0 <= rank < self.world):
            raise ProtocolError(
                f"flag {index} of rank {rank}: flags 0 to {flags - 1} of ranks 0 to {self.world - 1} are legal: "
                f"{Place(getcurrent(), what)}"
            )
        return self.ptr.offset + rank * self.stride + HEADER_WORDS + index


def signal(flags, rank, index, value):
    """Store `value` into flag `index` of `rank`: a release at system scope by the first thread.

    ProtocolError where the value does not fit into 32 bits, or the flag would go back.
    """
    me = getcurrent()
    me.pause()
    element = flags.element(rank, index, "signal")
    memory = flags.ptr.memory
    place = Place(me, f"signal of flag {index} to rank {rank}")
    memory.access("atomic", strided(element, (), (), _WORD_BYTES), me, place)
    old = flags.ptr.flat[element].item()
    if not _LEAST <= value < _END or 0 < (old - value) % _END < _LEAD:
        _refuse(old, value, place)
    if me.world.footprint is not None:
        me.world.footprint[-1] = me.world.footprint[-1]._replace(state=old)
    flags.ptr.flat[element] = wrapped(value)
    memory.signal(element * _WORD_BYTES, old, wrapped(value), me)
    memory.changed(element * _WORD_BYTES)


def signal_all(flags, index, value):
    """`signal` to every rank, this one included."""
    for i in range(1, flags.world + 1):
        signal(flags, (flags.rank + i) % flags.world, index, value)


def wait(flags, index, expected):
    """Wait until flag `index` of this rank has reached `expected`; acquire at system scope by the whole partition.

    Returns False once the rank's abort word is set, also if the flag is there, and then has acquired nothing. There is
    no time here: what would time out is a deadlock.
    """
    me = getcurrent()
    element = flags.element(flags.rank, index, "wait")
    memory, flat = flags.ptr.memory, flags.ptr.flat
    byte, abort = element * _WORD_BYTES, flags.ptr.offset + flags.rank * flags.stride + ABORT
    expected = int(expected)
    me.pause()
    while not flat[abort].item() and not _reached(flat[element].item(), expected):
        me.block(memory.watch(byte, abort * _WORD_BYTES), _describe, flags, index, expected, element)
    if flat[abort].item():
        me.sync()
        return False
    place = Place(me, f"wait for flag {index} to reach {expected}")
    memory.access("atomic", strided(element, (), (), _WORD_BYTES), me, place)
    if me.world.footprint is not None:
        passing = me.world.footprint[-1]._replace(kind="read", passes=lambda value: _reached(value, expected))
        me.world.footprint[-1] = passing
    memory.acquire_signal(byte, me, lambda value: _reached(value, expected))
    me.sync()
    return True


def wait_all(flags, first, count, expected, skip=-1, step=1):
    """`wait` for `count` flags from index `first` on, `step` apart, but for flag `skip`: all have come."""
    met = True
    for index in range(int(first), int(first) + int(count) * step, step):
        if index != skip:
            met = wait(flags, index, expected) and met
    return met


def _describe(flags, index, expected, element) -> str:
    value = flags.ptr.flat[element].item()
    ahead = (value - expected) % _END
    why = f", {ahead} ahead, which from {_LEAD} on means left behind" if ahead < _END // 2 else ""
    return f"flag {index} of rank {flags.rank} to reach {expected}: it is {value}{why}"


def barrier_all(flags, index, epoch):
    """All ranks meet: flags `index` to `index + world - 1` of each take `epoch`, one per source rank."""
    getcurrent().sync()
    for i in range(1, flags.world + 1):
        signal(flags, (flags.rank + i) % flags.world, index + flags.rank, epoch)
    return wait_all(flags, index, flags.world, epoch)
