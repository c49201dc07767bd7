"""Lesson 2: a kernel with a race, and the emulator's report of it.

Every rank sends a tile to the next one by TMA and raises a flag there; the receiver waits for the flag and copies the
tile out. How long must the sender wait between the store and the flag? `store_read_wait` says that the tile has left
shared memory, so that its buffer may be reused. It may still be on its way: a flag raised then can overtake it.
`store_wait` says that the tile has arrived. Values are nearly always right either way, on hardware and in tests that
compare values; the emulator tracks what is ordered after what, and reports the fault under any schedule.
"""

import torch

from tileweave import lang as gl
from tileweave.emulator import RaceError, World
from tileweave.ops.descriptors import describe

ROWS, COLS, WORLD = 16, 64, 2
TIMEOUT_US = 1_000_000


@gl.jit(do_not_specialize=["rank", "flags_stride", "timeout_us"])
def pass_on_kernel(
    rank,
    source,
    inbox,
    out,
    flags_ptr,
    flags_stride,
    timeout_us,
    WORLD: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    FULL: gl.constexpr,
):
    """out of rank r = source of rank r - 1, through r's slice of `inbox`."""
    TILE_BYTES: gl.constexpr = ROWS * COLS * 2
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    peer = (rank + 1) % WORLD
    tile = gl.allocate_shared_memory(source.dtype, [1, ROWS, COLS], inbox.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    gl.mbarrier_init(bar, count=1)

    gl.mbarrier_expect(bar, TILE_BYTES)
    gl.tma_load(source, [0, 0, 0], bar, tile)
    gl.mbarrier_wait(bar, 0)
    gl.store_async(inbox, peer, [0, 0], tile)
    if FULL:
        gl.store_wait(0)  # the tile is in the peer's memory
        gl.barrier()
    else:
        gl.store_read_wait(0)  # the tile has been read, no more
    gl.signal(flags, peer, 0, 1)

    gl.wait(flags, 0, 1)
    gl.fence_proxy_async()
    gl.store_read_wait(0)
    gl.mbarrier_expect(bar, TILE_BYTES)
    gl.load_async(inbox, rank, [0, 0], tile, bar)
    gl.mbarrier_wait(bar, 1)
    gl.tma_store(out, [0, 0, 0], tile)
    gl.store_read_wait(0)


def run(full: bool, seed: int) -> bool:
    """Run the kernel on emulated ranks; whether every tile came through."""
    source = torch.randn(WORLD, ROWS, COLS, dtype=torch.bfloat16)
    inbox, out = torch.zeros_like(source), torch.zeros_like(source)
    flags = torch.zeros(WORLD, 32, dtype=torch.int32)
    box = [1, ROWS, COLS]
    world = World(WORLD, seed=seed)

    def rank_main(rank: int) -> None:
        mine = slice(rank, rank + 1)
        tensors = [describe(x, box) for x in (source[mine], inbox, out[mine])]
        flag_block = (flags, flags.stride(0), TIMEOUT_US)
        world.launch(pass_on_kernel, (1,), rank, *tensors, *flag_block, WORLD, ROWS, COLS, full, num_warps=4)

    world.run(rank_main)
    return torch.equal(out, source.roll(1, dims=0))


def main() -> None:
    torch.manual_seed(0)
    print(f"store_wait, barrier, signal: right under 5 schedules: {all(run(True, seed) for seed in range(5))}")
    try:
        run(False, seed=0)
    except RaceError as report:
        print(f"store_read_wait, signal: {report}")


if __name__ == "__main__":
    main()
