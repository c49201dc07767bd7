"""Timestamps in a compiled kernel: its PTX again, with a stamp before and after everything that waits.

The kernel's source knows nothing of it, so a build without stamps is what it would be otherwise. A stamp is one 64-bit
word, `%globaltimer` (ns) above 16 bits that say which stamp it is; lane 0 of every warp stores its own, one behind the
other. PTX tells the places in the source that an instruction comes from, through all inlined calls: hence the roles.
"""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

SLOTS = 8192  # words of a warp, a power of two; what does not fit any more is written to the last one
ID_BITS = 16
END, START = 0, 1 << 15  # ids of a warp's last stamp, and of its first, plus the number of its SM
MAIN = "main"
LIBRARY = Path(__file__).parents[1]

FLAG, MBARRIER, WGMMA = "wait for a flag", "wait for an mbarrier", "wait for wgmma"
_KINDS = {
    r"ld\.acquire\.sys": FLAG,
    r"mbarrier\.try_wait": MBARRIER,
    r"cp\.async\.bulk\.wait_group": "wait for TMA stores",
    r"wgmma\.wait_group": WGMMA,
    r"griddepcontrol\.wait": "wait for the kernel before",
}
_WAIT = re.compile("|".join(f"({pattern})" for pattern in _KINDS))
_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) (\d+)(?:, \S+ \S+, inlined_at (\d+) (\d+) (\d+))?(?:.*//(.*))?")


@dataclass(frozen=True)
class Site:
    """A wait in the code. role: the function that its warps run, MAIN where a kernel has no roles, or says it itself;
    place: functions and lines, the wait's own first."""

    kind: str
    role: str
    place: str


def warps_of(ptx: str) -> int:
    """Warps of a CTA. ValueError for PTX that is not of one kernel."""
    found = re.findall(r"\.reqntid (\d+)", ptx)
    if len(found) != 1:
        raise ValueError(f"ptx: expected that of one kernel, which says .reqntid once, found it {len(found)} times")
    return int(found[0]) // 32


def stamped(ptx: str, address: int) -> tuple[str, list[Site]]:
    """A kernel's PTX with stamps, and what waits: wait i has ids 2 * i + 2 and 2 * i + 3.

    `address` is that of int64 [CTAs, warps, SLOTS] in the GPU's memory, zero at first. ValueError for PTX that is not
    of one kernel.
    """
    warps, places = warps_of(ptx), _Places(ptx)
    sites: list[Site] = []
    has_roles = False
    lines: list[str] = []
    for block in _blocks(ptx):
        places.follow(block[0])
        wait = _WAIT.search("\n".join(block))
        if wait and wait.lastindex:
            kind = list(_KINDS.values())[wait.lastindex - 1]
            functions = [_function(*call) for call in places.calls()]
            has_roles |= any(function.starts_roles for function in functions)
            sites.append(Site(kind, _role(functions), " < ".join(f"{each.name}:{each.row}" for each in functions)))
            # All lanes poll a flag each: the wait ends with the last one's.
            meet = "\tbar.warp.sync -1;" if kind == FLAG else ""
            lines += [_stamp(2 * len(sites), address), *block, meet, _stamp(2 * len(sites) + 1, address)]
        elif re.match(r"\s*ret;", block[0]):
            lines += [_stamp(END, address), *block]
        else:
            lines += block
            if block[0].startswith("// %bb.0:"):
                lines += [_first(warps), _stamp(START, address, "%smid")]
    if not has_roles:
        sites = [replace(site, role=MAIN) for site in sites]
    return "\n".join(lines) + "\n", sites


def _blocks(ptx: str) -> Iterator[list[str]]:
    """The lines of PTX one by one, but inline assembly as a whole."""
    block: list[str] = []
    for line in ptx.splitlines():
        block.append(line)
        if "// begin inline asm" not in block[0] or "// end inline asm" in line:
            yield block
            block = []


def _first(warps: int) -> str:
    """Where a thread's next stamp goes, in words: negative for those that store none."""
    return f"""
	.reg .b32 stamp_at;
	{{
	.reg .pred p; .reg .b32 tid, warp;
	mov.u32 tid, %tid.x;
	shr.u32 warp, tid, 5;
	mov.u32 stamp_at, %ctaid.x;
	mad.lo.u32 stamp_at, stamp_at, {warps}, warp;
	mul.lo.u32 stamp_at, stamp_at, {SLOTS};
	and.b32 tid, tid, 31;
	setp.ne.u32 p, tid, 0;
	@p mov.u32 stamp_at, -1;
	}}"""


def _stamp(number: int, address: int, plus: str = "0") -> str:
    return f"""
	{{
	.reg .pred p; .reg .b32 id, slot; .reg .b64 time, at;
	mov.u64 time, %globaltimer;
	mov.u32 id, {plus};
	or.b32 id, id, {number};
	cvt.u64.u32 at, id;
	shl.b64 time, time, {ID_BITS};
	or.b64 time, time, at;
	mul.wide.s32 at, stamp_at, 8;
	add.s64 at, at, {address};
	setp.ge.s32 p, stamp_at, 0;
	@p st.global.u64 [at], time;
	and.b32 slot, stamp_at, {SLOTS - 1};
	setp.lt.and.u32 p, slot, {SLOTS - 1}, p;
	@p add.s32 stamp_at, stamp_at, 1;
	}}"""


class _Places:
    """What PTX says, line by line, of the source: a place, and the calls through which it has been inlined there."""

    def __init__(self, ptx: str):
        files = re.findall(r'^\s*\.file\s+(\d+) "(.*)"', ptx, re.MULTILINE)
        self._files = {number: _here(Path(path)) for number, path in files}
        self._names = {path.name: path for path in self._files.values()}
        self._callers: dict[tuple, tuple] = {}
        self._at: tuple = ()
        self._told = ""

    def follow(self, line: str) -> None:
        """Go on with a line of PTX."""
        if match := _LOC.match(line):
            file, row, column, *caller, told = match.groups()
            self._at, self._told = (file, row, column), told or ""
            self._callers[self._at] = tuple(caller) if caller[0] else ()

    def calls(self) -> list[tuple[Path, int]]:
        """The line that instructions come from now, and those of the calls around it."""
        if "@[" in self._told:  # an older Triton: channel.py:78:40 @[ matmul.py:321:20 @[ kernel.py:408:34 ] ]
            found = re.findall(r"([\w.]+):(\d+)", self._told)
            return [(self._names[name], int(row)) for name, row in found if name in self._names]
        calls, at = [], self._at
        while at:
            calls.append((self._files[at[0]], int(at[1])))
            at = self._callers.get(at, ())
        return calls


def _here(path: Path) -> Path:
    """Where the library has a file now: Triton's cache holds what has been compiled of the same text elsewhere."""
    *_, rest = str(path).rpartition(f"/{LIBRARY.name}/")
    return LIBRARY / rest if (LIBRARY / rest).is_file() else path


@dataclass(frozen=True)
class _Function:
    """A line of source, by the function that it is in."""

    path: Path
    row: int
    name: str
    starts_roles: bool


def _role(functions: list[_Function]) -> str:
    """The role of a wait that is in the first function, in the last, the kernel, by way of the calls between: what the
    kernel calls, but for what starts the roles, and for the words of `lang`."""
    called = [each.name for each in functions[:-1] if not each.starts_roles and each.path.parent.name != "lang"]
    return called[-1] if called else MAIN


def _function(path: Path, row: int) -> _Function:
    for first, last, name, starts_roles in _functions(path):
        if first <= row <= last:
            return _Function(path, row, name, starts_roles)
    return _Function(path, row, path.name, False)


@cache
def _functions(path: Path) -> list[tuple[int, int, str, bool]]:
    """First and last line, name, and whether it starts warps of other roles, of all functions in a file."""
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            starts_roles = "warp_specialize(" in (ast.get_source_segment(source, node) or "")
            found.append((first, node.end_lineno or first, node.name, starts_roles))
    return found


def rebuilt(compiled: Any, ptx: str) -> Any:
    """A kernel as Triton has compiled it, but of this PTX; not loaded on any device."""
    from triton.compiler.compiler import make_backend

    target = compiled.metadata.target
    backend = make_backend(target)
    chosen = compiled.metadata._asdict()
    del chosen["num_warps"]  # by now that of all roles together, which is no option
    options = backend.parse_options(chosen)
    made = copy.copy(compiled)
    made.kernel = backend.make_cubin(ptx, {}, options, target.arch)
    made.module = made.function = made._run = None
    return made
