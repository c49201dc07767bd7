"""Numbers that rooms without each other's imports must agree on."""

import pytest

from tileweave.fabric.base import FLAGS, MAX_RANKS, STATE_WORDS
from tileweave.ops import ring_attention, ulysses_attention
from tileweave.planner.plan import SHARING_SMS
from tileweave.tiles import exchange, matmul


def value(constant):
    """Of a constant of device code, whichever backend declared it."""
    return getattr(constant, "value", constant)


def test_flags_and_words_suffice():
    first = value(matmul.FIRST_SHARE)
    assert first > MAX_RANKS and first + 2 * SHARING_SMS <= FLAGS
    assert value(matmul.OWN_WORDS) + MAX_RANKS <= STATE_WORDS


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 9, 63, MAX_RANKS])
def test_blocks_of_heads_have_flags_and_counters(world):
    """Of each receiver, what is sent; with two blocks what is finished; what is stored for each, and comes back."""
    kept, credits, back = (
        ring_attention.check.blocks_at_most(world, False),
        ring_attention.check.blocks_at_most(world, True),
        ulysses_attention.check.blocks_at_most(world),
    )
    assert min(kept, credits, back) >= 1
    assert max(kept, 2 * credits, 2 * back) * world <= FLAGS
    words = max((world - 1) * kept, world * credits, (2 * world - 1) * back)
    assert value(matmul.OWN_WORDS) + words <= value(exchange.NEXT) == STATE_WORDS - 1
