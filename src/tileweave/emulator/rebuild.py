"""Device functions rebuilt from their source over the emulator's words, every line where it was."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tileweave import lang
from tileweave.emulator import words
from tileweave.emulator.places import KERNEL_FILES
from tileweave.emulator.tiles import c_div, c_mod, converted, inverted

_HELPERS = {"__c_div": c_div, "__c_mod": c_mod, "__inverted": inverted, "__converted": converted}
_DIVISIONS = {ast.FloorDiv: "__c_div", ast.Mod: "__c_mod"}
_WORDS = {id(getattr(lang, name)): getattr(words, name) for name in words.__all__}


@lang.constexpr_function
def _probe():
    return None


# Where Triton is missing constexpr functions are plain ones.
_CONSTEXPR_FUNCTION = type(_probe)


class DeviceSemantics(ast.NodeTransformer):
    """What Python does otherwise than the device.

    `//` and `%` truncate, `~` of a truth value is `not`, numbers have `.to(dtype)`, and the result of an atomic that
    nobody uses is not told to the other threads (which takes a barrier).
    """

    def _call(self, node, name: str, *args):
        return ast.copy_location(ast.Call(ast.copy_location(ast.Name(name, ast.Load()), node), list(args), []), node)

    def visit_Expr(self, node):
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name.startswith("atomic_"):
                call.keywords.append(ast.keyword("used", ast.copy_location(ast.Constant(False), node)))
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            made = self._call(node, "__converted", node.func.value, *node.args)
            made.keywords = node.keywords
            return made
        return node

    def visit_BinOp(self, node):
        self.generic_visit(node)
        name = _DIVISIONS.get(type(node.op))
        return self._call(node, name, node.left, node.right) if name else node

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        return self._call(node, "__inverted", node.operand) if isinstance(node.op, ast.Invert) else node

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        name = _DIVISIONS.get(type(node.op))
        if not name or not isinstance(node.target, ast.Name):
            return node
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        return ast.copy_location(ast.Assign([node.target], self._call(node, name, read, node.value)), node)


class _Lazy:
    """A function that is being rebuilt while something that it calls refers to it."""

    def __init__(self, fn, device):
        self.fn, self.device, self.__name__ = fn, device, fn.__name__

    def __call__(self, *args, **kwargs):
        return _rebuilt(self.fn, self.device)(*args, **kwargs)


class _Module:
    """A module as kernels see it: each name translated when asked for."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        value = translate(getattr(self._module, name))
        setattr(self, name, value)
        return value


Edit = Callable[[str, ast.Module], ast.Module]

_MADE: dict[tuple[Any, bool], Any] = {}  # rebuilt functions and classes
_EDITS: list[tuple[Edit, dict[str, Any]]] = []
_BUSY: set[types.FunctionType] = set()
_LOCK = threading.RLock()  # worlds may run side by side


def translate(value):
    """What a global of a kernel, or an argument, is in the emulator."""
    if value is lang:
        return words
    word = _WORDS.get(id(value))
    if word is not None:
        return word
    if isinstance(value, types.ModuleType):
        return _module(value)
    if isinstance(value, lang.constexpr):
        return translate(value.value)
    if isinstance(value, type):
        return _rebuilt_class(value.declaration) if hasattr(value, "declaration") else value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(translate(item) for item in value)
    fn = value if isinstance(value, types.FunctionType) else getattr(value, "fn", None)
    if isinstance(fn, types.FunctionType):
        return rebuilt(value)
    return value


@functools.cache
def _module(module):
    return _Module(module)


@contextmanager
def edited(edit: Edit, names: dict[str, Any] | None = None) -> Iterator[None]:
    """Within it, device functions are built from `edit(file, tree)` of their source: a module with one function in it,
    at the lines of the file. Columns are those of the dedented function. `names`: what the edits may refer to."""
    entry = edit, names or {}
    with _LOCK:
        _EDITS.append(entry)
        _forget()
    try:
        yield
    finally:
        with _LOCK:
            _EDITS.remove(entry)
            _forget()


def _forget() -> None:
    _MADE.clear()
    _module.cache_clear()


def rebuilt(function):
    """The function of a `jit`, `constexpr_function` or plain function, over the emulator's words."""
    plain = isinstance(function, types.FunctionType)
    fn = function if plain else function.fn
    return _rebuilt(fn, not plain and not isinstance(function, _CONSTEXPR_FUNCTION))


def _rebuilt(fn: types.FunctionType, device: bool):
    made = _MADE.get((fn, device))
    if made is not None:
        return made
    with _LOCK:
        if fn in _BUSY:
            return _Lazy(fn, device)
        _BUSY.add(fn)
        try:
            made = _MADE[fn, device] = _build(fn, device)
        finally:
            _BUSY.discard(fn)
    return made


def _build(fn: types.FunctionType, device: bool):
    try:
        lines, first = inspect.getsourcelines(fn)
    except OSError:
        if device:
            raise
        return fn
    tree = ast.parse(textwrap.dedent("".join(lines)))
    if not isinstance(tree.body[0], ast.FunctionDef):  # a lambda: plain Python
        return fn
    _strip(tree.body[0])
    tree = ast.increment_lineno(tree, first - 1)
    for edit, _ in _EDITS if device else ():
        tree = edit(fn.__code__.co_filename, tree)
    if device:
        tree = ast.fix_missing_locations(DeviceSemantics().visit(tree))
    code = compile(tree, fn.__code__.co_filename, "exec", dont_inherit=True)
    known = dict(fn.__globals__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        known[name] = cell.cell_contents
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    scope = {**_HELPERS, "__name__": fn.__module__}
    scope.update({name: translate(known[name]) for name in used & known.keys()})
    for _, names in _EDITS:
        scope.update(names)
    exec(code, scope)
    if device:
        KERNEL_FILES.add(fn.__code__.co_filename)
    return scope[fn.__name__]


def _strip(function: ast.FunctionDef) -> None:
    """Decorators and annotations are for the compiler."""
    function.decorator_list, function.returns = [], None
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None


_NOT_MEMBERS = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "declaration", "__hash__"}


def _rebuilt_class(cls: type):
    made = _MADE.get((cls, True))
    if made is not None:
        return made
    with _LOCK:
        return _build_class(cls)


def _build_class(cls: type):
    made = _MADE[cls, True] = type(cls.__name__, (), {})
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        fields.update(inspect.get_annotations(base))
        for name, member in vars(base).items():
            if name in _NOT_MEMBERS:
                continue
            if isinstance(member, staticmethod):
                setattr(made, name, staticmethod(translate(member.__func__)))
            else:
                setattr(made, name, translate(member))
    if "__init__" not in vars(made):
        setattr(made, "__init__", _initializer(cls.__name__, list(fields)))  # noqa: B010  (mypy refuses the other form)
    return made


def _initializer(title: str, fields: list[str]):
    signature = inspect.Signature([inspect.Parameter(f, inspect.Parameter.POSITIONAL_OR_KEYWORD) for f in fields])

    def __init__(self, *args, **kwargs):
        given = signature.bind_partial(*args, **kwargs).arguments
        for name, value in given.items():
            setattr(self, name, value)
        missing = [name for name in fields if not hasattr(self, name)]
        if missing:
            raise TypeError(f"{title} is made without {', '.join(missing)}; its fields are {', '.join(fields)}")

    return __init__
