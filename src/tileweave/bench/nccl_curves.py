"""From measurements of NCCL to the profiles that ship: `python -m tileweave.bench.nccl_curves`.

Rewrites the curves of mechanism "nccl" in planner/profiles. Those of an H200 are the points of docs/figures as they
are: all-gather and reduce-scatter of collectives_2xH200.json, in CUDA graphs as the plain way is measured; all-reduce
of probe_2xH200.json, as the other file's all-reduce copies x first. Those of the others follow from it, see `scaled`.
"""

import json
from pathlib import Path
from typing import Any

from tileweave.bench.collectives import taken
from tileweave.planner import hardware

FIGURES = Path(__file__).parents[3] / "docs/figures"
PROFILES = Path(hardware.__file__).parent / "profiles"
ALONE, PROBED = "collectives_2xH200", "probe_2xH200"
KINDS = hardware.DIRECTIONS[2:]
SIZE_OF = 2  # bytes of an element: all was measured in bf16


def alone(kind: str) -> list[dict[str, Any]]:
    """Points of NCCL's all_gather or reduce_scatter along the first dimension, of the collectives' own figures."""
    rows = [row for row in _figures(ALONE)["rows"] if (row["op"], row.get("dim")) == (kind, 0)]
    sent = [taken(kind, SIZE_OF * row["shape"][0] * row["shape"][1], row["world"]) for row in rows]
    return [_point(int(each), row["us"]["nccl"][0]) for each, row in zip(sent, rows, strict=True)]


def probed(kind: str) -> list[dict[str, Any]]:
    """Points that `tileweave probe` measured."""
    found = (each for each in _figures(PROBED)["curves"] if (each["mechanism"], each["direction"]) == ("nccl", kind))
    return [dict(point, sms=0) for point in next(found)["points"]]


def curves() -> list[dict[str, Any]]:
    """The curves of an H200."""
    told = "NCCL alone, two H200s, without multicast"
    made = [(kind, probed(kind) if kind == "all_reduce" else alone(kind)) for kind in KINDS]
    files = {"all_reduce": PROBED}
    return [
        _curve(kind, "measured", f"docs/figures/{files.get(kind, ALONE)}.json: {told}", points) for kind, points in made
    ]


def scaled(curve: dict[str, Any], faster: float, why: str) -> dict[str, Any]:
    """The curve of a GPU whose links carry `faster` times as much: so much less time beyond what the smallest transfer
    takes, of which latency is most."""
    points = curve["points"]
    least = points[0]["total_bytes"] / points[0]["gb_per_s"] / 1e3
    times = [least + (each["total_bytes"] / each["gb_per_s"] / 1e3 - least) / faster for each in points]
    scaled_points = [_point(each["total_bytes"], us) for each, us in zip(points, times, strict=True)]
    return _curve(curve["direction"], "derived", f"{why}: {curve['source']}", scaled_points)


def filled(profile: dict[str, Any]) -> dict[str, Any]:
    """A profile's plain values with these curves."""
    here, there = (hardware.profile(name).link_nominal_gb_per_s for name in ("h200", profile["name"]))
    why = "H100 and H200 have the same SMs and links"
    if here != there:
        why = f"as two H200s, what it takes beyond its smallest transfer by the {there / here:g}-fold link"
    made = curves() if profile["name"] == "h200" else [scaled(each, there / here, why) for each in curves()]
    return {**profile, "curves": [each for each in profile["curves"] if each["mechanism"] != "nccl"] + made}


def _figures(name: str) -> dict[str, Any]:
    return json.loads((FIGURES / f"{name}.json").read_text())


def _point(total: int, us: float) -> dict[str, Any]:
    return {"total_bytes": total, "message_bytes": total, "sms": 0, "gb_per_s": round(total / us / 1e3, 4)}


def _curve(kind: str, origin: str, source: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "mechanism": "nccl", "direction": kind, "ways": 1, "over": "link", "kind": origin, "source": source,
        "points": points,
    }  # fmt: skip


if __name__ == "__main__":
    for name in hardware.SHIPPED:
        path = PROFILES / f"{name}.json"
        path.write_text(json.dumps(filled(json.loads(path.read_text())), indent=1) + "\n")
