"""What others publish of kernels that do not run here: shown beside measurements, marked, never mixed with them.

Times are of 8 GPUs, in the shapes of the whole product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tileweave.bench.figures import Figure
from tileweave.bench.rivals import versions

GPUS = 8
PAPER = "arXiv 2511.13940"
FLUX = "bytedance/flux issue 90"
UNCLEAR = "unsaid whether of N each GPU has a share"


@dataclass(frozen=True)
class Published:
    """A time of a contender, or, where us is None, what is said of it in `text`."""

    op: str
    on: str
    shape: str
    contender: str
    source: str
    us: float | None = None
    flop: float = 0.0
    text: str = ""

    @property
    def figure(self) -> Figure:
        """As measured ones are."""
        rate = self.flop / GPUS / self.us / 1e6 if self.us and self.flop else None
        return Figure(
            self.op, self.on, self.shape, self.contender, self.us, tflops=rate, note=self.text, source=self.source
        )


def _times(
    op: str, on: str, source: str, contenders: Sequence[str], rows: Sequence[tuple[tuple[int, int, int], tuple]]
) -> list[Published]:
    """Milliseconds of contenders at M, N, K of the whole product."""
    return [
        Published(op, on, f"M={m} N={n} K={k}", name, source, 1e3 * ms, 2.0 * m * n * k)
        for (m, n, k), times in rows
        for name, ms in zip(contenders, times, strict=True)
    ]


def _ratio(op: str, contender: str, low: str, high: str) -> Published:
    """How the paper's kernel compares with a contender."""
    text = f"the paper's kernel is {low} to {high} times as fast"
    return Published(op, f"{GPUS} H100", "the paper's shapes", contender, PAPER, text=text)


ROWS = (1024, 2048, 4096, 8192, 16384, 32768)
FLUX_GATHER = (
    (0.247, 0.250), (0.454, 0.426), (0.867, 0.673), (1.692, 1.315), (3.387, 2.804), (6.831, 5.819)
)  # fmt: skip
FLUX_SCATTER = (
    (0.180, 0.183), (0.290, 0.331), (0.542, 0.633), (1.04, 1.241), (2.011, 2.459), (3.978, 4.986)
)  # fmt: skip
PUBLISHED = [
    *(
        Published("all_gather_matmul", "8 H100", f"M={m} N=8192 K=8192", name, FLUX, 1e3 * ms, text=UNCLEAR)
        for m, times in zip(ROWS, FLUX_GATHER, strict=True)
        for name, ms in zip(("torch and NCCL", "flux"), times, strict=True)
    ),
    *_times(
        "matmul_reduce_scatter", "8 H100", FLUX, ("torch and NCCL", "flux"),
        [((m, 8192, 28672), times) for m, times in zip(ROWS, FLUX_SCATTER, strict=True)],
    ),
    *_times(
        "matmul_reduce_scatter", "8 H100 or H800", "kraken pull request 19", ("torch and NCCL", "async-tp"),
        [
            ((512, 4096, 14336), (0.134, 0.614)),
            ((1024, 4096, 14336), (0.224, 0.667)),
            ((2048, 4096, 14336), (0.423, 0.755)),
        ],
    ),
    *_times(
        "matmul_reduce_scatter", "8 H100", PAPER, ("its matmul alone", "parallelkittens"),
        [
            ((32768, 32768, GPUS * k), times)
            for k, times in (
                (512, (2.07, 6.48)), (1024, (2.92, 6.61)), (2048, (5.57, 7.53)), (4096, (11.78, 11.83)),
                (8192, (23.29, 25.33)),
            )
        ],
    ),
    *_times(
        "matmul_all_reduce", "8 H800", "flagos-ai/FlagTree pull request 861", ("torch and NCCL", "flagtree"),
        [
            ((1024, 8192, GPUS * 1024), (0.270, 0.212)),
            ((2048, 8192, GPUS * 3584), (0.579, 0.374)),
            ((8192, 8192, GPUS * 3584), (1.868, 1.193)),
            ((16384, 8192, GPUS * 3584), (3.628, 2.278)),
        ],
    ),
    *(
        _ratio(op, *of)
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
        for of in (("triton-distributed", "1.07", "5.63"), ("flux", "0.97", "2.33"), ("cutlass", "0.90", "7.39"))
    ),
    _ratio("ring_attention", "xdit", "1.07", "4.08"),
    _ratio("ulysses_attention", "yunchang", "1.01", "1.39"),
    _ratio("moe_dispatch_matmul", "comet", "0.92", "1.22"),
]  # fmt: skip


def published(ops: Sequence[str], only: Sequence[str] = ("",)) -> list[Figure]:
    """Figures of ops, of shapes as `Bench.chosen` takes them and of what is said of all shapes; without those of what
    is installed, which runs instead."""
    here = {name for name, version in versions().items() if version}
    return [
        each.figure
        for each in PUBLISHED
        if each.op in ops
        and each.contender not in here
        and (each.us is None or any(text in f"{each.op} {each.shape}" for text in only))
    ]
