"""The words that kernels may use: Gluon's under one name for every Triton, and the communication primitives.

    from tileweave import lang as gl

With Triton the names are Gluon's own and compile for the GPU; without it they are declarations, which the emulator
runs all the same. `tileweave.emulator.words` implements the same list, and a test holds the two equal.
"""

from importlib.util import find_spec

if find_spec("triton"):
    from tileweave.lang import _gluon as _backend
else:
    from tileweave.lang import _portable as _backend

from tileweave.lang._names import HOST, WORDS

globals().update({name: getattr(_backend, name) for name in WORDS + HOST})
HAS_TRITON = _backend.__name__.endswith("_gluon")
__all__ = [*WORDS, *HOST, "HAS_TRITON"]
