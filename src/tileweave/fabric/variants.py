"""Compiled kernels by what Triton specializes them on.

Triton's own launch analyses every argument each time, which costs more than the launch. Here a warm call makes a small
key instead and finds the compiled kernel under it. Compiling and loading are separate, because loading may wait for the
device, hence for a kernel that waits for a peer.
"""

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tileweave import lang

CONSTEXPR, PLAIN, SPECIALIZED = range(3)


class Variants:
    """The compiled variants of kernels on one device. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kinds: dict[Any, list[int]] = {}
        self._compiled: dict[tuple, Any] = {}
        self._compiling = threading.Lock()

    def get(self, kernel: Any, grid: int, args: Sequence[Any], num_warps: int) -> Any:
        """The compiled kernel for these arguments, not necessarily loaded. The kernel's device is the current one."""
        kinds = self._kinds.get(kernel)
        if kinds is None:
            kinds = self._kinds[kernel] = _kinds(kernel)
        key = (kernel, num_warps, *map(_trait, kinds, args))
        found = self._compiled.get(key)
        if found is None:
            with self._compiling:  # ranks want the same variants: compile each once
                found = self._compiled.get(key)
                if found is None:
                    found = kernel.warmup(*args, grid=(grid,), num_warps=num_warps)
                    self._compiled[key] = found
        return found


def load(compiled: Any, capturing: bool) -> None:
    """Put a compiled kernel on the current device, if it is not there. May wait for everything that runs there.

    RuntimeError where that would be needed while a CUDA graph is `capturing` the launch.
    """
    if compiled.module is not None:
        return
    if capturing:
        raise RuntimeError(
            f"{compiled.name}: a kernel cannot be loaded while a CUDA graph is captured: "
            "call the op once with these shapes before the capture (warm up)"
        )
    compiled._init_handles()


def enqueue(compiled: Any, grid: int, args: Sequence[Any], stream: int) -> None:
    """Launch a loaded kernel on the stream with this handle."""
    compiled[(grid, 1, 1)](*args, stream=stream)


def _kinds(kernel: Any) -> list[int]:
    """How Triton treats each parameter of a kernel."""
    kinds = []
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        if "constexpr" in str(parameter.annotation):
            kinds.append(CONSTEXPR)
        else:
            kinds.append(PLAIN if name in kernel.do_not_specialize else SPECIALIZED)
    return kinds


def _trait(kind: int, value: Any) -> Any:
    """What of an argument decides the variant."""
    if kind == CONSTEXPR:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, lang.TensorDescriptor):
        layout = value.layout
        return value.base.dtype, *value.block_shape, layout.swizzle_byte_width, layout.transposed
    wide = not -(2**31) <= value < 2**31
    return wide if kind == PLAIN else (wide, value == 1, value % 16 == 0)
