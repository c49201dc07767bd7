"""Reports: which ordering a race lacks, in the words of the library, and what a deadlock's agents wait for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tileweave.emulator.clocks import GENERIC
from tileweave.emulator.places import describe
from tileweave.emulator.search import name_of

_SHOWN = 3  # partitions of a deadlock that are named for one line of a kernel


@dataclass(frozen=True)
class Race:
    """Two accesses to `memory` that race, the earlier one first, and what would have ordered them."""

    memory: str
    first: Any
    second: Any
    missing: str

    def __str__(self):
        return (
            f"race on {self.memory}\n    {self.first.kind}: {self.first.place}\n"
            f"    {self.second.kind}: {self.second.place}\n    missing: {self.missing}"
        )

    def told(self) -> dict:
        """The same as plain values: memory, missing, and `sides`, each as `told_of` with the kind of access."""
        sides = [{"kind": x.kind, **told_of(x.place)} for x in (self.first, self.second)]
        return {"memory": self.memory, "sides": sides, "missing": self.missing}


def told_of(place) -> dict:
    """A place as plain values: agent (its name in search.py), rank, cta, role, what, file, line, function, source, and
    called_at of the caller; file None outside of kernels."""
    cta, code = place.part.cta, place.code
    role = place.name.partition("(")[2].rstrip(")") or place.name
    told = {"agent": name_of(place.part), "rank": cta.rank, "cta": cta.id, "role": role, "what": place.what}
    file = os.path.basename(code.co_filename) if code else None
    told |= {"file": file, "line": place.line, "function": code.co_name if code else None, "source": place.source}
    return {**told, "called_at": describe(*place.caller) if place.caller else None}


def missing_order(space: str, x, access, who, why: str) -> str:
    """What would have ordered access `x` before `access` by agent `who`, given `why` the check failed."""
    if why == "scope":
        return f"a common scope: those of these atomic operations ({x.scope}, {access.scope}) do not include each other"
    if why == "proxy":
        fence = "fence_async_shared" if space == "shared" else "fence_proxy_async"
        return (
            f"{fence} between the two, in {access.part.cta.title} after the wait or barrier that orders them: "
            "they go through different proxies"
        )
    if why == "barrier":
        return "barrier() of the partition between the two: different threads of it touch the same element"
    if why == "alias":
        return "fence_proxy_alias between the access through multicast and the one through unicast addresses"
    return _unordered(space, x, access, who) + _not_entered(x, access)


def _unordered(space: str, x, access, who) -> str:
    clock, cta, part = who.clock, who.cta, x.part
    if _of_predecessor(x, access):
        return (
            f"grid_dependency_wait() in {cta.title} before its access: a kernel that has one begins before what its "
            "stream's earlier kernels did can be seen"
        )
    if access.is_async and _came_later(x, access):
        return _completion(access, x)
    # Whether what the first thread of x's partition did after x is known to happen before: then some release reached
    # the second access, and x itself was not in it.
    told = clock.knows(GENERIC, cta, x.cta, part.lane) >= x.place.event + x.is_async
    if x.is_async and (told or x.cta is access.cta or clock.knows(GENERIC, cta, x.cta, x.lane) == x.count - 1):
        return _completion(x, access)
    if told and not x.is_async:
        return "barrier() of the partition between the access by all of its threads and the release by its first one"
    return f"{_chain(x.cta, access.cta)} (or, if the second is meant to come first, the same the other way round)"


def _not_entered(x, access) -> str:
    """What a race between launches of different numbers adds: that a write was done for a call which its rank may not
    have come to."""
    writer, other = sorted((x, access), key=lambda side: -side.cta.launch)
    ahead = writer.cta.launch - other.cta.launch
    hosts = x.cta.id is None or access.cta.id is None
    if writer.cta.rank == other.cta.rank or hosts or not ahead or writer.kind.endswith("read"):
        return ""
    return (
        f"; rank {other.cta.rank} may not have entered the call that is written for: what it uses in its launch "
        f"{other.cta.launch} is written again in launch {writer.cta.launch} of rank {writer.cta.rank}, so slots in "
        f"turn must be more than {ahead}, or rank {writer.cta.rank} must wait for a signal that rank {other.cta.rank} "
        "sends when it is done"
    )


def _of_predecessor(x, access) -> bool:
    """Whether access x was done on the same stream before the launch of the other one began."""
    first, second = x.cta, access.cta
    if first.rank != second.rank or second.id is None:
        return False
    return first.launch < second.launch or (first.id is None and not x.is_async)


def _came_later(x, op) -> bool:
    """Whether access x, seen before the access of an asynchronous operation, is meant to come after it.

    So it is where the same partition did x after it had issued the operation; a read before a late write is taken so.
    """
    if x.part is op.part:
        return x.place.event > op.place.event
    return x.kind == "read" and op.kind != "read"


def _completion(op, other) -> str:
    """How access `other` comes after what an asynchronous operation does."""
    what = op.place.what
    if what == "wgmma":
        return "warpgroup_mma_wait for the wgmma that reads it, then an arrival for which the writer waits"
    if what in ("tcgen05.mma", "tcgen05.cp"):
        return f"tcgen05_commit to an mbarrier after the {what}, and mbarrier_wait for it before the other access"
    if op.kind == "read" or what == "TMA load":
        how = "mbarrier_wait for the bytes of" if what == "TMA load" else "store_read_wait for"
        return f"{how} the {what}, by the partition of the other access or by one that then tells it"
    text = f"store_wait for the {what} and then barrier(), by the partition that issued it"
    if op.cta is not other.cta:
        text += f", before {_chain(op.cta, other.cta)}: what is released is what has been performed"
        text += "; or, if the other access is meant to come first, it must be waited for before "
        text += "this buffer is used again"
    return text


def _chain(first, second) -> str:
    if first is second:
        return "barrier(), or an mbarrier arrival after the first and a wait before the second"
    if first.rank == second.rank:
        return f"a release at scope gpu or sys by {first.title} after its access, acquired by {second.title} before its"
    return (
        f"a release at scope sys by rank {first.rank} after its access (signal), acquired at scope sys by rank "
        f"{second.rank} before its own (wait)"
    )


def deadlock(parts) -> str:
    """The text for a state in which nothing can run: every wait, those at one line of a kernel together."""
    lines: dict[tuple, list[str]] = {}
    for part in sorted(parts, key=lambda part: (part.cta.id is None, part.rank, part.cta.id or 0, part.name)):
        place, describe, args = part.waiting
        text = f"    {place} -- for {describe(*args)}"
        lines.setdefault((place.code, place.instruction, part.cta.id is None), []).append(text)
    shown = []
    for texts in lines.values():
        shown += texts[:_SHOWN]
        if len(texts) > _SHOWN:
            shown.append(f"    ... and {len(texts) - _SHOWN} more like these")
    return "deadlock: nothing can run\n" + "\n".join(shown)
