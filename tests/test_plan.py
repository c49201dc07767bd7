"""`tileweave.plan` and `tileweave plan`: what they answer, and what they refuse."""

import json

import pytest
import torch

import tileweave
from tileweave import Plan, plan
from tileweave.cli import main
from tileweave.ops.plans import SHARED, SIZES
from tileweave.planner import profile
from tileweave.planner.tiling import CORE_ROWS, ring_bytes

KEYS = {"mechanism", "schedule", "tile", "stages", "comm_sms", "predicted_us", "reason"}


@pytest.mark.parametrize("op", sorted(set(SIZES) - {"grouped_matmul"}))
def test_every_op_has_a_plan_with_reasons_and_alternatives(op):
    decision = plan(op, {}, gpu="h200", ranks=8)
    assert decision.gpu == "h200" and decision.ranks == 8 and decision.fused
    assert (decision.unmeasured is None) == (decision.plan.mechanism != "multimem") and decision.untried is None
    every = [decision.plan, decision.runner_up, *decision.rejected]
    assert len({(each.mechanism, each.schedule, each.tile, each.comm_sms) for each in every}) == len(every) >= 2
    assert all(isinstance(each, Plan) and each.predicted_us > 0 and len(each.reason) > 20 for each in every)
    assert [each.mechanism for each in every].count("nccl") == 1
    rest = [each.predicted_us for each in every[1:]]
    assert rest == sorted(rest)
    assert decision.simulated_us > 0 and decision.events
    assert decision.simulated_us == pytest.approx(decision.plan.predicted_us, rel=0.35)


MULTIPLYING = ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")


@pytest.mark.parametrize("gpu", ["b200", "gb200-nvl72"])
@pytest.mark.parametrize("op", [*MULTIPLYING, "all_reduce"])
def test_on_blackwell_it_tells_what_there_is_and_what_there_would_be(op, gpu, monkeypatch):
    """The plain way, and tiles of tcgen05 that fit, of predictions that nothing measured stands behind."""
    monkeypatch.delenv("TILEWEAVE_EXPERIMENTAL", raising=False)
    decision = plan(op, {}, gpu=gpu, ranks=8)
    assert (decision.verdict, decision.plan.mechanism) == ("fallback", "nccl") and decision.runner_up is None
    assert "is sm_100, not sm_90 (Hopper); TILEWEAVE_EXPERIMENTAL=sm100 tries" in decision.reason
    would = decision.untried
    assert would.fused and would.untried is None and would.to_dict() == decision.to_dict()["untried"]
    assert "no kernel has run on a GPU of compute capability 10.0" in would.unmeasured == decision.unmeasured
    if op in MULTIPLYING:
        hardware = profile(gpu)
        every = [each for each in (would.plan, would.runner_up, *would.rejected) if each.mechanism != "nccl"]
        assert every and all(each.core == "tcgen05" and each.tile[0] == CORE_ROWS for each in every)
        assert all(ring_bytes(each.tile, each.stages, "tcgen05") < hardware.shared_bytes for each in every)
    monkeypatch.setenv("TILEWEAVE_EXPERIMENTAL", "sm100")
    assert plan(op, {}, gpu=gpu, ranks=8).to_dict() == would.to_dict()


@pytest.mark.parametrize("op", ["grouped_matmul", "moe_dispatch_matmul", "moe_matmul_combine"])
def test_on_blackwell_experts_ops_have_plans_of_tcgen05(op, monkeypatch):
    """With many experts too, of which others have tiles of 64 rows."""
    monkeypatch.delenv("TILEWEAVE_EXPERIMENTAL", raising=False)
    hardware = profile("b200")
    for shape in ({}, {"experts": 512}):
        decision = plan(op, shape, gpu="b200")
        assert decision.verdict == "fallback" and decision.untried.fused
        would = decision.untried
        every = [each for each in (would.plan, would.runner_up, *would.rejected) if each.mechanism != "nccl"]
        assert every and all(each.core == "tcgen05" and each.tile[0] == CORE_ROWS for each in every)
        assert all(ring_bytes(each.tile, each.stages, "tcgen05") < hardware.shared_bytes for each in every)
        assert "no kernel has run on a GPU of compute capability 10.0" in would.unmeasured


def test_a_gpu_that_no_kernel_runs_on(tmp_path, monkeypatch):
    """Whatever the environment says."""
    monkeypatch.setenv("TILEWEAVE_EXPERIMENTAL", "sm100")
    path = tmp_path / "a100.json"
    path.write_text(json.dumps({**profile("h200").to_dict(), "gpu": "NVIDIA A100", "capability": "8.0"}))
    decision = plan("matmul_reduce_scatter", {}, gpu=str(path))
    assert decision.reason.startswith("NVIDIA A100 is sm_80, not sm_90 (Hopper): ") and decision.untried is None


def test_the_command_shows_both(capsys, monkeypatch):
    monkeypatch.delenv("TILEWEAVE_EXPERIMENTAL", raising=False)
    assert main(["plan", "matmul_reduce_scatter", "--gpu", "b200"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    before, after = told.split("With TILEWEAVE_EXPERIMENTAL=sm100 instead:")
    assert "fallback: NVIDIA B200 is sm_100" in before and "fused: " in after and "not measured: no kernel has" in after


def test_a_grouped_matmul_is_of_one_rank():
    """It has a plan for each tile, and no other way that anything is known of."""
    decision = plan("grouped_matmul", {}, gpu="h200")
    every = [decision.plan, decision.runner_up, *decision.rejected]
    assert decision.ranks == 1 and decision.fused and len({each.tile for each in every}) == len(every) == 6
    assert decision.simulated_us == pytest.approx(decision.plan.predicted_us, rel=0.01)


@pytest.mark.parametrize("m, schedule, other", [(64, "one_shot", "two_shots"), (8192, "two_shots", "one_shot")])
def test_an_all_reduce_has_two_ways(m, schedule, other):
    """Which the op chooses by size; the model does not contradict it where sizes are clear."""
    decision = plan("all_reduce", {"m": m, "n": 2048}, gpu="h200")
    rest = {each.schedule: each for each in (decision.runner_up, *decision.rejected) if each.mechanism == "register"}
    assert decision.plan.schedule == schedule and list(rest) == [other]
    assert decision.plan.predicted_us < rest[other].predicted_us and "behind them" in rest[other].reason


@pytest.mark.parametrize("m, ranks, grid", [(64, 2, 1), (4096, 4, 112), (8192, 8, 56)])
def test_a_collectives_communicators_are_those_of_its_grid(m, ranks, grid):
    """Of its largest launch, which the reason tells."""
    decision = plan("all_reduce", {"m": m, "n": m}, gpu="h200", ranks=ranks)
    assert decision.plan.comm_sms == grid and f"a grid of {grid} lays out" in decision.plan.reason


@pytest.mark.parametrize("op", sorted(SHARED))
def test_sizes_left_out_suit_any_number_of_ranks(op):
    for ranks in (3, 72):
        decision = plan(op, {}, gpu="gb200-nvl72", ranks=ranks)
        assert all(decision.shape[name] % ranks == 0 for name in SHARED[op])
    if SHARED[op]:
        with pytest.raises(ValueError, match="is not divisible by 3 ranks"):
            plan(op, {SHARED[op][0]: 8192}, gpu="h200", ranks=3)


def test_a_dispatch_of_more_rows_than_its_flags_count_is_no_kernels():
    """If all experts get as many."""
    decision = plan("moe_dispatch_matmul", {"tokens": 16777216}, gpu="h200", ranks=8)
    assert decision.verdict == "fallback"
    assert "16777216 rows, the flags of 11 SMs that communicate can count" in decision.reason
    assert plan("moe_dispatch_matmul", {"tokens": 1048576}, gpu="h200", ranks=8).fused


def test_a_collective_that_no_kernel_serves_is_the_groups_own():
    decision = plan("all_gather", {"m": 128}, gpu="h200", ranks=64)
    assert decision.verdict == "fallback" and decision.plan.mechanism == "nccl" and not decision.rejected
    assert plan("all_gather", {}, gpu="h200", ranks=1).verdict == "fallback"


def test_the_plan_is_that_which_explain_tells():
    """Of a group, the same plan as a call's."""
    with tileweave.virtual_world(2, device="cpu") as world:

        def both(rank, group):
            a, b = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)
            told = tileweave.explain("matmul_reduce_scatter", a, b, group)
            return told, plan("matmul_reduce_scatter", {"m": 256, "n": 128, "k": 128}, group=group, gpu="h200")

        for told, decision in world.run(both):
            assert {**told.plan.to_dict(), "reason": ""} == {**decision.plan.to_dict(), "reason": ""}
            assert decision.plan.reason.startswith(told.plan.reason)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_gather_matmul"])
def test_a_plan_of_float8_is_that_which_explain_tells(op):
    """Of operands with a scale each; its tiles are as deep in bytes, and the plain way is not said to be known."""
    with tileweave.virtual_world(2, device="cpu") as world:

        def both(rank, group):
            one = torch.ones(1)
            k, n = (64, 128) if op == "matmul_reduce_scatter" else (128, 64)
            a, b = (torch.zeros(size).to(torch.float8_e4m3fn) for size in ((256, k), (k, n)))
            m = 256 if op == "matmul_reduce_scatter" else 512
            told = tileweave.explain(op, a, b, group, scale_a=one, scale_b=one)
            sizes = {"m": m, "n": 128, "k": 128}
            return told, plan(op, sizes, torch.float8_e4m3fn, group=group, gpu="h200")

        for told, decision in world.run(both):
            assert told.fused and decision.fused and decision.dtype == "float8_e4m3fn"
            assert {**told.plan.to_dict(), "reason": ""} == {**decision.plan.to_dict(), "reason": ""}
            assert decision.plan.tile[2] == 128
    decision, wide = (plan(op, {}, dtype, gpu="h200") for dtype in (torch.float8_e4m3fn, torch.bfloat16))
    every = [decision.plan, decision.runner_up, *decision.rejected]
    assert decision.fused and all(each.mechanism != "nccl" and each.tile[2] == 128 for each in every)
    assert decision.cost.compute_us < 0.6 * wide.cost.compute_us
    assert decision.cost.total_us == pytest.approx(decision.plan.predicted_us, abs=0.1)


def test_float8_of_an_all_reduce_has_scales_of_blocks(capsys):
    """Which tensor cores of a Hopper GPU do not multiply with."""
    decision = plan("matmul_all_reduce", {}, torch.float8_e4m3fn, gpu="h200")
    assert decision.verdict == "fallback" and "multiplies by tcgen05, this GPU by wgmma" in decision.reason
    assert decision.plan is None
    would = plan("matmul_all_reduce", {}, torch.float8_e4m3fn, gpu="b200").untried
    assert would.fused and would.plan.core == "tcgen05" and would.plan.tile[2] == 128
    with pytest.raises(ValueError, match="K = 12 values are no whole blocks of 32"):
        plan("matmul_all_reduce", {"k": 96}, torch.float8_e4m3fn, gpu="h200")
    assert main(["plan", "matmul_all_reduce", "--gpu", "b200", "--dtype", "fp8"]) == 0
    assert "8 ranks of b200, float8_e4m3fn" in " ".join(capsys.readouterr().out.split())


def test_what_copies_moves_half_as_much_of_float8():
    for op in ("all_gather", "all_to_all"):
        decision, wide = (plan(op, {}, dtype, gpu="h200") for dtype in (torch.float8_e4m3fn, torch.bfloat16))
        assert decision.fused and decision.plan.predicted_us < 0.7 * wide.plan.predicted_us


def test_a_gather_of_few_rows_and_columns_is_not_fused_between_two_h200s():
    """Of eight tiles each on one SM."""
    decision = plan("all_gather_matmul", {"m": 64, "n": 512, "k": 28672}, gpu="h200", ranks=2)
    assert not decision.fused and "NCCL" in decision.plan.reason
    assert decision.runner_up.schedule == "inter_sm"
    assert plan("all_gather_matmul", {"m": 2048, "n": 28672, "k": 8192}, gpu="h200", ranks=2).fused


def test_more_ranks_than_links_join_have_the_plain_way_over_the_network():
    within = plan("matmul_reduce_scatter", {"m": 64 * 1024}, gpu="h200", ranks=8)
    beyond = plan("matmul_reduce_scatter", {"m": 64 * 1024}, gpu="h200", ranks=64)
    assert within.fused and not beyond.fused and "more than the 8 that links join" in beyond.plan.reason
    assert (beyond.verdict, beyond.plan.mechanism) == ("fallback", "nccl")
    assert plan("matmul_reduce_scatter", {"m": 64 * 1024}, gpu="gb200-nvl72", ranks=64).untried.fused


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("gemm", {}), "no planner for op 'gemm'; there is one for matmul_reduce_scatter"),
        (
            ("ring_attention", {"m": 3}),
            "ring_attention has the sizes batch, heads, kv_heads, seq, dim, causal, got 'm'",
        ),
        (("matmul_reduce_scatter", {"m": 0}), "m must be from 1 to"),
        (("moe_dispatch_matmul", {"topk": 300}), "topk=300 must be at most experts=256"),
        (("ulysses_attention", {"kv_heads": 3}), "multiple of those of k and v"),
        (
            ("all_gather_matmul", {}, torch.float32),
            "dtype must be torch.bfloat16 or torch.float16 or torch.float8_e4m3fn",
        ),
        (
            ("grouped_matmul", {}, torch.float8_e4m3fn),
            "dtype must be torch.bfloat16 or torch.float16 for grouped_matmul, got torch.float8_e4m3fn, which "
            "matmul_reduce_scatter, all_gather_matmul, matmul_all_reduce, all_gather, all_to_all have",
        ),
        (("all_reduce", {}, torch.float8_e4m3fn), "dtype must be torch.bfloat16 or torch.float16 for all_reduce"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(ValueError) as error:
        plan(*arguments, gpu="h200")
    assert said in str(error.value)


@pytest.mark.parametrize(
    "arguments, options, said",
    [
        ((None, {}), {}, "the name of an op and a mapping of its sizes"),
        (("matmul_reduce_scatter", "m=8"), {}, "the name of an op and a mapping of its sizes"),
        (("matmul_reduce_scatter", {"m": 8.0}), {}, "m must be an int"),
        (("matmul_reduce_scatter", {}, "bf16"), {}, "dtype must be a torch.dtype"),
        (("matmul_reduce_scatter", {}), {"gpu": 3}, "gpu must be the name of a profile"),
        (("matmul_reduce_scatter", {}), {"gpu": "h200", "ranks": "8"}, "ranks must be an int"),
        (("matmul_reduce_scatter", {}), {"group": 3}, "group"),
    ],
)
def test_what_is_of_a_wrong_type_is_refused(arguments, options, said):
    with pytest.raises(TypeError, match=said):
        plan(*arguments, **options)


@pytest.mark.parametrize(
    "op, sizes, said, plain",
    [
        ("matmul_reduce_scatter", {"n": 12}, "N = 12 is not a multiple of 8", True),
        ("ring_attention", {"dim": 100}, "heads have dimension 100", False),
        (
            "ulysses_attention",
            {"dim": 512},
            "heads have dimension 512, the kernel takes multiples of 8 up to 128",
            False,
        ),
        ("moe_dispatch_matmul", {"hidden": 7}, "H = 7 is no multiple of 8", False),
        ("moe_dispatch_matmul", {"inner": 9}, "I = 9 is no multiple of 8", False),
    ],
)
def test_what_no_kernel_serves_falls_back(op, sizes, said, plain, capsys):
    """As the op does. What torch and NCCL take is told where that is what the fallback is."""
    decision = plan(op, sizes, gpu="h200")
    assert (decision.verdict, decision.fused) == ("fallback", False) and said in decision.reason
    assert (decision.plan is not None) == plain and decision.runner_up is None and not decision.rejected
    assert json.loads(json.dumps(decision.to_dict()))["verdict"] == "fallback"
    shape = ",".join(f"{name}={size}" for name, size in sizes.items())
    assert main(["plan", op, "--gpu", "h200", "--shape", shape]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_attention_and_experts_are_never_given_to_nccl():
    """The ops never go that way, even where it is predicted faster."""
    decision = plan("moe_dispatch_matmul", {"tokens": 8 * 64}, gpu="h200")
    nccl = next(each for each in (decision.runner_up, *decision.rejected) if each.mechanism == "nccl")
    assert decision.fused and "the op never goes this way" in nccl.reason


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce"])
@pytest.mark.parametrize("ranks", [2, 8, 64, 72])
def test_the_plain_way_is_not_taken_where_a_way_of_ours_is_predicted_faster(op, ranks):
    for m in (72 * 64, 72 * 512):
        decision = plan(op, {"m": m, "n": 36864, "k": 36864}, gpu="gb200-nvl72", ranks=ranks).untried
        every = [each.predicted_us for each in (decision.runner_up, *decision.rejected) if each.mechanism != "nccl"]
        assert decision.fused or decision.plan.predicted_us < min(every)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--timeline", "/"], "expected a file whose name ends in .png"),
        (["--timeline", "timeline.txt"], "expected a file whose name ends in .png"),
        (["--ranks", "0"], "ranks must be from 1 to"),
        (["--gpu", "h300"], "gpu must be one of h100, h200, b200, gb200-nvl72"),
        (["--gpu", "none.json"], "none.json: cannot be read"),
        (["--shape", "m=100"], "m=100 is not divisible by 8 ranks, of which each has its share; 96 or 104 would be"),
        (["--shape", "m"], "--shape takes sizes as name=number"),
        (["--shape", "m=8,m=8"], "--shape names m twice"),
        (["--dtype", "fp4"], "--dtype must be one of bf16, fp16, fp8"),
    ],
)
def test_bad_usage_of_the_command(options, said, capsys):
    if "--timeline" in options:
        pytest.importorskip("matplotlib")
    gpu = [] if "--gpu" in options else ["--gpu", "h100"]
    assert main(["plan", "matmul_reduce_scatter", "--json", *gpu, *options]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]


def test_json_and_table(capsys):
    assert main(["plan", "matmul_all_reduce", "--gpu", "h100", "--shape", "m=4096", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runner_up"] and told["rejected"]
    assert all(set(each) >= KEYS for each in (told["plan"], told["runner_up"], *told["rejected"]))
    assert told["terms"]["bound"] in ("compute", "memory", "communication")
    assert main(["plan", "matmul_all_reduce", "--gpu", "h100", "--shape", "m=4096"]) == 0
    table = capsys.readouterr().out
    assert "runner-up" in table and "rejected" in table and told["plan"]["reason"] in table
    row = next(line for line in table.splitlines() if line.startswith("plan "))
    tile = "x".join(map(str, told["plan"]["tile"]))
    assert row.split()[3:5] == [tile, str(told["plan"]["stages"])]


def test_the_timeline_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    assert main(["plan", "all_gather_matmul", "--gpu", "h200", "--timeline", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
