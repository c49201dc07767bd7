"""Tables of committed figures, so that no number in the docs is typed by hand.

    python -m tileweave.bench.tables docs/performance.md

rewrites what stands between `<!-- figures: FILE -->` and `<!-- end -->` from the JSON file of that name beside it.
"""

import json
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, folder: Path) -> str:
    """A page with all its tables made anew."""
    return BLOCK.sub(lambda found: found[1] + table(json.loads((folder / found[2]).read_text())) + found[3], text)


def table(figures: dict) -> str:
    """One file's figures as a Markdown table, with the machine they were measured on."""
    make = _host_time if "us" in figures else _between_gpus if "tflops_per_gpu" in figures["rows"][0] else _virtual
    m = figures["machine"]
    note = f"{m['gpu']}, torch {m['torch']}, triton {m['triton']}, CUDA {m['cuda']}, {m['date']}."
    return make(figures) + f"\n{note}\n"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _virtual(figures: dict) -> str:
    names = list(figures["rows"][0]["tflops"])
    rows = []
    for r in figures["rows"]:
        shape = f"{r['world']}", f"{r['m']} x {r['n']} x {r['k_local']}"
        rates = [f"{r['tflops'][name]:.0f}" for name in names]
        low, high = (1e2 * (r["ms"]["fused"][i] / r["ms"]["local"][0] - 1) for i in (1, 2))
        rows.append([*shape, *rates, f"{r['overhead_percent']:+.1f}% ({low:+.1f} to {high:+.1f})"])
    return _markdown(["ranks", "M x N x K per rank", *names, "fused over local (spread)"], rows)


def _between_gpus(figures: dict) -> str:
    names = list(figures["rows"][0]["ms"])
    rows = []
    for r in figures["rows"]:
        times = []
        for name in names:
            median, low, high = (1e3 * value for value in r["ms"][name])
            eager = "" if r["graph"][name] else ", eager"
            times.append(f"{median:.1f} ({low:.1f}-{high:.1f}{eager})")
        rivals = {name: r["ms"][name][0] for name in names if name not in ("fused", "matmul")}
        best = min(rivals, key=lambda name: rivals[name])
        rate = r["tflops_per_gpu"]["fused"]
        rows.append(
            [
                f"{r['m']} x {r['n']} x {r['k']}",
                *times,
                f"{rate:.0f}",
                f"{rivals[best] / r['ms']['fused'][0]:.2f} ({best})",
            ]
        )
    return _markdown(
        ["M x N x K", *(f"{name}, us" for name in names), "TFLOP/s per GPU", "fused over best rival"], rows
    )


def _host_time(figures: dict) -> str:
    return _markdown(["call", "host time, us"], [[name, f"{value:.1f}"] for name, value in figures["us"].items()])


def main() -> None:
    """Rewrite the pages named on the command line."""
    for page in map(Path, sys.argv[1:]):
        page.write_text(filled(page.read_text(), page.parent))


if __name__ == "__main__":
    main()
