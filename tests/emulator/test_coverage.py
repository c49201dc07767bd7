"""What is counted of rings: the least used slot, but for slots of another ring, which nothing uses."""

from types import SimpleNamespace

import pytest

from tileweave.emulator.coverage import Coverage


def counted(*phases):
    """What is told of an array of barriers that have completed so many phases each."""
    birth = SimpleNamespace(caller=None, code=None, instruction=0)
    barriers = {i: SimpleNamespace(phase=phase, birth=birth) for i, phase in enumerate(phases)}
    coverage = Coverage()
    coverage.ended(SimpleNamespace(shared=[SimpleNamespace(name="ready", barriers=barriers)]))
    return coverage.told()["rings"]["ready"]


@pytest.mark.parametrize(
    ("phases", "uses"), [((3, 2, 2), 2), ((2, 1, 1), 1), ((1, 1, 0), 1), ((0, 0), 0), ((4, 4, 0, 0), 4)]
)
def test_the_least_used_slot(phases, uses):
    assert counted(*phases) == {"slots": len(phases), "uses": [uses, uses]}
