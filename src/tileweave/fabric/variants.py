"""Compiled kernels, found and loaded apart; copies beside them.

Loading may wait for the device, hence for a kernel that waits for a peer, so it has its moment; compiling has not.
Triton's own launch would do both, and analyse every argument each time, which costs more than the launch: a warm call
finds its kernel in its `Variant` instead.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from tileweave.fabric.base import Copies, Variant
from tileweave.lang.launches import launched_ahead

_compiling = threading.Lock()  # ranks of one process want the same variants: compile each once
_loading = threading.Lock()


def variant_of(kernel: Any, grid: int, args: Sequence[Any], num_warps: int, variant: Variant | None) -> Any:
    """The compiled kernel for these arguments on the current device, not necessarily loaded."""
    if variant is not None and variant.compiled is not None:
        return variant.compiled
    with _compiling:
        compiled = kernel.warmup(*args, grid=(grid,), num_warps=num_warps, launch_pdl=launched_ahead(kernel))
    if variant is not None:
        variant.compiled = compiled
    return compiled


def load(compiled: Any, capturing: bool) -> None:
    """Put a compiled kernel on the current device, if it is not there. May wait for everything that runs there.

    RuntimeError where that would be needed while a CUDA graph is `capturing` the launch.
    """
    with _loading:  # another rank of this process may be half through it
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


def copy_beside(stream: torch.cuda.Stream, copies: Copies) -> None:
    """Enqueue copies on `stream`, one behind the other, after what the current stream has been given so far."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
