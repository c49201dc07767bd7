"""Every lesson in examples/ runs on a CPU and prints what it promises."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISED = {
    "01_matmul_reduce_scatter.py": ["backend ", "relative error against float32"],
    "02_a_race_found.py": ["5 schedules: True", "store_wait for the TMA store"],
}


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == PROMISED.keys()


@pytest.mark.parametrize("name", PROMISED)
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    text = capsys.readouterr().out
    for promise in PROMISED[name]:
        assert promise in text
