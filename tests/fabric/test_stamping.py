"""What kernels' timestamps say: as a timeline on any machine, stored by kernels on a GPU."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import tileweave as tw
from tileweave import Plan
from tileweave.checker.problems import PROBLEMS
from tileweave.fabric import stamping as module
from tileweave.fabric.stamping import BETWEEN, RESIDENT, Launch, stamping, timeline_of, to_launch
from tileweave.lang.stamps import END, FLAG, ID_BITS, MAIN, MBARRIER, SLOTS, START, Site


def stored(stamps, ctas=1, warps=1, rank=0, sites=()):
    """A launch that has stored (ns, id) of each (CTA, warp)."""
    words = torch.zeros(ctas, warps, SLOTS, dtype=torch.int64)
    for (cta, warp), each in stamps.items():
        for slot, (ns, number) in enumerate(each):
            word = ((ns << ID_BITS) | number) % (1 << 64)
            words[cta, warp, slot] = word - (1 << 64) if word >> 63 else word
    return Launch(rank, 0, SimpleNamespace(name="a_kernel"), None, list(sites), words), words


def told(timeline):
    return [(s.rank, s.cta, s.role, s.kind, s.start, s.end) for s in timeline.spans]


def test_waits_and_what_is_between_them():
    sites = [Site(MBARRIER, "load_role", "a:1"), Site(FLAG, "load_role", "b:2")]
    loader = [(1000, START), (2000, 2), (3000, 3), (5000, 4), (5500, 5), (9000, END)]
    launch = stored({(0, 0): [(1000, START + 17), (10_000, END)], (0, 1): loader}, warps=2, sites=sites)
    timeline = timeline_of([launch])
    assert told(timeline) == [
        (0, 0, "SM", RESIDENT, 0.0, 9.0),
        (0, 0, "load_role", MBARRIER, 1.0, 2.0),
        (0, 0, "load_role", BETWEEN, 2.0, 4.0),
        (0, 0, "load_role", FLAG, 4.0, 4.5),
    ]
    assert timeline.spans[0].name == "SM 17" and timeline.spans[1].place == "a:1"
    assert timeline.now == 9.0 and timeline.lost == 0


def test_a_kernel_without_roles_is_at_work_from_its_start_to_its_end():
    launch = stored({(0, 0): [(0, START), (2000, 2), (3000, 3), (7000, END)]}, sites=[Site(FLAG, MAIN, "")])
    spans = [(kind, start, end) for _, _, role, kind, start, end in told(timeline_of([launch])) if role == MAIN]
    assert spans == [(BETWEEN, 0.0, 2.0), (FLAG, 2.0, 3.0), (BETWEEN, 3.0, 7.0)]


def test_warps_at_the_same_places_are_one_partition_and_its_code_again_another():
    sites = [Site(MBARRIER, "multiply_role", ""), Site(MBARRIER, "multiply_role", "")]
    wait = {site: [(0, START), (10, 2 * site + 2), (20, 2 * site + 3), (30, END)] for site in (0, 1)}
    launch = stored({(0, warp): wait[warp // 2] for warp in range(4)}, warps=5, sites=sites)
    waits = [span for span in told(timeline_of([launch])) if span[3] == MBARRIER]
    assert [role for _, _, role, *_ in waits] == ["multiply_role", "multiply_role 2"]


def test_ranks_have_one_clock_which_may_start_again_between_them():
    late, early = (stored({(0, 0): [(at, START), (at + 500, END)]}, rank=rank) for rank, at in ((0, 3), (1, -1000)))
    spans = told(timeline_of([late, early]))
    assert [(rank, start, end) for rank, _, role, _, start, end in spans if role == "SM"] == [
        (0, pytest.approx(1.003), pytest.approx(1.503)),
        (1, 0.0, pytest.approx(0.5)),
    ]


def test_what_does_not_fit_is_counted():
    many = [(0, START), *((n, 2 + n % 2) for n in range(SLOTS - 2)), (SLOTS, END)]
    timeline = timeline_of([stored({(0, 0): many}, sites=[Site(MBARRIER, MAIN, "")])])
    assert timeline.lost == 1 and timeline.now == SLOTS / 1e3
    assert sum(kind == MBARRIER for _, _, _, kind, *_ in told(timeline)) == (SLOTS - 2) // 2
    assert timeline_of([]) == timeline_of([])


def test_without_stamps_a_fabric_launches_what_it_compiled():
    compiled = SimpleNamespace()
    assert to_launch(compiled, 1, 0) is compiled
    with stamping(), pytest.raises(AttributeError):
        to_launch(compiled, 1, 0)  # has no PTX
    assert to_launch(compiled, 1, 0) is compiled


def test_each_launch_since_again_is_in_the_timeline(monkeypatch):
    """Launches of a rank are counted anew, so that the same calls find what was built for them."""
    built = []
    monkeypatch.setattr(module, "warps_of", lambda ptx: 1)
    monkeypatch.setattr(module, "stamped", lambda ptx, address: (ptx, []))
    monkeypatch.setattr(module, "rebuilt", lambda compiled, text: built.append(compiled) or f"{text} stamped")
    zeros = torch.zeros
    monkeypatch.setattr(module.torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda device: None)
    kernels = [SimpleNamespace(asm={"ptx": name}, name=name) for name in "ab"]
    with stamping() as stamps:
        assert stamps.timeline().spans == []
        for calls in (2, 1):
            for i in range(calls):
                for rank in (0, 1):
                    assert stamps.to_launch(kernels[i], 1, rank) == f"{'ab'[i]} stamped"
                    words = stamps._launches[rank, i].words
                    words[0, 0, :2] = torch.tensor([START, (1 << ID_BITS) + END])
            assert set(stamps.timeline().kernels.values()) == set("ab"[:calls])
            launches = {(span.rank, span.launch) for span in stamps.timeline().spans}
            assert launches == {(rank, i) for rank in (0, 1) for i in range(calls)}
            stamps.again()
    assert len(built) == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op, schedule, tile, roles",
    [
        ("matmul_reduce_scatter", "intra_sm", (128, 256, 64), {"multiply_role 2", "store_role 2"}),
        ("all_gather_matmul", "inter_sm", (128, 256, 64), {"multiply_role 2", "store_role 2", "communicate"}),
        ("all_gather_matmul", "inter_sm", (64, 128, 64), {"multiply_role", "communicate"}),
        ("ring_attention", "inter_sm", (64, 64, 64), {"consume_role", "communicate"}),
    ],
)
def test_roles_store_when_they_wait(op, schedule, tile, roles):
    problem, ranks = PROBLEMS[op], 2
    sizes = problem.sizes_for(ranks, {})
    operands = problem.operands(sizes, ranks, 0)
    plan = Plan("tma", schedule, tile, 3, comm_sms=2 if schedule == "inter_sm" else 0)
    with tw.virtual_world(ranks, device="cuda") as world, stamping() as stamps:
        mine = [tuple(x.to(world.device) for x in each) for each in operands]

        def call(rank, group):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            outs = problem.call(mine[rank], group, plan=plan)
            events[1].record()
            return events, outs

        world.run(call)
        stamps.again()
        results = world.run(call)
        timeline = stamps.timeline()
    for rank, (events, outs) in enumerate(results):
        for out, truth in zip(outs, problem.truth(operands, {})[rank], strict=True):
            assert tw.ops.matmul_reduce_scatter.relative_error(out.cpu(), truth) < 0.02
        spans = [span for span in timeline.spans if span.rank == rank]
        seen = {span.role for span in spans}
        assert roles | {"load_role", "store_role", "SM"} <= seen, seen
        sms = [span.name for span in spans if span.role == "SM"]
        assert len(set(sms)) > len(sms) / 2  # small CTAs may share one
        took = max(span.end for span in spans) - min(span.start for span in spans)
        assert 1 < took <= events[0].elapsed_time(events[1]) * 1e3 + 2  # as the stream's own clock has it
        for cta in {span.cta for span in spans}:
            (whole,) = [span for span in spans if span.cta == cta and span.role == "SM"]
            for role in seen - {"SM"}:
                each = [span for span in spans if span.cta == cta and span.role == role]
                assert all(whole.start <= span.start <= span.end <= whole.end for span in each)
                assert all(before.end <= after.start for before, after in pairwise(each))
    assert timeline.lost == 0
