"""What a kernel's source says of how it is launched."""

import inspect
from functools import cache
from typing import Any


def launched_ahead(kernel: Any) -> bool:
    """Whether a kernel (of `jit`) is launched while its predecessor on the stream ends: it says `grid_dependency_wait`,
    in its own text and not in that of a function that it calls."""
    return _says_so(kernel.fn)


@cache
def _says_so(fn: Any) -> bool:
    return "grid_dependency_wait(" in inspect.getsource(fn)
