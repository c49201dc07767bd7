"""Faults planted by rule: each synchronizing statement of a kernel dropped, moved, doubled, weakened, misdirected.

The rules work on the source's syntax tree, so they follow it by themselves: `mutants(lines)` lists what they make of
statements that a check has been seen to reach, and `planted(mutant)` puts one of them in place of the real thing, in
this process, for whatever the emulator runs.

| operator | on | becomes |
|---|---|---|
| drop | wait, fence, signal, arrival, barrier, transfer, atomic used for itself | nothing; a wait's result: true |
| later, earlier | the same, as a statement | after the next one that does anything, before the last such |
| double | signal, arrival, transfer, atomic | twice |
| weaken | a full store wait | a read wait |
| one more pending | a wait for stores or products | may leave one more in flight |
| order | an atomic's `sem` | relaxed, acquire and release, where it was more |
| scope | an atomic's `scope` | the next smaller one |
| parity | a wait for an mbarrier | for the other phase |
| bytes | the bytes that an mbarrier expects | half, double |
| count | arrivals of an mbarrier's initialization; what an atomic adds | one more |
| slot | `index(...)` of a ring, `epoch & 1` | 0 |
| target | the rank of a signal, store, load | 0 |
| flag | the flag of a signal or wait | 0 |
| value | the value of a signal, wait | one less, one more |
| fewer | the number of flags waited for | one less |
"""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tileweave.emulator.rebuild import edited

_WAITS = {
    "mbarrier_wait", "wait", "wait_all", "barrier_all", "store_read_wait", "store_wait", "warpgroup_mma_wait",
    "producer_wait", "consumer_wait",
}  # fmt: skip
_FENCES = {"fence_async_shared", "fence_proxy_async", "fence_proxy_alias", "barrier", "grid_dependency_wait"}
_SIGNALS = {"signal", "signal_all", "mbarrier_arrive", "publish", "release"}
_TRANSFERS = {
    "tma_load", "tma_store", "load_async", "store_async", "store_add_async", "broadcast_async", "multimem_store",
    "multimem_add", "tcgen05_copy_scales",
}  # fmt: skip
_ATOMICS = {"atomic_add", "atomic_xchg", "atomic_cas", "atomic_max"}
_OTHERS = {"mbarrier_expect", "mbarrier_init"}
WORDS = _WAITS | _FENCES | _SIGNALS | _TRANSFERS | _ATOMICS | _OTHERS
_PURE = {  # words that compute numbers, and views
    "slice",
    "permute",
    "ready_at",
    "empty_at",
    "behind",
    "start",
    "next",
    "index",
    "reshape",
    "to",
    "where",
    "cdiv",
    "minimum",
    "program_id",
    "num_programs",
}
_METHODS = {"producer_wait", "consumer_wait", "publish", "release"}  # of Channel
_VALUES = {"wait", "wait_all", "barrier_all"}  # whose result is whether all went well
_SCOPES = {"sys": "gpu", "gpu": "cta"}
_ORDERS = {"acq_rel": ("relaxed", "acquire", "release"), "acquire": ("relaxed",), "release": ("relaxed",)}
_PLACES = {  # where the argument stands: rank, flag, value
    "signal": {"target": 1, "flag": 2, "value": 3}, "signal_all": {"flag": 1, "value": 2},
    "wait": {"flag": 1, "value": 2}, "wait_all": {"flag": 1, "fewer": 2, "value": 3},
    "store_async": {"target": 1}, "store_add_async": {"target": 1}, "load_async": {"target": 1},
    "barrier_all": {"flag": 1, "value": 2},
}  # fmt: skip

Edit = Callable[[ast.AST], ast.AST | list[ast.AST]]


@dataclass(frozen=True)
class Mutant:
    """One edit of a source file: `operator` applied at line and column (of the call, or of the expression), in a
    function. `number` tells several of one operator at one place apart."""

    file: str
    line: int
    column: int
    function: str
    source: str
    operator: str
    number: int = 0

    @property
    def key(self) -> str:
        """Names it while lines move: file, function, statement, operator."""
        which = f" {self.number}" if self.number else ""
        return f"{short(self.file)} {self.function}: {self.source} [{self.operator}{which}]"


def short(file: str) -> str:
    """A source file by its last two names."""
    return "/".join(file.split(os.sep)[-2:])


def mutants(reached: Iterable[tuple[str, int]]) -> list[Mutant]:
    """All mutants of statements at these lines (file, line), in the order of the source."""
    lines: dict[str, set[int]] = {}
    for file, line in reached:
        lines.setdefault(file, set()).add(line)
    found: list[Mutant] = []
    for file in sorted(lines):
        with open(file) as source:
            tree = ast.parse(source.read())
        seen: dict[str, int] = {}
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for mutant, _ in _of_function(file, function):
                    if mutant.line in lines[file]:
                        number = seen.get(mutant.key, 0)
                        seen[mutant.key] = number + 1
                        found.append(Mutant(**{**vars(mutant), "number": number}))
    return found


@contextmanager
def reaching() -> Iterator[set[tuple[str, int]]]:
    """Within it, the lines (file, line) of synchronizing calls that emulated kernels come by are noted."""
    reached: set[tuple[str, int]] = set()

    def edit(file: str, tree: ast.Module) -> ast.Module:
        for block in list(_blocks(tree.body[0])):
            for statement in list(block):
                calls = [node for node in _own_expressions(statement) if name_of(node) or _is_slot(node)]
                for line in {node.lineno for node in calls}:  # type: ignore[attr-defined]
                    mark = ast.Call(ast.Name("__mark", ast.Load()), [ast.Constant(file), ast.Constant(line)], [])
                    block.insert(block.index(statement), ast.copy_location(ast.Expr(mark), statement))
        return ast.fix_missing_locations(tree)

    with edited(edit, {"__mark": lambda file, line: reached.add((file, line))}):
        yield reached


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Within it, kernels are emulated with the mutant in the place of the real statement."""
    done = []

    def edit(file: str, tree: ast.Module) -> ast.Module:
        function = tree.body[0]
        if file != mutant.file or not isinstance(function, ast.FunctionDef) or function.name != mutant.function:
            return tree
        for found, apply in _of_function(file, function):
            same = (found.line, found.column, found.operator) == (mutant.line, mutant.column, mutant.operator)
            if same:
                done.append(found)
                apply()
                return ast.fix_missing_locations(tree)
        return tree

    with edited(edit):
        yield
    if not done:
        raise LookupError(f"no such place, or it was not reached: {mutant}")


def _of_function(file: str, function: ast.FunctionDef) -> Iterator[tuple[Mutant, Callable[[], None]]]:
    """The mutants of a function, each with what plants it in this tree."""
    for block in _blocks(function):
        for i, statement in enumerate(block):
            for operator, node, apply in _of_statement(block, i, statement, file):
                call = node if isinstance(node, ast.Call) else None
                source = ast.unparse(call or node)
                line, column = node.lineno, node.col_offset - function.col_offset  # as in the function alone
                yield Mutant(file, line, column, function.name, source, operator), apply


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for child in ast.walk(node):
        for name in ("body", "orelse"):
            block = getattr(child, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def name_of(call: ast.AST) -> str:
    """The word that a call is of, "" if it synchronizes nothing."""
    if not isinstance(call, ast.Call):
        return ""
    if isinstance(call.func, ast.Name):
        return call.func.id if call.func.id in WORDS else ""
    name = getattr(call.func, "attr", "")
    of_gl = isinstance(getattr(call.func, "value", None), ast.Name) and call.func.value.id == "gl"  # type: ignore
    return name if name in WORDS and (of_gl or name in _METHODS) else ""


def _is_slot(node: ast.AST) -> bool:
    """Whether an expression says which of two slots a call uses."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and ast.unparse(node) == "epoch & 1"


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without those of the statements within it."""
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        yield node
        stack += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _of_statement(block: list[ast.stmt], i: int, statement: ast.stmt, file: str):
    whole = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(whole, ast.Call) and name_of(whole) and name_of(whole) not in _OTHERS:
        yield from _of_whole(block, i, whole, file)
    for node in _own_expressions(statement):
        name = name_of(node)
        if name and isinstance(node, ast.Call):
            yield from _of_call(statement, node, name)
            if node is not whole and name in _VALUES | {"warpgroup_mma_wait"}:
                yield "drop", node, _replacing(statement, node, _result(node, name))
        elif _is_slot(node):
            yield "slot", node, _replacing(statement, node, ast.Constant(0))


def _of_whole(block: list[ast.stmt], i: int, call: ast.Call, file: str):
    """Operators on a statement that is nothing but a call."""
    name = name_of(call)

    def drop() -> None:
        block[i] = ast.copy_location(ast.Pass(), block[i])

    def move(j: int) -> Callable[[], None]:
        return lambda: block.insert(j, block.pop(i))

    yield "drop", call, drop
    after = next((j for j in range(i + 1, len(block)) if not _is_pure(block[j], file)), None)
    if after is not None and not isinstance(block[after], ast.Return):
        yield "later", call, move(after)
    before = next((j for j in range(i - 1, -1, -1) if not _is_pure(block[j], file)), None)
    if before is not None and not any(_defines(passed, call) for passed in block[before:i]):
        yield "earlier", call, move(before)
    if name in _SIGNALS | _TRANSFERS | _ATOMICS:
        yield "double", call, lambda: block.insert(i, copy.deepcopy(block[i]))


def _is_pure(statement: ast.stmt, file: str) -> bool:
    """Whether a statement does nothing that others could see: moving something over it changes nothing."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    if isinstance(statement, ast.If):
        return _calls_nothing(statement.test, file) and all(
            _is_pure(s, file) for s in statement.body + statement.orelse
        )
    simple = isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Pass)
    return simple and _calls_nothing(statement, file)


def _calls_nothing(node: ast.AST, file: str) -> bool:
    """Whether all that is called computes numbers: words that do, and functions of the file, or that it imports from
    tile files, that call nothing else."""
    calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    names = [(f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "?")) for f in calls]
    return all(name in _PURE or name in _pure_functions(file) for name in names)


@cache
def _pure_functions(file: str) -> frozenset[str]:
    with open(file) as source:
        tree = ast.parse(source.read())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    pure: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tileweave.tiles."):
            imported = Path(__file__).parents[1] / "tiles" / f"{node.module.rpartition('.')[2]}.py"
            pure |= _pure_functions(str(imported)) & {alias.name for alias in node.names}
    while True:  # until no function more is found to call pure ones only
        more = {f.name for f in functions if f.name not in pure and _only(f, pure | _PURE)}
        if not more:
            return frozenset(pure)
        pure |= more


def _only(function: ast.FunctionDef, names: set[str]) -> bool:
    """Whether a function calls nothing but these."""
    body = [n.func for s in function.body for n in ast.walk(s) if isinstance(n, ast.Call)]
    return all((f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "?")) in names for f in body)


def _defines(statement: ast.stmt, call: ast.Call) -> bool:
    """Whether a statement makes a name that the call needs: before it, the program would not even run."""
    made = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return bool(made & {n.id for n in ast.walk(call) if isinstance(n, ast.Name)})


def _result(call: ast.Call, name: str) -> ast.expr:
    """What a wait returns at once: that all went well, or the tile that it was to wait for."""
    if name != "warpgroup_mma_wait":
        return ast.Constant(True)
    tiles = next(keyword.value for keyword in call.keywords if keyword.arg == "deps")
    return tiles.elts[0]  # type: ignore[attr-defined]


def _replacing(root: ast.AST, old: ast.AST, new: ast.expr) -> Callable[[], None]:
    class Replace(ast.NodeTransformer):
        def visit(self, node):
            return ast.copy_location(new, old) if node is old else self.generic_visit(node)

    return lambda: Replace().visit(root)


def _of_call(statement: ast.stmt, call: ast.Call, name: str):
    """Operators on a call's arguments, wherever it stands."""

    def put(old: ast.expr, new: ast.expr) -> Callable[[], None]:
        return _replacing(statement, old, new)

    if name == "store_wait":
        yield "weaken", call, lambda: setattr(call.func, "attr", "store_read_wait")
    if name in ("store_wait", "store_read_wait", "warpgroup_mma_wait"):
        pending = call.args[0] if call.args else next(k.value for k in call.keywords if k.arg == "num_outstanding")
        yield "one more pending", call, put(pending, _plus(pending, 1))
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == "sem" and isinstance(value, ast.Constant):
            for weaker in _ORDERS.get(str(value.value), ()):
                yield f"order {weaker}", call, put(value, ast.Constant(weaker))
        if keyword.arg == "scope" and isinstance(value, ast.Constant) and value.value in _SCOPES:
            yield f"scope {_SCOPES[value.value]}", call, put(value, ast.Constant(_SCOPES[value.value]))
        if keyword.arg == "count" and name == "mbarrier_init":
            yield "count", call, put(value, _plus(value, 1))
    if name == "atomic_add":
        yield "count", call, put(call.args[1], _plus(call.args[1], 1))
    if name == "mbarrier_wait":
        flipped = ast.BinOp(copy.deepcopy(call.args[1]), ast.BitXor(), ast.Constant(1))
        yield "parity", call, put(call.args[1], flipped)
    if name == "mbarrier_expect":
        for what, factor in (("half", ast.FloorDiv()), ("double", ast.Mult())):
            changed = ast.BinOp(copy.deepcopy(call.args[1]), factor, ast.Constant(2))
            yield f"bytes {what}", call, put(call.args[1], changed)
    yield from _of_places(call, name, put)


def _of_places(call: ast.Call, name: str, put: Callable[[ast.expr, ast.expr], Callable[[], None]]):
    for what, place in _PLACES.get(name, {}).items():
        if place >= len(call.args) or any(isinstance(arg, ast.Starred) for arg in call.args):
            continue
        old = call.args[place]
        if what == "value":
            yield "value less", call, put(old, _plus(old, -1))
            yield "value more", call, put(old, _plus(old, 1))
        elif what == "fewer":
            yield "fewer", call, put(old, _plus(old, -1))
        elif not (isinstance(old, ast.Constant) and old.value == 0):
            yield what, call, put(old, ast.Constant(0))
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "index" and node.args:
            if not isinstance(node.args[0], ast.Constant):
                yield "slot", call, put(node.args[0], ast.Constant(0))
            return


def _plus(node: ast.expr, n: int) -> ast.BinOp:
    operator: ast.operator = ast.Add() if n > 0 else ast.Sub()
    return ast.BinOp(copy.deepcopy(node), operator, ast.Constant(abs(n)))
