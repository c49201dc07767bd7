"""How much device code the all-reduce adds to the matmul of one GPU."""

import ast
import inspect
from pathlib import Path

from tileweave.ops.matmul_all_reduce import launch

ADDS = "# ---------------------------------------------------------------- what the all-reduce adds"
KERNEL = "# ---------------------------------------------------------------- the kernel"
SHARED = {"run_with_movers"}  # the template's list of roles once more, with a mover in it
NORM = {"normalize"}


def statements(functions):
    """Lines of the functions' bodies that hold code: no docstrings, comments, blank lines."""
    lines = set()
    for function in functions:
        body = function.body[1:] if isinstance(function.body[0], ast.Expr) else function.body
        for statement in body:
            for node in ast.walk(statement):
                if hasattr(node, "lineno"):
                    lines.add(node.lineno)
    return len(lines)


def added():
    """Functions that belong to the all-reduce, by name."""
    text = Path(inspect.getsourcefile(launch)).with_name("kernel.py").read_text()
    first, last = (text[: text.index(mark)].count("\n") + 1 for mark in (ADDS, KERNEL))
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {f.name: f for f in functions if first < f.lineno < last and f.name not in SHARED}


ONE_SHOT = {"store", "publish", "fetch", "sum_up", "hand_out"}
TWO_SHOTS = {"is_own", "meet", "more_parts", "load_more", "epilogue", "store", "publish", "move_tile", "move_role"}


def test_every_function_belongs_to_a_schedule():
    assert set(added()) == ONE_SHOT | TWO_SHOTS | {"locate", "tiles_of"}


def test_one_shot_adds_fewer_than_fifty_lines():
    functions = added()
    assert 20 < statements(functions[name] for name in ONE_SHOT) < 50, statements(functions[n] for n in ONE_SHOT)


def test_lines_of_two_shots():
    functions = added()
    names = TWO_SHOTS | {"locate", "tiles_of"}
    assert statements(functions[name] for name in names) < 100, statements(functions[name] for name in names)
