"""The plain way, where it is predicted faster, is taken by calls only to which it gives what they ask for."""

import pytest
import torch

from tileweave.ops.all_gather_matmul import check as gathering
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce import check as reducing
from tileweave.ops.matmul_reduce_scatter import check as scattering

FP8 = torch.float8_e4m3fn
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def predicted_faster(monkeypatch):
    for module in (gathering, reducing, scattering):
        monkeypatch.setattr(module, "plainer", lambda site, plan, plain: "it is predicted faster")


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
