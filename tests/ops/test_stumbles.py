"""What users stumble over, whatever the op: each has an error, or a warning, that says what would be right."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tileweave as tw
from tileweave import Plan

PLAN = Plan(tile=(128, 128, 64), stages=3)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def calls():
    """Every op's operands, by name, and its other arguments; in a world of one."""
    ends = torch.tensor([8, 16], dtype=torch.int32)
    index = torch.tensor([[0, 1]] * 16)
    y, route = tw.moe_dispatch_matmul(normal(16, 16), index, normal(2, 16, 16))
    square = {"a": normal(16, 16), "b": normal(16, 16)}
    heads = dict.fromkeys("qkv", normal(1, 2, 16, 16))
    return {
        "matmul_reduce_scatter": (square, {}),
        "all_gather_matmul": (square, {}),
        "matmul_all_reduce": (square, {}),
        "all_gather": ({"x": normal(16, 16)}, {}),
        "reduce_scatter": ({"x": normal(16, 16)}, {}),
        "all_reduce": ({"x": normal(16, 16)}, {}),
        "all_to_all": ({"x": normal(16, 16)}, {"split_dim": 0, "concat_dim": 1}),
        "ring_attention": (heads, {}),
        "ulysses_attention": (heads, {}),
        "grouped_matmul": ({"x": normal(16, 16), "w": normal(2, 16, 16), "offsets": ends}, {}),
        "moe_dispatch_matmul": ({"x": normal(16, 16), "topk_index": index, "w": normal(2, 16, 16)}, {}),
        "moe_combine": ({"y": y}, {"route": route}),
        "moe_matmul_combine": ({"h": y, "w": normal(2, 16, 16)}, {"route": route}),
    }


OPS = tuple(calls())
PLANNED = [op for op in OPS if "matmul" in op or "attention" in op]


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_these_are_all_ops():
    others = {"check", "explain", "memory_report", "place_sequence", "plan", "tune", "unplace_sequence"}
    others |= {"virtual_world"}
    public = {name for name in tw.__all__ if name.islower() and not name.startswith("_")}
    assert public - others == set(OPS)


def test_a_dtensor_is_refused_by_name_and_told_what_would_do(mesh):
    for op, (operands, options) in calls().items():
        for name, x in operands.items():
            given = operands | {name: DTensor.from_local(x, mesh)}
            with pytest.raises(TypeError, match=rf"^{op}: {name}(\[0\])? must be this rank's tensor, got a DTensor; "):
                getattr(tw, op)(**given, **options)
            if op != "moe_combine":
                with pytest.raises(TypeError, match=r"to_local\(\) would be"):
                    tw.explain(op, **given, **options)


@pytest.mark.parametrize("wrong", [5, "text", None, {}, object()], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_tensor_is_refused_by_name(wrong):
    for op, (operands, options) in calls().items():
        for name in operands:
            with pytest.raises((TypeError, ValueError), match=rf"^{op}: {name}"):
                getattr(tw, op)(**operands | {name: wrong}, **options)


PLANS = {  # of a world of one
    "matmul_all_reduce": Plan("tma", "none", (128, 128, 64), 3),
    "ring_attention": Plan("tma", "inter_sm", (64, 64, 64), 3),
    "ulysses_attention": Plan("tma", "inter_sm", (64, 64, 64), 3),
    "moe_dispatch_matmul": Plan("tma", "inter_sm", (64, 64, 64), 3, comm_sms=2),
    "moe_matmul_combine": Plan("register", "intra_sm", (128, 128, 64), 3),
}


@pytest.mark.parametrize("op", PLANNED)
def test_a_plan_that_a_fallback_does_not_use_is_told_of(op):
    operands, options = calls()[op]
    options = options | {"plan": PLANS.get(op, PLAN)}
    with pytest.warns(UserWarning, match=rf"^{op}: plan is not used: CPU tensors outside an emulated world") as told:
        getattr(tw, op)(**operands, **options)
    assert {each.filename for each in told} == {__file__}, "whose line has made the call"
    with warnings.catch_warnings(action="ignore"):
        reason = tw.explain(op, **operands, **options).reason
    assert reason.endswith("; the plan is not used, it is one of the fused kernel")


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_without_data_is_told_of(op):
    operands, options = calls()[op]
    name = next(iter(operands))
    operands = operands | {name: operands[name].to("meta")}
    words = f"{op}: {name} is on the meta device, without data: a tensor on a CPU or a GPU would do"
    with pytest.raises(ValueError, match=f"^{words}$"):
        getattr(tw, op)(**operands, **options)
    with pytest.raises(ValueError, match=f"^{words}$"):
        tw.explain(op, **operands, **options)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (5, "got 5"),
        (None, "got None"),
        (lambda rank: 0, "got one that takes (rank): too many positional arguments"),
        (lambda a, b, c: 0, "got one that takes (a, b, c): missing a required argument: 'c'"),
    ],
    ids=("a number", "None", "one argument", "three arguments"),
)
def test_what_a_world_cannot_run_is_told_before_it_runs(fn, words):
    with tw.virtual_world(2, device="cpu") as world:
        with pytest.raises(TypeError, match=re.escape(f"fn: expected a function of a rank and its group, {words}")):
            world.run(fn)
        assert world.run(lambda *args: args[0]) == [0, 1]


@pytest.mark.parametrize("device", [5, "x", "mps"])
def test_devices_that_are_none(device):
    with pytest.raises((TypeError, ValueError), match=r"^device: expected"):
        tw.memory_report(None, device)
