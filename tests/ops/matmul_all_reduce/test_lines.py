"""How much device code the all-reduce adds to the matmul of one GPU with its bias, residual and norm."""

import ast
import inspect
from pathlib import Path

from tileweave.ops.matmul_all_reduce import launch

ADDS = "# ---------------------------------------------------------------- what the all-reduce adds"
KERNEL = "# ---------------------------------------------------------------- the kernel"
BOTH = {"store", "publish"}
ONE_SHOT = {"fetch", "sum_up", "hand_out"}
TWO_SHOTS = {"tiles_of", "locate", "is_own", "meet", "more_parts", "load_more", "epilogue", "move_tile", "move_role"}
WIRING = {"run_with_movers"}  # the template's list of roles once more, with one in addition


def added():
    """Lines of the functions that belong to the all-reduce, by name: signatures and decorators, but no docstrings."""
    text = Path(inspect.getsourcefile(launch)).with_name("kernel.py").read_text()
    first, last = (text[: text.index(mark)].count("\n") + 1 for mark in (ADDS, KERNEL))
    counts = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and first < node.lineno < last:
            docstring = node.body[0]
            lines = node.end_lineno - node.decorator_list[0].lineno + 1
            counts[node.name] = lines - (docstring.end_lineno - docstring.lineno + 1)
    return counts


def test_every_function_belongs_to_a_schedule():
    assert set(added()) == BOTH | ONE_SHOT | TWO_SHOTS | WIRING


def test_one_shot_adds_fewer_than_fifty_lines_of_code_of_its_own():
    """Of `store` those of the other schedules, of `publish` the signal to an owner, are not counted."""
    counts = added()
    others = 7 + 2
    assert 30 < sum(counts[name] for name in BOTH | ONE_SHOT) - others < 50


def test_two_shots_do_not_grow():
    """More than the fifty lines that a fused kernel is meant to add: about fifty to send and sum, fifty to fetch."""
    counts = added()
    assert sum(counts[name] for name in BOTH | TWO_SHOTS) < 135
