"""Regions and clocks against brute force."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tileweave.emulator.clocks import Past, Row, merged
from tileweave.emulator.regions import scattered
from tileweave.emulator.views import region_of

SIZE = 48


@st.composite
def tensors(draw):
    """A strided view of 2-byte elements in a storage of SIZE * SIZE."""
    base = torch.zeros(4, SIZE // 4, SIZE, dtype=torch.bfloat16)
    if draw(st.booleans()):
        base = base.view(SIZE, SIZE)
    t = base
    for dim in range(base.dim()):
        low = draw(st.integers(0, base.shape[dim] - 1))
        t = t.narrow(dim, low, draw(st.integers(0, min(base.shape[dim] - low, 12))))
    return t.transpose(-1, -2) if draw(st.booleans()) else t


def bytes_of(t):
    """All bytes of a tensor."""
    index = torch.arange(SIZE * SIZE).as_strided(t.shape, t.stride(), t.storage_offset()).reshape(-1)
    return {2 * i + j for i in index.tolist() for j in (0, 1)}


@given(tensors(), tensors())
def test_overlap_and_cover(a, b):
    x, y, mine, theirs = region_of(a), region_of(b), bytes_of(a), bytes_of(b)
    assert x.overlaps(y) == bool(mine & theirs)
    if theirs and x.covers(y):
        assert theirs <= mine
    if mine:
        assert x.covers(x)
        assert all(x.contains(byte) == (byte in mine) for byte in range(0, 2 * SIZE * SIZE, 7))


@given(tensors(), st.lists(st.integers(0, SIZE * SIZE - 1), max_size=40))
def test_scattered_elements(a, offsets):
    region = scattered(np.array(offsets, np.int64), 2)
    theirs = {2 * i + j for i in offsets for j in (0, 1)}
    assert region.overlaps(region_of(a)) == bool(bytes_of(a) & theirs)
    assert region_of(a).overlaps(region) == bool(bytes_of(a) & theirs)


@given(tensors())
def test_equal_regions_are_one_object(a):
    offsets = np.array(sorted(i // 2 for i in bytes_of(a) if i % 2 == 0), np.int64)
    assert scattered(offsets, 2) is region_of(a) or len(offsets) == 0 or region_of(a).rows == 0


class Cta:
    """What clocks need of a CTA."""

    def __init__(self, rank, launch):
        self.rank, self.launch = rank, launch


CTAS = [Cta(rank, launch) for rank in range(2) for launch in (1, 2) for _ in range(2)]


@st.composite
def pasts(draw):
    """Some knowledge of CTAS."""
    ended = tuple(draw(st.integers(0, 2)) for _ in range(2))
    known = draw(st.sets(st.sampled_from(range(len(CTAS)))))
    live = {}
    for i in known:
        if CTAS[i].launch > ended[CTAS[i].rank]:
            live[CTAS[i]] = Row(np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)), np.int32))
    return Past(ended, live)


@given(pasts(), pasts())
def test_merged_pasts_know_what_either_knows(a, b):
    both = merged(a, b)
    for cta in CTAS:
        for lane in range(5):
            assert both.count(cta, lane) == max(a.count(cta, lane), b.count(cta, lane))
    assert merged(both, a) is both and merged(both, b) is both
