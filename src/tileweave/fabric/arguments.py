"""Arguments of `virtual_world` held to their rules: each error names the argument, the rule and the value."""

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch

from tileweave.fabric.capability import cuda_refusal

MOST_RANKS = 1024  # a thread each
LONGEST_TIMEOUT = 2000  # seconds: kernels count microseconds in 32 bits


def whole_number(name: str, value: Any, least: int, meaning: str, most: int | None = None) -> int:
    """`value` as an int of at least `least`. TypeError if it is no whole number, ValueError if it is less, or more than
    `most`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # some tensors are whole numbers, most are none
        number = None
    if number is None:
        raise TypeError(f"{name}: expected {meaning}, as an int, got {value!r}")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}: expected {meaning}, got {number}")
    return number


def seconds(name: str, value: Any) -> float:
    """`value` as a timeout. TypeError if it is no number, ValueError if kernels cannot wait for so long."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number of seconds, got {value!r}")
    if not 0 < value <= LONGEST_TIMEOUT:  # neither nan nor inf is
        raise ValueError(f"{name}: expected a positive number of seconds, up to {LONGEST_TIMEOUT}, got {value}")
    return float(value)


def ranks(name: str, value: Any, size: int) -> tuple[int, ...]:
    """`value` as ranks of a world of `size`. TypeError unless it is a sequence of ints, ValueError for other ranks."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected a sequence of ranks, such as (0,), got {value!r}")
    chosen = tuple(whole_number(name, rank, 0, f"ranks from 0 to {size - 1}") for rank in value)
    unknown = sorted({rank for rank in chosen if rank >= size})
    if unknown:
        raise ValueError(f"{name}: expected ranks from 0 to {size - 1}, got {unknown}")
    return chosen


def check_function(fn: Any) -> None:
    """TypeError unless `fn`, what a world runs, can be called with a rank and its group."""
    if not callable(fn):
        raise TypeError(f"fn: expected a function of a rank and its group, got {fn!r}")
    try:
        takes = inspect.signature(fn)
    except ValueError:  # some builtins have none
        return
    try:
        takes.bind(0, None)
    except TypeError as error:
        raise TypeError(
            f"fn: expected a function of a rank and its group, got one that takes {takes}: {error}"
        ) from None


def place(name: str, value: Any) -> torch.device:
    """The device of a world: "auto" is CUDA where virtual ranks can run and the CPU elsewhere.

    TypeError unless `value` is a str or a torch.device; ValueError for a device that is neither, or is not there.
    """
    if not isinstance(value, str | torch.device):
        raise TypeError(f"{name}: expected 'auto', 'cpu' or 'cuda', got {value!r}")
    if value == "auto":
        return torch.device("cpu" if cuda_refusal("cuda") else "cuda")
    try:
        device = torch.device(value)
    except RuntimeError:  # what torch says of it lists devices that are no choice here
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected auto, cpu or cuda, got {str(value)!r}")
    if device.type == "cuda" and device.index is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if device.index >= count:
            raise ValueError(f"{name}: expected cuda:0 to cuda:{count - 1}, which PyTorch sees, got {str(value)!r}")
    return device
