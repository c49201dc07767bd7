"""Virtual ranks on one Hopper GPU."""

import gc
import time
import weakref

import pytest
import torch

import tileweave as tw
from tests.fabric.kernels import meet_kernel, pass_on_kernel
from tileweave.fabric import FabricTimeout, fabric_of, virtual_world
from tileweave.fabric.base import BLOCK_WORDS
from tileweave.fabric.capability import sms_per_rank
from tileweave.fabric.workspace import CUDA_GRANULE

pytestmark = pytest.mark.gpu


def pass_on(group=None):
    """One call of the pass-on kernel, a small op: 100 * epoch + the rank before this one, as a CUDA tensor [1]."""
    fabric = fabric_of(group, "cuda")
    channel = fabric.channel("pass_on", 0, 64)
    boxes = channel.staging.view(torch.int32)
    out = torch.full((1,), -1, dtype=torch.int32, device=fabric.device)
    flags = (channel.flags, channel.flags.stride(0), channel.timeout_us)
    args = (fabric.rank, *flags, channel.state, boxes, boxes.stride(0), out, fabric.world_size)
    fabric.launch(pass_on_kernel, 1, args, num_warps=1)
    return out


def meet(epoch, group=None, silent=-1, num_warps=1):
    """All CTAs of all ranks meet, unless rank `silent` does not signal; a CUDA tensor [sms] of ones where all came."""
    fabric = fabric_of(group, "cuda")
    channel = fabric.channel("meet", 0, 0)
    out = torch.full((fabric.sms,), -1, dtype=torch.int32, device=fabric.device)
    flags = (channel.flags, channel.flags.stride(0), channel.timeout_us)
    args = (fabric.rank, *flags, epoch, silent, out, fabric.world_size)
    fabric.launch(meet_kernel, fabric.sms, args, num_warps=num_warps)
    return out


def expected(size, epoch):
    return [100 * epoch + (rank - 1) % size for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_kernels_meet_and_the_world_persists(size):
    with virtual_world(size, "cuda", timeout=10) as world:
        for epoch in range(1, 4):
            outs = world.run(lambda rank, group: pass_on(group))
            assert [out.item() for out in outs] == expected(size, epoch)


@pytest.mark.parametrize("size", [4, 16])
def test_many_calls_in_a_run_with_a_late_rank(size):
    def body(rank, group):
        outs = []
        for call in range(50):
            if call % 10 == rank:
                time.sleep(0.02)
            outs.append(pass_on(group))
        return outs

    with virtual_world(size, "cuda", timeout=10) as world:
        outs = world.run(body)
    assert [out.item() for out in outs[2]] == [100 * epoch + 1 for epoch in range(1, 51)]


@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_largest_grids_are_resident_together(size):
    with virtual_world(size, "cuda", timeout=10) as world:
        assert world.sms == sms_per_rank(size, world.device, None)
        outs = world.run(lambda rank, group: meet(1, group))
    assert all(out.eq(1).all() for out in outs)


def test_local_launches_concern_no_other_rank():
    """Each rank multiplies by groups as often and between as other calls as it likes; new variants are loaded there."""

    def body(rank, group):
        outs = []
        for call in range(1, 5):
            for experts in range((rank + call) % 3):
                x, w = (
                    torch.ones(64, 64 * call).bfloat16().cuda(),
                    torch.ones(experts + 1, 64 * call, 72).bfloat16().cuda(),
                )
                ends = torch.full((experts + 1,), 64, dtype=torch.int32, device="cuda")
                outs.append(tw.grouped_matmul(x, w, ends).eq(64 * call))
            outs.append(meet(call, group).eq(1))
        return outs

    with virtual_world(3, "cuda", timeout=10) as world:
        for outs in world.run(body):
            assert all(out.all() for out in outs)


def test_variants_that_are_new_in_mid_flight():
    """A first launch loads a module, which waits for the device: no peer's kernel may wait for us meanwhile."""

    def body(rank, group):
        outs = []
        for call, warps in enumerate((1, 2, 4, 8), 1):
            time.sleep(0.1 * rank)
            outs.append(meet(call, group, num_warps=warps))
            torch.ones(call, device="cuda").cumsum(0).sort()  # PyTorch's own kernels are loaded lazily as well
        return outs

    with virtual_world(4, "cuda", timeout=20) as world:
        for outs in world.run(body):
            assert all(out.eq(1).all() for out in outs)


def test_a_rank_with_a_variant_of_its_own():
    with virtual_world(2, "cuda", timeout=20) as world:
        world.run(lambda rank, group: meet(1, group))
        outs = world.run(lambda rank, group: meet(2, group, num_warps=2 + 2 * rank))
    assert all(out.eq(1).all() for out in outs)


def test_a_peer_that_never_signals():
    with virtual_world(2, "cuda", timeout=1.0) as world:
        world.run(lambda rank, group: meet(1, group))
        start = time.monotonic()
        with pytest.raises(FabricTimeout) as caught:
            world.run(lambda rank, group: meet(2, group, silent=1))
        assert 0.9 < time.monotonic() - start < 5
        error = caught.value
        assert (error.op, error.index, error.expected, error.seen) == ("meet", 1, 2, 1)
        assert error.rank in (0, 1)
        outs = world.run(lambda rank, group: meet(1, group))  # flags start anew
        assert all(out.eq(1).all() for out in outs)


def test_growth_keeps_flags_and_gives_zeros():
    def body(rank, group):
        fabric = fabric_of(group, "cuda")
        outs, sizes, zero = [pass_on(group)], [], []
        for nbytes in (10, 3 << 20, 100, 9 << 20):
            channel = fabric.channel("pass_on", nbytes, nbytes)
            sizes.append((channel.adding.shape[1] >> 20, channel.staging.shape[1] >> 20))
            zero.append(not channel.adding.any())
            outs.append(pass_on(group))
        return outs, sizes, zero

    with virtual_world(3, "cuda", timeout=10) as world:
        results = world.run(body)
    for rank, (outs, sizes, zero) in enumerate(results):
        assert [out.item() for out in outs] == [expected(3, epoch)[rank] for epoch in range(1, 6)]
        assert sizes == [(4, 4), (8, 8), (8, 8), (20, 20)] and all(zero)


def test_the_exception_of_a_rank_is_raised_and_nobody_hangs():
    def body(rank, group):
        pass_on(group)
        if rank == 1:
            raise KeyError("rank 1 has a problem")
        return pass_on(group)

    with virtual_world(3, "cuda", timeout=10) as world:
        start = time.monotonic()
        with pytest.raises(KeyError, match="rank 1 has a problem"):
            world.run(body)
        assert time.monotonic() - start < 5
        outs = world.run(lambda rank, group: pass_on(group))
        assert [out.item() for out in outs] == expected(3, 1)


def test_a_rank_that_returns_early():
    with virtual_world(2, "cuda", timeout=10) as world:
        with pytest.raises(RuntimeError, match=r"rank 1 waits for all ranks .* but rank 0 has returned"):
            world.run(lambda rank, group: rank and pass_on(group))
        assert [out.item() for out in world.run(lambda rank, group: pass_on(group))] == expected(2, 1)


def test_ranks_that_do_not_agree_are_told_so():
    def body(rank, group):
        return pass_on(group) if rank else meet(1, group)

    message = r"the call is channel\('meet'.* on rank 0, channel\('pass_on'.* on rank 1"
    with virtual_world(2, "cuda", timeout=10) as world, pytest.raises(RuntimeError, match=message):
        world.run(body)


def test_streams_are_ordered_with_the_callers():
    with virtual_world(3, "cuda", timeout=10) as world:
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(100_000_000)
        x.fill_(3)
        ys = world.run(lambda rank, group: x * rank)
        total = ys[0] + ys[1] + ys[2]
        streams = set(world.run(lambda rank, group: torch.cuda.current_stream().cuda_stream))
    assert total.eq(9).all()
    assert len(streams) == 3 and torch.cuda.current_stream().cuda_stream not in streams


def test_a_ranks_launches_follow_each_other_across_streams():
    def body(rank, group):
        side, outs = torch.cuda.Stream(), []
        for call in range(6):
            if call % 2 == 0:
                outs.append(pass_on(group))
                torch.cuda._sleep(5_000_000 * (rank + 1))
            else:
                with torch.cuda.stream(side):
                    outs.append(pass_on(group))
        torch.cuda.current_stream().wait_stream(side)
        return outs

    with virtual_world(2, "cuda", timeout=10) as world:
        outs = world.run(body)
    assert [out.item() for out in outs[0]] == [100 * epoch + 1 for epoch in range(1, 7)]


def test_reduce_scatter():
    torch.manual_seed(0)
    xs = [torch.randn(4096, 1024, device="cuda").to(torch.bfloat16) for _ in range(4)]
    total = torch.stack(xs).float().sum(0)

    def body(rank, group):
        torch.cuda._sleep(20_000_000 * rank)
        x = xs[rank] * 1
        share = fabric_of(group, "cuda").reduce_scatter(x)
        x.fill_(float("nan"))  # legal as soon as the call has returned
        return share

    with virtual_world(4, "cuda", timeout=10) as world:
        for _ in range(3):
            torch.testing.assert_close(torch.cat(world.run(body)).float(), total, rtol=1e-2, atol=1e-2)


def capture(fn):
    """A graph of fn() on the current stream, and fn's result. Ranks capture at the same time."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        result = fn()
    finally:
        graph.capture_end()
    return graph, result


def test_graphs_replay():
    def body(rank, group):
        fabric = fabric_of(group, "cuda")
        pass_on(group)
        torch.cuda.synchronize()
        fabric.rendezvous()
        graph, out = capture(lambda: pass_on(group))
        seen = []
        for _ in range(5):
            fabric.rendezvous()
            graph.replay()
            seen.append(out.clone())
        return seen

    with virtual_world(2, "cuda", timeout=10) as world:
        outs = world.run(body)
    assert [out.item() for out in outs[0]] == [100 * epoch + 1 for epoch in range(2, 7)]


def test_growth_during_a_capture_is_refused():
    def body(rank, group):
        torch.cuda.synchronize()
        fabric_of(group, "cuda").rendezvous()
        capture(lambda: pass_on(group))

    with virtual_world(2, "cuda", timeout=10) as world:
        with pytest.raises(RuntimeError, match=r"pass_on: its workspace must grow.*warm up"):
            world.run(body)
        assert [out.item() for out in world.run(lambda rank, group: pass_on(group))] == expected(2, 1)


def test_a_process_alone_is_a_world_of_one():
    fabric = fabric_of(None, "cuda")
    assert (fabric.backend, fabric.rank, fabric.world_size, fabric.refusal()) == ("virtual", 0, 1, None)
    first, second = pass_on().item(), pass_on().item()
    assert second - first == 100


def test_a_world_leaves_no_memory_behind():
    world = virtual_world(2, "cuda", timeout=10)
    with world:
        world.run(lambda rank, group: pass_on(group).item())
        memory = weakref.ref(world.workspace.ops["pass_on"].staging)
    gc.collect()
    assert memory() is None
    with pytest.raises(RuntimeError, match="closed"):
        world.run(lambda rank, group: None)


def test_more_sms_than_the_gpu_has():
    with pytest.raises(ValueError, match=r"n, sms: 2 ranks of 100 SMs need 200, the GPU has \d+"):
        virtual_world(2, "cuda", sms=100)


def test_a_grid_that_cannot_be_resident_is_refused():
    with virtual_world(2, "cuda", sms=3) as world, pytest.raises(ValueError, match=r"expected 1 to 3 .* got 4"):
        world.run(lambda rank, group: fabric_of(group).launch(meet_kernel, 4, (), num_warps=1))


def test_a_bound_of_the_workspace(monkeypatch):
    """A first call's slots fit, a larger one's do not beside them; the world goes on."""
    held = 4 * BLOCK_WORDS + 2 * 2 * CUDA_GRANULE
    monkeypatch.setenv("TILEWEAVE_WORKSPACE", str(held))
    with virtual_world(2, "cuda", timeout=10) as world:

        def larger(rank, group):
            with pytest.raises(RuntimeError, match=rf"pass_on: .* hold {held} already, and TILEWEAVE_WORKSPACE allows"):
                fabric_of(group).channel("pass_on", 0, CUDA_GRANULE + 1)
            return pass_on(group).item()

        first = world.run(lambda rank, group: pass_on(group).item())
        assert world.run(lambda rank, group: tw.memory_report(group))[0]["pass_on"]["own"] == held
        assert [x - y for x, y in zip(world.run(larger), first, strict=True)] == [100, 100]
