"""Groups of some ranks of an emulated world, used in turn by a rank that is in both: apart, they are clean."""

from functools import partial

import pytest
import torch

import tileweave as tw
from tileweave.checker import CallableCase, check, run_trial
from tileweave.checker.ops import _made
from tileweave.checker.problems import PROBLEMS
from tileweave.checker.setups import _plan
from tileweave.fabric import fabric_of
from tileweave.ops.matmul_reduce_scatter import relative_error

GROUPS = (0, 1), (2, 1)  # of three ranks: one of them is in both, behind another one each time
TILE = (64, 64, 64)
SIZES = {"m": 16, "n": 72, "k": 2 * 72}
INTER = _plan("inter_sm", comm_sms=1, tile=TILE)
TOKENS = {"tokens": 20, "hidden": 8, "inner": 8, "experts": 6, "topk": 2}
CASES = {
    "matmul_reduce_scatter": (SIZES, _plan("intra_sm", tile=TILE)),
    "all_gather_matmul": (SIZES | {"k": 72}, INTER),
    "matmul_all_reduce": (SIZES | {"m": 8, "n": 136}, INTER),
    "all_reduce": ({"m": 16, "n": 24}, {}),
    "all_to_all": ({"m": 16, "n": 24}, {}),
    "ring_attention": ({"heads": 1, "kv_heads": 1, "seq": 64, "dim": 64}, _plan("inter_sm", "tma", 1, (64, 16, 64), 3)),
    "ulysses_attention": ({"heads": 2, "kv_heads": 2, "seq": 64, "dim": 64}, _plan("inter_sm", "tma", 1, TILE, 3)),
    "moe_dispatch_matmul": (TOKENS, _plan("inter_sm", comm_sms=2, tile=TILE)),
}


def calls_in_turn(world, op, members=GROUPS, shared=False, calls=2):
    """Each group's ranks make calls of an op, a rank of both groups in turn; all results are right."""
    sizes, options = CASES[op]
    problem, groups = PROBLEMS[op], [world.part(ranks) for ranks in members]
    if shared:
        groups[1].workspace = groups[0].workspace
    numbers = [range(call * len(groups), (call + 1) * len(groups)) for call in range(calls)]
    operands = [[problem.operands(sizes, 2, number) for number in of_call] for of_call in numbers]

    def program(rank, _):
        made = []
        for of_call in operands:
            for x, part in zip(of_call, groups, strict=True):
                if rank in part.ranks:
                    group = part.of(rank)
                    made.append((x, group.rank, problem.call(_made(x[group.rank], group), group, **options)))
        return made

    for rank, made in enumerate(world.run(program)):
        assert len(made) == calls * sum(rank in ranks for ranks in members)
        for x, number, outs in made:
            for out, truth in zip(outs, problem.truth(x, options)[number], strict=True):
                assert relative_error(out, truth) <= problem.tolerance(2, False)


@pytest.mark.parametrize("op", CASES)
def test_ops_are_clean_in_two_overlapping_groups(op):
    report = check(CallableCase(partial(calls_in_turn, op=op), ranks=3), range(3), processes=1)
    assert report.ok and report.schedules == 3 and report.flag_uses == 2, report.story


@pytest.mark.parametrize("members", [((0, 1), (2, 3)), ((0, 1), (0, 1)), ((0, 1), (1, 2), (2, 0))])
def test_disjoint_groups_equal_ones_and_a_circle_of_them(members):
    function = partial(calls_in_turn, op="all_reduce", members=members)
    report = check(CallableCase(function, ranks=1 + max(map(max, members))), range(3), processes=1)
    assert report.ok and report.schedules == 3, report.story


@pytest.mark.parametrize("op", ["all_reduce", "matmul_reduce_scatter"])
def test_groups_that_share_flags_are_found(op):
    report = check(CallableCase(partial(calls_in_turn, op=op, shared=True), ranks=3), range(3), processes=1)
    assert not report.ok and report.finding.kind != "error", report.story
    assert report.schedules == 1


def test_a_meeting_of_some_ranks_orders_these_only():
    """Rank 2 reads what rank 0 has written, and has met rank 1 only, who met rank 0 before it, or behind it."""

    def program(world, late):
        x, parts = torch.zeros(4), [world.part((0, 1)), world.part((1, 2))]

        def of_rank(rank, group):
            if rank == 0:
                world.touch(x, "write")
            for part in parts[::-1] if late else parts:
                if rank in part.ranks:
                    fabric_of(part.of(rank)).rendezvous()
            if rank == 2:
                world.touch(x, "read")

        world.run(of_rank)

    assert check(CallableCase(partial(program, late=False), ranks=3), range(6), processes=1).ok
    finding = check(CallableCase(partial(program, late=True), ranks=3), range(6), processes=1).finding
    assert finding.kind == "race" and "host write" in finding.text and "host read" in finding.text


def test_a_rank_that_does_not_come_to_its_group_is_named():
    def program(world):
        part = world.part((0, 2))
        world.run(lambda rank, group: rank == 0 and fabric_of(part.of(0)).rendezvous())

    finding = run_trial(CallableCase(program, ranks=3), 0).finding
    assert finding.kind == "deadlock" and "ranks [2] to come to the rendezvous" in finding.text


def test_groups_are_of_ranks_of_the_world_and_for_them():
    with tw.virtual_world(3, device="cpu") as world:
        for ranks in ([], [0, 0], [0, 3], [-1]):
            with pytest.raises(ValueError, match="ranks: expected some of 0 to 2, each once"):
                world.part(ranks)
        part = world.part((2, 0))
        with pytest.raises(ValueError, match=r"rank: expected one of \[2, 0\], got 1"):
            part.of(1)

        def program(rank, group):
            x = torch.full((4,), float(rank))
            if rank == 1:
                with pytest.raises(RuntimeError, match="this thread is no rank of that world"):
                    tw.all_reduce(x, part.of(0))
                return None
            with pytest.raises(ValueError, match="expected this thread's"):
                tw.all_reduce(x, part.of(2 - rank))
            return tw.all_gather(torch.full((1, 8), float(rank)), part.of(rank))[:, 0].tolist()

        assert world.run(program) == [[2.0, 0.0], None, [2.0, 0.0]]
