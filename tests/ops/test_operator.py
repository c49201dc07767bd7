"""The op as PyTorch sees it: the registered operator, torch.compile, names of groups, max_sms."""

import gc
import shutil

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tests.fabric.test_distributed import start
from tests.ops.problems import assert_right, operands
from tileweave import Plan
from tileweave.fabric import group_name, group_size, named_fabric
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance

OPERATOR = torch.ops.tileweave.matmul_reduce_scatter.default
SMALL = Plan(tile=(128, 64, 64), stages=2)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(rank, name, **changes):
    """Arguments of the operator whose inputs require gradients, those of one rank of two."""
    a, b, bias = operands(2, 16, 24, 8, seed=1, bias=True)
    given = dict(
        a=a[rank].requires_grad_(), b=b[rank].requires_grad_(), group_name=name, op="avg", bias=bias.requires_grad_(),
        deterministic=False, out_dtype=None, plan="", max_sms=0,
    )  # fmt: skip
    return tuple({**given, **changes}.values())


@pytest.mark.parametrize("changes", [{}, dict(bias=None, out_dtype=torch.float32, plan=SMALL.to_json(), max_sms=1)])
def test_opcheck_in_a_world_of_one_and_in_an_emulated_world(changes):
    torch.library.opcheck(OPERATOR, arguments(0, group_name(None), **changes))
    with tw.virtual_world(2, device="cpu") as w:
        w.run(lambda rank, group: torch.library.opcheck(OPERATOR, arguments(rank, group_name(group), **changes)))


def test_fake_tensors_have_the_results_shape_and_raise_the_same_errors():
    with tw.virtual_world(4, device="cpu") as w, FakeTensorMode():
        name = w.run(lambda rank, group: group_name(group))[0]
        a, b = torch.empty(64, 8, dtype=torch.half), torch.empty(24, 8, dtype=torch.half)
        for out_dtype in (None, torch.float32):
            out = OPERATOR(a, b.t(), name, "sum", None, False, out_dtype, "", 0)
            assert out.shape == (16, 24) and out.dtype == (out_dtype or torch.half) and out.device == a.device
            assert out.is_contiguous()
        with pytest.raises(ValueError, match="6 rows, not divisible by the world size 4; 4 or 8 would be"):
            OPERATOR(a[:6], b.t(), name, "sum", None, False, None, "", 0)
        with pytest.raises(ValueError, match=r"a is \[64, 8\] and b is \[24, 8\]"):
            OPERATOR(a, b, name, "sum", None, False, None, "", 0)


def test_the_operators_own_errors():
    a, b = torch.zeros(4, 8).bfloat16(), torch.zeros(8, 8).bfloat16()
    name = group_name(None)
    for bad in ("fast", "{}", '{"tile": [128, 64, 64], "speed": 11}'):
        with pytest.raises(ValueError, match=r"plan: expected a JSON object with mechanism, schedule, .* got"):
            OPERATOR(a, b, name, "sum", None, False, None, bad, 0)
    with pytest.raises(ValueError, match="max_sms must be at least 0, which stands for all, got -1"):
        OPERATOR(a, b, name, "sum", None, False, None, "", -1)
    with pytest.raises(ValueError, match="'sum' or 'avg', got 'max'"):
        OPERATOR(a, b, name, "max", None, False, None, "", 0)


def test_names_of_groups():
    with tw.virtual_world(2, device="cpu") as w, tw.virtual_world(2, device="cpu") as other:
        groups = w.run(lambda rank, group: group)
        names = [{group.group_name for group in world.run(lambda rank, group: group)} for world in (w, other)]
        assert len(names[0]) == len(names[1]) == 1 and names[0] != names[1]  # one a world
        assert {group_size(name) for each in names for name in each} == {2}

        def rank_program(rank, group):
            assert named_fabric(group_name(group), torch.device("cpu")).rank == rank
            with pytest.raises(ValueError, match=f"of rank {rank}, got that of rank {1 - rank}"):
                group_name(groups[1 - rank])
            with pytest.raises(RuntimeError, match="no rank of that world"):
                named_fabric(other.name, torch.device("cpu"))

        w.run(rank_program)
        with pytest.raises(RuntimeError, match="no rank of that world, or the world is not running"):
            tw.matmul_reduce_scatter(torch.zeros(4, 8).bfloat16(), torch.zeros(8, 8).bfloat16(), groups[0])


def test_the_name_of_a_world_that_is_gone():
    name = tw.virtual_world(2, device="cpu").name
    gc.collect()
    with pytest.raises(RuntimeError, match=name.removeprefix("2:")):
        named_fabric(name, torch.device("cpu"))


def test_what_is_no_name_of_a_group():
    for name in ("0", "", "four:0"):
        with pytest.raises(ValueError, match=r"group_name: expected what group_name gives, such as '4:0'"):
            named_fabric(name, torch.device("cpu"))


def step(x, y, z, group, plan=None, **options):
    """A function as a model would have it: pointwise work around the op."""
    out = tw.matmul_reduce_scatter(torch.tanh(x), y, group, bias=z, plan=plan, op="avg", **options)
    return torch.tanh(out) * 2


def true_step(a, b, bias):
    return 2 * torch.tanh(reference([torch.tanh(x.float()) for x in a], b, "avg", bias.float()))


def assert_compiled_is_right(run, sizes, group=True, **options):
    """`run(step)` on two ranks with each M of `sizes`: results and gradients against the float32 reference."""
    for m in sizes:
        a, b, bias = operands(2, m, 24, 16, seed=m, bias=True)

        def rank_program(rank, group_, a=a, b=b, bias=bias):
            inputs = [x.detach().requires_grad_() for x in (a[rank], b[rank], bias)]
            out = run(*inputs, group_ if group else None, **options)
            out.sum().backward()
            return out.detach(), *(x.grad for x in inputs)

        with tw.virtual_world(2, device="cpu") as w:
            outs, of_a, of_b, of_bias = zip(*w.run(rank_program), strict=True)
        leaves = [[x.float().detach().requires_grad_() for x in xs] for xs in (a, b)]
        truth = true_step(*leaves, bias)
        truth.sum().backward()
        pairs = [(torch.cat(outs), truth.detach())]
        pairs += [(x, y.grad) for xs, ys in zip((of_a, of_b), leaves, strict=True) for x, y in zip(xs, ys, strict=True)]
        pairs += [(x, (2 - o.float() ** 2 / 2).sum(0)) for x, o in zip(of_bias, outs, strict=True)]
        for got, true in pairs:
            assert relative_error(got, true) <= 2 * tolerance(torch.bfloat16, 2, True)


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_full_graphs(backend, dynamic, group):
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    assert_compiled_is_right(run, (32, 48), group)
    worlds = 2
    assert counter.frame_count <= worlds * (1 if dynamic else 2)  # both ranks share what was compiled


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_by_inductor():
    assert_compiled_is_right(torch.compile(step, fullgraph=True), (32,))


def test_a_compiled_function_follows_the_world_and_the_plan():
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    for world in (1, 2, 4):  # no more variants than torch.compile keeps of a function
        a, b, bias = operands(world, 32, 24, 16, seed=1, bias=True)
        for plan in (SMALL, Plan(tile=(128, 128, 64), stages=3)):
            with tw.virtual_world(world, device="cpu") as w:
                outs = w.run(lambda rank, group, a=a, b=b, z=bias, plan=plan: run(a[rank], b[rank], z, None, plan=plan))
            assert relative_error(torch.cat(outs), true_step(a, b, bias)) <= tolerance(torch.bfloat16, world, False)
    with pytest.raises(ValueError, match="'tma'"), tw.virtual_world(2, device="cpu") as w:
        plan = Plan(mechanism="multimem")
        w.run(lambda rank, group: run(*(x[rank] for x in operands(2, 32, 24, 16, seed=1)[:2]), None, group, plan=plan))


def test_a_compiled_function_under_autocast_and_checkpointing():
    def block(x, y, group):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(step, x, y, None, group, use_reentrant=False)

    a, b, _ = operands(2, 32, 24, 16, seed=2, dtype=torch.float32)

    def rank_program(rank, group):
        results = []
        for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            inputs = [a[rank].clone().requires_grad_(), b[rank].clone().requires_grad_()]
            out = run(*inputs, group)
            out.sum().backward()
            results.append([out.detach(), *(x.grad for x in inputs)])
        return results

    with tw.virtual_world(2, device="cpu") as w:
        for plain, compiled in w.run(rank_program):
            assert plain[0].dtype == torch.bfloat16 and plain[1].dtype == torch.float32
            for x, y in zip(plain, compiled, strict=True):
                assert x.any() and relative_error(y, x.float()) <= tolerance(torch.bfloat16, 2, True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_sms", [1, 3, 100])
def test_max_sms_bounds_the_grid(max_sms, deterministic, monkeypatch):
    a, b, bias = operands(3, 3 * 136, 136, 72, seed=1, bias=True)
    grids = []
    options = dict(bias=bias, deterministic=deterministic, plan=SMALL, max_sms=max_sms)
    with tw.virtual_world(3, device="cpu", sms=4) as w:
        kind = type(w.run(lambda rank, group: named_fabric(group_name(group), torch.device("cpu")))[0])
        launch = kind.launch

        def recorded(self, kernel, grid, args, **options):
            grids.append(grid)
            return launch(self, kernel, grid, args, **options)

        monkeypatch.setattr(kind, "launch", recorded)
        outs = w.run(lambda rank, group: tw.matmul_reduce_scatter(a[rank], b[rank], group, **options))
        del options["plan"]
        routes = w.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[rank], b[rank], group, **options))
    assert_right(outs, a, b, bias=bias, deterministic=deterministic)
    assert set(grids) == {min(max_sms, 4)}
    assert all(f"on {min(max_sms, 4)} SMs" in route.reason for route in routes)


def processes_body(rank):
    """Gradients and compiled functions in a group of processes and in a subgroup, whose ranks are others."""
    pair = dist.new_group([2, 1])
    for group in (None, dist.group.WORLD, pair):
        members = [0, 1, 2] if group is not pair else [1, 2]
        if rank not in members:
            continue
        world, mine = len(members), members.index(rank)
        a, b, bias = operands(world, 6 * world, 24, 16, seed=3, bias=True)
        leaves = [[x.float().detach().requires_grad_() for x in xs] for xs in (a, b)]
        truth = true_step(*leaves, bias)
        truth.sum().backward()
        for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            inputs = [x.detach().requires_grad_() for x in (a[mine], b[mine], bias)]
            out = run(*inputs, group)
            out.sum().backward()
            pairs = [
                (out.detach(), truth.detach().chunk(world)[mine]),
                (inputs[0].grad, leaves[0][mine].grad),
                (inputs[1].grad, leaves[1][mine].grad),
                (inputs[2].grad, (2 - out.detach().float() ** 2 / 2).sum(0)),
            ]
            for got, true in pairs:
                assert relative_error(got, true) <= 2 * tolerance(torch.bfloat16, world, True)


def test_gradients_and_compiled_functions_between_processes(tmp_path):
    start(tmp_path, processes_body)


def test_plans_survive_json():
    for plan in (SMALL, Plan(tile=[128, 64, 64], predicted_us=1.5, reason='because "it" is\n the best')):
        assert Plan.from_json(plan.to_json()) == plan and isinstance(plan.tile, tuple)


def test_inference_mode_and_no_grad():
    a, b, bias = operands(2, 32, 24, 16, seed=1, bias=True)
    weights = [x.requires_grad_() for x in b]
    for mode in (torch.inference_mode, torch.no_grad):
        with tw.virtual_world(2, device="cpu") as w, mode():
            outs = w.run(lambda rank, group: tw.matmul_reduce_scatter(a[rank], weights[rank], group, bias=bias))
        assert not outs[0].requires_grad
        assert_right(outs, a, [x.detach() for x in b], bias=bias)
