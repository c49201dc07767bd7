"""Storages with the history of accesses to them, and the check of each access against that history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tileweave.emulator.clocks import ALIAS, GENERIC, GLOBAL, SHARED, Clock, Past, merged
from tileweave.emulator.explain import Race, missing_order
from tileweave.emulator.locations import Location
from tileweave.emulator.places import Place
from tileweave.emulator.regions import Region
from tileweave.emulator.touches import Touch

if TYPE_CHECKING:
    from tileweave.emulator.agents import CTA, Partition
    from tileweave.emulator.copies import Copy
    from tileweave.emulator.mbarrier import MBarrier
    from tileweave.emulator.world import World

STRONG = ("add", "atomic", "volatile read")  # kinds of access that do not race among themselves
READS = ("read", "volatile read")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the bits of an element, by its size
_KEPT = 4096  # groups kept for the next launch, which is likely to touch the same regions
_PRUNE = 48  # accesses of one kind to one region beyond which settled ones are looked for


def included(scope: str, a: CTA, b: CTA) -> bool:
    """Whether a scope around CTA `a` includes CTA `b`."""
    return scope == "sys" or (a.rank == b.rank and (scope == "gpu" or a is b))


def mutual(scope: str, cta: CTA, other_scope: str, other: CTA) -> bool:
    """Whether two operations' scopes include each other."""
    return included(scope, cta, other) and included(other_scope, other, cta)


class Access:
    """One access: its kind, the lane and event that made it, and where.

    `pattern` tells which thread touches which element, `barriers` how many barriers of the partition came before.
    """

    __slots__ = (
        "barriers", "count", "cta", "is_async", "kind", "lane", "multicast", "part", "pattern", "place", "scope",
    )  # fmt: skip

    def __init__(self, kind, who, place, scope="sys", multicast=False, pattern=None):
        self.kind, self.place, self.scope, self.multicast, self.pattern = kind, place, scope, multicast, pattern
        self.lane, self.count, self.is_async, self.cta = who.lane, who.count, who.is_async, who.cta
        self.part = place.part
        self.barriers = self.part.barriers


class Group:
    """The accesses to one region that may still race: the latest of each lane.

    `strong` holds adds and atomics at system scope, which need no check among themselves; `near` the groups whose
    region overlaps, each with whether this one covers it.
    """

    __slots__ = ("near", "reads", "region", "strong", "writes")

    def __init__(self, region: Region):
        self.region = region
        self.reads: dict[tuple, Access] = {}
        self.writes: dict[tuple, Access] = {}
        self.strong: dict[tuple, Access] = {}
        self.near: list[tuple[Group, bool]] | None = None


class Released(NamedTuple):
    """What releases at one location, of one rank and scope, have published.

    `inside` is for acquires in the same CTA, for which proxy fences count too.
    """

    generic: Past
    alias: Past
    inside: dict[CTA, Clock]


Releases = dict[tuple, Released]  # by scope, and rank (or CTA for scope cta)


class Memory:
    """A storage ("global"), or an allocation in shared or tensor memory ("shared", "tensor").

    It keeps `tensor` alive, so that its address is not handed out again during a world's life.
    """

    def __init__(self, world: World, name: str, space: str, tensor: torch.Tensor):
        self.world, self.name, self.space, self.tensor = world, name, space, tensor
        self.row = {"shared": SHARED, "global": GLOBAL, "tensor": GENERIC}[space]  # tensor memory has no proxies
        self.groups: dict[Region, Group] = {}
        # Groups by the bits of their extent in bytes, and by their first byte without its last so many bits.
        self._levels: dict[int, dict[int, list[Group]]] = {}
        self._unplaced: list[Group] = []  # groups that are not in the index yet: only writes make that necessary
        self.written = False
        self.released: dict[int, Releases] = {}  # by first byte of the location
        self.locations: dict[int, Location] = {}  # words that strong operations have written, by first byte
        self.versions: dict[int, int] = {}  # of locations that somebody has looked at more than once: changes so far
        self.watchers: dict[int, list] = {}  # partitions that wait for the location at a byte to change
        self.aborts: dict[int, set[int]] = {}  # locations whose watchers a change of this one wakes as well
        self.barriers: dict[int, MBarrier] = {}
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._bits: dict[int, np.ndarray] = {}

    def forget(self) -> None:
        """Everything so far happens before everything to come."""
        if len(self.groups) > _KEPT:
            self.groups.clear()
            self._levels.clear()
            self._unplaced.clear()
        for group in self.groups.values():
            group.reads.clear()
            group.writes.clear()
            group.strong.clear()
        self.released.clear()
        self.locations.clear()
        self.written = False

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole storage as a vector of `dtype`."""
        flat = self._flat.get(dtype)
        if flat is None:
            storage = self.tensor.untyped_storage()
            flat = torch.empty(0, dtype=dtype).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
            self._flat[dtype] = flat
        return flat

    def bits(self, itemsize: int) -> np.ndarray:
        """The whole storage as a vector of integers of so many bytes."""
        found = self._bits.get(itemsize)
        if found is None:
            found = self._bits[itemsize] = self.flat(BITS[itemsize]).numpy()
        return found

    def group(self, region: Region) -> Group:
        """The history of a region."""
        group = self.groups.get(region)
        if group is None:
            group = self.groups[region] = Group(region)
            self._unplaced.append(group)
        return group

    def _place(self) -> None:
        """Put new groups into the index and into the lists of their neighbours."""
        for group in self._unplaced:
            region = group.region
            for other in self._neighbours(region):
                if other.near is not None and region.overlaps(other.region):
                    other.near.append((group, other.region.covers(region)))
            level = (region.hi - region.lo).bit_length()
            self._levels.setdefault(level, {}).setdefault(region.lo >> level, []).append(group)
        self._unplaced.clear()

    def _neighbours(self, region: Region) -> Iterator[Group]:
        """Groups that may overlap a region."""
        lo, last = region.lo, region.hi - 1
        for level, cells in self._levels.items():
            # What begins in a cell ends in the next one at the latest.
            first, past = (lo >> level) - 1, (last >> level) + 1
            if past - first < len(cells):
                for cell in range(first, past):
                    yield from cells.get(cell, ())
            else:
                for cell, groups in cells.items():
                    if first <= cell < past:
                        yield from groups

    def _near(self, group: Group) -> list[tuple[Group, bool]]:
        region = group.region
        group.near = [
            (other, region.covers(other.region)) for other in self._neighbours(region) if region.overlaps(other.region)
        ]
        return group.near

    def access(
        self, kind: str, region: Region, who, place: Place, scope: str = "sys", multicast: bool = False, pattern=None
    ) -> None:
        """Check an access against the history, and enter it.

        `kind` is 'read', 'write', or 'add', 'atomic' and 'volatile read', which do not race among themselves where
        their scopes include each other. Two tile-wide accesses of equal `pattern` have each thread at the same
        elements; None equals no other. Reports through `World.found`.
        """
        if region.lo >= region.hi:
            return
        group = self.group(region)
        access = Access(kind, who, place, scope, multicast, pattern)
        strong = kind in STRONG and scope == "sys"
        self.written = self.written or kind != "read"
        if self.written and self._unplaced:
            self._place()
        if kind in READS:
            if self.written:
                for near, _ in group.near or self._near(group):
                    if near.writes:
                        self._check(near.writes, access, who, False)
                    if near.strong:
                        self._check(near.strong, access, who, False)
            history = group.reads
        else:
            replaces = kind == "write"
            for near, covered in group.near or self._near(group):
                if near.writes:
                    self._check(near.writes, access, who, replaces and covered)
                if near.strong and not strong:
                    self._check(near.strong, access, who, replaces and covered)
                if near.reads:
                    self._check(near.reads, access, who, replaces and covered)
            history = group.strong if strong else group.writes
            if replaces and self.released:  # a plain store ends what was released through these bytes
                for byte in [b for b in self.released if region.contains(b)]:
                    del self.released[byte]
            if replaces and self.locations:
                for byte in [b for b in self.locations if region.contains(b)]:
                    del self.locations[byte]
            if self.versions and kind != "atomic":
                for byte in [b for b in self.versions if region.contains(b)]:
                    self.changed(byte)
        history[who.cta, who.lane, kind, scope, pattern] = access
        if len(history) > _PRUNE:
            self._prune(history)
        if self.world.footprint is not None:
            self.world.footprint.append(Touch(self, self._where(who.cta), kind, region))

    def writers(self, region: Region) -> Iterator[Access]:
        """The latest writes to parts of a region."""
        if self.written:
            group = self.group(region)
            for near, _ in group.near or self._near(group):
                yield from near.writes.values()

    def _where(self, cta: CTA) -> tuple:
        """A name for this memory in every schedule: of global ones of one size the same."""
        nbytes = self.tensor.untyped_storage().nbytes()
        return (nbytes,) if self.space == "global" else (self.name, nbytes, cta.rank, cta.launch, cta.id)

    def _prune(self, history: dict) -> None:
        settled = self.world.settled()
        for key in [key for key, x in history.items() if x.cta.launch <= settled[x.cta.rank]]:
            del history[key]

    def _check(self, history: dict, access: Access, who, drop: bool) -> None:
        """Report the accesses of `history` that race with this one; `drop` those that it takes the place of."""
        clock, cta, part, is_async = who.clock, who.cta, access.part, who.is_async
        kind, scope, row = access.kind, access.scope, self.row
        strong = kind in STRONG
        mine = None  # the same access by others of the partition's threads
        for x in history.values():
            why = ""
            if strong and x.kind in STRONG:
                if scope == x.scope == "sys" or mutual(scope, cta, x.scope, x.cta):
                    continue
                why = "scope"
            if x.place is access.place:
                mine = x
            elif x.part is part and not is_async and not x.is_async:
                if x.barriers == part.barriers and self._between_threads(x, access):
                    self.found(x, access, who, "barrier")
                elif x.multicast is not access.multicast:
                    self._check_alias(x, access, who)
            elif clock.knows(GENERIC, cta, x.cta, x.lane) < x.count:
                self.found(x, access, who, why or "order")
            elif is_async and not (x.is_async and x.cta is cta) and clock.knows(row, cta, x.cta, x.lane) < x.count:
                self.found(x, access, who, "proxy")
            elif x.multicast is not access.multicast:
                self._check_alias(x, access, who)
        if drop:
            history.clear()
            if mine is not None:
                history[mine.cta, mine.lane, mine.kind, mine.scope, mine.pattern] = mine

    def _between_threads(self, x: Access, access: Access) -> bool:
        """Whether different threads of a partition make two accesses that no barrier of it separates.

        The compiler puts barriers between dependent accesses to shared memory, but none between those to global memory.
        """
        if self.space != "global" or x.lane == access.lane:
            return False
        return x.pattern is None or x.pattern != access.pattern

    def _check_alias(self, x: Access, access: Access, who) -> None:
        """Accesses of one partition through multicast and unicast addresses need an alias fence between."""
        if x.part is access.part and not x.is_async:
            crowd = x.part.crowd
            seen = crowd.fenced[ALIAS] if x.lane == crowd.lane else who.clock.knows(ALIAS, who.cta, x.cta, x.lane)
        else:
            seen = who.clock.knows(ALIAS, who.cta, x.cta, x.lane)
        if seen < x.count:
            self.found(x, access, who, "alias")

    def found(self, x: Access, access: Access, who, why: str) -> None:
        """Report a race of access `x` with a later one by agent `who`; `why` is what `missing_order` takes."""
        missing = missing_order(self.space, x, access, who, why)
        self.world.found(Race(f"{self.space} memory {self.name}", x, access, missing))

    def version(self, byte: int) -> int:
        """A number that grows with every change of the location at a byte, from now on."""
        return self.versions.setdefault(byte, 0)

    def changed(self, byte: int) -> None:
        """The location at a byte may have a new value: those who wait for it may look again."""
        if byte not in self.versions:
            return
        self.versions[byte] += 1
        for watched in (byte, *self.aborts.pop(byte, ())):
            waiting = self.watchers.pop(watched, None)
            if waiting:
                self.world.wake(waiting)

    def watch(self, byte: int, abort: int | None = None) -> list:
        """The list to block on until the location at a byte, or the one at `abort`, changes."""
        self.version(byte)
        if abort is not None:
            self.version(abort)
            self.aborts.setdefault(abort, set()).add(byte)
        return self.watchers.setdefault(byte, [])

    def release(self, byte: int, part: Partition | Copy, scope: str) -> Releases:
        """Publish at a location what the first thread of a partition knows; returns all that is published there."""
        cta = part.cta
        entries = self.released.setdefault(byte, {})
        key = (scope, cta if scope == "cta" else cta.rank)
        generic = part.clock.published(cta, part.serial, part.count)
        # Until somebody uses multicast, alias fences are taken to be everywhere.
        alias = part.clock.published(cta, part.serial, part.count, ALIAS) if self.world.multicast else generic
        clock = part.clock.copy()
        inside = {cta: clock}
        old = entries.get(key)
        if old is not None:
            same = old.alias is old.generic and alias is generic
            generic = merged(old.generic, generic)
            alias = generic if same else merged(old.alias, alias)
            inside = {other: told for other, told in old.inside.items() if not other.ended}
            if cta in inside:
                clock.join(inside[cta])
            inside[cta] = clock
        entries[key] = Released(generic, alias, inside)
        part.tick()
        return entries

    def signal(self, byte: int, old: int, value: int, part: Partition | Copy) -> None:
        """A release at system scope by storing `value`, which a wait tells from other values stored there."""
        self.world.coverage.raised(self, byte)
        location = self.location(byte, old)
        who = part.cta, part.lane, part.count
        location.write(value, dict(self.release(byte, part, "sys")), who)

    def location(self, byte: int, value) -> Location:
        """The writes to a word that now holds `value`. One is entered when what it releases has been, but this is asked
        for before, as a word that has none yet begins with what has been released so far."""
        location = self.locations.get(byte)
        if location is None:
            location = self.locations[byte] = Location(value, dict(self.released.get(byte, ())))
        return location

    def strong_read(self, byte: int, part: Partition, value, scope: str, acquires: bool, everybody: bool):
        """What a strong read of a location, which now holds `value`, returns, and whether that is the newest value.

        It may be older: a write that nothing orders before the read need not have arrived.
        """
        location = self.locations.get(byte)
        if location is None:
            if acquires:
                self.acquire(byte, part, scope, everybody)
            return value, True
        number, oldest = location.newest, location.oldest_readable(part)
        if oldest < number:
            number -= self.world.draw(number - oldest + 1)
        found = location.read(number, part)
        if acquires and found.told:
            self._take(found.told, part, scope, everybody)
        return found.value, number == location.newest

    def acquire(self, byte: int, part: Partition, scope: str, everybody: bool) -> None:
        """Learn what was released at a location within mutual scopes; without `everybody`, the first thread only."""
        entries = self.released.get(byte)
        if entries:
            self._take(entries, part, scope, everybody)

    def acquire_signal(self, byte: int, part: Partition, reached: Callable[[int], bool]) -> None:
        """Learn, all threads, what the first signal told whose value is one that `reached` accepts.

        Later ones may have been stored already, but a program must not rely on reading them.
        """
        location = self.locations.get(byte)
        if location is None:
            self.acquire(byte, part, "sys", True)
            return
        number = next((n for n, write in enumerate(location.writes, location.first) if reached(write.value)), None)
        if number is not None:
            told = location.read(number, part).told
            if told:
                self._take(told, part, "sys", True)

    def _take(self, entries: Releases, part: Partition, scope: str, everybody: bool) -> None:
        if not everybody:
            part.part_ways()
        clocks = [part.clock]
        if everybody and part.crowd.apart is not None:
            clocks.append(part.crowd.apart)
        cta = part.cta
        for (released_scope, where), (generic, alias, inside) in entries.items():
            if cta in inside:
                for clock in clocks:
                    clock.join(inside[cta])
            if released_scope == "cta" or scope == "cta":
                continue
            if where == cta.rank or scope == released_scope == "sys":
                for clock in clocks:
                    clock.acquire(cta, generic, alias)
