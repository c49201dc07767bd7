"""What a run has exercised: how often each slot of a ring and each flag was used. Used once, it means little."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tileweave.emulator.places import line_of

if TYPE_CHECKING:
    from tileweave.emulator.agents import CTA
    from tileweave.emulator.memory import Memory
    from tileweave.emulator.world import World


class Coverage:
    """Counts of one world, or of several.

    rings: of each array of mbarriers, by its place in the source, how many barriers it has, and the phases completed of
    the least used one, in the CTA that used it least and in the one that used it most. One without any is not counted
    where others have some: a ring leaves no slot out, so it is of another ring, which this kernel has no use for.
    flags: how often each was raised, by address of its storage and byte. ctas: how many have ended.
    """

    def __init__(self) -> None:
        self.rings: dict[str, tuple[int, int, int]] = {}
        self.flags: Counter[tuple[int, int]] = Counter()
        self.ctas = 0

    @classmethod
    def of(cls, worlds: Iterable[World]) -> Coverage:
        """That of several worlds, which must be alive: so that those that share memory, runs one after the other, raise
        the same flags."""
        total = cls()
        for each in (world.coverage for world in worlds):
            total.ctas += each.ctas
            total.flags.update(each.flags)
            for name, (slots, low, high) in each.rings.items():
                _, least, most = total.rings.get(name, (slots, low, high))
                total.rings[name] = slots, min(low, least), max(high, most)
        return total

    def ended(self, cta: CTA) -> None:
        """A CTA has ended: take in its barriers."""
        self.ctas += 1
        for memory in cta.shared:
            if memory.barriers:
                barriers = list(memory.barriers.values())
                name, phases = _name(memory), min((each.phase for each in barriers if each.phase), default=0)
                _, low, high = self.rings.get(name, (0, phases, phases))
                self.rings[name] = len(barriers), min(low, phases), max(high, phases)

    def raised(self, memory: Memory, byte: int) -> None:
        """A signal has stored a value in a flag."""
        self.flags[memory.tensor.untyped_storage().data_ptr(), byte] += 1

    def told(self) -> dict:
        """The counts as plain values: per ring slots and the range of uses, flags and the fewest uses of one."""
        rings = {name: {"slots": n, "uses": [low, high]} for name, (n, low, high) in sorted(self.rings.items())}
        return {
            "ctas": self.ctas,
            "rings": rings,
            "flags": len(self.flags),
            "uses": min(self.flags.values(), default=0),
        }


def _name(memory: Memory) -> str:
    """An array of mbarriers by what it is called, and the line that asked for it (behind the function that made it)."""
    birth = next(iter(memory.barriers.values())).birth
    code, instruction = birth.caller or (birth.code, birth.instruction)
    where = f", {os.path.basename(code.co_filename)}:{line_of(code, instruction)}" if code else ""
    return f"{memory.name}{where}"
