"""The collectives as PyTorch sees them: gradients, torch.compile, fake tensors, processes of a gloo group."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tests.fabric.test_distributed import start
from tests.ops.collectives import assert_right, inputs
from tileweave.fabric import fabric_of, group_name
from tileweave.ops.collectives import reference

CASES = [  # a collective, its options, the shape of x for so many ranks
    ("all_gather", dict(dim=1), lambda world: (3, 4, 5)),
    ("reduce_scatter", dict(dim=1), lambda world: (3, 4 * world, 5)),
    ("reduce_scatter", dict(dim=-1, op="avg"), lambda world: (3, 2, 5 * world)),
    ("all_reduce", dict(op="sum"), lambda world: (3, 7)),
    ("all_reduce", dict(op="avg"), lambda world: (3, 7)),
    ("all_to_all", dict(split_dim=0, concat_dim=2), lambda world: (2 * world, 3, 5)),
]
IDS = [f"{name} {options}" for name, options, _ in CASES]
cases = pytest.mark.parametrize("name, options, shape", CASES, ids=IDS)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def schema_arguments(name, options):
    """Options as the operator takes them, in order."""
    if name == "all_to_all":
        return options["split_dim"], options["concat_dim"]
    dim = (options.get("dim", 0),) if name != "all_reduce" else ()
    return dim if name == "all_gather" else (*dim, options.get("op", "sum"), False)


@cases
def test_opcheck_in_a_world_of_one_and_in_an_emulated_world(name, options, shape):
    operator = getattr(torch.ops.tileweave, name).default
    given = schema_arguments(name, options)

    def rank_program(rank, group, world):
        x = inputs(world, shape(world), 1, torch.float32)[rank].requires_grad_()
        torch.library.opcheck(operator, (x, group_name(group), *given))

    rank_program(0, None, 1)
    with tw.virtual_world(2, device="cpu") as w:
        w.run(lambda rank, group: rank_program(rank, group, 2))


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients(world, dtype, name, options, shape):
    xs = inputs(world, shape(world), 2, dtype)
    leaves = [x.clone().float().requires_grad_() for x in xs]
    truth = reference(name, leaves, **options)
    weights = inputs(world, truth[0].shape, 3, dtype)
    sum((out * weight.float()).sum() for out, weight in zip(truth, weights, strict=True)).backward()

    def rank_program(rank, group):
        x = xs[rank].clone().requires_grad_()
        out = getattr(tw, name)(torch.tanh(x) * 0 + x, group, **options)
        out.backward(weights[rank])
        return x.grad

    with tw.virtual_world(world, device="cpu", sms=2) as w:
        for got, leaf in zip(w.run(rank_program), leaves, strict=True):
            rounding = 2**-7 if dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(got.float(), leaf.grad, rtol=rounding, atol=rounding)


@cases
def test_second_derivatives(name, options, shape):
    xs = inputs(2, shape(2), 4, torch.float32)

    def losses(outs):
        return sum((out**3).sum() for out in outs)

    leaves = [x.clone().requires_grad_() for x in xs]
    firsts = torch.autograd.grad(losses(reference(name, leaves, **options)), leaves, create_graph=True)
    sum((first**2).sum() for first in firsts).backward()

    def rank_program(rank, group):
        x = xs[rank].clone().requires_grad_()
        out = getattr(tw, name)(x, group, **options)
        (first,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
        (first**2).sum().backward()
        return x.grad

    with tw.virtual_world(2, device="cpu") as w:
        for got, leaf in zip(w.run(rank_program), leaves, strict=True):
            torch.testing.assert_close(got, leaf.grad)


@cases
def test_fake_tensors_have_the_results_shape(name, options, shape):
    with tw.virtual_world(4, device="cpu") as w, FakeTensorMode():
        group = w.run(lambda rank, group: group_name(group))[0]
        x = torch.empty(shape(4), dtype=torch.half)
        out = getattr(torch.ops.tileweave, name).default(x.mT.contiguous().mT, group, *schema_arguments(name, options))
        assert out.shape == reference(name, [x] * 4, **options)[0].shape and out.dtype == torch.half
        assert out.is_contiguous()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_full_graphs(backend, dynamic):
    def layer(x, group):
        x = tw.all_to_all(torch.tanh(x), group, split_dim=1, concat_dim=0)
        x = tw.reduce_scatter(tw.all_gather(x, group, dim=1) * 2, group, dim=1, op="avg")
        return tw.all_reduce(torch.tanh(x), group)

    counter = CompileCounterWithBackend(backend)
    run = torch.compile(layer, fullgraph=True, backend=counter, dynamic=dynamic)
    with tw.virtual_world(2, device="cpu") as w:
        for rows in (6, 10):
            xs = inputs(2, (rows, 4, 5), rows, torch.float32)

            def rank_program(rank, group, xs=xs):
                results = []
                for call in (layer, run):
                    x = xs[rank].clone().requires_grad_()
                    out = call(x, group)
                    (out**2).sum().backward()
                    results.append((out.detach(), x.grad))
                return results

            for plain, compiled in w.run(rank_program):
                for x, y in zip(plain, compiled, strict=True):
                    assert x.any()
                    torch.testing.assert_close(x, y)
    assert counter.frame_count <= (1 if dynamic else 2)


def test_modes_without_gradients_and_parameters():
    xs = [torch.nn.Parameter(x) for x in inputs(2, (4, 6), 1)]
    with tw.virtual_world(2, device="cpu") as w:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outs = w.run(lambda rank, group: tw.all_gather(xs[rank], group))
            assert not outs[0].requires_grad
            assert_right("all_gather", outs, [x.detach() for x in xs])


def test_warm_calls_launch_what_is_remembered_and_see_new_data():
    with tw.virtual_world(2, device="cpu") as w:

        def rank_program(rank, group):
            results = []
            for seed in range(4):
                xs = inputs(2, (6, 8), seed)
                results.append((tw.all_reduce(xs[rank], group), tw.reduce_scatter(xs[rank], group)))
            return results, len(fabric_of(group).views("collectives"))

        for rank, (results, kinds) in enumerate(w.run(rank_program)):
            assert kinds == 2
            for seed, (whole, share) in enumerate(results):
                total = torch.stack(inputs(2, (6, 8), seed)).float().sum(0)
                torch.testing.assert_close(whole.float(), total, rtol=2**-8, atol=0)
                torch.testing.assert_close(share.float(), total.chunk(2)[rank], rtol=2**-8, atol=0)


def processes_body(rank):
    """All collectives in a group of processes and in a subgroup, whose ranks are others; gradients, compiled calls."""
    pair = dist.new_group([2, 1])
    for group in (None, dist.group.WORLD, pair):
        members = [0, 1, 2] if group is not pair else [1, 2]
        if rank not in members:
            continue
        world, mine = len(members), members.index(rank)
        for name, options, shape in CASES:
            call = getattr(tw, name)
            route = tw.explain(name, torch.zeros(shape(world)), group, **options)
            assert not route.fused and "CPU tensors outside an emulated world" in route.reason
            for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.complex64):
                if dtype not in (torch.float32, torch.bfloat16) and name not in ("all_gather", "all_to_all"):
                    continue
                xs = inputs(world, shape(world), 1, dtype)
                out = call(xs[mine].mT.contiguous().mT, group, **options)
                true = reference(name, xs, **options)[mine]
                torch.testing.assert_close(out.to(true.dtype), true, rtol=2**-6, atol=2**-6)
                assert out.is_contiguous() and out.dtype == dtype
            if name in ("reduce_scatter", "all_reduce"):
                xs = inputs(world, shape(world), 1)
                out, true = call(xs[mine], group, deterministic=True, **options), reference(name, xs, **options)[mine]
                torch.testing.assert_close(out.float(), true, rtol=2**-8, atol=0)
            empty = call(torch.zeros(0, *shape(world)[1:]), group, **options)
            assert empty.numel() == 0
            xs = inputs(world, shape(world), 5, torch.float32)
            grads = []
            for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
                x = xs[mine].clone().requires_grad_()
                (run(x, group, **options) ** 2).sum().backward()
                grads.append(x.grad)
            torch.testing.assert_close(*grads)
            leaves = [x.clone().requires_grad_() for x in xs]
            sum((out**2).sum() for out in reference(name, leaves, **options)).backward()
            torch.testing.assert_close(grads[0], leaves[mine].grad)


def test_the_fallback_between_processes(tmp_path):
    start(tmp_path, processes_body)
