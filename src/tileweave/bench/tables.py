"""Tables of committed figures, so that no number in the docs is typed by hand.

    python -m tileweave.bench.tables docs/performance.md

rewrites what stands between `<!-- figures: FILE -->` and `<!-- end -->` from the JSON file of that name beside it.
"""

import json
import re
import sys
from pathlib import Path

ALONE = ("matmul", "own matmul", "attention")  # contenders that transfer nothing
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, folder: Path) -> str:
    """A page with all its tables made anew."""
    return BLOCK.sub(lambda found: found[1] + table(json.loads((folder / found[2]).read_text())) + found[3], text)


def table(figures: dict) -> str:
    """One file's figures as a Markdown table, with the machine they were measured on."""
    row = figures["rows"][0] if "rows" in figures else figures
    kinds = {
        "b": _core,
        "tflops_of_attention": _attention,
        "ablations_ms": _ablations,
        "tflops_per_gpu": _between_gpus,
        "over_matmul_us": _all_reduce,
        "over_all_percent": _sequence,
        "bytes_by_token": _moe,
        "planned": _grouped,
        "probe": _probe,
        "plans": _scopes,
        "gb_per_s": _collectives,
        "tflops": _virtual,
        "us": _host_time,
    }
    make = next(make for name, make in kinds.items() if name in row)
    m = figures.get("probe", figures)["machine"]
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


def _core(figures: dict) -> str:
    rows = []
    for r in figures["rows"]:
        times = {name: us for name, us in r["us"].items() if name != "cublas"}
        best = min(times, key=lambda name: times[name][0])
        size, stages, split = best.split("/")
        median, low, high = times[best]
        cublas = r["us"]["cublas"]
        rows.append(
            [
                f"{r['shape']}",
                f"{r['m']} x {r['n']} x {r['k']}",
                r["b"],
                f"{cublas[0]:.1f} ({cublas[1]:.1f}-{cublas[2]:.1f})",
                f"{median:.1f} ({low:.1f}-{high:.1f})",
                f"{size}, {stages} stages" + (f", last wave shared by {split}" if split != "1" else ""),
                f"{cublas[0] / median:.2f}",
            ]
        )
    head = ["layer of", "M x N x K", "b", "cuBLAS, us", "tileweave, us", "its tiles", "speed over cuBLAS"]
    return _markdown(head, rows)


def _attention(figures: dict) -> str:
    names = list(figures["rows"][0]["us"])
    rows = []
    for r in figures["rows"]:
        shape = r["shape"]
        heads = f"{shape['heads']}" + (f" / {shape['kv_heads']}" if shape["kv_heads"] != shape["heads"] else "")
        sizes = [f"{shape[name]}" for name in ("batch", "rows", "dim")]
        rates = [f"{r['tflops_of_attention'][name]:.0f}" for name in names]
        core = r["us"]["core"][0]
        over = [f"{r['us'][name][0] / core:.2f}" for name in names if name != "core"]
        rows.append([sizes[0], heads, *sizes[1:], "causal" if r["causal"] else "full", *rates, *over])
    head = ["batch", "heads", "sequence", "head dim", "mask", *(f"{name}, TFLOP/s" for name in names)]
    return _markdown([*head, *(f"speed over {name}" for name in names if name != "core")], rows)


def _ablations(figures: dict) -> str:
    names = [name for name in figures["rows"][0]["ablations_ms"] if name != "op"]
    rows = []
    for r in figures["rows"]:
        base, low, high = r["ablations_ms"]["op"]
        against = [f"{100 * (r['ablations_ms'][name][0] / base - 1):+.1f}%" for name in names]
        shape = f"{r['world']}", f"{r['m']} x {r['n']} x {r['k_local']}"
        rows.append([*shape, f"{base:.2f} ({low:.2f}-{high:.2f})", *against])
    return _markdown(["ranks", "M x N x K per rank", "op, ms", *names], rows)


def _between_gpus(figures: dict) -> str:
    names = list(dict.fromkeys(name for r in figures["rows"] for name in r["us"]))
    rows = []
    for r in figures["rows"]:
        times = []
        for name in names:
            if name not in r["us"]:
                times.append("-")
                continue
            median, low, high = r["us"][name]
            times.append(f"{median:.1f} ({low:.1f}-{high:.1f}{'' if r['graph'][name] else ', eager'})")
        rivals = {name: us[0] for name, us in r["us"].items() if name not in ("tileweave", *ALONE)}
        best = min(rivals, key=lambda name: rivals[name])
        ahead = f"{rivals[best] / r['us']['tileweave'][0]:.2f} ({best})"
        shape = r["shape"] if "shape" in r else f"{r['m']} x {r['n']} x {r['k']}"
        rows.append([r["op"], shape, *times, f"{r['tflops_per_gpu']['tileweave']:.0f}", ahead])
    head = [
        "op",
        "shape" if "shape" in figures["rows"][0] else "M x N x K",
        *(f"{name}, us" for name in names),
        "TFLOP/s per GPU",
        "speed over best rival",
    ]
    return _markdown(head, rows)


def _all_reduce(figures: dict) -> str:
    names = list(figures["rows"][0]["us"])
    rows = []
    for r in figures["rows"]:
        times = [f"{r['us'][name][0]:.1f} ({r['us'][name][1]:.1f}-{r['us'][name][2]:.1f})" for name in names]
        shape = f"{r['world']}", f"{r['m']} x {r['n']} x {r['k_local']}", r["plan"]["schedule"]
        rows.append([*shape, *times, f"{r['overhead_percent']:+.1f}%", f"{r['over_matmul_us']:+.1f}"])
    head = ["ranks", "M x N x K per rank", "schedule", *(f"{name}, us" for name in names)]
    return _markdown([*head, "fused over local", "over matmul, us"], rows)


def _sequence(figures: dict) -> str:
    rows = []
    for r in figures["rows"]:
        mask = f"causal, {r['placement']}" if r["causal"] else "full"
        over = ["{:+.1f}% ({:+.1f} to {:+.1f})".format(*r[key]) for key in ("overhead_percent", "over_all_percent")]
        sizes = [f"{r[name]}" for name in ("world", "batch", "heads", "rows")]
        rows.append(
            [r["op"], *sizes, mask, f"{r['plan']['comm_sms']}", f"{r['tflops']['fused']:.0f}", r["over"], *over]
        )
    head = ["op", "ranks", "batch", "heads", "sequence", "mask", "communicators of a rank", "TFLOP/s of all ranks"]
    return _markdown([*head, "compared with", "fused over it (spread)", "over it on all SMs (spread)"], rows)


def _moe(figures: dict) -> str:
    names = list(dict.fromkeys(name for r in figures["rows"] for name in r["tflops"]))
    rows = []
    for r in figures["rows"]:
        low, high = (1e2 * (r["ms"]["fused"][i] / r["ms"]["local"][0] - 1) for i in (1, 2))
        rates = [f"{r['tflops'][name]:.0f}" if name in r["tflops"] else "-" for name in names]
        sent = [f"{r[by] / 1e6:.0f}" for by in ("bytes_by_token", "bytes_by_choice")]
        over = f"{r['overhead_percent']:+.1f}% ({low:+.1f} to {high:+.1f})"
        rows.append([r["kind"], f"{r['world']}", f"{r['tokens']}", r["routing"], *rates, over, *sent])
    head = ["kernels of", "ranks", "tokens", "routing", *(f"{name}, TFLOP/s" for name in names), "fused over local"]
    return _markdown([*head, "MB by token", "MB by choice"], rows)


def _grouped(figures: dict) -> str:
    names = [name for name in figures["rows"][0]["ms"] if name != "torch"]
    rows = []
    for r in figures["rows"]:
        over = [f"{r['ms']['torch'][0] / r['ms'][name][0]:.2f}" for name in names]
        rows.append([f"{r['rows']}", f"{r['experts']}", r["routing"], f"{r['tflops']['torch'][0]:.0f}", *over])
    head = ["rows", "experts", "routing", "torch, TFLOP/s"]
    return _markdown([*head, *(f"{name.split('/')[0]} over torch" for name in names)], rows)


def _probe(figures: dict) -> str:
    """The copies over links, a line for each thing that varied."""
    copies = [r for r in figures["probe"]["rows"] if r["over"] == "link" and r["columns"] == 64 and r["spread"] == 1]
    most, usual = max(r["sms"] for r in copies), {"tma": 16384, "register": 16}
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for r in sorted(copies, key=lambda r: (r["total"], r["message"], r["sms"])):
        if r["mechanism"] == "naive":
            varied, at = "what makes it slow", " + ".join(r["naive"]) or "nothing"
        elif r["sms"] in (0, most):
            varied, at = "bytes", _bytes(r["total"])
        elif r["message"] == usual[r["mechanism"]]:
            varied, at = "SMs", f"{r['sms']}"
        else:
            varied, at = "bytes of a message", _bytes(r["message"])
        way = r["mechanism"], r["direction"], "both at once" if r["ways"] == 2 else "one", varied
        rate = f"{r['gb_per_s']:.{0 if r['gb_per_s'] >= 10 else 1}f}"
        lines.setdefault(way, {}).setdefault(at, rate)
    rows = [[*way, ", ".join(f"{at}: {rate}" for at, rate in lines[way].items())] for way in sorted(lines)]
    flags = ", ".join(f"{figures['numbers'][name]['value']:.2f}" for name in ("sync_us", "flag_gpu_us", "flag_cta_us"))
    waits = f"\nA flag between GPUs, between SMs, within an SM: {flags} us.\n"
    return _markdown(["mechanism", "direction", "ways", "varied", "GB/s"], rows) + waits


def _bytes(n: int) -> str:
    return f"{n >> 20} MB" if n >= 1 << 20 else f"{n >> 10} KB" if n >= 1 << 10 else f"{n} B"


def _scopes(figures: dict) -> str:
    rows = []
    for r in figures["rows"]:
        best: dict[str, tuple[float, str]] = {}
        for name, us in r["us"].items():
            way, comm_sms = name.rsplit(" ", 1)
            best[way] = min(best.get(way, (us[0], comm_sms)), (us[0], comm_sms))
        for us, way, comm_sms in sorted((us, way, comm_sms) for way, (us, comm_sms) in best.items()):
            shape = f"{r['size']}^3" if r["share"] * r["world"] == r["size"] else f"{r['size']}, {r['share']}"
            rows.append([r["op"], shape, *way.split(" "), comm_sms, f"{us:.1f}"])
    return _markdown(["op", "product", "mechanism", "schedule", "SMs left or communicating", "us"], rows)


def _collectives(figures: dict) -> str:
    rows = []
    for r in figures["rows"]:
        dims = ", ".join(f"{name.replace('_dim', '')} {r[name]}" for name in r if name.endswith("dim"))
        (rows_of, columns), us = r["shape"], r["us"]
        times = [f"{us[name][0]:.1f} ({us[name][1]:.1f}-{us[name][2]:.1f})" for name in us]
        rate, over = f"{r['gb_per_s']['tileweave']:.0f}", f"{us['nccl'][0] / us['tileweave'][0]:.2f}"
        rows.append([r["op"], dims, f"{rows_of} x {columns}", *times, rate, over])
    head = ["op", "dimensions", "x of a rank", *(f"{name}, us" for name in figures["rows"][0]["us"])]
    return _markdown([*head, "GB/s from the peer", "speed over nccl"], rows)


def _host_time(figures: dict) -> str:
    return _markdown(["call", "host time, us"], [[name, f"{value:.1f}"] for name, value in figures["us"].items()])


def main() -> None:
    """Rewrite the pages named on the command line."""
    for page in map(Path, sys.argv[1:]):
        page.write_text(filled(page.read_text(), page.parent))


if __name__ == "__main__":
    main()
