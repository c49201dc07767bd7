"""Channels and how they grow."""

import torch

from tileweave.fabric.base import BLOCK_WORDS, HEADER_WORDS
from tileweave.fabric.workspace import EMULATED_GRANULE, Workspace


def make(world=3):
    return Workspace(world, torch.device("cpu"), 1000)


def test_a_new_channel_is_zero_and_large_enough():
    workspace = make()
    assert workspace.find("op", 0, 1, 1) is None
    workspace.grow("op", 1000, 0)
    channel = workspace.find("op", 1, 1000, 0)
    assert channel.flags.shape == (3, BLOCK_WORDS) and channel.flags.dtype == torch.int32
    assert channel.adding.shape == (3, 2 * 1024) and channel.staging.shape == (3, 2 * EMULATED_GRANULE)
    assert not any(part.any() for part in (channel.flags, channel.state, channel.adding, channel.staging))
    assert channel.timeout_us == 1000


def test_sizes_never_shrink_and_flags_survive_growth():
    workspace = make()
    workspace.grow("op", 1000, 500)
    before = workspace.find("op", 2, 10, 10)
    before.flags[2, HEADER_WORDS] = 7
    before.state[0] = 9
    workspace.grow("op", 10, 5000)
    after = workspace.find("op", 2, 1000, 5000)
    assert after.flags[2, HEADER_WORDS] == 7 and after.state[0] == 9
    assert after.adding.data_ptr() == before.adding.data_ptr()
    assert after.staging.shape[1] >= 2 * 5000


def test_state_belongs_to_a_rank_and_ops_do_not_share():
    workspace = make()
    workspace.grow("op", 1, 1)
    workspace.grow("other", 1, 1)
    workspace.find("op", 0, 1, 1).state[0] = 5
    assert workspace.find("op", 1, 1, 1).state[0] == 0
    assert workspace.find("other", 0, 1, 1).state[0] == 0


def test_rank_strides_fit_tma():
    workspace = make()
    for nbytes in (1, 255, 256, 257, 100_000):
        workspace.grow("op", nbytes, nbytes)
        channel = workspace.find("op", 0, nbytes, nbytes)
        assert channel.adding.stride(0) % 256 == 0 and channel.staging.stride(0) % 256 == 0


def test_a_recorded_timeout_is_told_with_its_fields():
    workspace = make()
    workspace.grow("op", 1, 1)
    assert workspace.timed_out() is None
    workspace.find("op", 0, 1, 1).flags[1, :6] = torch.tensor([1, 1, 4, 10, 9, 2], dtype=torch.int32)
    error = workspace.timed_out()
    assert (error.op, error.rank, error.index, error.expected, error.seen) == ("op", 2, 4, 10, 9)
    assert "op: rank 2 waited in vain for its flag 4: expected at least 10, last seen 9" in str(error)
    workspace.clear()
    assert workspace.timed_out() is None
