"""Flags: what a signal publishes and a wait acquires, wrap-around, bounds, abort, meetings."""

import pytest
import torch

from tests.emulator.kernels import primitives as k
from tileweave.emulator import DeadlockError, EmulatorError, ProtocolError, RaceError, World

SEEDS = range(8)
HEADER = 16


def flags_of(world, first=0):
    flags = torch.zeros(world, HEADER + 8, dtype=torch.int32)
    flags[:, HEADER:] = first
    return flags


def ping(seed, W=2, first=0, barrier=1, early=0, missing=0):
    data, out = torch.zeros(W, 256, dtype=torch.int32), torch.full((W, 256), -1, dtype=torch.int32)
    flags = flags_of(W, first)
    world = World(W, seed)
    options = flags, flags.shape[1], first, barrier, early, missing
    world.run(lambda r: world.launch(k.ping, (1,), r, W, data, out, *options))
    return out, flags


@pytest.mark.parametrize("first", [0, 2**31 - 2, 2**31 - 1, -1])
def test_signal_publishes_and_wait_acquires_also_across_the_wrap(first):
    for seed in SEEDS:
        out, flags = ping(seed, W=3, first=first)
        for rank in range(3):
            assert torch.equal(out[rank], torch.arange(256, dtype=torch.int32) + (rank - 1) % 3)
        expected = (first + 1 + 2**31) % 2**32 - 2**31
        assert (flags[:, HEADER + 3] == expected).all()


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        ({"barrier": 0}, "barrier() of the partition"),
        ({"early": 1}, "a release at scope sys"),
        ({"missing": 1}, "a release at scope sys"),
    ],
)
def test_a_signal_that_does_not_publish_is_a_race(fault, hint):
    texts = []
    for seed in SEEDS:
        with pytest.raises(RaceError) as found:
            ping(seed, **fault)
        texts.append(str(found.value))
    assert any(hint in text for text in texts)


def test_a_wait_that_nobody_answers_names_flag_expected_and_seen():
    out, flags = torch.zeros(2, dtype=torch.int32), flags_of(2, first=4)
    world = World(2)
    with pytest.raises(DeadlockError) as found:
        world.run(lambda r: world.launch(k.waits, (1,), r, 2, flags, HEADER + 8, 5, 4 + r, out))
    text = str(found.value)
    assert "flag 5 of rank 1 to reach 5: it is 4" in text
    assert "rank 1 CTA 0 partition main, primitives.py" in text
    assert "gl.wait(flags, INDEX, expected)" in text
    assert "seed 0" in text


@pytest.mark.parametrize("index", [-1, 8, 1000])
def test_an_index_outside_of_the_block_is_a_protocol_error(index):
    out, flags = torch.zeros(1, dtype=torch.int32), flags_of(1)
    world = World(1)
    with pytest.raises(ProtocolError, match=r"flags 0 to 7 of ranks 0 to 0 are legal"):
        world.run(lambda r: world.launch(k.waits, (1,), r, 1, flags, HEADER + 8, index, 0, out))


def test_signal_all_reaches_every_rank_and_checks_its_index():
    for seed in SEEDS:
        flags, world = flags_of(4), World(4, seed)
        world.run(lambda r, w=world, f=flags: w.launch(k.signals_all, (1,), r, 4, f, HEADER + 8, 2))
        assert (flags[:, HEADER + 2 : HEADER + 6] == 1).all()
    world = World(4)
    with pytest.raises(ProtocolError, match="signal"):
        world.run(lambda r: world.launch(k.signals_all, (1,), r, 4, flags, HEADER + 8, 6))


def waits_for_all(W, seed, expected=1, abort=0, kernel=k.waits_for_all):
    data, out, flags = torch.zeros(W, dtype=torch.int32), torch.full((W,), -1, dtype=torch.int32), flags_of(W)
    flags[:, 0] = abort
    world = World(W, seed)
    world.run(lambda r: world.launch(kernel, (1,), r, W, data, out, flags, HEADER + 8, expected))
    return out


@pytest.mark.parametrize("W", [1, 2, 3, 5])
def test_wait_all_acquires_what_every_rank_has_published(W):
    for seed in SEEDS:
        assert (waits_for_all(W, seed) == W * (W + 1) // 2).all()
    assert (waits_for_all(W, 0, abort=1) == 0).all()


def test_wait_all_for_too_little_is_a_race_and_for_too_much_a_deadlock():
    with pytest.raises(RaceError):
        for seed in SEEDS:
            waits_for_all(3, seed, expected=0)
    with pytest.raises(DeadlockError, match=r"flag 2 of rank \d to reach 2: it is"):
        waits_for_all(3, 0, expected=2)


@pytest.mark.parametrize("W", [1, 2, 3, 5])
def test_wait_all_may_skip_a_flag_and_acquires_the_others(W):
    for seed in SEEDS:
        sums = waits_for_all(W, seed, expected=0, kernel=k.waits_for_others)
        assert sums.tolist() == [W * (W + 1) // 2 - (rank + 1) for rank in range(W)]
    if W > 1:  # skips a flag that comes, and waits for its own, which does not
        with pytest.raises(DeadlockError, match=r"flag (\d) of rank \d to reach 1: it is 0"):
            waits_for_all(W, 0, expected=1, kernel=k.waits_for_others)


def test_an_abort_makes_waits_return_false():
    for seed in SEEDS:
        out, flags = torch.full((1,), -1, dtype=torch.int32), flags_of(2)
        world = World(2, seed)
        world.run(lambda r, w=world, f=flags, o=out: w.launch(k.waits_or_aborts, (1,), r, 2, f, HEADER + 8, o))
        assert out.item() == 0


def test_after_an_abort_a_wait_fails_also_where_its_flag_is_there():
    for abort in (0, 1):
        out, flags = torch.full((1,), -1, dtype=torch.int32), flags_of(1, first=5)
        flags[0, 0] = abort
        world = World(1)
        world.run(lambda r, w=world, f=flags, o=out: w.launch(k.waits, (1,), r, 1, f, HEADER + 8, 3, 4, o))
        assert out.item() == 1 - abort


@pytest.mark.parametrize("W", [1, 2, 3])
def test_meetings_back_to_back(W):
    for seed in SEEDS:
        data, flags, world = torch.zeros(W, dtype=torch.int32), flags_of(W), World(W, seed)
        world.run(lambda r, w=world, d=data, f=flags, n=W: w.launch(k.meetings, (1,), r, n, d, f, HEADER + 8, 3))


def test_ranks_drift_apart():
    """Some schedule lets a rank end its second call before another has begun its first."""
    drifted = False
    for seed in range(20):
        order, world, x = [], World(2, seed), torch.zeros(2, 64)

        def fn(rank, order=order, world=world, x=x):
            for call in range(2):
                order.append((rank, call))
                world.launch(k.writes, (1,), x[rank], 1.0, 64)

        world.run(fn)
        drifted = drifted or order[:2] in ([(0, 0), (0, 1)], [(1, 0), (1, 1)])
    assert drifted


def test_findings_are_emulator_errors():
    assert all(issubclass(kind, EmulatorError) for kind in (RaceError, DeadlockError, ProtocolError))


@pytest.mark.parametrize(("ahead", "reached"), [(0, True), (2**16 - 1, True), (2**16, False), (2**31 + 7, False)])
def test_a_flag_far_ahead_is_one_that_was_left_behind(ahead, reached):
    out, flags = torch.zeros(1, dtype=torch.int32), flags_of(1, first=(100 + ahead + 2**31) % 2**32 - 2**31)
    world = World(1)

    def run():
        world.run(lambda r: world.launch(k.waits, (1,), r, 1, flags, HEADER + 8, 5, 100, out))

    if reached:
        run()
    else:
        with pytest.raises(DeadlockError):
            run()


def signals(values, first=0):
    flags, world = flags_of(1, first), World(1)
    world.run(lambda r: [world.launch(k.signals, (1,), flags, HEADER + 8, 2, value) for value in values])
    return flags[0, HEADER + 2].item()


@pytest.mark.parametrize(
    ("first", "values", "last"),
    [
        (0, [1, 1, 2, 7], 7),
        (2**31 - 1, [2**31, 2**31 + 1], 1 - 2**31),  # into the sign, as 32 bits without one
        (-2, [-1, 0, 1], 1),  # around
        (-2, [2**32 - 1, 0], 0),
        (-(2**16), [3], 3),  # some calls leave a flag out: it may be far behind
        (5, [-(2**31) + 100], -(2**31) + 100),  # half round and more
    ],
)
def test_a_flag_goes_on_and_around(first, values, last):
    assert signals(values, first) == last


@pytest.mark.parametrize(
    ("first", "values", "what"),
    [
        (0, [2, 1], "1 is signalled to a flag that is at 2 already"),
        (-2, [0, -1], "-1 is signalled to a flag that is at 0 already"),
        (0, [2**32], "4294967296 does not fit into the 32 bits of a flag"),
        (0, [-(2**31) - 1], "does not fit"),
    ],
)
def test_a_flag_that_goes_back_or_beyond_its_bits_is_a_protocol_error(first, values, what):
    with pytest.raises(ProtocolError, match=f"flag overflow: .*({what}).*signal of flag 2 to rank 0 by rank 0 CTA 0"):
        signals(values, first)


def test_a_wait_says_that_its_flag_is_too_far_ahead():
    out, flags, world = torch.zeros(1, dtype=torch.int32), flags_of(1, first=2**16 + 4), World(1)
    with pytest.raises(DeadlockError, match="it is 65540, 65537 ahead, which from 65536 on means left behind"):
        world.run(lambda r: world.launch(k.waits, (1,), r, 1, flags, HEADER + 8, 5, 3, out))
