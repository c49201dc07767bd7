"""The op as PyTorch sees it: gradients, the registered operator, torch.compile, autocast, processes."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tests.fabric.test_distributed import start
from tests.ops.matmul_all_reduce.problems import NONE, assert_right, operands
from tileweave import Plan
from tileweave.fabric import group_name
from tileweave.ops.matmul_all_reduce import reference, relative_error, tolerance

OPERATOR = torch.ops.tileweave.matmul_all_reduce.default
PLANS = {schedule: Plan(schedule=schedule, tile=(64, 64, 64), stages=2) for schedule in ("one_shot", "intra_sm")}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(x):
    return None if x is None else x.detach().requires_grad_()


def loss_of(results, weights):
    """A loss to which every result contributes."""
    results = results if isinstance(results, tuple) else (results,)
    return sum((x.float() * w).sum() for x, w in zip(results, weights, strict=False))


def true_gradients(a, b, extras, weights, eps=1e-6):
    """Float32 gradients of the loss: of each a, of each b, of each of the extras."""
    a, b = ([leaf(x.float()) for x in xs] for xs in (a, b))
    given = {name: leaf(x.float()) for name, x in extras.items()}
    loss_of(reference(a, b, *({**NONE, **given}.values()), eps), weights).backward()
    return [x.grad for x in a], [x.grad for x in b], {name: x.grad for name, x in given.items()}


def gradients(world, a, b, extras, weights, call=tw.matmul_all_reduce, **options):
    """Those of all ranks: of a, of b, of the extras by name."""

    def rank_program(rank, group):
        mine, given = (leaf(a[rank]), leaf(b[rank])), {name: leaf(x) for name, x in extras.items()}
        loss_of(call(*mine, group, **given, **options), weights).backward()
        return *(x.grad for x in mine), {name: x.grad for name, x in given.items()}

    return list(zip(*world.run(rank_program), strict=True))


def assert_gradients(got, truth, dtype, world):
    of_a, of_b, of_extras = got
    pairs = [*zip(of_a, truth[0], strict=True), *zip(of_b, truth[1], strict=True)]
    pairs += [(mine[name], true) for mine in of_extras for name, true in truth[2].items()]
    for x, y in pairs:
        assert x.dtype == dtype and x.shape == y.shape
        assert relative_error(x, y) <= 2 * tolerance(dtype, world)


@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize("extras", ["", "b", "r", "brn"])
@pytest.mark.parametrize("world, m, n, k, dtype", [(2, 40, 24, 16, torch.bfloat16), (3, 7, 72, 24, torch.float16)])
def test_gradients_are_those_of_one_process(world, m, n, k, dtype, extras, schedule):
    a, b, given = operands(world, m, n, k, 1, extras, dtype)
    weights = torch.randn(2, m, n, generator=torch.Generator().manual_seed(2))
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        got = gradients(w, a, b, given, weights, plan=PLANS[schedule])
    assert_gradients(got, true_gradients(a, b, given, weights), dtype, world)


@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_of_one_of_the_two_results(which):
    a, b, given = operands(2, 16, 24, 8, 3)
    weights = torch.zeros(2, 16, 24)
    weights[which] = torch.randn(16, 24)

    def only(*args, **kw):
        results = list(tw.matmul_all_reduce(*args, **kw))
        results[1 - which] = results[1 - which].detach()
        return tuple(results)

    with tw.virtual_world(2, device="cpu", sms=2) as w:
        of_a, of_b, of_extras = gradients(w, a, b, given, weights, call=only)
    truth = true_gradients(a, b, given, weights)
    if which == 1:  # the norm's weight has no part in it
        assert all(mine.pop("norm_weight") is None for mine in of_extras)
        del truth[2]["norm_weight"]
    assert_gradients((of_a, of_b, of_extras), truth, torch.bfloat16, 2)


@pytest.mark.parametrize("m, n, k", [(0, 16, 8), (4, 0, 8), (4, 16, 0), (2, 1, 1)])
def test_gradients_of_empty_and_single_sizes(m, n, k):
    a, b, given = operands(2, m, n, k, 4)
    weights = torch.randn(2, m, n, generator=torch.Generator().manual_seed(4))  # some make one cancel
    with tw.virtual_world(2, device="cpu", sms=2) as w:
        got = gradients(w, a, b, given, weights)
    assert_gradients(got, true_gradients(a, b, given, weights), torch.bfloat16, 2)


def test_nothing_is_communicated_backwards(monkeypatch):
    a, b, given = operands(2, 16, 24, 8, 5)

    def rank_program(rank, group):
        x = leaf(a[rank])
        out = tw.matmul_all_reduce(x, b[rank], group, **given)[0].sum()
        if rank == 0:  # the other one has no backward pass
            out.backward()
        return x.grad

    with tw.virtual_world(2, device="cpu", sms=2) as w:
        grads = w.run(rank_program)
    assert grads[0].any() and grads[1] is None


def arguments(rank, name, extras="brn", **changes):
    a, b, given = operands(2, 16, 24, 8, 1, extras)
    given = {**NONE, **{key: leaf(x) for key, x in given.items()}}
    made = dict(
        a=leaf(a[rank]), b=leaf(b[rank]), group_name=name, bias=given["bias"], deterministic=False,
        residual=given["residual"], norm_weight=given["norm_weight"], norm_eps=1e-6, plan="", max_sms=0,
    )  # fmt: skip
    return tuple({**made, **changes}.values())


@pytest.mark.parametrize("extras", ["", "brn"])
def test_opcheck_in_a_world_of_one_and_in_an_emulated_world(extras):
    torch.library.opcheck(OPERATOR, arguments(0, group_name(None), extras))
    plan = PLANS["intra_sm"].to_json()
    with tw.virtual_world(2, device="cpu") as w:
        w.run(lambda rank, g: torch.library.opcheck(OPERATOR, arguments(rank, group_name(g), extras, plan=plan)))


def test_fake_tensors_have_the_results_shape_and_raise_the_same_errors():
    with FakeTensorMode():
        a, b, residual = torch.empty(5, 8).half(), torch.empty(8, 24).half(), torch.empty(5, 24).half()
        name = group_name(None)
        for given, count in (((None, None), 1), ((residual, None), 1), ((residual, residual[0]), 2)):
            outs = OPERATOR(a, b, name, None, False, *given, 1e-6, "", 0)
            assert [(tuple(x.shape), x.dtype) for x in outs] == [((5, 24), torch.half)] * count
        with pytest.raises(ValueError, match=r"a is \[5, 8\] and b is \[24, 8\]"):
            OPERATOR(a, b.t(), name, None, False, None, None, 1e-6, "", 0)


def step(x, y, group, bias=None, residual=None, norm_weight=None, **options):
    """A function as a model would have it: pointwise work around the op."""
    out = tw.matmul_all_reduce(
        torch.tanh(x), y, group, bias=bias, residual=residual, norm_weight=norm_weight, **options
    )
    return torch.tanh(out[0]) + out[1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_full_graphs(backend, dynamic):
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    for m in (32, 48):
        a, b, given = operands(2, m, 24, 16, m)

        def rank_program(rank, group, a=a, b=b, given=given):
            found = []
            for call in (step, run):
                inputs = [leaf(x) for x in (a[rank], b[rank], *given.values())]
                out = call(*inputs[:2], group, *inputs[2:])
                out.float().sum().backward()
                found.append([out.detach(), *(x.grad for x in inputs)])
            return found

        with tw.virtual_world(2, device="cpu") as w:
            for plain, compiled in w.run(rank_program):
                for x, y in zip(plain, compiled, strict=True):
                    assert x.any() and relative_error(y, x.float()) <= tolerance(torch.bfloat16, 2)
    assert counter.frame_count <= 4  # two worlds, two M


def test_autocast_casts_as_torch_matmul_does():
    a, b, given = operands(2, 16, 24, 8, 2, dtype=torch.float32)

    def rank_program(rank, group):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert tw.explain("matmul_all_reduce", a[rank], b[rank], group, **given).fused
            return tw.matmul_all_reduce(a[rank], b[rank], group, **given)

    with tw.virtual_world(2, device="cpu") as w:
        results = w.run(rank_program)
    half = [[x.bfloat16() for x in xs] for xs in (a, b)]
    assert_right(results, *half, {name: x.bfloat16() for name, x in given.items()})


def test_max_sms_bounds_the_grid_and_is_agreed_on():
    a, b, given = operands(2, 130, 136, 72, 1)
    with tw.virtual_world(2, device="cpu", sms=4) as w:
        outs = w.run(lambda rank, group: tw.matmul_all_reduce(a[rank], b[rank], group, **given, max_sms=1))
        routes = w.run(lambda rank, group: tw.explain("matmul_all_reduce", a[rank], b[rank], group, max_sms=3))
        assert_right(outs, a, b, given)
        assert all("on 3 SMs" in route.reason for route in routes)
        with pytest.raises(RuntimeError, match="max_sms is 1 on rank 0, 2 on rank 1"):
            w.run(lambda rank, group: tw.matmul_all_reduce(a[rank], b[rank], group, max_sms=1 + rank))


def processes_body(rank):
    """Results and gradients in a group of processes and in a subgroup, whose ranks are others."""
    pair = dist.new_group([2, 1])
    for group in (None, dist.group.WORLD, pair):
        members = [0, 1, 2] if group is not pair else [1, 2]
        if rank not in members:
            continue
        world, mine = len(members), members.index(rank)
        a, b, given = operands(world, 7, 24, 16, 3)
        weights = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2))
        truth = reference(a, b, *({**NONE, **given}.values()))
        true_a, true_b, true_extras = true_gradients(a, b, given, weights)
        for deterministic in (False, True):
            x, y = leaf(a[mine]), leaf(b[mine])
            inputs = {name: leaf(z) for name, z in given.items()}
            results = tw.matmul_all_reduce(x, y, group, **inputs, deterministic=deterministic)
            loss_of(results, weights).backward()
            pairs = [*zip(results, truth, strict=True), (x.grad, true_a[mine]), (y.grad, true_b[mine])]
            pairs += [(z.grad, true_extras[name]) for name, z in inputs.items()]
            for got, true in pairs:
                assert relative_error(got.detach(), true) <= 2 * tolerance(torch.bfloat16, world)
        route = tw.explain("matmul_all_reduce", a[mine], b[mine], group)
        assert not route.fused and "all-reduce" in route.reason


def test_results_and_gradients_between_processes(tmp_path):
    start(tmp_path, processes_body)
