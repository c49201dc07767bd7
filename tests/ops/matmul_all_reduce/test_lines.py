"""How much device code the all-reduce adds to the matmul of one GPU with its bias, residual and norm."""

import ast
import inspect
from pathlib import Path

from tileweave.ops.matmul_all_reduce import launch

ADDS = "# ---------------------------------------------------------------- what the all-reduce adds"
KERNEL = "# ---------------------------------------------------------------- the kernel"
# Of these the kernel of one GPU has so many lines: it finds a tile, takes in a residual and a bias, stores a part.
ALONE = {"locate": 4, "load_more": 13, "epilogue": 7, "store": 4}
ONE_SHOT = {"store", "publish"}
TWO_SHOTS = {"is_own", "locate", "store", "publish"}
INTRA_SM = {*TWO_SHOTS, "meet", "load_more", "epilogue"}
# Lines of `store`, and signals of `publish`, that are another schedule's.
OTHERS = {"one shot": 7 + 4, "intra": 3 + 2 + 2, "inter": 3 + 4 + 4}


def added():
    """Lines of the functions that belong to the all-reduce, by name: signatures and decorators, but no docstrings."""
    text = Path(inspect.getsourcefile(launch)).with_name("kernel.py").read_text()
    first, last = (text[: text.index(mark)].count("\n") + 1 for mark in (ADDS, KERNEL))
    counts = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and first < node.lineno < last:
            docstring = node.body[0]
            lines = node.end_lineno - node.decorator_list[0].lineno + 1
            counts[node.name] = lines - (docstring.end_lineno - docstring.lineno + 1) - ALONE.get(node.name, 0)
    return counts


def test_every_function_belongs_to_a_schedule():
    assert set(added()) == ONE_SHOT | INTRA_SM


def test_each_schedule_adds_fewer_than_fifty_lines_of_code_of_its_own():
    """Besides the roles that it shares with others: movers, communicators and the sums of one shot, in `tiles`."""
    counts = added()
    for schedule, names in (("one shot", ONE_SHOT), ("intra", INTRA_SM), ("inter", TWO_SHOTS)):
        assert 10 < sum(counts[name] for name in names) - OTHERS[schedule] < 50
