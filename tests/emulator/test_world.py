"""Hosts: a thread per rank, one at a time; launches, meetings, touches, failures."""

import gc
import threading
import weakref

import pytest
import torch

from tests.emulator.kernels import primitives as k
from tileweave import lang as gl
from tileweave.emulator import DeadlockError, RaceError, World

SEEDS = range(6)


def test_results_in_rank_order_each_on_a_thread_of_its_own():
    threads = set()

    def fn(rank):
        threads.add(threading.current_thread())
        return rank * 10

    assert World(4).run(fn) == [0, 10, 20, 30]
    assert len(threads) == 4 and not any(thread.is_alive() for thread in threads)


def test_one_thread_runs_at_a_time():
    for seed in SEEDS:
        world, x, inside = World(3, seed), torch.zeros(3, 64), []

        def fn(rank, world=world, x=x, inside=inside):
            for _ in range(3):
                inside.append(rank)
                assert inside == [rank]
                inside.clear()
                world.launch(k.writes, (2,), x[rank, :0], 1.0, 0)
                world.rendezvous()

        world.run(fn)


def test_a_meeting_runs_one_action_and_gives_its_result_to_all():
    for seed in SEEDS:
        calls, world = [], World(3, seed)

        def fn(rank, calls=calls, world=world):
            first = world.rendezvous(lambda: calls.append(rank) or len(calls))
            second = world.rendezvous(lambda: calls.append(rank) or torch.zeros(len(calls)))
            return first, second

        results = world.run(fn)
        assert len(calls) == 2
        assert {first for first, _ in results} == {1}
        assert all(second is results[0][1] for _, second in results)


def test_a_meeting_orders_what_ranks_do():
    for seed in SEEDS:
        x, world = torch.zeros(64), World(2, seed)

        def fn(rank, x=x, world=world):
            if rank == 0:
                world.launch(k.writes, (1,), x, 1.0, 64)
            world.rendezvous()
            if rank == 1:
                world.launch(k.writes, (1,), x, 2.0, 64)
            world.rendezvous()
            world.touch(x, "read")

        world.run(fn)
        assert (x == 2).all()


def test_without_a_meeting_it_is_a_race():
    for seed in SEEDS:
        x, world = torch.zeros(64), World(2, seed)
        with pytest.raises(RaceError, match="a release at scope sys by rank"):
            world.run(lambda rank, w=world, x=x: w.launch(k.writes, (1,), x, 1.0, 64))


def test_touch_shows_races_with_hosts():
    for seed in SEEDS:
        x, world = torch.zeros(64), World(2, seed)

        def fn(rank, x=x, world=world):
            if rank == 0:
                world.launch(k.writes, (1,), x, 1.0, 64)
            else:
                world.touch(x, "read")

        with pytest.raises(RaceError, match=r"host read by rank 1 host, test_world.py:\d+ in fn: world.touch"):
            world.run(fn)


def test_memory_and_order_last_over_runs():
    x, world = torch.zeros(64), World(2)
    world.run(lambda rank: world.launch(k.writes, (1,), x, 1.0, 64) if rank == 0 else None)
    world.run(lambda rank: world.launch(k.writes, (1,), x, 2.0, 64) if rank == 1 else None)
    assert (x == 2).all()


class Oops(Exception):
    pass


@pytest.mark.parametrize("others", ["meet", "wait", "end"])
def test_an_exception_of_one_rank_ends_the_run(others):
    for seed in SEEDS:
        flags, out, world = torch.zeros(3, 24, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), World(3, seed)
        cleaned, before = [], threading.active_count()

        def fn(rank, world=world, flags=flags, out=out, cleaned=cleaned):
            try:
                if rank == 1:
                    raise Oops("rank 1")
                if others == "meet":
                    world.rendezvous()
                elif others == "wait":
                    world.launch(k.waits, (1,), rank, 3, flags, 24, 0, 1, out)
            finally:
                cleaned.append(rank)

        with pytest.raises(Oops, match="rank 1"):
            world.run(fn)
        assert sorted(cleaned) == [0, 1, 2]
        assert threading.active_count() == before
        assert world.run(lambda rank: rank) == [0, 1, 2]


def test_an_exception_of_a_kernel_ends_the_run():
    @gl.jit
    def fails(x):
        gl.store(x + undefined_name, 1)  # noqa: F821

    before = threading.active_count()
    world = World(2)
    with pytest.raises(NameError, match="undefined_name"):
        world.run(lambda rank: world.launch(fails, (1,), torch.zeros(1)))
    assert threading.active_count() == before


def test_a_rank_that_does_not_come_to_a_meeting():
    world = World(3)
    with pytest.raises(DeadlockError, match=r"ranks \[1\] to come to the rendezvous"):
        world.run(lambda rank: world.rendezvous() if rank != 1 else None)


def test_ranks_that_meet_by_other_means_than_the_world():
    meeting = threading.Barrier(2)
    threads = []

    def fn(rank):
        threads.append(threading.current_thread())
        meeting.wait()

    for seed in SEEDS:
        with pytest.raises(
            DeadlockError,
            match=r"rank [01]'s thread has run for 0\.1 s.* now at test_world\.py:\d+ in fn: meeting\.wait\(\)\. Ranks",
        ):
            World(2, seed, host_timeout=0.1).run(fn)
    assert all(thread.daemon for thread in threads)
    meeting.abort()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_lost_thread_ends_when_it_calls_the_world():
    go, ended, threads = threading.Event(), [], []
    world = World(1, host_timeout=0.1)

    def fn(rank):
        threads.append(threading.current_thread())
        try:
            go.wait()
            world.rendezvous()
        finally:
            ended.append(rank)

    with pytest.raises(DeadlockError, match="host_timeout"):
        world.run(fn)
    assert world.run(lambda rank: rank) == [0]
    go.set()
    threads[0].join(timeout=10)
    assert ended == [0]


def test_worlds_within_worlds_and_beside_each_other():
    def inner(rank):
        x, world = torch.zeros(2, 64), World(2, rank)
        world.run(lambda r: world.launch(k.writes, (1,), x[r], 1.0, 64))
        return x.sum().item()

    assert World(2).run(inner) == [128, 128]
    results: list = [None] * 3
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, inner(i))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [128] * 3


def test_limited_sms_run_ctas_in_turn():
    x = torch.zeros(256)
    for sms in (1, 2, 4, None):
        world = World(1, sms=sms)
        world.run(lambda rank, w=world: w.launch(k.adds, (4,), x, x, 256, 64))
    assert (x == 4).all()


def test_launch_arguments():
    world, x = World(1), torch.zeros(64)
    with pytest.raises(TypeError, match="missing a required argument"):
        world.run(lambda rank: world.launch(k.writes, (1,), x))
    with pytest.raises(ValueError, match="meta"):
        world.run(lambda rank: world.launch(k.writes, (1,), x.to("meta"), 1.0, 64))
    world.run(lambda rank: world.launch(k.writes, (1,), x, value=gl.constexpr(3.0), B=64, num_warps=4, num_stages=2))
    assert (x == 3).all()


@pytest.mark.parametrize("call", ["launch", "rendezvous", "touch"])
def test_calls_outside_of_a_run(call):
    args = {"launch": (k.writes, (1,)), "rendezvous": (), "touch": (torch.zeros(1), "read")}[call]
    with pytest.raises(RuntimeError, match=f"World.{call} is called inside of the function given to World.run"):
        getattr(World(1), call)(*args)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"ranks": 1, "sms": 0}, "sms must be at least 1"),
        ({"ranks": 1, "reduce_scope": "cta"}, "reduce_scope must be 'gpu' or 'sys', got 'cta'"),
        ({"ranks": 2, "delayed": (2,)}, r"delayed ranks \[2\]"),
        ({"ranks": 1, "host_timeout": 0}, "host_timeout must be positive"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        World(**options)


def test_inputs_that_require_grad_and_tensors_without_elements():
    x, world = torch.zeros(64, requires_grad=True), World(1)
    empty = torch.zeros(0)
    y = torch.zeros(64)
    world.run(lambda rank: world.launch(k.adds, (1,), x, y, 64, 64))
    world.run(lambda rank: world.launch(k.adds, (1,), empty, empty, 0, 64))
    assert (y == 1).all()


def test_reads_of_other_parts_are_found_after_a_meeting():
    """What a memory remembers is dropped at a meeting; what is read after it is remembered again."""
    x, world = torch.zeros(256), World(2)

    def fn(rank):
        if rank == 0:
            world.launch(k.writes, (1,), x, 1.0, 256)
        world.rendezvous()
        if rank == 1:
            world.touch(x[64:128], "read")
        else:
            world.launch(k.writes, (1,), x, 2.0, 256)

    with pytest.raises(RaceError, match="x"):
        world.run(fn)


def test_a_run_leaves_the_garbage_collector_as_it_was():
    before, seen = gc.get_threshold(), []

    def fn(rank):
        seen.append(gc.get_threshold())
        raise KeyError(rank)

    with pytest.raises(KeyError):
        World(1).run(fn)
    assert gc.get_threshold() == before and seen[0][0] > before[0] and gc.get_freeze_count() == 0


def test_what_runs_leave_is_collected_without_being_asked_for():
    """Cycles that hold tensors are few objects and much memory: a run's must not live until the process ends."""

    class Cycle:
        def __init__(self):
            self.itself = self

    left = weakref.WeakSet()
    for _ in range(8):
        World(1).run(lambda rank: left.add(Cycle()))
    kept = [[] for _ in range(20_000)]  # enough to look at what is new, too few to look at everything
    assert kept and not left


def test_of_runs_in_two_threads_the_last_to_end_leaves_the_garbage_collector_as_it_was():
    before, both_run, first_is_over = gc.get_threshold(), threading.Barrier(2), threading.Event()

    def first():
        World(1).run(lambda rank: both_run.wait(10))
        first_is_over.set()

    def second(rank):
        both_run.wait(10)
        assert first_is_over.wait(10)
        seen.append(gc.get_threshold()[0])

    seen, thread = [], threading.Thread(target=first)
    thread.start()
    World(1).run(second)
    thread.join()
    assert seen[0] > before[0] and gc.get_threshold() == before and gc.get_freeze_count() == 0
