"""Places in kernels: who was where, cheap to note and formatted only for a report."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from functools import lru_cache
from types import CodeType, FrameType

KERNEL_FILES: set[str] = set()  # files of which functions have been rebuilt; their frames are places in a kernel


class Place:
    """An agent at one of its events, what it does there, and the instruction (and that of the function's caller)."""

    __slots__ = ("caller", "code", "event", "instruction", "name", "part", "what")

    def __init__(self, part, what: str, code: CodeType | None = None, instruction: int = 0):
        self.part, self.what, self.code, self.instruction = part, what, code, instruction
        self.name, self.event = part.name, part.count
        self.caller: tuple[CodeType, int] | None = None
        if code is None:
            self._find()

    def _find(self) -> None:
        frame = kernel_frame(sys._getframe(2))
        if frame is not None:
            self.code, self.instruction = frame.f_code, frame.f_lasti
            outer = frame.f_back
            if outer is not None and outer.f_code.co_filename in KERNEL_FILES:
                self.caller = outer.f_code, outer.f_lasti

    @property
    def line(self) -> int:
        """The line number in the kernel's file (0: none)."""
        return line_of(self.code, self.instruction) if self.code else 0

    @property
    def source(self) -> str:
        """The text of the line."""
        if not self.code:
            return ""
        linecache.checkcache(self.code.co_filename)
        return linecache.getline(self.code.co_filename, self.line).strip()

    def __str__(self):
        cta = self.part.cta
        text = f"{self.what} by {cta.title}" + ("" if cta.id is None else f" partition {self.name}")
        if self.code:
            text += f", {describe(self.code, self.instruction)}: {self.source}"
        if self.caller:
            text += f" (called at {describe(*self.caller)})"
        return text


def kernel_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is a kernel's, from `frame` outwards; None if none is."""
    files = KERNEL_FILES
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    return frame


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(os.path.join(path, "") for path in (_PACKAGE, *_INSTALLED))


def written_by_user(frame: FrameType | None, outermost: CodeType | None = None) -> str:
    """The innermost line of the user's own program, from `frame` outwards, up to a call by `outermost`; empty if there
    is none: all of it is this package's, Python's or an installed library's."""
    while frame is not None and frame.f_code is not outermost:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_LIBRARIES)):
            place = f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
            return f"{place}: {linecache.getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""


@lru_cache(4096)
def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction."""
    for i, (line, *_) in enumerate(code.co_positions()):
        if i == instruction // 2:
            return line or code.co_firstlineno
    return code.co_firstlineno


def describe(code: CodeType, instruction: int) -> str:
    """File, line and function of an instruction."""
    return f"{os.path.basename(code.co_filename)}:{line_of(code, instruction)} in {code.co_name}"
