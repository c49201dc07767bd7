"""Compiled kernels by what Triton specializes them on.

Triton's own launch analyses every argument each time, which costs more than the launch. Here a warm call makes a small
key instead and finds the compiled kernel under it. Compiling and loading are separate, because loading may wait for the
device, hence for a kernel that waits for a peer.
"""

import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from tileweave import lang
from tileweave.fabric.base import Variant


class Variants:
    """The compiled variants of kernels on one device. Safe to use from several threads."""

    def __init__(self) -> None:
        self._traits: dict[Any, list[Callable[[Any], Hashable]]] = {}
        self._compiled: dict[tuple, Any] = {}
        self._compiling = threading.Lock()

    def get(self, kernel: Any, grid: int, args: Sequence[Any], num_warps: int, variant: Variant | None) -> Any:
        """The compiled kernel for these arguments, not necessarily loaded. The kernel's device is the current one."""
        if variant is not None and variant.compiled is not None:
            return variant.compiled
        traits = self._traits.get(kernel)
        if traits is None:
            traits = self._traits[kernel] = _traits(kernel)
        runtime = len(traits)
        key = (kernel, num_warps, *args[runtime:], *[trait(value) for trait, value in zip(traits, args, strict=False)])
        found = self._compiled.get(key)
        if found is None:
            with self._compiling:  # ranks want the same variants: compile each once
                found = self._compiled.get(key)
                if found is None:
                    found = kernel.warmup(*args, grid=(grid,), num_warps=num_warps)
                    self._compiled[key] = found
        if variant is not None:
            variant.compiled = found
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


def _traits(kernel: Any) -> list[Callable[[Any], Hashable]]:
    """For each parameter before the compile-time ones, which come last, what of its argument decides the variant."""
    traits: list[Callable[[Any], Hashable]] = []
    parameters = list(inspect.signature(kernel.fn).parameters.items())
    constexprs = ["constexpr" in str(parameter.annotation) for _, parameter in parameters]
    if constexprs != sorted(constexprs):
        raise TypeError(f"{kernel.__name__}: compile-time parameters must come last")
    for name, _ in parameters[: len(parameters) - sum(constexprs)]:
        traits.append(_plain if name in kernel.do_not_specialize else _specialized)
    return traits


def _plain(value: Any) -> Hashable:
    """Of what Triton does not specialize: the width of an integer."""
    return -(2**31) <= value < 2**31 if type(value) is int else _specialized(value)


def _specialized(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, lang.TensorDescriptor):
        layout = value.layout
        return value.base.dtype, *value.block_shape, layout.swizzle_byte_width, layout.transposed
    return -(2**31) <= value < 2**31, value == 1, value % 16 == 0
