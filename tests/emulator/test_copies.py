"""Copies of a copy engine beside a kernel: what they are ordered with, and what a copied word tells."""

import pytest
import torch

from tests.emulator.kernels import copies as k
from tileweave.emulator import RaceError, World

SEEDS = range(8)
HEADER, N = 16, 128


def ring(seed, *, word_first=False, waits=True, flags_each=1):
    """Every rank copies its row to the next one's inbox, and a word behind it, beside a kernel that waits for its own.

    Three times, each time with another value and an inbox of its own.
    """
    world = World(3, seed)
    flags = torch.zeros(3, HEADER + 4, dtype=torch.int32)
    words = torch.zeros(3, 4, dtype=torch.int32)
    source, inboxes = torch.zeros(3, N), [torch.full((3, N), -1.0) for _ in range(3)]
    outs = [torch.full((3, N), -2.0) for _ in range(3)]

    def program(rank):
        peer = (rank + 1) % 3
        for call in range(3):
            world.launch(k.fills, (1,), rank, source, 10.0 * call + rank, N)
            world.launch(k.fills, (1,), rank, words, call + 1, 4)
            data = inboxes[call][peer], source[rank]
            word = flags[peer, HEADER : HEADER + flags_each], words[rank, :flags_each]
            pairs = [word, data] if word_first else [data, word]
            arguments = rank, 3, inboxes[call], outs[call], flags, HEADER + 4, call + 1, flags_each, waits, N
            world.launch(k.takes, (1,), *arguments, copies=pairs)

    world.run(program)
    return outs


@pytest.mark.parametrize("flags_each", [1, 4])
def test_a_word_tells_of_the_copies_ahead_of_it(flags_each):
    for seed in SEEDS:
        for call, out in enumerate(ring(seed, flags_each=flags_each)):
            assert torch.equal(out[:, 0], torch.tensor([10.0 * call + (rank - 1) % 3 for rank in range(3)]))


@pytest.mark.parametrize("fault", [dict(word_first=True), dict(waits=False)])
def test_a_read_that_no_word_orders_is_a_race(fault):
    for seed in SEEDS:
        with pytest.raises(RaceError, match=r"copy-engine copy by rank \d host"):
            ring(seed, **fault)


def test_a_copy_into_what_a_peer_still_reads_is_a_race():
    """The inbox of the previous time, although its reader need not have gone on."""
    found = 0
    for seed in SEEDS:
        world = World(2, seed)
        flags, words = torch.zeros(2, HEADER + 1, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
        source, inbox, out = torch.zeros(2, N), torch.zeros(2, N), torch.zeros(2, N)

        def program(rank, world=world, flags=flags, words=words, source=source, inbox=inbox, out=out):
            for call in range(2):
                world.launch(k.fills, (1,), rank, words, call + 1, 4)
                pairs = [(inbox[1 - rank], source[rank]), (flags[1 - rank, HEADER:], words[rank, :1])]
                arguments = rank, 2, inbox, out, flags, HEADER + 1, call + 1, 1, True, N
                world.launch(k.takes, (1,), *arguments, copies=pairs)

        try:
            world.run(program)
        except RaceError:
            found += 1
    assert found


def test_copies_take_tensors_alike_and_contiguous():
    world, x = World(1), torch.zeros(4, N)
    for pair, text in (((x[0], x[0, :4]), r"got \[128\].* and \[4\]"), ((x[:, 0], x[:, 1]), "contiguous")):
        with pytest.raises(ValueError, match=text):
            world.run(lambda _, pair=pair: world.launch(k.fills, (1,), 0, x, 1.0, N, copies=[pair]))
