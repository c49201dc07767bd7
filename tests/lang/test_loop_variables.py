"""Two names of one value before a loop that gives both new ones: Triton may carry one of them through the loop only.

It finds a loop's variables by comparing the values that names have before and after one turn. With `last = at` before
the loop and `last = at`, `at = next(at)` within, `last` has the same value after a turn as before it: that which `at`
had. So it counts as unchanged, in every turn (seen with Triton 3.6 and 3.9: the compiled kernel ends with the first
`at`). The emulator, which runs Python, cannot see this; so the text is checked.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(file for folder in ("src", "tests", "examples") for file in (ROOT / folder).rglob("*.py"))


def device_functions(tree):
    """The functions of a module that are decorated as device code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
            if any(ast.unparse(d).rsplit(".", 1)[-1] == "jit" for d in decorators):
                yield node


def assigned(loop):
    """Names that a loop gives values."""
    return {node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def without(pairs, names):
    """The pairs that have none of the names."""
    return {pair for pair in pairs if not pair & names}


def assign(pairs, targets, value):
    """Pairs of names of one value after an assignment of one target, or of a tuple element by element."""
    if isinstance(targets, ast.Tuple):
        same = isinstance(value, ast.Tuple) and len(value.elts) == len(targets.elts)
        values = value.elts if same else [None] * len(targets.elts)
        for i, each in enumerate(values):  # all values, then all targets: a, b = b, a
            pairs = assign(pairs, ast.Name(f"value {i}"), each)
        for i, target in enumerate(targets.elts):
            pairs = assign(pairs, target, ast.Name(f"value {i}"))
        return without(pairs, {f"value {i}" for i in range(len(values))})
    if not isinstance(targets, ast.Name):
        return pairs
    pairs = without(pairs, {targets.id})
    if isinstance(value, (ast.Name, ast.Attribute)) and (text := ast.unparse(value)) != targets.id:
        aliases = {text}.union(*(pair for pair in pairs if text in pair))
        pairs = pairs | {frozenset((targets.id, alias)) for alias in aliases}
    return pairs


def follow(statements, pairs, found):
    """Pairs of names of one value after statements. To `found` go loops with two such names that both get new values,
    one of them that which the other had before the turn."""
    for node in statements:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = assign(pairs, target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            pairs = assign(pairs, node.target, node.value if isinstance(node, ast.AnnAssign) else None)
        elif isinstance(node, ast.If):
            pairs = follow(node.body, pairs, found) | follow(node.orelse, pairs, found)
        elif isinstance(node, ast.For) and "static_range" in ast.unparse(node.iter):  # unrolled: nothing is carried
            pairs = follow(node.body, without(pairs, {node.target.id}), found)
        elif isinstance(node, (ast.For, ast.While)):
            names = assigned(node)
            before = {name: f"{name} before line {node.lineno}" for name in names}
            turn = {frozenset(pair) for pair in before.items()} | without(pairs, names)
            after = follow(node.body, turn, found)
            for x, y in (sorted(pair) for pair in pairs if pair <= names):
                if {frozenset((x, before[y])), frozenset((y, before[x]))} & after:
                    found.append((node.lineno, x, y))
            pairs = without(pairs, names)
    return pairs


def shared_loop_variables(text):
    """(line of a loop, name, name) for each pair of names in device code that the loop may take for one variable."""
    found = []
    for function in device_functions(ast.parse(text)):
        follow(function.body, set(), found)
    return found


def test_no_kernel_has_two_names_for_one_loop_variable():
    texts = {file: file.read_text() for file in FILES if file != Path(__file__)}
    functions = [function for text in texts.values() for function in device_functions(ast.parse(text))]
    assert len(functions) > 100
    found = {str(file.relative_to(ROOT)): shared_loop_variables(text) for file, text in texts.items()}
    assert not {file: loops for file, loops in found.items() if loops}


def test_the_template_with_the_trap_is_found():
    text = (ROOT / "src/tileweave/tiles/matmul_wgmma.py").read_text()
    good = "    last = mm.ring.start()"
    assert text.count(good) == 1
    ((line, *names),) = shared_loop_variables(text.replace(good, "    last = at"))
    assert names == ["at", "last"] and "for step" in text.splitlines()[line - 1]


BAD = {
    "a name of another": "last = at\nfor i in range(n):\n    last = at\n    at = at + 1",
    "in one branch": "last = at + 0\nif n > 2:\n    last = at\nfor i in range(n):\n    last, at = at, at + 1",
    "in a tuple": "at, last = 2 * n, at\nat = last\nwhile at < n:\n    last = at\n    at += 1",
    "two names of a third": "first, last = n, n\nfor i in range(n):\n    if C:\n        first = last\n    last += i",
    "two names of a member": "a, b = mm.k, mm.k\nfor i in range(n):\n    a = b\n    b = b + 1",
    "inside a loop": "for i in range(n):\n    last = at\n    for j in range(i):\n        last = at\n        at += j",
    "behind an unrolled loop": "for i in gl.static_range(4):\n    last = at\nwhile at < n:\n    last = at\n    at += 1",
}
GOOD = {
    "another value": "last = at + 0\nfor i in range(n):\n    last = at\n    at = at + 1",
    "a new value before the loop": "last = at\nlast = n * 2\nfor i in range(n):\n    last = at\n    at = at + 1",
    "one of them is not changed": "last = at\nfor i in range(n):\n    last = last + at",
    "the other's new value": "m = mn\nfor i in range(n):\n    mn = m + i\n    m = mn",
    "within one turn": "for i in range(n):\n    last = at\n    at = at + 1",
    "an unrolled loop": "last = at\nfor i in gl.static_range(4):\n    last = at\n    at = at + 1",
    "swapped": "a, b = n * 2, n * 3\na, b = b, a\nfor i in range(n):\n    a, b = b, a",
}


@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_examples(name):
    body = "\n".join(f"    {line}" for line in ({**BAD, **GOOD}[name]).splitlines())
    for decorator in ("gl.jit", "jit", 'gl.jit(do_not_specialize=["n"])'):
        assert bool(shared_loop_variables(f"@{decorator}\ndef f(mm, at, n):\n{body}\n")) == (name in BAD)
    assert not shared_loop_variables(f"def f(mm, at, n):\n{body}\n"), "not device code"
