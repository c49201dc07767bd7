"""The memory model, test by test: what the emulator must show and must not, and what a GPU may show."""

from pathlib import Path

import pytest

from tileweave import lang
from tileweave.bench.litmus.cases import CASES
from tileweave.bench.litmus.run import TURNS, WARPS, Memory, emulated, faults, not_allowed, observed
from tileweave.bench.litmus.table import BLOCK, filled

PAGE = Path(__file__).parents[3] / "docs/memory-model.md"
NAMES = [case.name for case in CASES]


def test_every_test_says_what_it_expects():
    assert len(set(NAMES)) == len(CASES)
    for case in CASES:
        assert (case.finding is None) == (case.allowed is not None), case.name
        assert case.shown <= (case.allowed or frozenset()), case.name
        assert case.never is None or case.never not in case.allowed, case.name
        assert case.weak is None or case.allowed is None or case.weak in case.allowed, case.name
        for outcome in [*(case.allowed or ()), *filter(None, [case.never, case.weak])]:
            assert len(outcome) == len(case.results), case.name


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_emulator(case):
    assert not faults(case, *emulated(case))


@pytest.mark.skipif(not lang.HAS_TRITON, reason="needs Triton")
def test_the_compiler_takes_what_a_gpu_is_to_run():
    from tileweave.bench.compile import compile_report

    for case in {case.kernel: case for case in CASES if case.gpu}.values():
        report = compile_report(case.kernel, Memory(case, 2, "meta").arguments(case, 0, TURNS), WARPS)
        assert report["target"] == "sm_90a" and report["stack"] == 0, case.name


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.gpu], ids=[case.name for case in CASES if case.gpu])
def test_a_gpu(case):
    outcomes = observed(case, launches=50)
    assert outcomes and not not_allowed(case, outcomes)


def test_the_docs_have_the_table():
    text = PAGE.read_text()
    assert BLOCK.search(text)
    assert filled(text, PAGE.parent) == text, "run python -m tileweave.bench.litmus --table docs/memory-model.md"
