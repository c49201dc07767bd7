"""Search: every strategy replays, priorities reach orders that chance hardly does, an exhaustive search runs each order
once and finds what only one of them shows."""

import pytest
import torch

from tests.emulator.kernels import matmul_reduce_scatter, puts
from tests.emulator.problems import run_put, run_reduce_scatter
from tileweave import lang as gl
from tileweave.emulator import DeadlockError, RaceError, World
from tileweave.emulator.exhaustive import Exploration, Redundant
from tileweave.emulator.search import PriorityOrder, RandomOrder, Recorded, Replay


@gl.jit
def counting_kernel(x, N: gl.constexpr):
    """Each CTA adds to one word N times."""
    for _ in range(N):
        gl.atomic_add(x, 1, sem="relaxed", scope="sys")


@gl.jit
def last_kernel(x, out, N: gl.constexpr):
    """Who comes last writes its number."""
    if gl.atomic_add(x, 1, sem="acq_rel", scope="gpu") == N - 1:
        gl.atomic_xchg(out, gl.program_id(0), sem="relaxed", scope="gpu")


@gl.jit
def crossed_kernel(locks, N: gl.constexpr):
    """Two CTAs take two locks, in opposite order."""
    me = gl.program_id(0)
    while gl.atomic_cas(locks + me, 0, 1, sem="acquire", scope="gpu") != 0:
        pass
    while gl.atomic_cas(locks + (1 - me), 0, 1, sem="acquire", scope="gpu") != 0:
        pass
    gl.atomic_xchg(locks + (1 - me), 0, sem="release", scope="gpu")
    gl.atomic_xchg(locks + me, 0, sem="release", scope="gpu")


@gl.jit
def apart_kernel(x):
    """CTAs that have nothing to do with each other."""
    gl.atomic_add(x + gl.program_id(0), 1, sem="relaxed", scope="gpu")
    gl.atomic_add(x + gl.program_id(0), 1, sem="relaxed", scope="gpu")


def explore(kernel, grid, *args, limit=10_000):
    """Run every order; the exploration, and what each came to: the last tensor, or the error's type."""
    search, ends = Exploration(limit), []
    for order in search:
        tensors = [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in args]
        world = World(1, strategy=order)
        try:
            world.run(lambda rank, world=world, tensors=tensors: world.launch(kernel, (grid,), *tensors))
            ends.append([x.tolist() for x in tensors if isinstance(x, torch.Tensor)][-1])
        except Redundant:
            pass
        except (RaceError, DeadlockError) as error:
            ends.append(type(error))
    return search, ends


def words(n=1):
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize("ctas", [2, 3, 4])
def test_who_comes_last_is_everybody_once_for_each_order(ctas):
    search, ends = explore(last_kernel, ctas, words(), words(), ctas)
    orders = {2: 2, 3: 6, 4: 24}[ctas]
    assert search.complete and search.runs == orders
    assert {end[0] for end in ends} == set(range(ctas))


def test_independent_steps_need_one_order():
    search, _ = explore(apart_kernel, 3, words(3))
    assert search.complete and search.runs == 1


def test_additions_to_one_word_are_run_in_every_order():
    search, _ = explore(counting_kernel, 2, words(), 2)
    assert search.complete and search.runs == 6  # 4! / (2! 2!)


def test_the_order_that_deadlocks_is_found():
    search, ends = explore(crossed_kernel, 2, words(2), 2)
    assert search.complete and DeadlockError in ends and len(set(map(str, ends))) > 1


def test_a_bound_is_kept():
    search, _ = explore(last_kernel, 4, words(), words(), 4, limit=5)
    assert not search.complete and search.runs + search.cut == 5


STRATEGIES = {"random": RandomOrder, "priorities": PriorityOrder}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_seed_replays(name):
    traces = {}
    for seed in (1, 1, 2, 2):
        error, world = run_reduce_scatter(matmul_reduce_scatter, seed, strategy=STRATEGIES[name](seed))
        assert error < 1e-2
        traces.setdefault(seed, set()).add((world.trace, world.steps))
    assert [len(each) for each in traces.values()] == [1, 1] and traces[1] != traces[2]


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_was_recorded_is_replayed(name):
    recorded = Recorded(STRATEGIES[name](3))
    run_reduce_scatter(matmul_reduce_scatter, 3, strategy=recorded)
    again = Recorded(Replay(recorded.turns, recorded.draws))
    error, _ = run_reduce_scatter(matmul_reduce_scatter, 3, strategy=again)
    assert error < 1e-2 and again.turns == recorded.turns


def test_the_plain_schedule_ends():
    error, _ = run_reduce_scatter(matmul_reduce_scatter, 0, strategy=Replay())
    assert error < 1e-2


def test_priorities_find_what_chance_hardly_does():
    def fails(strategy):
        world, locks = World(1, strategy=strategy), words(2)
        try:
            world.run(lambda rank: world.launch(crossed_kernel, (2,), locks, 2))
        except DeadlockError:
            return True
        return False

    assert any(fails(PriorityOrder(seed, depth=2, steps=12)) for seed in range(40))


def test_a_put_is_right_in_every_order_and_wrong_in_each_without_its_fence():
    for last, want in (((2, 1), None), ((0, 1), RaceError)):
        search, found = Exploration(400), []
        for order in search:
            try:
                run_put(puts, 0, last=last, strategy=order)
            except Redundant:
                continue
            except RaceError as error:
                found.append(type(error))
        assert set(found) == ({want} if want else set())
        assert search.complete, search.runs
