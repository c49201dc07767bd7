"""Plans of the op: choices, refusals and predictions; and how long its kernel is."""

import ast
import dataclasses
from pathlib import Path

import pytest

from tests.ops.all_gather_matmul.problems import plan
from tileweave.ops.all_gather_matmul import kernel
from tileweave.planner.all_gather_matmul import Problem, block_tiles, candidates, plan_for, unsupported

BIG = Problem(rows=1024, ns=(8192,), k=8192, world=8, sms=132)


# Measured between two H200s: 4096^3 and 8192^3 take 98 and 744 us so, by communicators 120 and 744 at best.
@pytest.mark.parametrize("world, rows, n, k", [(2, 2048, 2048, 4096), (2, 4096, 4096, 8192), (8, 2048, 8192, 8192)])
def test_between_gpus_the_copy_engine_brings_large_shards(world, rows, n, k):
    chosen = plan_for(Problem(rows, (n,), k, world, 132))
    assert (chosen.mechanism, chosen.schedule, chosen.comm_sms) == ("copy_engine", "inter_sm", 0)
    assert "copy engine" in chosen.reason and chosen.predicted_us > 0


@pytest.mark.parametrize("world, rows, n", [(2, 4096, 4096), (8, 1024, 3584), (8, 2048, 8192)])
def test_within_a_gpu_a_few_sms_communicate(world, rows, n):
    chosen = plan_for(Problem(rows, (n,), 8192, world, 132, linked=False))
    assert (chosen.mechanism, chosen.schedule) == ("tma", "inter_sm") and 2 <= chosen.comm_sms <= 12
    assert f"push by {chosen.comm_sms} of 132 SMs" in chosen.reason and chosen.predicted_us > 0


def test_more_compute_needs_fewer_communicators():
    within = dataclasses.replace(BIG, linked=False)
    few, many = (plan_for(dataclasses.replace(within, ns=(n,))).comm_sms for n in (57344, 2048))
    assert few < many


def test_few_rows_are_joined_and_too_many_ranks_have_no_copy_engine():
    few = plan_for(Problem(32, (14336,), 8192, 2, 132))
    assert (few.mechanism, few.schedule) == ("tma", "one_shot") and "one shot" in few.reason
    assert plan_for(dataclasses.replace(BIG, world=65)).mechanism == "tma"


def test_one_rank_and_one_sm():
    alone = plan_for(dataclasses.replace(BIG, world=1))
    assert (alone.comm_sms, alone.schedule) == (0, "inter_sm") and "plain matmul" in alone.reason
    narrow = plan_for(dataclasses.replace(BIG, sms=1, linked=False))
    assert (narrow.comm_sms, narrow.schedule) == (1, "none") and "gather first" in narrow.reason


@pytest.mark.parametrize("rows, ns, k", [(1, (8,), 8), (1, (8192,), 8), (8192, (8,), 8192), (16384, (57344, 8), 8192)])
@pytest.mark.parametrize("world, sms", [(1, 132), (2, 66), (8, 16), (126, 1), (3, 2)])
def test_every_problem_has_a_plan(rows, ns, k, world, sms):
    problem = Problem(rows, ns, k, world, sms, linked=False)
    chosen = plan_for(problem)
    assert unsupported(problem, chosen) is None and chosen.reason
    costs = [cost for cost, _ in candidates(problem)]
    assert costs == sorted(costs)


def test_the_prediction_counts_what_is_sent():
    thin = dataclasses.replace(BIG, ns=(64,))
    sent = 2 * thin.rows * thin.k * (thin.world - 1)
    assert plan_for(thin).predicted_us >= sent / 350e3
    assert plan_for(dataclasses.replace(thin, world=1, rows=8192)).predicted_us < plan_for(thin).predicted_us


@pytest.mark.parametrize("comm_sms", [1, 2, 8, 16])
@pytest.mark.parametrize("rows, k", [(1, 8), (1024, 8192), (8192, 64), (100000, 512), (130, 136)])
@pytest.mark.parametrize("flags", [1, 15, 63])
def test_blocks_cover_the_shard_with_the_flags_there_are(flags, rows, k, comm_sms):
    problem = Problem(rows, (64,), k, 2, 132)
    height = block_tiles(problem, plan(comm_sms=comm_sms), flags)
    tiles = -(-rows // 128)
    assert 1 <= height <= tiles and -(-tiles // height) <= flags
    assert height == tiles or height * -(-k // 64) >= 4 * comm_sms


# Roles that a world of one has no use for, and of `load` what it has beside its load from own rows.
ALL = ("place", "before_load")
JOINED = ("before_load_joined", "load_joined")
COMMUNICATORS = (*ALL, "tile_of", "receiver", "tell", "communicate")
ADDED_ROLES = {
    "tma": (*COMMUNICATORS, "fetch", "send"),
    "register": (*COMMUNICATORS, "copy_tile", "lines_to"),
    "multimem": (*COMMUNICATORS, "broadcast_tile"),
    "copy_engine": (*ALL, "give_back", "await_places_kernel"),
    "tma, one shot": ("place", *JOINED, *COMMUNICATORS[2:], "fetch", "send"),
    "register, one shot": ("place", *JOINED, *COMMUNICATORS[2:], "copy_tile", "lines_to"),
}
# Lines of a role that are another schedule's, another mechanism's, or of scales.
OF_OTHERS = {
    "load_joined": ["load_b(", "keep("],
    "tell": ["send_scales(", "if work.DIRECT or work.MULTIMEM:", "signal_all(", "else:"],
    "communicate": [
        "if work.MULTIMEM:",
        "_blocks(",
        "if work.BY_REGISTERS:",
        "_blocks(",
        "else:",
        "if work.LAST:",
        "2 if work.BLOCKS",
    ],
    "fetch": ["TILE_BYTES: gl.constexpr", "BESIDE: gl.constexpr", "if work.BLOCKS:", "fetch_row_scales("],
    "send": ["if work.BLOCKS:", "send_row_scales("],
    "before_load": ["if work.MULTIMEM:", "fence_proxy_alias("],
}
ADDED_TO_LOAD = """    else:
        where = [place(work, owner, epoch), gl.where(there, row, work.rows), step * work.slots.block_shape[3]]
        source = owner if work.DIRECT else flags.rank
        gl.load_async(work.slots, source, where, operand_buf(mm, at, work.slots), bar)
"""
ADDED = "# ---------------------------------------------------------------- what the all-gather adds"


def lines_of(text):
    """Of each function behind `what the all-gather adds`: decorators and all, but for docstrings."""
    first, counts = text[: text.index(ADDED)].count("\n"), {}
    for role in ast.parse(text).body:
        if isinstance(role, ast.FunctionDef) and role.lineno > first:
            docstring = role.body[0]
            lines = role.end_lineno - role.decorator_list[0].lineno + 1
            counts[role.name] = lines - (docstring.end_lineno - docstring.lineno + 1)
    return counts


@pytest.mark.parametrize("mechanism", ADDED_ROLES)
def test_a_mechanism_adds_fewer_than_fifty_lines_to_the_kernel_of_one_gpu(mechanism):
    """What all inter-SM kernels share is in tiles/; 8-bit and 4-bit operands have some lines more for their scales."""
    text = Path(kernel.__file__).read_text()
    counts = lines_of(text)
    for role, others in OF_OTHERS.items():
        body = text[text.index(f"def {role}(") :].split("@gl.jit")[0]
        assert all(line in body for line in others)
        counts[role] -= len(others)
    assert ADDED_TO_LOAD in text
    added = 0 if "one shot" in mechanism else len(ADDED_TO_LOAD.splitlines())
    count = added + sum(counts[role] for role in ADDED_ROLES[mechanism])
    assert 30 < count < 50, count
    assert set(counts) == {
        "load",
        "keep",
        "locate_joined",
        "all_gather_matmul_kernel",
        "send_scales",
        "load_scales_of",
    }.union(*ADDED_ROLES.values())
