"""The op as PyTorch sees it: the registered operator, torch.compile, autocast, processes of a gloo group."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tests.fabric.test_distributed import start
from tests.ops.all_gather_matmul import test_float8 as float8
from tests.ops.all_gather_matmul.problems import assert_right, operands, plan
from tests.ops.all_gather_matmul.test_gradients import assert_near, gradients, leaf, problem, true_gradients
from tileweave.fabric import group_name
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance

OPERATOR = torch.ops.tileweave.all_gather_matmul.default


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("return_gathered, regather", [(False, False), (True, True)])
def test_opcheck_in_a_world_of_one_and_in_an_emulated_world(return_gathered, regather):
    a, b, bias = operands(2, 16, [24, 8], 8, seed=1)

    def check(rank, group):
        tensors = leaf(a[rank]), [leaf(y) for y in b[rank]], [leaf(z) for z in bias[rank]]
        x, ys, zs = tensors
        torch.library.opcheck(OPERATOR, (x, ys, group_name(group), zs, return_gathered, "", 0, regather))

    check(0, None)
    with tw.virtual_world(2, device="cpu") as w:
        w.run(check)


def test_fake_tensors_have_the_results_shapes_and_raise_the_same_errors():
    with tw.virtual_world(4, device="cpu") as w, FakeTensorMode():
        name = w.run(lambda rank, group: group_name(group))[0]
        a, b = torch.empty(16, 8, dtype=torch.half), [torch.empty(n, 8, dtype=torch.half).t() for n in (24, 32)]
        results = OPERATOR(a, b, name, [], True, "", 0, False)
        assert [x.shape for x in results] == [(64, 24), (64, 32), (64, 8)]
        assert all(x.dtype == torch.half and x.is_contiguous() for x in results)
        with pytest.raises(ValueError, match=r"a is \[16, 8\] and b\[0\] \[24, 8\]"):
            OPERATOR(a, [b[0].t()], name, [], False, "", 0, False)


def test_the_operators_own_errors():
    a, b, name = torch.zeros(4, 8).bfloat16(), [torch.zeros(8, 8).bfloat16()], group_name(None)
    with pytest.raises(ValueError, match=r"plan: expected a JSON object with mechanism, schedule, .* got"):
        OPERATOR(a, b, name, [], False, "fast", 0, False)
    with pytest.raises(ValueError, match="max_sms must be at least 0, which stands for all, got -1"):
        OPERATOR(a, b, name, [], False, "", -1, False)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_full_graphs(backend, dynamic, many):
    """Results' gradients through a function as a model would have it; both ranks share what was compiled."""
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter, dynamic=dynamic)
    def call(x, ys, group, bias, **options):
        if many:
            return tw.all_gather_matmul(x * 1, ys, group, bias=bias, **options)
        out, gathered = tw.all_gather_matmul(x * 1, ys[0], group, bias=bias[0], **options)
        return [out], gathered

    for rows in (16, 24):
        given = problem(2, rows, [24, 8] if many else [24], 16, seed=rows)
        with tw.virtual_world(2, device="cpu") as w:
            got = gradients(w, *given, call=call, return_gathered=True)
        assert_near(got, true_gradients(*given, return_gathered=True), torch.bfloat16, 2, slack=1.5)
    assert counter.frame_count <= 2 * (1 if dynamic else 2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_by_inductor():
    given = problem(2, 16, [24], 16)
    with tw.virtual_world(2, device="cpu") as w:
        got = gradients(w, *given, call=torch.compile(tw.all_gather_matmul, fullgraph=True), plan=plan())
    assert_near(got, true_gradients(*given), torch.bfloat16, 2, slack=1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_matmul_does(dtype):
    a, b, bias, weights = problem(2, 16, [24, 8], 16, torch.float32)

    def call(x, ys, group, bias):
        with torch.autocast("cpu", dtype=dtype):
            assert tw.explain("all_gather_matmul", x, ys, group, bias=bias).fused
            outs = tw.all_gather_matmul(x, ys, group, bias=bias)
            assert all(out.dtype == dtype for out in outs)
            with pytest.raises(ValueError, match="float64"):
                tw.all_gather_matmul(x.double(), ys[0].double(), group)
        return outs

    with tw.virtual_world(2, device="cpu") as w:
        got = gradients(w, a, b, bias, [[x.to(dtype) for x in each] for each in weights], call=call)
    low = [x.to(dtype) for x in a], *([[x.to(dtype) for x in each] for each in xs] for xs in (b, bias, weights))
    truth = true_gradients(*low)
    assert all(x.dtype == torch.float32 for xs in got for x in xs)
    assert_near([[x.to(dtype) for x in xs] for xs in got], truth, dtype, 2, slack=2)


def test_inference_mode_and_no_grad():
    a, b, bias = operands(2, 16, [24], 16, seed=1)
    weights = [[x.requires_grad_() for x in each] for each in b]
    for mode in (torch.inference_mode, torch.no_grad):
        with tw.virtual_world(2, device="cpu") as w, mode():
            outs = w.run(lambda rank, group: tw.all_gather_matmul(a[rank], weights[rank], group, bias=bias[rank]))
        assert not outs[0][0].requires_grad
        assert_right(outs, a, [[x.detach() for x in each] for each in b], bias)


def processes_body(rank):
    """The fallback, its gradients and compiled functions, in a group of processes and in a subgroup of other ranks."""
    pair = dist.new_group([2, 1])
    for group in (None, dist.group.WORLD, pair):
        members = [0, 1, 2] if group is not pair else [1, 2]
        if rank not in members:
            continue
        world, mine = len(members), members.index(rank)
        a, b, bias, weights = problem(world, 6, [24, 7], 16, seed=3)
        truth = true_gradients(a, b, bias, weights, return_gathered=True)[mine]
        route = tw.explain("all_gather_matmul", a[mine], b[mine], group)
        assert not route.fused and route.backend == "fallback" and "CPU tensors" in route.reason
        for run in (tw.all_gather_matmul, torch.compile(tw.all_gather_matmul, fullgraph=True, backend="aot_eager")):
            x, ys, zs = leaf(a[mine]), [leaf(y) for y in b[mine]], [leaf(z) for z in bias[mine]]
            outs, gathered = run(x, ys, group, bias=zs, return_gathered=True)
            assert torch.equal(gathered.detach(), torch.cat(a))
            total = sum((t * w).sum() for t, w in zip([*outs, gathered], weights[mine], strict=True))
            for got, true in zip(torch.autograd.grad(total, [x, *ys, *zs]), truth, strict=True):
                assert relative_error(got, true) <= 2 * tolerance(torch.bfloat16, world, True)
            for out, y, z in zip(outs, b[mine], bias[mine], strict=True):
                error = relative_error(out.detach(), torch.cat(a).float() @ y.float() + z.float())
                assert error <= 2 * tolerance(torch.bfloat16, 1, True)


def float8_body(rank):
    """A group that knows no float8 gathers bytes."""
    given = float8.operands(3, 6, [24, 7], 32, True)
    a, b, bias, scale_a, scale_b = given
    options = dict(bias=bias[rank], scale_a=scale_a[rank], scale_b=scale_b[rank], return_gathered=True)
    for plan_of_nobody in (None, plan(tile=(128, 64, 128))):
        mine = tw.all_gather_matmul(a[rank], b[rank], plan=plan_of_nobody, **options)
        each = a, [b[rank]], [bias[rank]], scale_a, [scale_b[rank]]
        float8.assert_scaled_right([mine], each)


@pytest.mark.parametrize("body", [processes_body, float8_body])
def test_the_fallback_between_processes(tmp_path, body):
    start(tmp_path, body)
