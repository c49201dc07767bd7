"""Inline PTX that has no result."""

from triton.experimental.gluon import language as _gl
from triton.experimental.gluon.language._core import builtin as _builtin


@_builtin
def asm(text, args=(), constraints="", _semantic=None):
    """PTX for its effect: one throw-away integer result keeps the operation alive."""
    tail = "," + constraints if constraints else ""
    _gl.inline_asm_elementwise(
        text + " mov.u32 $0, 0;", "=r" + tail, list(args), dtype=_gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )
