"""Shapes of attention over a sequence that ranks share, as the benchmarks of ring and Ulysses attention name them."""

from dataclasses import dataclass

from tileweave.bench.harness import Work

DIM, SAMPLE = 128, 64  # of a head; rows of a head that are compared with float32


@dataclass(frozen=True)
class Case:
    """`rows` is the length of the whole sequence."""

    op: str
    batch: int
    heads: int
    rows: int
    causal: bool

    @property
    def placement(self) -> str:
        """How the sequence lies."""
        return "zigzag" if self.op == "ring_attention" and self.causal else "contiguous"

    @property
    def shape(self) -> str:
        """What a table says of the case."""
        mask = f"causal {self.placement}" if self.causal else "full"
        return f"B{self.batch} H{self.heads} S{self.rows} D{DIM} {mask}"

    @property
    def flop(self) -> float:
        """Operations of all ranks: two products, of which a causal mask leaves half."""
        return 4 * self.batch * self.heads * self.rows**2 * DIM / (2 if self.causal else 1)

    def work(self, world: int) -> Work:
        """Of one of so many GPUs: in a ring its keys and values go to all others; in Ulysses attention all but a share
        of queries, keys, values and results goes to others."""
        share = 2.0 * self.batch * self.heads * self.rows * DIM / world  # bytes of a rank's part of one tensor
        sent = 2 * (world - 1) if self.op == "ring_attention" else 4 * (world - 1) / world
        return Work(self.flop / world, share * sent)
