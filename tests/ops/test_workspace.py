"""How much workspace a call takes, which is what its page says, and what TILEWEAVE_WORKSPACE does.

A page counts slots; the fabric has a block of flags besides, and what rounding adds. Where only memory counts no kernel
is run.
"""

import math

import pytest
import torch

import tileweave as tw
from tileweave.checker.ops import OpCase
from tileweave.checker.problems import PROBLEMS
from tileweave.fabric.bound import SETTING
from tileweave.fabric.emulated import EmulatedFabric
from tileweave.planner.tiling import part_rows

RANKS, WIDTH = 3, 2  # WIDTH: bytes of a bfloat16
BEYOND = 6144  # bytes of flags and rounding, in two channels


def up(size, grain):
    return math.ceil(size / grain) * grain


def of_reduce_scatter(s, plan, options):
    apart = options.get("deterministic") or plan.schedule in ("one_shot", "none")
    above = RANKS * part_rows(plan.tile) if plan.schedule == "one_shot" else 0
    return 2 * (s["m"] + above if apart else s["m"] // RANKS) * s["n"] * WIDTH


def of_all_gather(s, plan, options):
    rows = {"one_shot": s["m"] // RANKS * (RANKS + 1)}.get(plan.schedule, s["m"])
    if plan.mechanism == "multimem":
        rows = RANKS * up(s["m"] // RANKS, plan.tile[0])
    slots = 1 if plan.mechanism == "copy_engine" else 2
    return slots * rows * up(s["k"], plan.tile[2]) * WIDTH


def of_all_reduce(s, plan, options):
    if plan.schedule == "none":
        return 2 * s["m"] * s["n"] * WIDTH
    if plan.schedule == "one_shot":
        return 2 * RANKS * s["m"] * s["n"] * WIDTH
    rows = up(s["m"], plan.tile[0]) if plan.schedule == "inter_sm" else s["m"]
    return 2 * rows * RANKS * up(s["n"] // RANKS, plan.tile[1]) * WIDTH


def of_ring(s, plan, options):
    heads = s["kv_heads"]
    peers = heads // (RANKS - 1) * (RANKS - 1) if plan.schedule == "two_blocks" else heads * (RANKS - 1)
    return 2 * 2 * peers * s["seq"] // RANKS * s["dim"] * WIDTH


def of_ulysses(s, plan, options):
    heads = 2 * s["heads"] // RANKS + 2 * max(s["kv_heads"] // RANKS, 1)
    return 2 * RANKS * heads * s["seq"] // RANKS * s["dim"] * WIDTH


def of_collective(s, plan, options):
    return 2 * s["m"] * s["n"] * WIDTH


PAGES = {
    "matmul_reduce_scatter": of_reduce_scatter, "all_gather_matmul": of_all_gather, "matmul_all_reduce": of_all_reduce,
    "ring_attention": of_ring, "ulysses_attention": of_ulysses, "reduce_scatter": of_collective,
    "all_reduce": of_collective, "all_to_all": of_collective,
    "all_gather": lambda s, plan, options: of_collective(s, plan, options) // RANKS,
    "attention": lambda *_: 0, "grouped_matmul": lambda *_: 0,
}  # fmt: skip
VARIANTS = [(op, name) for op in PAGES for name in OpCase(op, RANKS).all_variants]


def memory(operands, call, **options):
    """What each rank holds after a call: bytes by channel."""
    with tw.virtual_world(RANKS, device="cpu") as world:
        world.run(lambda rank, group: call(operands[rank], group, **options))
        reports = world.run(lambda rank, group: tw.memory_report(group))
    assert all(report == reports[0] for report in reports)
    return {channel: report["own"] for channel, report in reports[0].items()}


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_a_call_takes_what_its_page_says_and_no_byte_less_will_do(op, variant, monkeypatch):
    monkeypatch.setattr(EmulatedFabric, "launch", lambda *args, **options: None)
    case = OpCase(op, RANKS)
    operands, options = PROBLEMS[op].operands(case.sizes, RANKS, 0), case.all_variants[variant]
    told = PAGES[op](case.sizes, options.get("plan"), options)
    held = sum(memory(operands, PROBLEMS[op].call, **options).values())
    assert told <= held < told + BEYOND
    if not held:
        return

    def refused(x, group, **options):
        with pytest.raises(RuntimeError, match=rf"needs \d+ more bytes .* {SETTING} allows {held - 1}: .* {held} or"):
            PROBLEMS[op].call(x, group, **options)

    monkeypatch.setenv(SETTING, str(held))
    assert sum(memory(operands, PROBLEMS[op].call, **options).values()) == held
    monkeypatch.setenv(SETTING, str(held - 1))
    memory(operands, refused, **options)


@pytest.mark.parametrize("capacity", [None, 130])
def test_experts_take_what_their_page_says(capacity):
    """Of the ranks' rows, in whole tiles for each expert, one slot; of the choices that are brought back, two."""
    hidden, experts, tile, g = 136, 2, (64, 64, 64), torch.Generator().manual_seed(0)
    x, w = torch.randn(40, hidden, generator=g).bfloat16(), torch.randn(experts, hidden, 16, generator=g).bfloat16()
    index = torch.randint(0, experts * RANKS, (RANKS, 40, 2), generator=g)
    plan = tw.Plan("tma", "inter_sm", tile, 3, comm_sms=2)

    def call(rank, group):
        y, route = tw.moe_dispatch_matmul(
            x, index[rank], w, group, experts=experts * RANKS, capacity=capacity, plan=plan, max_tokens=40
        )
        tw.moe_matmul_combine(y, w.transpose(1, 2).contiguous(), route, group)
        return y.shape[0], route.homes

    with tw.virtual_world(RANKS, device="cpu") as world:
        (rows, homes), *_ = zip(*world.run(call), strict=True), None
        held = world.run(lambda rank, group: tw.memory_report(group))[0]
    most = capacity or max(rows)
    whole = (most // tile[0] + experts) * tile[0] * up(hidden, tile[2]) * WIDTH
    assert whole <= held["moe_dispatch_matmul"]["own"] < whole + BEYOND
    assert homes[0] == 80
    back = 2 * homes[0] * hidden * WIDTH
    assert back <= held["moe_matmul_combine"]["own"] < back + BEYOND
