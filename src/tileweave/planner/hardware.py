"""Hardware profiles: what the cost model reads of a GPU and of what joins it to others, each figure with its source.

A profile is a JSON file, one of `profiles/` or one that `tileweave probe` wrote:

    {"format": "tileweave hardware profile", "version": 1, "name": "h200", "gpu": "NVIDIA H200", "capability": "9.0",
     "numbers": {"sms": {"value": 132, "kind": "published", "source": "..."}, ...},
     "curves": [{"mechanism": "tma", "direction": "put", "ways": 1, "over": "link", "kind": "measured", "source": "...",
                 "points": [{"total_bytes": 1073741824, "message_bytes": 16384, "sms": 8, "gb_per_s": 358.0}, ...]}]}

The numbers are the fields of `Hardware`. GB/s is 10^9 bytes a second, one direction.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

FORMAT, VERSION = "tileweave hardware profile", 1
KINDS = ("published", "measured", "derived")  # derived: computed or estimated from figures of the other kinds
MECHANISMS = ("tma", "register", "copy_engine", "multimem", "nccl", "naive")
DIRECTIONS = ("put", "get", "all_gather", "reduce_scatter", "all_reduce")  # the last three: of nccl
OVER = ("link", "memory")  # to or from a peer, or within the GPU's own memory
SHIPPED = ("h100", "h200", "b200", "gb200-nvl72")  # 8, 8, 8 and 72 GPUs joined by NVLink


@dataclass(frozen=True)
class Number:
    """A figure: its value, whether it is published, measured or derived, and where it is from."""

    value: float
    kind: str
    source: str


@dataclass(frozen=True)
class Point:
    """A bandwidth: of `total_bytes` in messages of `message_bytes`, moved by `sms` SMs (0: by none).

    What NCCL moves is `total_bytes` that a rank sends, in one message.
    """

    total_bytes: int
    message_bytes: int
    sms: int
    gb_per_s: float


@dataclass(frozen=True)
class Curve:
    """Bandwidths of one mechanism in one direction. ways: 1, or 2 where data goes both ways at once; over: "link" or
    "memory"; `naive`: volatile stores, a peer address looked up per access, a synchronization per message."""

    mechanism: str
    direction: str
    ways: int
    over: str
    kind: str
    source: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Hardware:
    """Sizes and rates of one GPU, its links, and how many GPUs they join. GB/s are of one direction.

    sms; memory_bytes; l2_bytes; shared_bytes: of a CTA; memory_gb_per_s: of device memory; links: of a GPU to NVLink;
    link_nominal_gb_per_s: of all of them; ranks: GPUs that they join; network_gb_per_s: to any other GPU; multicast: 1
    if the fabric reduces and broadcasts; link_gb_per_s: what TMA tiles fill of the link, and sm_gb_per_s what one SM
    does; register_gb_per_s, register_sm_gb_per_s: the same by 16-byte accesses; copy_gb_per_s: of the copy engine after
    copy_start_us; launch_us: of a kernel; sync_us: a flag from one GPU to another, with the wait; flag_gpu_us: from SM
    to SM; flag_cta_us: an mbarrier; matmul_tflops: of a large bf16 product, and matmul_peak_tflops by data sheet;
    attention_tflops: of forward attention with heads of 128.
    """

    name: str
    gpu: str
    capability: str
    sms: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    links: int
    ranks: int
    multicast: int
    memory_gb_per_s: float
    link_nominal_gb_per_s: float
    link_gb_per_s: float
    sm_gb_per_s: float
    register_gb_per_s: float
    register_sm_gb_per_s: float
    copy_gb_per_s: float
    network_gb_per_s: float
    copy_start_us: float
    launch_us: float
    sync_us: float
    flag_gpu_us: float
    flag_cta_us: float
    matmul_tflops: float
    matmul_peak_tflops: float
    attention_tflops: float
    curves: tuple[Curve, ...] = ()
    sources: Mapping[str, Number] = field(default_factory=dict, compare=False, repr=False)

    @property
    def of_capability(self) -> tuple[int, int]:
        """The compute capability."""
        major, minor = self.capability.split(".")
        return int(major), int(minor)

    def curve(self, mechanism: str, direction: str, ways: int = 1, over: str = "link") -> Curve | None:
        """The first such curve; None if there is none."""
        same = (mechanism, direction, ways, over)
        return next((c for c in self.curves if (c.mechanism, c.direction, c.ways, c.over) == same), None)

    def transfer_us(self, mechanism: str, direction: str, total_bytes: float) -> float | None:
        """Microseconds of a transfer of so many bytes by what is told by total size alone, the copy engine or NCCL: its
        bandwidth between points by the logarithm of the size, below the first one the time of the first. None without
        such a curve."""
        found = self.curve(mechanism, direction)
        if found is None:
            return None
        points = sorted(found.points, key=lambda each: each.total_bytes)
        size = max(total_bytes, points[0].total_bytes)
        above = next((i for i, each in enumerate(points) if each.total_bytes >= size), len(points) - 1)
        low, high = points[max(above - 1, 0)], points[above]
        if low is high or size >= high.total_bytes:
            return size / (high.gb_per_s * 1e3)
        part = math.log(size / low.total_bytes) / math.log(high.total_bytes / low.total_bytes)
        return size / (low.gb_per_s * (high.gb_per_s / low.gb_per_s) ** part * 1e3)

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain values, as it stands in a file."""
        return {
            "format": FORMAT, "version": VERSION, "name": self.name, "gpu": self.gpu, "capability": self.capability,
            "numbers": {name: vars(number) for name, number in self.sources.items()},
            "curves": [{**vars(c), "points": [vars(point) for point in c.points]} for c in self.curves],
        }  # fmt: skip


TEXTS = ("name", "gpu", "capability")
NUMBERS: dict[str, Any] = {f.name: f.type for f in fields(Hardware) if f.name not in (*TEXTS, "curves", "sources")}


def from_dict(values: Any, where: str) -> Hardware:
    """The profile of plain values, as `to_dict` gives them; ValueError that names `where` and the field otherwise."""
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{where}: expected a JSON object with format {FORMAT!r}, as `tileweave probe` writes it")
    if values.get("version") != VERSION:
        raise ValueError(f"{where}: version is {values.get('version')!r}, this release reads {VERSION}; probe anew")
    try:
        numbers = {name: Number(**number) for name, number in values["numbers"].items()}
        curves = tuple(
            Curve(**{**each, "points": tuple(Point(**point) for point in each["points"])}) for each in values["curves"]
        )
        texts = {name: values[name] for name in TEXTS}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not of the form of a profile: {type(error).__name__}: {error}") from error
    _check_numbers(numbers, where)
    for each in curves:
        _check_curve(each, where)
    if wrong := [name for name, text in texts.items() if not isinstance(text, str) or not text]:
        raise ValueError(f"{where}: {wrong[0]} must be a string, got {texts[wrong[0]]!r}")
    if not re.fullmatch(r"\d+\.\d", texts["capability"]):
        raise ValueError(f"{where}: capability must be of the form MAJOR.MINOR, got {texts['capability']!r}")
    of = {name: NUMBERS[name](number.value) for name, number in numbers.items()}
    return Hardware(**texts, **of, curves=curves, sources=numbers)


def _check_numbers(numbers: dict[str, Number], where: str) -> None:
    if missing := NUMBERS.keys() - numbers.keys():
        raise ValueError(f"{where}: numbers lack {', '.join(sorted(missing))}")
    if unknown := numbers.keys() - NUMBERS.keys():
        raise ValueError(f"{where}: numbers have {', '.join(sorted(unknown))}, which version {VERSION} has not")
    for name, number in numbers.items():
        _check_value(f"{where}: numbers.{name}.value", number.value, least=0)
        if number.value == 0 and name != "multicast":
            raise ValueError(f"{where}: numbers.{name}.value must be above 0, got 0")
        if NUMBERS[name] is int and number.value != int(number.value):
            raise ValueError(f"{where}: numbers.{name}.value must be whole, got {number.value}")
        _check_origin(f"{where}: numbers.{name}", number)


def _check_curve(curve: Curve, where: str) -> None:
    place = f"{where}: curve of {curve.mechanism!r}, {curve.direction!r}"
    legal = (("mechanism", MECHANISMS), ("direction", DIRECTIONS), ("ways", (1, 2)), ("over", OVER))
    for name, values in legal:
        if getattr(curve, name) not in values:
            raise ValueError(f"{place}: {name} must be one of {', '.join(map(repr, values))}")
    _check_origin(place, curve)
    if not curve.points:
        raise ValueError(f"{place}: expected a point at least")
    for point in curve.points:
        for name, least in (("total_bytes", 1), ("message_bytes", 1), ("sms", 0), ("gb_per_s", 0)):
            _check_value(f"{place}: {name}", getattr(point, name), least)


def _check_value(place: str, value: Any, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError(f"{place} must be a finite number of at least {least}, got {value!r}")


def _check_origin(place: str, told: Number | Curve) -> None:
    if told.kind not in KINDS:
        raise ValueError(f"{place}: kind must be one of {', '.join(map(repr, KINDS))}, got {told.kind!r}")
    if not isinstance(told.source, str) or not told.source:
        raise ValueError(f"{place}: source must say where the figure is from, got {told.source!r}")


@lru_cache(maxsize=64)
def profile(name: str) -> Hardware:
    """The profile that ships under `name`, one of SHIPPED, or of the JSON file of that name. ValueError otherwise."""
    if name in SHIPPED:
        return read(str(files("tileweave.planner") / f"profiles/{name}.json"))
    if not name.endswith(".json"):
        raise ValueError(f"gpu must be one of {', '.join(SHIPPED)} or a profile's file NAME.json, got {name!r}")
    return read(name)


def read(path: str) -> Hardware:
    """The profile of a file; ValueError if it cannot be read or is none."""
    try:
        return from_dict(json.loads(Path(path).read_text(encoding="utf-8")), path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from error


H200 = profile("h200")
