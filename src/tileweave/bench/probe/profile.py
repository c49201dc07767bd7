"""From measurements to a hardware profile, as `planner/hardware.py` reads it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tileweave.bench.probe.copies import NAIVE
from tileweave.bench.probe.sweep import ACCESS, BULK, GB, KB, TILE, Row
from tileweave.planner.hardware import SHIPPED, Hardware, from_dict, profile

FIELDS = ("mechanism", "direction", "ways", "over")


def nearest(gpu: str) -> Hardware:
    """The shipped profile of this GPU, else of an H200."""
    return next((found for found in map(profile, SHIPPED) if found.gpu in gpu or gpu in found.gpu), profile("h200"))


def facts() -> dict[str, Any]:
    """What PyTorch says of the current GPU, by the profile's names."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def assemble(here: dict[str, Any], found: dict[str, Any], machine: dict[str, str]) -> dict[str, Any]:
    """The profile as plain values, with all that was measured under `probe`; ValueError if it were no legal one.

    here: `facts`, with `links` and `link_nominal_gb_per_s` where known, and `ranks` that a link joined; found: `rows`
    of `sweep.measure` and what else there was time for: `sync_us`, `flag_gpu_us`, `flag_cta_us`, `launch_us` (median,
    lowest, highest), `matmul_tflops` by size and `attention_tflops` by contender. What was not measured is the nearest
    shipped profile's, with its source.
    """
    base = nearest(here["gpu"])
    ran_on = f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}"
    numbers = {name: vars(number) for name, number in base.sources.items()}
    for name in ("sms", "memory_bytes", "l2_bytes", "links", "link_nominal_gb_per_s", "ranks"):
        if here.get(name):
            numbers[name] = {"value": here[name], "kind": "measured", "source": f"asked of the machine: {ran_on}"}
    for name, (value, how) in {**rates_of(found["rows"]), **others_of(found)}.items():
        numbers[name] = {"value": value, "kind": "measured", "source": f"tileweave probe, {how}: {ran_on}"}
    made = {
        "format": base.to_dict()["format"], "version": base.to_dict()["version"],
        "name": f"{base.name}-probed", "gpu": here["gpu"], "capability": here["capability"],
        "numbers": numbers, "curves": curves_of(found["rows"], f"tileweave probe: {ran_on}"),
    }  # fmt: skip
    from_dict(made, "probe")
    return {**made, "probe": {"machine": machine, **found}}


def regular(row: Row) -> bool:
    """Whether a row belongs to a curve: contiguous tiles, neighbouring accesses; of the naive ones the fully naive."""
    naive = len(NAIVE) if row["mechanism"] == "naive" else 0
    return row["columns"] == row["width"] and row["spread"] == 1 and len(row["naive"]) == naive


def curves_of(rows: list[Row], source: str) -> list[dict[str, Any]]:
    """A profile's curves of rows, those of one mechanism, direction, number of ways and place together."""
    curves: dict[tuple, dict[str, Any]] = {}
    for row in filter(regular, rows):
        same = tuple(row[name] for name in FIELDS)
        origin = {"kind": "measured", "source": source, "points": []}
        curve = curves.setdefault(same, {**dict(zip(FIELDS, same, strict=True)), **origin})
        sizes = {"total_bytes": row["total"], "message_bytes": row["message"], "sms": row["sms"]}
        curve["points"].append({**sizes, "gb_per_s": round(row["gb_per_s"], 4)})
    return list(curves.values())


def rates_of(rows: list[Row]) -> dict[str, tuple[float, str]]:
    """Numbers that are read off rows, and how."""
    puts = [row for row in rows if (row["direction"], row["ways"]) == ("put", 1) and regular(row)]

    def best(over: str, mechanism: str, message: int | None, at: Callable[[Row], bool] = lambda row: True) -> float:
        found = (
            row["gb_per_s"]
            for row in puts
            if (row["over"], row["mechanism"]) == (over, mechanism) and message in (None, row["message"]) and at(row)
        )
        return max(found, default=0.0)

    def of_sms(mechanism: str, message: int, sms: int) -> float:
        return best("link", mechanism, message, lambda row: row["sms"] == sms and row["total"] >= BULK) / sms

    slowest = [row["us"][0] for row in puts if (row["over"], row["total"]) == ("link", 32 * KB) and not row["sms"]]
    found = {
        "memory_gb_per_s": (
            2 * best("memory", "tma", TILE, lambda row: row["total"] >= GB),
            "reads and writes, by TMA",
        ),
        "link_gb_per_s": (best("link", "tma", TILE), "the best put of 16 KB tiles"),
        "sm_gb_per_s": (of_sms("tma", TILE, 4), "a quarter of what four SMs put by 16 KB tiles"),
        "register_gb_per_s": (best("link", "register", ACCESS), "the best put of 16-byte accesses"),
        "register_sm_gb_per_s": (of_sms("register", ACCESS, 16), "a sixteenth of what 16 SMs put"),
        "copy_gb_per_s": (best("link", "copy_engine", None), "the best put of the copy engine"),
        "copy_start_us": (slowest[0] if slowest else 0.0, "what the copy engine takes for 32 KB"),
    }
    return {name: (round(value, 4), how) for name, (value, how) in found.items() if value}


def others_of(found: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Latencies, launches and rates of compute, and how they were measured."""
    numbers: dict[str, tuple[float, str]] = {}
    hows = {
        "sync_us": "signal and wait between GPUs",
        "flag_gpu_us": "signal and wait between two SMs",
        "flag_cta_us": "an mbarrier between two partitions",
        "launch_us": "kernels behind each other in a graph",
    }
    for name, how in hows.items():
        if found.get(name):
            numbers[name] = round(found[name][0], 4), how
    if squares := found.get("matmul_tflops"):
        numbers["matmul_tflops"] = _middle(rates["tileweave"] for rates in squares.values()), "our matmul of squares"
    if attention := found.get("attention_tflops"):
        numbers["attention_tflops"] = round(attention["core"], 1), "our forward attention, head dimension 128"
    return numbers


def _middle(values: Iterable[float]) -> float:
    """The lower median."""
    ordered = sorted(values)
    return round(ordered[(len(ordered) - 1) // 2], 1)
