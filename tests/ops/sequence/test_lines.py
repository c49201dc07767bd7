"""How much device code attention between ranks adds to the attention of one GPU."""

import ast
from pathlib import Path

import pytest

import tileweave as tw

KERNEL = "# ---------------------------------------------------------------- the kernel"
ADDS = {
    "ring_attention": ("what the ring adds", 115),
    "ulysses_attention": ("what the heads' journey adds", 106),
}


@pytest.mark.parametrize("op", ADDS)
def test_what_is_added_grows_no_more(op):
    """Signatures and decorators count, docstrings do not, nor do roles that kernels share, in `tiles`."""
    heading, most = ADDS[op]
    text = (Path(tw.__file__).parent / "ops" / op / "kernel.py").read_text()
    first, last = text.index(f"- {heading}\n"), text.index(KERNEL)
    count = 0
    for node in ast.parse(text[first:last].partition("\n")[2]).body:
        docstring = node.body[0]
        count += node.end_lineno - node.decorator_list[0].lineno + 1
        count -= docstring.end_lineno - docstring.lineno + 1
    assert most - 5 <= count <= most, "say so here, and in docs/design.md"
