"""What was measured: plans by the problem that they are for, and the cache of such measurements, a file for each.

A file lies in the folder that TILEWEAVE_CACHE names, `~/.cache/tileweave` (or XDG_CACHE_HOME's) otherwise; its name is
the hash of its key: op, problem, hardware, versions, code. It is replaced at once or not at all. What is read is
believed only if it is whole, small, and has the key that was asked for.
"""

import hashlib
import json
import math
import os
import stat
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tileweave.planner.plan import AGREED, Plan

FORMAT, VERSION = "tileweave tuned plans", 1
LARGEST = 1 << 16  # bytes of a file that is read
CODE = ("fabric", "lang", "ops", "planner", "tiles")  # parts of the package
KINDS = ("*.py", "*.json")  # of their files: the planner's constants are JSON
Times = list[tuple[Plan, float]]


@dataclass(frozen=True)
class Tuned:
    """The plan that was fastest for an op's problem, and the microseconds that a call with it took."""

    op: str
    problem: Any
    plan: Plan
    measured_us: float


@lru_cache(maxsize=1)
def code_hash(package: Path = Path(__file__).parents[1]) -> str:
    """Of all that decides what a call runs and how fast: device code, its launches, the fabric, the planner."""
    found = hashlib.sha256()
    for path in sorted(each for part in CODE for kind in KINDS for each in (package / part).rglob(kind)):
        text = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return found.hexdigest()[:16]


def folder() -> Path:
    """Where the cache is; OSError if it can be nowhere."""
    if named := os.environ.get("TILEWEAVE_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tileweave"
    except RuntimeError as error:  # of a user without a home: no reason to keep the other ranks waiting
        raise OSError("there is no home folder") from error


def path_of(key: dict[str, Any]) -> Path:
    """The file of a key, whether it is there or not."""
    return folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def write(key: dict[str, Any], times: Times) -> None:
    """Keep the microseconds of each plan; a UserWarning where that is not possible."""
    plans = [{"plan": {name: getattr(plan, name) for name in AGREED}, "us": us} for plan, us in times]
    text = json.dumps({"format": FORMAT, "version": VERSION, "key": key, "times": plans}, indent=1)
    why, path = "it is measured anew next time", None
    try:
        path = path_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as error:
        warnings.warn(f"TILEWEAVE_CACHE: {path or 'a file'} cannot be written: {error}; {why}", stacklevel=2)


def read(key: dict[str, Any], plans: list[Plan]) -> Times | None:
    """What was measured of these plans, the fastest first; None where nothing was. A file that is not what `write`
    wrote for them is not used, of which a UserWarning tells."""
    path = None
    try:
        path = path_of(key)
        return _parsed(_text(path), key, plans)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"TILEWEAVE_CACHE: {path or 'a file'} is not used, it is measured anew: {why}", stacklevel=2)
        return None


def _text(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe nobody writes to, say
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise ValueError(f"expected a file of at most {LARGEST} bytes")
        return file.read(LARGEST).decode()


def _parsed(text: str, key: dict[str, Any], plans: list[Plan]) -> Times:
    values = json.loads(text)
    for name, expected in (("format", FORMAT), ("version", VERSION), ("key", json.loads(json.dumps(key)))):
        if values[name] != expected:
            raise ValueError(f"{name} is another one")
    known = {tuple(getattr(plan, name) for name in AGREED): plan for plan in plans}
    times = []
    for each in values["times"]:
        told = {**each["plan"], "tile": tuple(each["plan"]["tile"])}
        plan, us = known.pop(tuple(told[name] for name in AGREED)), each["us"]
        if type(us) not in (int, float) or not math.isfinite(us) or us <= 0:
            raise ValueError(f"us must be a finite number above 0, got {us!r}")
        times.append((plan, float(us)))
    if known:
        raise ValueError(f"{len(known)} of {len(plans)} plans are missing")
    return sorted(times, key=lambda each: each[1])
