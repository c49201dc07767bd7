"""Expert parallelism on virtual ranks of a real GPU."""

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.moe.problems import assert_right, problem, run, there_and_back, truth
from tests.ops.moe.test_combine import back
from tests.ops.moe.test_combine import plan as back_plan
from tests.ops.moe.test_dispatch import plan
from tests.ops.moe.test_moe import gradients, leaves, true_gradients
from tileweave import FabricTimeout
from tileweave.fabric import fabric_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("routing", ["random", "skewed", "one", "empty", "same"])
@pytest.mark.parametrize(
    "tokens, experts, k", [([90], 8, 2), ([70, 0], 8, 1), ([40, 99, 1, 300], 129, 8), ([16] * 8, 64, 4)]
)
def test_worlds_and_routings(tokens, experts, k, routing):
    p = problem(tokens, experts, k, 136, 72, routing=routing, device="cuda")
    with tw.virtual_world(len(tokens), device="cuda", timeout=5.0) as world:
        for options in ({}, dict(capacity=4096, max_tokens=300)):
            assert_right([out for out, *_ in run(world, p, **options)], truth(p))


@pytest.mark.parametrize("comm_sms", [2, 3, 8, 16])
@pytest.mark.parametrize(
    "tile, stages", [((128, 256, 64), 4), ((64, 256, 64), 5), ((64, 64, 64), 10), ((256, 128, 64), 4)]
)
def test_tiles_and_communicators(tile, stages, comm_sms):
    p = problem([200, 333], 12, 4, 520, 264, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as world:
        for _ in range(3):
            for gated in (False, True)[: tile[1] // 64]:  # a gate takes half of the columns, 64 at least
                results = run(world, p, gated=gated, second=False, plan=plan(tile, stages, comm_sms))
                assert_right([out for out, *_ in results], truth(p, gated=gated, second=False))


@pytest.mark.parametrize("transposed", [(True, True), (True, False)])
def test_gates_of_transposed_weights_and_silu(transposed):
    p = problem([200, 333], 6, 4, 520, 264, device="cuda")
    p.w, p.gate = (w.mT.contiguous().mT if flag else w for w, flag in zip((p.w, p.gate), transposed, strict=True))
    with tw.virtual_world(2, device="cuda", timeout=5.0) as world:
        gated = run(world, p, second=False)
        plain = run(world, p, gated=False, activation="silu", second=False)
    assert_right([out for out, *_ in gated], truth(p, second=False))
    assert_right([out for out, *_ in plain], truth(p, gated=False, activation="silu", second=False))


def test_compiled_in_full_graphs():
    p = problem([70, 40], 8, 2, 136, 72, device="cuda")
    seeds = [torch.randn(x.shape, device="cuda") for x in p.x]

    def step(x, index, weight, w, gate, down, group):
        h, route = tw.moe_dispatch_matmul(x, index, w, group, topk_weight=weight, w_gate=gate, capacity=512)
        return tw.moe_matmul_combine(h, down, route, group)

    compiled = torch.compile(step, fullgraph=True, dynamic=False)

    def rank_program(rank, group):
        found = []
        for call in (step, compiled):
            x, weight, w, gate, down = mine = leaves(p, rank)
            out = call(x, p.index[rank], weight, w, gate, down, group)
            (out.float() * seeds[rank]).sum().backward()
            found.append([out.detach(), *(each.grad for each in mine)])
        return found

    with tw.virtual_world(2, device="cuda", timeout=20.0) as world:
        for plain, by_compiler in world.run(rank_program):
            for a, b in zip(plain, by_compiler, strict=True):
                assert (a.float() - b.float()).norm() <= 0.02 * a.float().norm()


@pytest.mark.parametrize(
    "tile, stages", [((128, 256, 64), 4), ((64, 256, 64), 5), ((64, 64, 64), 10), ((256, 128, 64), 4)]
)
def test_tiles_of_the_way_back(tile, stages):
    p = problem([200, 333], 12, 4, 2056, 264, device="cuda")
    goal = truth(p, gated=False)
    with tw.virtual_world(2, device="cuda", timeout=5.0) as world:
        chosen, first = back_plan(tile, stages), None
        for _ in range(3):
            outs = world.run(lambda rank, group: back(p, rank, group, chosen))
            assert_right(outs, goal)
            first = first or outs
            assert all(torch.equal(*pair) for pair in zip(outs, first, strict=True))


def test_512_experts_and_many_tokens():
    p = problem([3000, 2500], 512, 8, 256, 128, device="cuda")
    sample = torch.arange(0, 2500, 97)
    p_sample = type(p)(*([each[sample] for each in given] for given in (p.x, p.index, p.weight)), p.w, p.gate, p.down)
    with tw.virtual_world(2, device="cuda", timeout=5.0) as world:
        results = run(world, p)
    assert_right([out[sample] for out, *_ in results], truth(p_sample))


@pytest.mark.parametrize("capacity", [None, 512])
def test_gradients(capacity):
    p = problem([70, 0, 40], 7, 2, 136, 72, device="cuda")
    seeds = [torch.randn(x.shape, device="cuda") for x in p.x]
    with tw.virtual_world(3, device="cuda", timeout=5.0) as world:
        got = world.run(lambda rank, group: gradients(p, rank, group, seeds, capacity=capacity))
    for mine, goal in zip(got, true_gradients(p, seeds), strict=True):
        for g, true in zip(mine, goal, strict=True):
            assert (g.float() - true).norm() <= 0.03 * true.norm() + 1e-6


@pytest.mark.parametrize("debug", ["0", "1"])
def test_replays_with_new_routing(debug, monkeypatch):
    """Also in debug mode, which looks at choices only where the host may wait for them."""
    monkeypatch.setenv("TILEWEAVE_DEBUG", debug)
    problems = [
        problem([96, 80], 9, 3, 136, 72, seed=i, routing=r, device="cuda")
        for i, r in enumerate(("random", "same", "skewed", "empty"))
    ]
    same = problems[0]
    for p in problems[1:]:
        p.w, p.gate, p.down = same.w, same.gate, same.down

    def rank_program(rank, group):
        x, index, weight = (each[rank].clone() for each in (same.x, same.index, same.weight))
        static = type(same)([x] * 2, [index] * 2, [weight] * 2, same.w, same.gate, same.down)

        def call():
            return there_and_back(static, rank, group, capacity=600, max_tokens=96)[0]

        with torch.no_grad():
            call()
            torch.cuda.synchronize()
            fabric_of(group).rendezvous()
            graph, out = capture(call)
        found = []
        for i in range(40):
            p = problems[3 * i % len(problems)]
            for mine, new in ((x, p.x), (index, p.index), (weight, p.weight)):
                mine.copy_(new[rank])
            fabric_of(group).rendezvous()
            graph.replay()
            found.append(out.clone())
        return found

    with tw.virtual_world(2, device="cuda", timeout=5.0) as world:
        by_rank = world.run(rank_program)
    for i, outs in enumerate(zip(*by_rank, strict=True)):
        assert_right(outs, truth(problems[3 * i % len(problems)]))


@pytest.mark.parametrize("name", ["moe_dispatch_matmul", "moe_matmul_combine"])
def test_an_absent_rank_gives_a_timeout_and_the_world_works_again(name):
    """Rank 1 has fallen a call behind for good: its peers wait for rows that never come."""
    p = problem([90, 80, 70], 9, 3, 136, 72, device="cuda")
    with tw.virtual_world(3, device="cuda", timeout=1.0) as world:
        run(world, p)
        world.workspace.ops[name].state[1, 0] -= 1
        with pytest.raises(FabricTimeout, match=rf"{name}: rank \d waited"):
            run(world, p)
        assert_right([out for out, *_ in run(world, p)], truth(p))
