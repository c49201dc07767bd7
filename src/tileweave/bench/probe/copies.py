"""The ways to copy between ranks' memory, and whether they copy right."""

from dataclasses import dataclass

import torch

from tileweave.bench.probe.kernel import register_copy_kernel, tma_copy_kernel
from tileweave.fabric import Fabric
from tileweave.ops.descriptors import describe

LINE = 64  # bf16 elements in a line of 128-byte swizzling: the narrowest box
SMALLEST_TILE = 1024  # bytes: eight lines, below which that swizzling has no pattern
RING_BYTES, DEEPEST = 192 << 10, 24  # of shared memory for tiles in flight; and how many at most
WARPS = 16  # of a CTA that copies through registers
NAIVE = ("volatile", "lookup", "release")  # what makes a copy naive, see `register_copy_kernel`
# GB/s of an SM that a copy exceeds in all likelihood, so that it is repeated long enough but no longer.
LEAST_GB_PER_S = {"tma": 10.0, "register": 5.0, "naive": 0.5, "copy_engine": 200.0}
GUESSED_LINK, GUESSED_START_US = 300.0, 2.0


@dataclass(frozen=True)
class Copy:
    """A copy of `total` bytes by `sms` SMs (0: the copy engine) in messages of `message` bytes: a TMA tile, a thread's
    access, or all.

    direction "put": a rank writes to the next one, "get": it reads from it; ways 1: rank 0 alone does, 2: all do.
    columns: of a TMA tile, in elements of 2 bytes, and `width` of the matrix that it is a box of; spread: that many
    neighbouring threads are far apart; naive: some of NAIVE.
    """

    mechanism: str
    direction: str
    total: int
    message: int
    sms: int
    ways: int = 1
    columns: int = LINE
    width: int = LINE
    spread: int = 1
    naive: tuple[str, ...] = ()

    def ends(self, rank: int, world: int) -> tuple[int, int] | None:
        """The ranks that `rank` copies from and to; None if it looks on. A world of one copies within itself."""
        if rank and self.ways == 1:
            return None
        peer = (rank + 1) % world
        return (rank, peer) if self.direction == "put" else (peer, rank)

    def repeats(self, us: float) -> int:
        """How often to do it so that it takes about `us` microseconds, or less."""
        rate = min(GUESSED_LINK, LEAST_GB_PER_S[self.mechanism] * max(self.sms, 1))
        most = 200 if self.mechanism == "copy_engine" else 2000  # copies of the engine are enqueued one by one
        return max(1, min(most, int(us / (GUESSED_START_US + self.total / (rate * 1e3)))))


class Arena:
    """Memory for copies of up to `nbytes`, a power of two: what is copied and where copies go, `sources` and `copies`,
    int32 [world, nbytes / 4] each. Collective to make; `fill` comes first."""

    def __init__(self, fabric: Fabric, nbytes: int):
        self.fabric, self.nbytes = fabric, nbytes
        channel = fabric.channel("probe", 0, nbytes)
        self.staging = channel.staging
        self.state = channel.state
        words = channel.staging.view(torch.int32)
        self.sources, self.copies = words[:, : nbytes // 4], words[:, nbytes // 4 : nbytes // 2]
        self.offsets = torch.arange(fabric.world_size, device=fabric.device) * words.stride(0)

    def fill(self) -> None:
        """Random data into this rank's sources, the same on all ranks but that rank r adds r. Collective."""
        drawn = torch.Generator(self.fabric.device).manual_seed(0)
        self.sources[self.fabric.rank].random_(generator=drawn).add_(self.fabric.rank)
        self.meet()

    def meet(self) -> None:
        """Wait until all ranks' GPUs have done what they were given."""
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize(self.fabric.device)
        self.fabric.rendezvous()

    def enqueue(self, copy: Copy, repeats: int) -> None:
        """Do a copy so many times, on the current stream. Collective."""
        rank, world = self.fabric.rank, self.fabric.world_size
        ends = copy.ends(rank, world)
        source, target = ends or (rank, rank)
        if copy.mechanism == "copy_engine":
            here, there = (each[: copy.total // 4] for each in (self.sources[source], self.copies[target]))
            for _ in range(repeats if ends else 0):
                there.copy_(here, non_blocking=True)
        elif copy.mechanism == "tma":
            self._by_tma(copy, source, target, repeats if ends else 0)
        else:
            self._by_registers(copy, source, target, repeats if ends else 0)

    def verify(self, copy: Copy) -> None:
        """Do a copy once; RuntimeError on every rank unless it is right and wrote nothing behind it. Collective."""
        rank, world = self.fabric.rank, self.fabric.world_size
        mine, end = self.copies[rank], copy.total // 4
        self.meet()  # a peer may still be writing here
        mine.fill_(-1)
        self.meet()
        self.enqueue(copy, 1)
        self.meet()
        wrong = bool((mine[end : end + LINE] != -1).any())
        for other in range(world):
            ends = copy.ends(other, world)
            if ends and ends[1] == rank:
                wrong |= not torch.equal(mine[:end], self.sources[rank][:end] + (ends[0] - rank))
        found = self.fabric.all_gather(torch.tensor([wrong], dtype=torch.int32, device=self.fabric.device))
        if found.any():
            raise RuntimeError(f"{copy} is wrong on rank {int(found.argmax())}")

    def _by_tma(self, copy: Copy, source: int, target: int, repeats: int) -> None:
        memory = self.staging.view(torch.bfloat16)[:, : self.nbytes].unflatten(1, (-1, copy.width))
        rows = copy.message // (2 * copy.columns)
        stages = min(DEEPEST, RING_BYTES // copy.message)
        down = self.nbytes // (2 * copy.width)
        numbers = source, target, copy.total // copy.message, copy.width // copy.columns, down, repeats
        args = describe(memory, (1, rows, copy.columns)), *numbers, stages
        self.fabric.launch(tma_copy_kernel, copy.sms, args, num_warps=1)

    def _by_registers(self, copy: Copy, source: int, target: int, repeats: int) -> None:
        vec, threads = copy.message // 4, 32 * WARPS
        at_once = threads if copy.total < 4 << 20 or copy.naive else 4 * threads
        pointers = self.sources, self.copies, self.sources.stride(0), self.offsets, self.state
        numbers = source, target, copy.total // copy.message, repeats
        ways = (each in copy.naive for each in NAIVE)
        args = *pointers, *numbers, vec, at_once, copy.spread, *ways
        self.fabric.launch(register_copy_kernel, copy.sms, args, num_warps=WARPS)
