"""Programs drawn at random: the emulator shows nothing that the axioms of the PTX memory model forbid, and reports
races where, and only where, they see one.
"""

import random

import pytest
import torch

from tests.emulator.litmus.axioms import executions
from tileweave import lang as gl
from tileweave.emulator import World

LENGTH, LINE = 4, 32
DATA = 2 * LINE  # words below are strong, those from here on weak
SCHEDULES = 40


@gl.jit
def runs(cells, out, PROGRAM: gl.constexpr):
    """CTA t does what thread t of a program does, all its threads as one. For the emulator only."""
    thread = gl.program_id(0)
    for i, (kind, word, value, sem) in enumerate(PROGRAM[thread]):
        gl.barrier()
        if kind == "write":
            gl.atomic_xchg(cells + word * LINE, value, sem=sem, scope="gpu")
        elif kind == "read":
            gl.store(out + thread * LENGTH + i, gl.atomic_add(cells + word * LINE, 0, sem=sem, scope="gpu"))
        elif kind == "store":
            gl.store(cells + DATA + word * LINE, value)
        else:
            gl.load(cells + DATA + word * LINE)


def shown(program, seed):
    """What one schedule shows, and whether races are reported, as `executions` has it."""
    cells, out = torch.zeros(4 * LINE, dtype=torch.int32), torch.zeros(len(program) * LENGTH, dtype=torch.int32)
    world = World(1, seed, halt=False)
    world.run(lambda rank: world.launch(runs, (len(program),), cells, out, program))
    words = sorted({op[1] for thread in program for op in thread if op[0] in ("write", "read")})
    reads = [t * LENGTH + i for t, thread in enumerate(program) for i, op in enumerate(thread) if op[0] == "read"]
    return (*out[reads].tolist(), *cells[[w * LINE for w in words]].tolist()), bool(world.races)


def drawn(seed, weak=0.0):
    """A program of two or three threads; a share `weak` of its operations are weak."""
    dice = random.Random(seed)
    threads, length = dice.choice([(2, 3), (2, 3), (3, 2)]) if not weak else dice.choice([(2, 4), (3, 3)])
    values = iter(range(1, 100))

    def operation():
        word, stores = dice.randrange(2), dice.random() < 0.5
        if dice.random() < weak:
            return ("store", 0, next(values), "") if stores else ("load", 0, 0, "")
        if stores:
            return "write", word, next(values), dice.choice(["relaxed", "release"])
        return "read", word, 0, dice.choice(["relaxed", "acquire"])

    return tuple(tuple(operation() for _ in range(length)) for _ in range(threads))


def W(word, sem="relaxed"):
    """A write of 1."""
    return "write", word, 1, sem


def R(word, sem="relaxed"):
    """A read."""
    return "read", word, 0, sem


@pytest.mark.parametrize(
    ("program", "allowed", "forbidden"),
    [
        (((W(0), W(1, "release")), (R(1, "acquire"), R(0))), (0, 0), (1, 0)),
        (((W(0), W(1)), (R(1), R(0))), (1, 0), None),
        (((W(0, "release"), R(1, "acquire")), (W(1, "release"), R(0, "acquire"))), (0, 0), None),
        (((R(0), W(1)), (R(1), W(0))), (1, 1), None),
        (((R(0, "acquire"), W(1, "release")), (R(1, "acquire"), W(0, "release"))), (0, 0), (1, 1)),
        (((W(0),), (R(0), R(0))), (0, 1), (1, 0)),
        (((W(0),), (R(0), W(1, "release")), (R(1, "acquire"), R(0))), (1, 1, 1), (1, 1, 0)),
        (((W(0),), (W(1),), (R(0, "acquire"), R(1, "acquire")), (R(1, "acquire"), R(0))), (1, 0, 1, 0), None),
    ],
)
def test_the_axioms_say_what_is_known_of_classic_programs(program, allowed, forbidden):
    found = {outcome[: len(allowed)] for outcome, _ in executions(program)}
    assert allowed in found and forbidden not in found


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_nothing_forbidden_is_shown(first):
    for number in range(first, first + 10):
        program = drawn(number)
        allowed = executions(program)
        for seed in range(SCHEDULES):
            assert shown(program, seed) in allowed, (program, seed)


@pytest.mark.parametrize("first", range(100, 160, 10))
def test_races_are_reported_where_there_are_some(first):
    for number in range(first, first + 10):
        program = drawn(number, weak=0.4)
        allowed = executions(program)
        for seed in range(SCHEDULES // 2):
            assert shown(program, seed) in allowed, (program, seed)
