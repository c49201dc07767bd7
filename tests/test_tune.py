"""`tileweave.tune`: what is measured, kept, told to all ranks and used, with a clock that says what the test wants."""

import importlib
import json
import os
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tileweave
from tileweave.bench import sweep
from tileweave.fabric import FabricTimeout, fabric_of
from tileweave.fabric.world import current_group
from tileweave.ops import route as routing
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_reduce_scatter import operator, reference, relative_error, tolerance
from tileweave.ops.moe.check import choose, choose_combine, combine_problem_of, most_rows
from tileweave.ops.moe.routing import Experts
from tileweave.ops.plans import contenders
from tileweave.planner import Plan, Problem
from tileweave.planner import plan as planner
from tileweave.planner.tuned import Tuned, code_hash, path_of, read, write

tuning = importlib.import_module("tileweave.tune")
OP, SIZES = "matmul_reduce_scatter", {"m": 256, "n": 128, "k": 128}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def world():
    with tileweave.virtual_world(2, device="cpu") as world:
        yield world


@pytest.fixture
def clock(monkeypatch):
    """Makes plans the faster the less `us(rank, index of the plan)` says. Returns how often each rank asked."""
    asked = [0, 0]

    def install(us):
        @contextmanager
        def fake(fabric):
            def timer(call):
                call()
                return read

            def read():
                asked[fabric.rank] += 1
                return us(fabric.rank, (asked[fabric.rank] - 1) % count)

            yield timer

        site = Site("emulated", 2, 4, torch.device("cpu"), None)
        count = len(contenders(OP, site, SIZES, torch.bfloat16)[1])
        monkeypatch.setitem(tuning.CLOCKS, "cpu", fake)
        return asked

    return install


def tuned(world):
    first, second = world.run(lambda rank, group: tileweave.tune(OP, SIZES, group=group))
    assert first == second
    return first


def operands():
    a, b = [torch.randn(256, 64).bfloat16() for _ in range(2)], [torch.randn(64, 128).bfloat16() for _ in range(2)]
    return a, b, reference(a, b)


def test_calls_use_what_was_fastest_also_where_an_earlier_one_was_prepared(world, clock, monkeypatch):
    asked, used = clock(lambda rank, index: 10.0 - index), []
    fused = operator.fused
    monkeypatch.setattr(operator, "fused", lambda *args: (used.append(args[5]), fused(*args))[1])
    a, b, truth = operands()

    def call(rank, group):
        return tileweave.matmul_reduce_scatter(a[rank], b[rank], group)

    world.run(call)
    before = used[-1]
    found = tuned(world)
    assert asked == [3 * len(found.times)] * 2 and not found.cached
    assert found.times == tuple(sorted(found.times, key=lambda each: each[1]))
    used.clear()
    out = torch.cat(world.run(call))
    assert relative_error(out, truth) <= tolerance(torch.bfloat16, 2, True)
    assert [replace(plan, reason="") for plan in used] == [replace(found.plan, reason="")] * 2
    assert used[0].to_dict() != before.to_dict()
    told = world.run(lambda rank, group: tileweave.explain(OP, a[rank], b[rank], group))[0]
    assert told.plan == used[0] and told.measured_us == found.measured_us == min(us for _, us in found.times)
    assert told.to_dict()["measured_us"] == found.measured_us and told.predicted_us == found.plan.predicted_us
    assert told.to_dict()["error"] == told.error == found.plan.predicted_us / found.measured_us - 1
    decision = world.run(lambda rank, group: tileweave.plan(OP, SIZES, group=group))[0]
    assert decision.reason == told.reason
    mine = world.run(lambda rank, group: tileweave.explain(OP, a[rank], b[rank], group, plan=before))[0]
    assert mine.plan == before and mine.measured_us is None and mine.error is None


def test_the_slowest_rank_decides_and_all_agree(world, clock):
    """Plan 0 is fast on one rank and slow on the other."""
    clock(lambda rank, index: (100.0 if rank else 1.0) if index == 0 else 5.0 + index)
    found = tuned(world)
    assert found.measured_us == 6.0 and found.times[-1][1] == 100.0


def test_what_is_kept_is_not_measured_again(clock, cache):
    asked = clock(lambda rank, index: 5.0 + index)
    seen = []
    for _ in range(2):
        with tileweave.virtual_world(2, device="cpu") as world:
            seen.append(tuned(world))
    assert [each.cached for each in seen] == [False, True] and seen[0].times == seen[1].times
    assert asked[0] == 3 * len(seen[0].times) and len(os.listdir(cache)) == 1


def test_ranks_that_ask_for_different_calls_are_told_so(world, clock):
    """On each rank, before anything is measured."""
    asked, said = clock(lambda rank, index: 5.0 + index), []

    def run(rank, group):
        with pytest.raises(
            ValueError, match=r"all ranks ask for the same: rank 0 .*'m': 256.*, rank 1 .*'m': 512"
        ) as told:
            tileweave.tune(OP, {**SIZES, "m": 256 << rank}, group=group)
        said.append(str(told.value))

    world.run(run)
    assert len(said) == 2 and len(set(said)) == 1 and asked == [0, 0]


def test_only_the_first_rank_reads(world, clock, monkeypatch):
    """So that ranks that see other files agree."""
    clock(lambda rank, index: 5.0 + index)
    tuned(world)
    who = []
    monkeypatch.setattr(tuning, "read", lambda *args: (who.append(current_group().rank), read(*args))[1])
    assert tuned(world).cached and who == [0]


KEY, PLANS = {"op": "x", "n": [1]}, [Plan(), Plan(stages=3)]


def test_a_measurement_holds_for_the_code_that_it_was_made_with(tmp_path):
    """An edited kernel has another hash, and the cache is asked by it."""
    (tmp_path / "ops" / "x").mkdir(parents=True)
    kernel = tmp_path / "ops" / "x" / "kernel.py"
    seen = []
    for text in ("a = 1", "a = 2", "a = 1"):
        kernel.write_text(text)
        seen.append(code_hash.__wrapped__(tmp_path))
    assert seen[0] == seen[2] != seen[1]
    (tmp_path / "ops" / "constants.json").write_text("{}")
    assert code_hash.__wrapped__(tmp_path) not in seen
    assert (
        tuning._key(OP, Problem(1, 1, 1, 2, 2, 4), SIZES, SimpleNamespace(device=torch.device("cpu"), backend=""))[
            "code"
        ]
        == code_hash()
    )


def spoil(path, how):
    """A cache file that nobody should believe."""
    text = path.read_text()
    values = json.loads(text)
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        changed = {
            "empty": "", "truncated": text[: len(text) // 2], "deep": "[" * 60000, "long": text + " " * (1 << 16),
            "list": "[]", "bytes": "\ufffd", "number": text.replace("2.5", "NaN"), "zero": text.replace("2.5", "0"),
            "digits": text.replace("2.5", "9" * 5000), "text": text.replace("2.5", '"2.5"'),
            "version": json.dumps({**values, "version": 9}), "key": json.dumps({**values, "key": {"op": "y"}}),
            "fewer": json.dumps({**values, "times": values["times"][:1]}),
            "twice": json.dumps({**values, "times": values["times"] * 2}),
            "other plan": text.replace('"stages": 3', '"stages": 999'),
            "no tile": text.replace('"tile"', '"tiles"'),
        }[how]  # fmt: skip
        assert changed != text
        path.write_text(changed, encoding="utf-16" if how == "bytes" else "utf-8")


@pytest.mark.parametrize(
    "how",
    [
        "empty", "truncated", "deep", "long", "list", "bytes", "number", "zero", "digits", "text", "version", "key",
        "fewer", "twice", "other plan", "no tile", "pipe", "folder",
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_was_written_is_told_and_not_used(how):
    write(KEY, [(PLANS[1], 2.5), (PLANS[0], 4.0)])
    assert read(KEY, PLANS) == [(PLANS[1], 2.5), (PLANS[0], 4.0)]
    spoil(path_of(KEY), how)
    with pytest.warns(UserWarning, match="is not used, it is measured anew"):
        assert read(KEY, PLANS) is None


def test_it_is_measured_anew_where_the_file_is_broken(world, clock, cache):
    asked = clock(lambda rank, index: 5.0 + index)
    found = tuned(world)
    (path,) = cache.iterdir()
    path.write_text("{")
    with pytest.warns(UserWarning, match="is not used"):
        assert tuned(world) == found
    assert asked[0] == 6 * len(found.times) and tuned(world).cached


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        write(KEY, [(PLANS[0], 1.0)])


def test_a_user_without_a_home_has_no_cache_and_is_told(monkeypatch):
    """An error of the rank that reads would leave the others waiting."""
    monkeypatch.delenv("TILEWEAVE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.warns(UserWarning, match="is not used, it is measured anew: OSError: there is no home folder"):
        assert read(KEY, PLANS) is None
    with pytest.warns(UserWarning, match="cannot be written: there is no home folder"):
        write(KEY, [(PLANS[0], 1.0)])


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TILEWEAVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert path_of(KEY).parent == tmp_path / "tileweave" and path_of(KEY) != path_of({**KEY, "n": [2]})


def test_a_fault_leaves_the_group_as_it_was(world, monkeypatch):
    @contextmanager
    def broken(fabric):
        def timer(call):
            raise OSError("no clock")

        yield timer

    monkeypatch.setitem(tuning.CLOCKS, "cpu", broken)
    with pytest.raises(OSError, match="no clock"):
        world.run(lambda rank, group: tileweave.tune(OP, SIZES, group=group))
    assert world.tuned == [(), ()]


@pytest.mark.parametrize("op", sorted(op for op in tuning.OPS if op.endswith("attention") or op in sweep.MATMULS))
def test_all_that_the_op_remembers_is_forgotten(op):
    """In each of the channels that it looks for earlier calls in."""
    operator = importlib.import_module(f"tileweave.ops.{op}.operator")
    names = getattr(operator, "CHANNELS", (op,))
    views = {name: {"kind": "launch"} for name in names}
    tuning._forget(SimpleNamespace(views=views.get), op)
    assert views == {name: {} for name in names}


@pytest.mark.parametrize(
    "op, sizes",
    [
        ("all_gather_matmul", {"m": 128, "n": 128, "k": 64}),
        ("matmul_all_reduce", {"m": 128, "n": 128, "k": 128}),
        ("ring_attention", {"heads": 2, "seq": 256, "dim": 64, "causal": 1}),
        ("ulysses_attention", {"heads": 2, "seq": 256, "dim": 64}),
        ("grouped_matmul", {"rows": 96, "hidden": 64, "inner": 128, "experts": 2}),
        ("moe_dispatch_matmul", {"tokens": 32, "hidden": 64, "inner": 64, "experts": 4, "topk": 2}),
        ("moe_matmul_combine", {"tokens": 32, "hidden": 64, "inner": 64, "experts": 4, "topk": 2}),
    ],
)
def test_every_such_op_can_be_tuned(world, monkeypatch, op, sizes):
    """The last plan that is tried is the fastest, and the op takes it."""
    turns = iter(range(1000, 0, -1))

    @contextmanager
    def clock(fabric):
        yield lambda call: (call(), lambda: float(next(turns)))[1]

    monkeypatch.setitem(tuning.CLOCKS, "cpu", clock)
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    first, second = world.run(lambda rank, group: tileweave.tune(op, sizes, group=group))
    assert first == second and len(first.times) >= 2
    decision = world.run(lambda rank, group: tileweave.plan(op, sizes, group=group))[0]
    assert "measured" in decision.reason and decision.plan.comm_sms == first.plan.comm_sms
    assert decision.plan.tile == first.plan.tile

    def told(rank, group):
        return tuning.call_of(op, decision.shape, torch.bfloat16, fabric_of(group), group)()

    def explained(*args, **options):
        return tileweave.explain(op, *args, **options)

    monkeypatch.setitem(tuning.OPS, op, explained)  # what makes a call asks then what it would do
    monkeypatch.setattr(tuning, op, explained)
    for route in world.run(told):
        assert (route.measured_us, route.predicted_us) == (first.measured_us, first.plan.predicted_us)
        assert route.error == first.plan.predicted_us / first.measured_us - 1


def test_the_plain_way_is_taken_where_it_was_measured_faster():
    """By calls that it serves; others have the planner's kernel."""
    site = Site("processes", 4, 132, torch.device("cuda"), None, "it is off", linked=True, nccl=True)
    problem, plans = contenders(OP, site, {"m": 4096, "n": 4096, "k": 4096}, torch.bfloat16)
    assert plans[-1].mechanism == "nccl" and isinstance(problem, Problem)
    there = site._replace(tuned=(Tuned(OP, problem, plans[-1], 12.5),))
    found = routing.by_plan(OP, there, problem, planner, None, "torch and NCCL")
    assert (found.verdict, found.plan, found.measured_us) == ("plain", None, 12.5)
    assert found.predicted_us == plans[-1].predicted_us
    assert routing.by_plan(OP, there, problem, planner, None, None).verdict == "fused"


@pytest.mark.parametrize("op", sweep.MATMULS)
def test_the_first_plan_is_measured_in_other_rings_too(op):
    """Beside as many other plans as without."""
    site = Site("processes", 2, 132, torch.device("cuda"), None, "it is off", linked=True, nccl=True)
    plans = contenders(op, site, {"m": 4096, "n": 4096, "k": 4096}, torch.bfloat16)[1][:-1]
    rings = [plan for plan in plans if replace(plan, stages=0) == replace(plans[0], stages=0)]
    assert 1 <= len(rings) - 1 <= 2 and len({plan.stages for plan in rings}) == len(rings)
    others = [replace(plan, stages=0) for plan in plans if plan not in rings]
    assert len(others) >= 4 and len(set(others)) == len(others)


def test_a_tuned_dispatch_has_the_planners_plan_where_its_own_flags_count_too_few_rows():
    """So that no call falls back for having been tuned."""
    site = Site("processes", 8, 132, torch.device("cuda"), None, "it is off", linked=True, nccl=True)
    sizes = {"tokens": 32768, "hidden": 7168, "inner": 2048, "experts": 256, "topk": 8}
    problem, plans = contenders("moe_dispatch_matmul", site, sizes, torch.bfloat16)
    assert len({plan.comm_sms for plan in plans}) == 3 and len(set(plans)) == len(plans) >= 6
    rings = {plan.stages for plan in plans if replace(plan, stages=0) == replace(plans[0], stages=0)}
    assert len(rings) > 1 and all(plan.predicted_us > 0 for plan in plans)
    fewest = min(plans, key=lambda plan: most_rows(problem, plan))
    there = site._replace(tuned=(Tuned("moe_dispatch_matmul", problem, fewest, 12.5),))
    w, limit = Like(torch.Size((32, 7168, 2048)), torch.bfloat16, site.device), most_rows(problem, fewest)
    routes = [choose(there, w, False, Experts(256, 8), most, None) for most in (limit, limit + 1)]
    assert [route.measured_us for route in routes] == [12.5, None] and all(route.fused for route in routes)
    assert routes[1].plan.comm_sms > routes[0].plan.comm_sms


def test_a_way_back_is_tuned_for_any_rows():
    """Ranks have other numbers of rows, perhaps of experts."""
    site = Site("processes", 8, 132, torch.device("cuda"), None, "it is off", linked=True, nccl=True)
    sizes = {"tokens": 32768, "hidden": 7168, "inner": 2048, "experts": 256, "topk": 8}
    problem, plans = contenders("moe_matmul_combine", site, sizes, torch.bfloat16)
    assert len(set(plans)) == len(plans) == 5 and all(plan.predicted_us > 0 for plan in plans)
    assert len({plan.tile for plan in plans}) == 4
    for taken in plans[-2:]:
        there, chosen = site._replace(tuned=(Tuned("moe_matmul_combine", problem, taken, 12.5),)), []
        for own, rows, tokens in ((32, 8, 4), (31, 99999, 4096)):  # of 255 experts
            w = Like(torch.Size((own, 2048, 7168)), torch.bfloat16, site.device)
            asked = combine_problem_of(there, w, 255, 8 * tokens, 8)
            chosen.append(choose_combine(there, rows, w, asked, None).plan)
        assert chosen == [taken] * 2


def test_plans_are_called_then_captured_then_timed_in_turn(world, monkeypatch):
    """A graph that is captured before the workspace has grown for all would hold what it was; ranks meet in between."""
    log = []

    @contextmanager
    def clock(fabric):
        def timer(call):
            log.append(("capture", fabric.rank, fabric.tuned[0].plan))
            plan = fabric.tuned[0].plan
            return lambda: log.append(("time", fabric.rank, plan)) or 1.0

        yield timer

    def call(rank, group):
        fabric = fabric_of(group)
        eager = lambda: log.append(("call", rank, fabric.tuned[0].plan))  # noqa: E731
        with clock(fabric) as timer:
            return tuning.measured(fabric, OP, None, [PLANS[0], PLANS[1]], eager, timer)

    monkeypatch.setattr(tuning, "ROUNDS", 2)
    found = world.run(call)
    assert found[0] == found[1] == [(plan, 1.0) for plan in PLANS]
    for rank in range(2):
        done = [(what, PLANS.index(plan)) for what, who, plan in log if who == rank]
        assert done == [(what, i) for what in ("call", "capture", "time", "time") for i in range(2)]
    kinds = [what for what, *_ in log]
    assert kinds == ["call"] * 4 + ["capture"] * 4 + ["time"] * 8


def test_all_ranks_are_told_of_a_replay_that_one_has_waited_in_vain_in(world, monkeypatch):
    """None is left waiting for the one that knows."""

    def call(rank, group):
        fabric = fabric_of(group)

        def check():
            if rank == 1:
                raise FabricTimeout(OP, 1, 4, 7, 6)

        monkeypatch.setattr(fabric, "check", check)
        with pytest.raises(FabricTimeout, match=f"{OP}: rank 1 waited") as found:
            tuning.measured(fabric, OP, None, [PLANS[0]], lambda: None, lambda call: lambda: 1.0)
        return found.value.index, found.value.seen, fabric.tuned

    assert world.run(call) == [(4, 6, ())] * 2


def test_nothing_is_measured_without_a_gpu_or_a_kernel(world, clock, tmp_path):
    assert world.run(lambda rank, group: tileweave.tune(OP, SIZES, group=group)) == [None, None]
    clock(lambda rank, index: 1.0)
    assert world.run(lambda rank, group: tileweave.tune(OP, {**SIZES, "n": 12}, group=group)) == [None, None]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        assert tileweave.tune(OP, SIZES) is None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("all_gather", {}), "tune: no planner for op 'all_gather'"),
        ((OP, {"m": 0}), "tune: m must be from 1"),
        (("moe_dispatch_matmul", {"experts": 4}), "tune: topk=8 must be at most experts=4"),
        ((OP, {}, torch.float32), "tune: dtype must be"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        tileweave.tune(*arguments)


@pytest.mark.gpu
def test_on_a_gpu():
    """Virtual ranks: a measurement, what it leaves, and no measurement in a graph."""
    sizes = {"m": 2048, "n": 1024, "k": 1024}
    a, b = (
        [torch.randn(2048, 512, device="cuda").bfloat16() for _ in range(2)],
        torch.randn(512, 1024).cuda().bfloat16(),
    )

    def run(rank, group):
        found = tileweave.tune(OP, sizes, group=group)
        again = tileweave.tune(OP, sizes, group=group)
        return (
            found,
            again,
            tileweave.explain(OP, a[rank], b, group),
            tileweave.matmul_reduce_scatter(a[rank], b, group),
        )

    with tileweave.virtual_world(2, device="cuda") as world:
        (found, again, told, first), (other, _, _, second) = world.run(run)
    assert found == other and not found.cached and again.cached and again.times == found.times
    assert 0 < told.measured_us == found.measured_us < 1e4
    truth = reference(a, [b, b])
    assert relative_error(torch.cat([first, second]), truth) <= tolerance(torch.bfloat16, 2, True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="tune before the capture"):
        tileweave.tune(OP, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op, sizes",
    [
        ("all_gather_matmul", {"m": 2048, "n": 1024, "k": 1024}),
        ("matmul_all_reduce", {"m": 2048, "n": 1024, "k": 1024}),
        ("ring_attention", {"heads": 8, "seq": 4096, "dim": 128, "causal": 1}),
        ("ulysses_attention", {"heads": 8, "seq": 4096, "dim": 128}),
        ("grouped_matmul", {"hidden": 1024, "inner": 512, "experts": 8, "rows": 4096}),
        ("moe_dispatch_matmul", {"hidden": 1024, "inner": 512, "experts": 8, "tokens": 2048, "topk": 2}),
        ("moe_matmul_combine", {"hidden": 1024, "inner": 512, "experts": 8, "tokens": 2048, "topk": 2}),
    ],
)
def test_every_such_op_on_a_gpu(op, sizes):
    """Virtual ranks: what is measured is told by `plan` afterwards, and no graph holds memory any more."""
    with tileweave.virtual_world(2, device="cuda") as world:
        first, second = world.run(lambda rank, group: tileweave.tune(op, sizes, group=group))
        decision = world.run(lambda rank, group: tileweave.plan(op, sizes, group=group))[0]
        held = world.run(lambda rank, group: [each.captured for each in fabric_of(group, "cuda").channels()])
    # A grouped matmul is each rank's own: no other waits for it.
    assert op == "grouped_matmul" or (first == second and held[0])
    assert not any(held[0] + held[1])
    assert len(first.times) >= 2 and 0 < first.measured_us < 1e5
    assert "measured" in decision.reason and decision.plan.tile in (first.plan.tile, second.plan.tile)
