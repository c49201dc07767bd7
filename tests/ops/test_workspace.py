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
from tileweave.fabric import fabric_of
from tileweave.fabric.bound import SETTING
from tileweave.fabric.emulated import EmulatedFabric
from tileweave.ops.contract import Site
from tileweave.ops.plans import SIZES, contenders
from tileweave.planner.tiling import part_rows
from tileweave.tune import OPS, call_of

RANKS, WIDTH = 3, 2  # WIDTH: bytes of a bfloat16
BEYOND = 6144  # bytes of flags and rounding, in two channels
SCALES = {"mxfp8": (4, 128), "nvfp4": (16, 256)}  # bytes of a row's scales in a K step, of so many elements


def up(size, grain):
    return math.ceil(size / grain) * grain


def of_reduce_scatter(s, plan, options):
    apart = options.get("deterministic") or plan.schedule in ("one_shot", "none")
    above = RANKS * part_rows(plan.tile, plan.core) if plan.schedule == "one_shot" else 0
    return 2 * (s["m"] + above if apart else s["m"] // RANKS) * s["n"] * WIDTH


def of_all_gather(s, plan, options):
    rows = {"one_shot": s["m"] // RANKS * (RANKS + 1)}.get(plan.schedule, s["m"])
    if plan.mechanism == "multimem":
        rows = RANKS * up(s["m"] // RANKS, plan.tile[0])
    slots = 1 if plan.mechanism == "copy_engine" else 2
    if options.get("scaled") in SCALES:  # a K step of 128 bytes, and scales of whole 128 rows
        scales, elements = SCALES[options["scaled"]]
        each = s["m"] // RANKS
        return 2 * RANKS * up(s["k"], elements) // elements * (each * 128 + up(each, 128) * scales)
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


PLANNED = {
    "matmul_reduce_scatter": {"m": 96, "n": 64, "k": 96}, "all_gather_matmul": {"m": 96, "n": 96, "k": 72},
    "matmul_all_reduce": {"m": 40, "n": 128, "k": 96}, "all_gather": {"m": 48, "n": 64},
    "reduce_scatter": {"m": 48, "n": 64}, "all_reduce": {"m": 48, "n": 64}, "all_to_all": {"m": 48, "n": 48},
    "ring_attention": {"heads": 2, "kv_heads": 2, "seq": 96, "dim": 64},
    "ulysses_attention": {"heads": 3, "kv_heads": 3, "seq": 96, "dim": 64},
}  # fmt: skip


@pytest.mark.parametrize("op", PLANNED)
def test_what_plan_tells_is_what_the_fabric_makes(op, monkeypatch):
    """Of the op's own choice, whichever it is."""
    monkeypatch.setattr(EmulatedFabric, "launch", lambda *args, **options: None)
    sizes = SIZES[op] | PLANNED[op]

    def call(rank, group):
        run = call_of(op, sizes, torch.bfloat16, fabric_of(group, "cpu"), group) if op in OPS else None
        rows = sizes.get("m", 0) // (RANKS if op in ("all_gather", "all_to_all") else 1)
        options = {"split_dim": 1, "concat_dim": 0} if op == "all_to_all" else {}
        run() if run else getattr(tw, op)(torch.zeros(rows, sizes["n"]).bfloat16(), group=group, **options)
        return tw.memory_report(group), tw.plan(op, sizes, group=group).workspace_bytes

    with tw.virtual_world(RANKS, device="cpu") as world:
        for report, told in world.run(call):
            held = sum(channel["own"] for channel in report.values())
            assert 0 < told <= held < told + BEYOND


@pytest.mark.parametrize("op", [op for op in PLANNED if op in OPS])
def test_plans_that_do_not_fit_the_gpu_that_is_there(op):
    """What the ranks' GPU has counts, not what a profile says."""
    sizes = SIZES[op] | PLANNED[op]

    def decide(rank, group):
        return tw.plan(op, sizes, group=group), contenders(op, Site.of(fabric_of(group, "cpu")), sizes, torch.bfloat16)

    with tw.virtual_world(RANKS, device="cpu") as world:
        chosen, (_, plans) = world.run(decide)[0]
        assert chosen.fused and plans
        world.memory_bytes = chosen.workspace_bytes - 1
        less, (_, fewer) = world.run(decide)[0]
        world.memory_bytes = 1000
        none, (_, nothing) = world.run(decide)[0]
        plan = chosen.plan
        with pytest.raises(ValueError, match="bytes on each rank, and the GPU has 1000 in all"):
            world.run(lambda _, group: call_of(op, sizes, torch.bfloat16, fabric_of(group, "cpu"), group, plan=plan)())
    assert less.plan is None or less.workspace_bytes < chosen.workspace_bytes
    assert plan not in fewer and nothing == []
    assert none.verdict == "fallback" and "larger than the 1000 bytes of the GPU" in none.reason


def test_plans_that_do_not_fit_are_rejected_for_it(monkeypatch):
    """By the op too, which falls back where none fits."""
    decision = tw.plan("matmul_all_reduce", {"m": 1 << 17, "n": 1 << 17, "k": 1024}, gpu="h200")
    rejected = {each.schedule: each.reason for each in decision.rejected}
    assert decision.fused and "549755813888 bytes on each rank, and the GPU has 141000000000" in rejected["one_shot"]
    decision = tw.plan("matmul_reduce_scatter", {"m": 1 << 20, "n": 1 << 20, "k": 1024}, gpu="h200")
    assert decision.verdict == "fallback" and "the workspace of every plan is larger" in decision.reason
    monkeypatch.setenv(SETTING, "1000000")
    decision = tw.plan("matmul_reduce_scatter", {}, gpu="h200")
    assert decision.runner_up.mechanism == "nccl" and decision.workspace_bytes == 1 << 25
    for each in (decision.plan, *decision.rejected):
        assert f"{SETTING} allows 1000000" in each.reason
