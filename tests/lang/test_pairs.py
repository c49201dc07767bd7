"""What compilers say of pairs of CTAs, which no kernel of ours has: docs/blackwell.md tells it."""

from tests.compilers import NEWEST, OLDEST, needs_triton, report

pytestmark = needs_triton
MODULE = "tests.lang.pair_kernel"


def test_the_newest_has_pairs_also_by_roles():
    assert "tcgen05.mma.cta_group::2" in report(MODULE, NEWEST, "roles")["tcgen05"]
    assert "refused" not in report(MODULE, NEWEST, "barriers")


def test_a_pair_cannot_wait_for_a_flag():
    """As register layouts of `lang` do not say which CTA of a pair has what."""
    said = report(MODULE, NEWEST, "roles that wait for a flag")["refused"]
    assert "Layout has 1 CTAs per CGA, but the context requires 2 CTAs per CGA" in said


def test_the_oldest_has_no_barriers_of_pairs():
    said = report(MODULE, OLDEST, "barriers")["refused"]
    assert "barrier allocation must be a descriptor of 1xi64 type" in said
