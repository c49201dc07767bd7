"""Groups of 3 to 7 processes, one behind, within and beside the other; threads, forks, and the end of a process."""

import subprocess
import sys

import pytest

from tests.fabric.groups_program import SITUATIONS
from tests.fabric.groups_program import a_killed_process_is_an_error_to_the_others as LAST


def python(module, tmp_path):
    """The finished process of a module of this folder."""
    command = [sys.executable, "-m", f"tests.fabric.{module}", f"file://{tmp_path}/init"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The program's process: one for all situations, as importing PyTorch takes longer than they."""
    return python("groups_program", tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize("situation", [each.__name__ for each in (*SITUATIONS, LAST)])
def test_all_ranks_come_through(ran, situation):
    assert situation in ran.stdout.split(), ran.stderr


def test_the_program_ends_well(ran):
    assert ran.returncode == 0, ran.stderr


def test_a_process_that_has_closed_nothing_ends_and_gives_all_back(tmp_path):
    """A world, a group and its fabric's memory are still referred to when the interpreter ends."""
    done = python("exit_program", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["end: 16 8", "held: 0 0 0", ""]
    assert "Traceback" not in done.stderr and "leaked" not in done.stderr
