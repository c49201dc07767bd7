"""The tables and the picture of docs/planner.md: `python -m tileweave.bench.planner_page` (needs matplotlib).

Rewrites what stands between `<!-- predictions -->` and `<!-- end -->`, and figures/planner.png beside it.
"""

from collections.abc import Iterable
from typing import Any

from tileweave.bench.predictions import FIGURES, FILES, Point, points, summary
from tileweave.plan import plan
from tileweave.planner.decision import PLAIN, Decision
from tileweave.planner.plan import Plan

PAGE = FIGURES.parent / "planner.md"
BEGIN, END = "<!-- predictions -->\n", "<!-- end -->"
RANKS = (2, 4, 8, 16, 32, 64, 72)
RACK = 36864  # a size that all of these divide
ROWS = tuple(64 << i for i in range(9))
LAYER = {"all_gather_matmul": (28672, 8192), "matmul_reduce_scatter": (8192, 28672), "matmul_all_reduce": (8192, 28672)}
WORST = 12  # points that are told one by one


def ways(decision: Decision) -> dict[str, float]:
    """Predicted microseconds of each way of a decision, of GPUs of Blackwell those of kernels that nobody has tried."""
    decision = decision.untried or decision
    every: Iterable[Plan | None] = (decision.plan, decision.runner_up, *decision.rejected)
    return {f"{each.mechanism} {each.schedule}": each.predicted_us or 0.0 for each in every if each is not None}


def by_gpu(op: str) -> dict[str, dict[str, float]]:
    """TFLOP/s of a rank in each way at M = N = K = 32768 on eight GPUs of each kind."""
    flop = 2.0 * 32768**3 / 8
    sizes = {"m": 32768, "n": 32768, "k": 32768}
    return {
        gpu: {way: flop / us / 1e6 for way, us in ways(plan(op, sizes, gpu=gpu, ranks=8)).items()}
        for gpu in ("h100", "h200", "b200")
    }


def by_ranks(op: str) -> dict[int, tuple[float, float, float]]:
    """Of a product of RACK^3 on so many GPUs of a rack: what is taken, the plain way, and the product alone, us."""
    found = {}
    for ranks in RANKS:
        decision = plan(op, {"m": RACK, "n": RACK, "k": RACK}, gpu="gb200-nvl72", ranks=ranks)
        decision = decision.untried or decision
        us = ways(decision)
        assert decision.plan and decision.cost, "a product that kernels can serve"
        alone = max(decision.cost.compute_us, decision.cost.memory_us)
        found[ranks] = decision.plan.predicted_us or 0.0, us[f"{PLAIN} none"], alone
    return found


def by_rows(op: str, ranks: int) -> dict[int, float]:
    """The plain way's time over the best kernel's, by the rows of a layer of Llama-70B's sizes, on H200s."""
    n, k = LAYER[op]
    found = {}
    for rows in ROWS:
        us = ways(plan(op, {"m": rows, "n": n, "k": k}, gpu="h200", ranks=ranks))
        found[rows] = us[f"{PLAIN} none"] / min(time for way, time in us.items() if not way.startswith(PLAIN))
    return found


def tables(every: list[Point]) -> str:
    """All tables of the page."""
    lines = ["| figures | predictions beside them |", "| --- | --- |"]
    lines += [f"| {file} | {summary([each for each in every if each.file == file])} |" for file in FILES]
    lines += [f"| all | {summary(every)} |", "", f"The {WORST} worst:", ""]
    lines += ["| figures | op | ranks | M x N x K | way | predicted, us | measured, us | error |", "| --- " * 8 + "|"]
    for each in sorted(every, key=lambda each: -abs(each.error))[:WORST]:
        cells = (each.file, each.op, each.world, each.shape, each.way, f"{each.predicted_us:.0f}",
                 f"{each.measured_us:.0f}", f"{each.error:+.0%}")  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        rates = by_gpu(op)
        lines += ["", f"{op}, 32768^3 on eight GPUs, TFLOP/s of a rank, predicted:", ""]
        lines += ["| way | " + " | ".join(rates) + " |", "| --- " * (len(rates) + 1) + "|"]
        lines += [f"| {way} | " + " | ".join(f"{of[way]:.0f}" for of in rates.values()) + " |" for way in rates["h100"]]
    lines += [
        "",
        f"{RACK}^3 on a part of a GB200 NVL72, predicted, taken / torch.mm and NCCL / the product alone, us:",
        "",
    ]
    lines += ["| ranks | " + " | ".join(LAYER) + " |", "| --- " * (len(LAYER) + 1) + "|"]
    racks = {op: by_ranks(op) for op in LAYER}
    for ranks in RANKS:
        lines.append(
            f"| {ranks} | " + " | ".join(" / ".join(f"{us:.0f}" for us in racks[op][ranks]) for op in LAYER) + " |"
        )
    lines += ["", "The plain way's time over the best kernel's, layers of Llama-70B's sizes on H200s, predicted:", ""]
    lines += ["| op | ranks | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |", "| --- " * (len(ROWS) + 2) + "|"]
    for op in LAYER:
        for ranks in (2, 8):
            ratios = by_rows(op, ranks).values()
            lines.append(f"| {op} | {ranks} | " + " | ".join(f"{each:.2f}" for each in ratios) + " |")
    return "\n".join(lines) + "\n"


def draw(every: list[Point]) -> None:
    """The picture: predictions beside measurements, and the three questions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18, 10), layout="constrained")
    (one, two), (three, four) = figure.subplots(2, 2)
    for file in FILES:
        of = [each for each in every if each.file == file]
        one.plot([each.measured_us for each in of], [each.predicted_us for each in of], "o", markersize=3, label=file)
    ends = [min(each.measured_us for each in every), max(each.measured_us for each in every)]
    one.plot(ends, ends, color="gray", linewidth=1)
    _axes(one, "measured, us", "predicted, us", log=True)
    names, places = [], []
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        for gpu, rates in by_gpu(op).items():
            for way, rate in sorted(rates.items()):
                names.append(f"{op.removeprefix('matmul_')} {gpu} {way}")
                places.append(rate)
    two.barh(names, places)
    two.tick_params(axis="y", labelsize=6)
    _axes(two, "TFLOP/s of a rank, 32768^3, eight GPUs, predicted", "", legend=False)
    for op in LAYER:
        racks = by_ranks(op)
        three.plot(list(racks), [us[0] / us[2] for us in racks.values()], "o-", label=f"{op}, taken")
        three.plot(list(racks), [us[1] / us[2] for us in racks.values()], "o:", label=f"{op}, torch.mm and NCCL")
        for ranks, style in ((2, "o-"), (8, "s--")):
            ratios = by_rows(op, ranks)
            four.plot(list(ratios), list(ratios.values()), style, label=f"{op}, {ranks} H200")
    _axes(three, f"ranks of a GB200 NVL72, {RACK}^3", "time over the product's, predicted", log=True)
    four.axhline(1.0, color="gray", linewidth=1)
    four.set_xscale("log", base=2)
    _axes(four, "rows", "the plain way's time over the best kernel's, predicted")
    figure.savefig(FIGURES / "planner.png", dpi=80)


def _axes(axes: Any, x: str, y: str, log: bool = False, legend: bool = True) -> None:
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize=7)


def filled(text: str, every: list[Point]) -> str:
    """The page with its tables made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables(every) + END + rest.split(END)[1]


if __name__ == "__main__":
    measured = points()
    draw(measured)
    PAGE.write_text(filled(PAGE.read_text(), measured))
