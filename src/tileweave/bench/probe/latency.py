"""How long a flag, a barrier or a launch takes."""

import time

import torch

from tileweave.bench.measure import interleaved
from tileweave.bench.probe.kernel import flag_kernel, mbarrier_kernel
from tileweave.bench.probe.timing import Us, spread, timed
from tileweave.bench.recording import Recorder, together
from tileweave.fabric import Fabric, Variant
from tileweave.fabric.virtual import VirtualFabric, VirtualWorld

TURNS, LAUNCHES, ROUNDS = 1000, 200, 7


class HandOver:
    """Two parties that hand a flag to each other: two SMs of each rank, or, `between`, ranks 0 and 1."""

    def __init__(self, fabric: Fabric, between: bool):
        self.fabric, self.between = fabric, between
        channel = fabric.channel("probe flags", 0, 0)
        self.flags = channel.flags, channel.flags.stride(0), channel.timeout_us
        self.came = torch.zeros(2, dtype=torch.int32, device=fabric.device)
        self.first = 1  # what the next launch begins to count from

    def enqueue(self, turns: int) -> None:
        """Hand it over and back so many times, on the current stream. Collective."""
        rank = self.fabric.rank
        mine, theirs = (0, 1) if self.between else (rank, rank)
        party, grid = (rank, 1) if self.between else (0, 2)
        numbers = rank, party % 2, mine, theirs, self.first, turns if party < 2 else 0
        args = *numbers, self.came, *self.flags, self.fabric.world_size
        self.fabric.launch(flag_kernel, grid, args, num_warps=1)
        self.first += turns

    def verify(self, turns: int) -> None:
        """Hand it over so many times; RuntimeError unless it came as often. Collective."""
        self.came.zero_()
        self.enqueue(turns)
        came = int(self.came.max())
        if came != turns and not (self.between and self.fabric.rank > 1):
            raise RuntimeError(f"rank {self.fabric.rank}: a flag came {came} times of {turns}")


def flag_us(fabric: Fabric, between: bool) -> Us:
    """One hand-over of a flag with `lang.signal` and `lang.wait`, in microseconds. Collective."""
    parties = HandOver(fabric, between)
    parties.verify(TURNS)
    return [us / 2 for us in timed(fabric, parties.enqueue, TURNS, ROUNDS, 2 if between else 1)]


def mbarrier_us(fabric: Fabric) -> Us:
    """One hand-over of an mbarrier between two partitions of a CTA, in microseconds. Collective."""
    out = torch.zeros(1, dtype=torch.int32, device=fabric.device)

    def enqueue(turns: int) -> None:
        fabric.launch(mbarrier_kernel, 1, (out, turns), num_warps=4)

    enqueue(TURNS)
    if int(out) != TURNS:
        raise RuntimeError(f"the barriers were handed over {int(out)} times of {TURNS}")
    return [us / 2 for us in timed(fabric, enqueue, TURNS, ROUNDS, 1)]


def launch_us() -> tuple[Us, Us]:
    """Microseconds of a launch of an empty kernel: on the GPU, of many behind each other in a graph; of the host."""
    with VirtualWorld(1, torch.device("cuda", torch.cuda.current_device()), 1, 60.0) as world:

        def rank_program(rank, group):
            real: VirtualFabric = group.world.fabric(rank)
            out, variant, host = torch.zeros(1, dtype=torch.int32, device=real.device), Variant(), []
            for _ in range(ROUNDS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(LAUNCHES):
                    real.launch(mbarrier_kernel, 1, (out, 0), num_warps=4, variant=variant)
                host.append(1e6 * (time.perf_counter() - start) / LAUNCHES)
            kept = Recorder(real, False)
            kept.launch(mbarrier_kernel, 1, (out, 0), num_warps=4)
            return kept.kept, spread(host[1:]), torch.cuda.current_stream()

        launches, host, stream = world.run(rank_program)[0]
        times = interleaved({"launches": together(launches, [stream], LAUNCHES)}, ROUNDS)["launches"]
    return spread([1e3 * ms / LAUNCHES for ms in times.rounds]), host
