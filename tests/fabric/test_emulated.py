"""Emulated worlds: ranks as threads, kernels in the emulator."""

import threading

import pytest
import torch

import tileweave.fabric as fabrics
from tests.fabric.kernels import meet_kernel, pass_on_kernel
from tileweave.fabric import fabric_of, virtual_world


def pass_on(group, out):
    """One call of the pass-on kernel; a small op."""
    fabric = fabric_of(group, "cpu")
    channel = fabric.channel("pass_on", 0, 64)
    boxes = channel.staging.view(torch.int32)
    fabric.launch(
        pass_on_kernel,
        1,
        (
            fabric.rank,
            channel.flags,
            channel.flags.stride(0),
            channel.timeout_us,
            channel.state,
            boxes,
            boxes.stride(0),
            out,
            fabric.world_size,
        ),
        num_warps=1,
    )
    return out


def boxed(rank, group):
    return pass_on(group, torch.zeros(1, dtype=torch.int32)).item()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_kernels_meet_and_the_world_persists(size):
    with virtual_world(size, "cpu") as world:
        for epoch in range(1, 4):
            assert world.run(boxed) == [100 * epoch + (rank - 1) % size for rank in range(size)]


def test_several_calls_in_a_run():
    with virtual_world(3, "cpu", seed=5) as world:
        results = world.run(lambda rank, group: [boxed(rank, group) for _ in range(4)])
    assert results[1] == [100, 200, 300, 400]


def test_every_cta_of_the_largest_grid_is_resident():
    with virtual_world(2, "cpu", sms=3) as world:

        def body(rank, group):
            fabric = fabric_of(None, "cpu")
            channel = fabric.channel("meet", 0, 0)
            out = torch.zeros(fabric.sms, dtype=torch.int32)
            args = (
                rank,
                channel.flags,
                channel.flags.stride(0),
                channel.timeout_us,
                1,
                -1,
                out,
                fabric.world_size,
            )
            fabric.launch(meet_kernel, fabric.sms, args, num_warps=1)
            return out.tolist()

        assert world.run(body) == [[1, 1, 1]] * 2


def test_a_grid_that_cannot_be_resident_is_refused():
    with virtual_world(2, "cpu", sms=3) as world, pytest.raises(ValueError, match=r"expected 1 to 3 .* got 4"):
        world.run(lambda rank, group: fabric_of(group, "cpu").launch(meet_kernel, 4, (), num_warps=1))


def test_the_group_is_the_threads_default():
    with virtual_world(2, "cpu") as world:

        def body(rank, group):
            default = fabric_of(None, "cpu")
            assert default is fabric_of(group, "cpu")
            return default.rank, default.world_size, default.backend, default.refusal(), group.size()

        assert world.run(body) == [(0, 2, "emulated", None, 2), (1, 2, "emulated", None, 2)]
    assert fabric_of(None, "cpu").backend == "fallback"


def test_results_come_in_rank_order_and_grad_mode_is_the_callers():
    with virtual_world(3, "cpu") as world:
        assert world.run(lambda rank, group: (rank, torch.is_grad_enabled())) == [(r, True) for r in range(3)]
        with torch.no_grad():
            assert world.run(lambda rank, group: torch.is_grad_enabled()) == [False] * 3


def test_values_go_to_all_ranks():
    with virtual_world(4, "cpu") as world:
        assert world.run(lambda rank, group: fabric_of(group, "cpu").gather_values(rank)) == [[0, 1, 2, 3]] * 4


def test_an_action_of_a_meeting_runs_once_for_all():
    calls = []
    with virtual_world(4, "cpu") as world:
        results = world.run(lambda rank, group: fabric_of(group).exchange("x", 0, lambda _: calls.append(1) or "met"))
    assert results == ["met"] * 4 and calls == [1]


def test_growth_in_the_middle_of_calls():
    with virtual_world(2, "cpu") as world:

        def body(rank, group):
            seen = [boxed(rank, group)]
            for nbytes in (10, 10_000, 100):
                channel = fabric_of(group, "cpu").channel("pass_on", nbytes, nbytes)
                seen.append(channel.staging.shape[1])
                seen.append(boxed(rank, group))
            return seen

        assert world.run(body)[0] == [101, 512, 201, 20480, 301, 20480, 401]


def test_channels_are_the_ranks_own_as_they_are_now():
    with virtual_world(2, "cpu") as world:

        def body(rank, group):
            fabric = fabric_of(group, "cpu")
            none, _, other = fabric.channels(), fabric.channel("pass_on", 10, 10), fabric.channel("other", 10, 10)
            grown = fabric.channel("pass_on", 10_000, 10)
            here = fabric.channels()
            return not none and len(here) == 2 and here[0] is grown and here[1] is other

        assert world.run(body) == [True, True]


def test_the_exception_of_a_rank_is_raised_and_nobody_hangs():
    def body(rank, group):
        if rank == 1:
            raise KeyError("rank 1 has a problem")
        fabric_of(group, "cpu").rendezvous()

    with virtual_world(3, "cpu") as world:
        before = threading.active_count()
        with pytest.raises(KeyError, match="rank 1 has a problem"):
            world.run(body)
        assert threading.active_count() == before
        assert world.run(boxed) == [102, 100, 101]


def test_an_exception_while_a_peers_kernel_waits():
    def body(rank, group):
        fabric_of(group, "cpu").channel("pass_on", 0, 64)
        if rank == 0:
            raise KeyError("no launch")
        boxed(rank, group)

    with virtual_world(2, "cpu") as world:
        with pytest.raises(KeyError, match="no launch"):
            world.run(body)
        assert world.run(boxed) == [101, 100]


def test_ranks_that_do_not_agree_are_told_so():
    def body(rank, group):
        fabric_of(group, "cpu").channel("op", 100 + rank, 0)

    message = r"the call is channel.*adding_bytes=100, .* on rank 0, channel.*adding_bytes=101, .* on rank 1"
    with virtual_world(2, "cpu") as world, pytest.raises(RuntimeError, match=message):
        world.run(body)


def test_an_error_in_an_action_reaches_every_rank():
    caught = []

    def body(rank, group):
        try:
            fabric_of(group, "cpu").exchange("x", None, lambda _: 1 // 0)
        except ZeroDivisionError:
            caught.append(rank)

    with virtual_world(3, "cpu") as world:
        world.run(body)
    assert sorted(caught) == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 3, 6])
def test_reduce_scatter(dtype, rows):
    torch.manual_seed(0)
    xs = [torch.randn(rows, 5).to(dtype) for _ in range(3)]
    kept = [x.clone() for x in xs]
    with virtual_world(3, "cpu") as world:

        def body(rank, group):
            share = fabric_of(group, "cpu").reduce_scatter(xs[rank])
            xs[rank].fill_(float("nan"))  # legal as soon as the call has returned
            return share

        shares = world.run(body)
    total = torch.stack(kept).float().sum(0)
    assert all(share.dtype == dtype and share.shape == (rows // 3, 5) for share in shares)
    torch.testing.assert_close(torch.cat(shares).float(), total, rtol=1e-2, atol=1e-2)


def test_reduce_scatter_checks_its_arguments():
    refusal = pytest.raises(ValueError, match=r"multiple of the world size 2, got shape \(3, 4\)")
    with virtual_world(2, "cpu") as world, refusal:
        world.run(lambda rank, group: fabric_of(group, "cpu").reduce_scatter(torch.ones(3, 4)))


def test_worlds_in_worlds():
    def outer(rank, group):
        with virtual_world(2, "cpu") as inner:
            inside = inner.run(boxed)
        return inside, boxed(rank, group)

    with virtual_world(2, "cpu") as world:
        assert world.run(outer) == [([101, 100], 101), ([101, 100], 100)]


def test_misuse_of_a_world():
    with virtual_world(2, "cpu") as world:
        kept = world.run(lambda rank, group: group)
        with pytest.raises(RuntimeError, match="not running"):
            fabric_of(kept[0], "cpu")
        with pytest.raises(RuntimeError, match="running already"):
            world.run(lambda rank, group: world.run(boxed))
    with pytest.raises(RuntimeError, match="closed"):
        world.run(boxed)
    assert fabrics.virtual_world(1, "cpu").size == 1


def test_a_backward_pass_runs_on_its_ranks_own_thread():
    """On a GPU the engine's one thread for it would wait in the first rank's backward pass for all others."""
    with virtual_world(2, "cpu") as world:
        for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            with mode:
                assert world.run(lambda rank, group: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()
