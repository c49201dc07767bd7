"""What is checked: something that makes emulated worlds, runs them, and asserts that the results are right."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import tileweave as tw


class Case(Protocol):
    """One thing to check; pickled, so that several processes can run its schedules."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def ranks(self) -> int:
        """How many ranks its worlds have."""

    @property
    def ways(self) -> tuple[str, ...]:
        """How it can be run besides as it is written: `ways` of trial.py."""

    def variant(self, seed: int) -> str:
        """Which variant of the case is this seed's turn; "": it has one."""

    def run(self, seed: int, way: str = "") -> None:
        """Run once, in worlds that take their order from `seed`. AssertionError if a result is wrong."""


@dataclass(frozen=True)
class FunctionCase:
    """A function of one's own, `target` = "module:function": called with an emulated world of `ranks` ranks if it takes
    an argument, with none if it makes its worlds itself. It asserts what must hold, and returns nothing.

    TypeError if the target is not such a function; ImportError, with the error and its line, if its module cannot be
    imported.
    """

    target: str
    ranks: int = 2
    sms: int = 4
    path: str = ""  # a folder to find the module in, besides those that Python looks into

    @property
    def name(self) -> str:
        """The target."""
        return self.target

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        module, colon, attribute = self.target.partition(":")
        if not (module and colon and attribute):
            raise TypeError(f"expected module:function, got {self.target!r}")
        if module.endswith(".py") or os.sep in module or module.startswith("."):
            name = os.path.basename(module).removesuffix(".py")
            raise TypeError(f"expected a module as `import` has it, such as {name}:{attribute}, got {self.target!r}")
        if self.path and self.path not in sys.path:
            sys.path.insert(0, self.path)
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except (Exception, SystemExit) as error:
            raise ImportError(f"{module} cannot be imported: {_told(error)}") from error
        if not callable(found):
            raise TypeError(f"{module} has no function {attribute!r}: expected module:function")
        if len(_required(found)) > 1:
            raise TypeError(
                f"{self.target} takes {len(_required(found))} arguments: a check calls it with a world or none"
            )
        return found

    @property
    def ways(self) -> tuple[str, ...]:
        """As it is written."""
        return ()

    def variant(self, seed: int) -> str:
        """It has one."""
        return ""

    def run(self, seed: int, way: str = "") -> None:
        """Call the function once."""
        call(self.function(), self.ranks, self.sms, seed)


@dataclass(frozen=True)
class CallableCase:
    """The same for a function at hand, in this process."""

    function: Callable[..., Any]
    ranks: int = 2
    sms: int = 4

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__qualname__", repr(self.function))

    @property
    def ways(self) -> tuple[str, ...]:
        """As it is written."""
        return ()

    def variant(self, seed: int) -> str:
        """It has one."""
        return ""

    def run(self, seed: int, way: str = "") -> None:
        """Call the function once."""
        call(self.function, self.ranks, self.sms, seed)


def call(function: Callable[..., Any], ranks: int, sms: int, seed: int) -> None:
    """Call a function of one's own, with an emulated world if it takes one."""
    if not _required(function):
        function()
        return
    with tw.virtual_world(ranks, device="cpu", seed=seed, sms=sms) as world:
        function(world)


def function_case(target: str, ranks: int) -> FunctionCase:
    """A FunctionCase for a target as typed in a shell: modules are looked for in the current folder, too."""
    case = FunctionCase(target, ranks, path=os.getcwd())
    case.function()
    return case


def _told(error: BaseException) -> str:
    """An error of an import in one line, behind the file and line that it comes from."""
    what = traceback.format_exception_only(error)[-1].strip()
    places = [(place.filename, place.lineno) for place in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    file, line = next((each for each in reversed(places) if not each[0].startswith("<")), (__file__, 0))
    return what if file == __file__ else f"{file}:{line}: {what}"


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
