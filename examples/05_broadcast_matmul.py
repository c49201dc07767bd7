"""Lesson 5: a new fused kernel, written from nothing, broken in two ways, and what `tileweave check` says of each.

Rank 0 has A, every rank a B of its own, and all want A @ B: a broadcast and a matmul in one kernel. CTA c of rank 0
sends c's rows of A to every rank, and CTA c of every rank multiplies them when they have come. docs/tutorial-check.md
goes through it step by step:

    tileweave check 05_broadcast_matmul:right                       (in examples/)
    tileweave check 05_broadcast_matmul:told_too_early
    tileweave check 05_broadcast_matmul:never_acknowledged
"""

import torch

from tileweave import lang as gl
from tileweave import virtual_world
from tileweave.checker import CallableCase, check
from tileweave.fabric import fabric_of
from tileweave.ops.descriptors import describe

BM, BN, BK = 64, 64, 64
EPOCH, DONE = gl.constexpr(0), gl.constexpr(1)  # words of `state`


@gl.jit
def send_rows(flags, a, inbox, row, place, epoch, k_steps, tile, bar, FULL: gl.constexpr, ACKNOWLEDGED: gl.constexpr):
    """Rank 0: this CTA's rows of A to every rank, and then word of it."""
    BYTES: gl.constexpr = tile.shape[1] * tile.shape[2] * 2
    first = gl.num_programs(0) + gl.program_id(0) * flags.world
    if ACKNOWLEDGED:  # the slot was last used two calls ago
        gl.wait_all(flags, first, flags.world, epoch - 2)
        gl.fence_proxy_async()
    phase = 0
    for step in range(k_steps):
        gl.mbarrier_expect(bar, BYTES)
        gl.tma_load(a, [row, step * tile.shape[2]], bar, tile.reshape([tile.shape[1], tile.shape[2]]))
        gl.mbarrier_wait(bar, phase)
        phase = phase ^ 1
        gl.broadcast_async(inbox, flags.world, [place, step * tile.shape[2]], tile)
        gl.store_read_wait(0)  # the tile may be loaded again
    if FULL:
        gl.store_wait(0)  # it has arrived everywhere
    gl.barrier()
    gl.signal_all(flags, gl.program_id(0), epoch)
    return phase


@gl.jit(do_not_specialize=["rank", "flags_stride", "timeout_us", "slot_rows", "k_steps"])
def broadcast_matmul_kernel(
    rank, a, inbox, b, out, flags_ptr, flags_stride, timeout_us, state, slot_rows, k_steps,
    WORLD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    FULL: gl.constexpr, ACKNOWLEDGED: gl.constexpr,
):  # fmt: skip
    """out [rows, BN] of every rank = rank 0's a [rows, k] @ its own b [k, BN]. Grid: a CTA for BM rows, co-resident.

    | word | written by | waited for by | why its reuse is safe |
    |---|---|---|---|
    | inbox slot e % 2 of d | CTA c of rank 0 in call e, its rows | CTA c of d, after flags[d][c] | acknowledged |
    | flags[d][c] = e | CTA c of rank 0, its rows are performed | CTA c of rank d | monotonic |
    | flags[0][CTAs + c * WORLD + d] = e | CTA c of d, its rows are loaded | CTA c of 0 in call e + 2 | monotonic |
    | state[EPOCH], state[DONE] | the last CTA | next launch | stream order |
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    BYTES: gl.constexpr = (BM * BK + BK * BN) * 2
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    epoch = gl.load(state + EPOCH) + 1
    row = gl.program_id(0) * BM
    place = (epoch & 1) * slot_rows + row
    a_tile = gl.allocate_shared_memory(a.dtype, [1, BM, BK], inbox.layout)
    b_tile = gl.allocate_shared_memory(b.dtype, [BK, BN], b.layout)
    c_tile = gl.allocate_shared_memory(out.dtype, [BM, BN], out.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)

    phase = 0
    if rank == 0:
        phase = send_rows(flags, a, inbox, row, place, epoch, k_steps, a_tile, bar, FULL, ACKNOWLEDGED)

    met = gl.wait(flags, gl.program_id(0), epoch)
    gl.fence_proxy_async()
    acc = gl.zeros([BM, BN], gl.float32, LAYOUT)
    for step in range(k_steps):
        gl.mbarrier_expect(bar, BYTES)
        gl.load_async(inbox, rank, [gl.where(met, place, 2 * slot_rows), step * BK], a_tile, bar)
        gl.tma_load(b, [step * BK, 0], bar, b_tile)
        gl.mbarrier_wait(bar, phase)
        phase = phase ^ 1
        acc = gl.warpgroup_mma(a_tile.reshape([BM, BK]), b_tile, acc)
    if ACKNOWLEDGED:
        gl.barrier()
        gl.signal(flags, gl.to_tensor(0), gl.num_programs(0) + gl.program_id(0) * WORLD + rank, epoch)

    c_tile.store(acc.to(out.dtype))
    gl.fence_async_shared()
    gl.barrier()
    gl.tma_store(out, [row, 0], c_tile)
    gl.store_read_wait(0)
    if gl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.atomic_xchg(state + DONE, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(state + EPOCH, epoch, sem="relaxed", scope="gpu")


def prepare(fabric, a, b, full=True, acknowledged=True):
    """The kernel's arguments for a [rows, k], of which rank 0's counts, and b [k, BN]; and the result to be written."""
    channel = fabric.channel("broadcast_matmul", 0, a.nbytes)
    inbox = channel.staging.view(a.dtype).unflatten(1, (-1, a.shape[1]))
    out = torch.empty(a.shape[0], BN, dtype=a.dtype, device=a.device)
    boxes = describe(a, [BM, BK]), describe(inbox, [1, BM, BK], padding="nan"), describe(b, [BK, BN])
    flags = channel.flags, channel.flags.stride(0), channel.timeout_us
    sizes = inbox.shape[1] // 2, a.shape[1] // BK, fabric.world_size, BM, BN, BK
    return (fabric.rank, *boxes, describe(out, [BM, BN]), *flags, channel.state, *sizes, full, acknowledged), out


def broadcast_matmul(fabric, a, b, **options):
    """Rank 0's `a` times this rank's `b`. Collective."""
    args, out = prepare(fabric, a, b, **options)
    fabric.launch(broadcast_matmul_kernel, a.shape[0] // BM, args, num_warps=4)
    return out


def assert_right(world, calls=3, **options):
    """Calls one after the other, with new data each: more than there are slots, so that one is used again."""
    n = world.size
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(calls, 2 * BM, 3 * BK, generator=generator).bfloat16()
    b = torch.randn(calls, n, 3 * BK, BN, generator=generator).bfloat16()

    def program(rank, group):
        fabric = fabric_of(group)
        return [broadcast_matmul(fabric, a[i], b[i, rank], **options) for i in range(calls)]

    for rank, outs in enumerate(world.run(program)):
        for i, out in enumerate(outs):
            truth = a[i].float() @ b[i, rank].float()
            error = (out.float() - truth).norm() / truth.norm()
            assert error < 1e-2, f"call {i} of rank {rank}: relative error {error:.1e}"


def right(world):
    """As it should be."""
    assert_right(world)


def told_too_early(world):
    """The flag is raised when the tiles have left shared memory, not when they have arrived."""
    assert_right(world, full=False)


def never_acknowledged(world):
    """Rank 0 does not ask whether the others have used what it sent two calls ago."""
    assert_right(world, acknowledged=False)


def main() -> None:
    with virtual_world(2, device="cpu") as world:
        right(world)
    print("one schedule: right")
    for function, schedules in ((right, 14), (told_too_early, 14), (never_acknowledged, 14)):
        report = check(CallableCase(function, ranks=2), range(schedules), processes=1)
        print(f"\n{function.__name__}: {'clean' if report.ok else 'a finding'} (schedules: {report.schedules})")
        print(report.story or f"each flag was raised {report.flag_uses} times")


if __name__ == "__main__":
    main()
