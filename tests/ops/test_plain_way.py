"""The plain way, where it is predicted faster, is taken by calls only to which it gives what they ask for."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import tileweave
from tileweave.fabric.processes import ProcessFabric
from tileweave.ops import route as routing
from tileweave.ops.all_gather_matmul import check as gathering
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce import check as reducing
from tileweave.ops.matmul_all_reduce import launch
from tileweave.ops.matmul_reduce_scatter import check as scattering

FP8 = torch.float8_e4m3fn
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def predicted_faster(monkeypatch):
    """Nothing that is decided so is remembered for other tests."""
    modules = gathering, reducing, scattering
    monkeypatch.setattr(routing, "faster_plain", lambda us, plain: "it is predicted faster" if plain else None)
    for module in modules:
        module.settle.cache_clear()
    yield
    for module in modules:
        module.settle.cache_clear()


def site(world):
    return Site("processes", world, 132, CUDA, None, "it is off", linked=True, nccl=True)


def like(*shape, dtype=torch.bfloat16, transposed=False):
    return Like.of(
        torch.empty(*shape, dtype=dtype, device="meta").t()
        if transposed
        else torch.empty(*shape, dtype=dtype, device="meta")
    )._replace(device=CUDA)


@pytest.mark.parametrize(
    ("world", "dtype", "out_dtype", "deterministic", "plain"),
    [
        (4, torch.bfloat16, None, False, True),
        (4, torch.bfloat16, None, True, False),
        (2, torch.float16, None, True, True),
        (4, torch.bfloat16, torch.float32, False, False),
        (4, FP8, None, False, False),
    ],
)
def test_matmul_reduce_scatter(world, dtype, out_dtype, deterministic, plain):
    scales = [like(64, 1, dtype=torch.float32), like(1, 64, dtype=torch.float32)] if dtype == FP8 else [None, None]
    a, b = like(64, 64, dtype=dtype), like(64, 64, dtype=dtype, transposed=True)
    _, route = scattering.settle(site(world), a, b, "sum", None, deterministic, out_dtype, None, 0, *scales)
    assert route.fused != plain and ("it is predicted faster" in route.reason) == plain


@pytest.mark.parametrize(("dtype", "plain"), [(torch.bfloat16, True), (FP8, False)])
def test_all_gather_matmul(dtype, plain):
    scales = [like(64, 1, dtype=torch.float32), (like(1, 64, dtype=torch.float32),)] if dtype == FP8 else []
    a, b = like(64, 64, dtype=dtype), like(64, 64, dtype=dtype, transposed=True)
    _, route = gathering.settle(site(4), a, (b,), (), False, None, 0, *scales)
    assert route.fused != plain


@pytest.mark.parametrize(
    ("extras", "deterministic", "plain"), [("", False, True), ("", True, False), ("rn", False, False)]
)
def test_matmul_all_reduce(extras, deterministic, plain):
    residual, norm = (like(64, 64), like(64)) if extras else (None, None)
    options = reducing.Options(deterministic, 1e-6, 0)
    _, route = reducing.settle(site(4), like(64, 64), like(64, 64), None, residual, norm, options, None)
    assert route.fused != plain


def routes(max_sms=0, plans=(None, None, None)):
    """Of a call of each of the three ops."""
    x = like(64, 64)
    options = reducing.Options(False, 1e-6, max_sms)
    return [
        scattering.settle(site(4), x, x, "sum", None, False, None, plans[0], max_sms)[1],
        gathering.settle(site(4), x, (x,), (), False, plans[1], max_sms)[1],
        reducing.settle(site(4), x, x, None, None, None, options, plans[2])[1],
    ]


def test_a_call_with_max_sms_or_a_plan_gets_the_kernel():
    """Neither torch nor NCCL leaves SMs to others."""
    assert not any(route.fused for route in routes())
    limited = routes(max_sms=100)
    assert all(route.fused for route in limited)
    assert all(route.fused for route in routes(plans=[replace(route.plan) for route in limited]))


@pytest.mark.parametrize("deterministic", [False, True])
def test_matmul_all_reduce_sums_by_the_groups_own_all_reduce_unless_in_a_fixed_order(deterministic, monkeypatch):
    """A stand-in for a group of two with NCCL; our all-reduce is one that adds nothing."""
    monkeypatch.setattr(launch, "run_collective", lambda fabric, name, x, *options: x)
    fabric = SimpleNamespace(nccl=True, world_size=2, all_reduce=lambda x: 2 * x)
    a = torch.eye(8, dtype=torch.bfloat16)
    call = reducing.Call(a.dtype, 8, 8, 8, False, False, False, reducing.Options(deterministic, 1e-6, 0))
    (out,) = launch.unfused(fabric, call, a, a, launch.Extras(None, None, None))
    assert torch.equal(out, a if deterministic else 2 * a)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce"])
def test_a_call_that_is_not_fused_is_decided_once(op, monkeypatch):
    """As one that is: later calls of the kind do not ask for the path, and are right with other data."""
    operator = import_module(f"tileweave.ops.{op}.operator")
    asked, settle = [], operator.settle
    monkeypatch.setattr(operator, "settle", lambda *args: (asked.append(args), settle(*args))[1])
    call = getattr(tileweave, op)

    def run(rank, group):
        call(torch.zeros(16, 16).bfloat16(), torch.zeros(16, 16).bfloat16(), group)  # makes a channel
        before = len(asked)
        outs = [call(torch.full((16, 20), x).bfloat16(), torch.ones(20, 16).bfloat16(), group) for x in (1.0, 2.0)]
        return outs, len(asked) - before

    with tileweave.virtual_world(1, device="cpu") as world:
        ((first, second), times) = world.run(run)[0]
    assert times == 1 and torch.equal(2 * first, second) and first.unique().tolist() == [20.0]


def test_what_is_remembered_without_a_channel_goes_when_there_is_one():
    """A stand-in for a group of processes, of which no peer is asked for anything."""
    fabric = ProcessFabric.__new__(ProcessFabric)
    fabric._ops, fabric._unmapped = {}, {}
    fabric.views("op")["kind"] = "plain"
    assert fabric.views("op") == {"kind": "plain"} and fabric.views("other") == {}
    fabric._ops["op"] = SimpleNamespace(channel=SimpleNamespace(views={}))
    assert fabric.views("op") == {}
    del fabric._ops["op"]
    assert fabric.views("op") == {}
