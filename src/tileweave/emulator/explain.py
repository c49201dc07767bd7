"""Race reports: which ordering is missing, in the words of the library."""

from __future__ import annotations

from tileweave.emulator.clocks import GENERIC


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
    if why == "alias":
        return "fence_proxy_alias between the access through multicast and the one through unicast addresses"
    return _unordered(space, x, access, who)


def _unordered(space: str, x, access, who) -> str:
    seen = who.clock.knows(GENERIC, who.cta, x.cta, x.lane)
    if x.is_async and x.place.what.startswith("TMA") and x.kind in ("write", "add"):
        if seen == x.count - 1:
            return (
                "store_wait for the bulk store, in the partition that issued it, then barrier() and the release: only "
                "the reading of its buffer (store_read_wait) is known, not that its writes are performed"
            )
        if x.part.elected:
            return "barrier() between store_wait, which only the elected thread knows of, and the release"
    if x.is_async and x.place.what == "wgmma":
        return "warpgroup_mma_wait for the wgmma that reads it, then an arrival that the writer waits for"
    if not x.is_async and x.lane != x.part.lane and who.clock.knows(GENERIC, who.cta, x.cta, x.part.lane) > 0:
        return "barrier() of the partition between the access by all of its threads and the release by its first one"
    if x.cta.rank != access.part.cta.rank:
        return (
            f"a release at scope sys by rank {x.cta.rank} after its access (signal), acquired at scope sys by rank "
            f"{access.part.cta.rank} before its own (wait)"
        )
    if x.cta is not access.part.cta:
        return "a release at scope gpu or sys after the first access, acquired before the second"
    if space == "shared" and x.is_async:
        return f"a wait for the {x.place.what} (mbarrier_wait, store_read_wait or warpgroup_mma_wait) before the second"
    return "a barrier between the two: barrier(), or an mbarrier arrival after the first and a wait before the second"
