"""Numbers that rooms without each other's imports must agree on."""

from tileweave.fabric.base import FLAGS, MAX_RANKS, STATE_WORDS
from tileweave.planner.plan import SHARING_SMS
from tileweave.tiles import matmul


def test_flags_and_words_suffice():
    first = matmul.FIRST_SHARE.value if hasattr(matmul.FIRST_SHARE, "value") else matmul.FIRST_SHARE
    own = matmul.OWN_WORDS.value if hasattr(matmul.OWN_WORDS, "value") else matmul.OWN_WORDS
    assert first > MAX_RANKS and first + 2 * SHARING_SMS <= FLAGS
    assert own + MAX_RANKS <= STATE_WORDS
