"""The tables in the docs are what the committed figures say."""

from pathlib import Path

from tileweave.bench.tables import BLOCK, filled

PAGE = Path(__file__).parents[1] / "docs/performance.md"


def test_tables_are_made_from_the_committed_figures():
    text = PAGE.read_text()
    assert len(BLOCK.findall(text)) == 18
    assert filled(text, PAGE.parent) == text, "run python -m tileweave.bench.tables docs/performance.md"
    assert text.count("NVIDIA H200, torch") == 18
