"""Expert parallelism in emulated worlds, against float32: values, order of rows, capacity, gradients, contract."""

import pytest
import torch

import tileweave as tw
from tests.ops.moe.problems import assert_right, problem, run, there_and_back, truth
from tileweave.ops import descriptors
from tileweave.ops.matmul_reduce_scatter import relative_error

ROUTINGS = ["random", "skewed", "one", "empty", "same"]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "tokens, experts, k", [([9], 8, 2), ([7, 0], 8, 1), ([4, 9, 1], 10, 3), ([5, 5, 5, 5], 17, 8), ([1] * 8, 8, 2)]
)
def test_worlds_routings_unequal_tokens_and_experts_that_do_not_divide(tokens, experts, k, routing):
    p = problem(tokens, experts, k, routing=routing)
    with tw.virtual_world(len(tokens), device="cpu") as world:
        assert_right([out for out, *_ in run(world, p)], truth(p))


def test_512_experts():
    p = problem([40, 30], 512, 8, h=8, i=8)
    with tw.virtual_world(2, device="cpu", sms=2) as world:
        assert_right([out for out, *_ in run(world, p)], truth(p))


@pytest.mark.parametrize(
    "options", [dict(gated=False, second=False), dict(gated=False, weighted=False), dict(second=False)]
)
def test_without_gate_weights_or_second_matmul(options):
    p = problem([6, 8], 8, 2)
    with tw.virtual_world(2, device="cpu") as world:
        for activation in (None, "silu"):
            results = run(world, p, activation=activation, **options)
            goal = truth(p, activation=activation, **options)
            assert_right([out for out, *_ in results], goal)


def test_rows_are_sorted_by_expert_source_token_and_choice():
    p = problem([6, 8, 3], 7, 3)
    with tw.virtual_world(3, device="cpu") as world:
        results = run(world, p, gated=False)
    for rank, (_, y, route) in enumerate(results):
        first, end = p.experts.of(rank)
        wanted = [
            (int(e), source, t, j)
            for source, index in enumerate(p.index)
            for t, row in enumerate(index)
            for j, e in enumerate(row)
            if first <= e < end
        ]
        wanted.sort()
        goal = [p.x[source][t].float() @ p.w[e].float() for e, source, t, _ in wanted]
        assert y.shape[0] == len(goal) and (not goal or relative_error(y, torch.stack(goal)) <= 0.01)
        counts = [sum(e == expert for e, *_ in wanted) for expert in range(first, end)]
        assert route.offsets.tolist() == torch.tensor(counts).cumsum(0).tolist()
        for place, (_, source, t, j) in enumerate(wanted):
            assert results[source][2].place[t, j] == place


def test_a_token_is_sent_once_to_a_rank():
    p = problem([6, 8], 8, 6, routing="random")
    with tw.virtual_world(2, device="cpu") as world:
        for rank, (_, _, route) in enumerate(run(world, p)):
            owner = torch.where(p.index[rank] < 0, -1, p.index[rank] // 4)
            for d in range(2):
                wanted = (owner == d).any(1)
                sent = route.token_slot[:, d]
                assert ((sent >= 0) == wanted).all()
                assert sorted(sent[sent >= 0].tolist()) == list(range(int(wanted.sum())))


def test_with_a_capacity_nothing_else_changes_until_it_is_full():
    p = problem([6, 8], 8, 2)
    with tw.virtual_world(2, device="cpu") as world:
        exact = run(world, p)
        for options in (dict(capacity=40), dict(capacity=40, max_tokens=8)):
            for (out, y, route), (out_exact, y_exact, _) in zip(run(world, p, **options), exact, strict=True):
                assert torch.equal(out, out_exact) and route.dropped == 0
                assert (
                    y.shape[0] == 40 and torch.equal(y[: y_exact.shape[0]], y_exact) and not y[y_exact.shape[0] :].any()
                )


@pytest.mark.parametrize("capacity", [1, 5, 11])
def test_rows_over_capacity_are_dropped_the_last_ones_first(capacity):
    p = problem([6, 8], 4, 3, routing="skewed")
    with tw.virtual_world(2, device="cpu") as world:
        exact, results = run(world, p), run(world, p, capacity=capacity)
    kept = [
        torch.where((r.place >= 0) & (r.place < capacity), i, -1) for i, (_, _, r) in zip(p.index, exact, strict=True)
    ]
    for rank, (_, _, route) in enumerate(results):
        assert route.dropped == ((p.index[rank] >= 0) & (kept[rank] < 0)).sum()
        assert torch.equal(route.place >= 0, kept[rank] >= 0)
    p.index = kept
    assert_right([out for out, *_ in results], truth(p))


def test_calls_follow_each_other_with_new_routing():
    problems = [problem([6, 8, 4], 9, 3, seed=seed, routing=r) for seed, r in enumerate(ROUTINGS)]
    with tw.virtual_world(3, device="cpu", delayed=(1,)) as world:
        by_rank = world.run(lambda rank, group: [there_and_back(p, rank, group)[0] for p in problems])
    for outs, p in zip(zip(*by_rank, strict=True), problems, strict=True):
        assert_right(outs, truth(p))


def test_other_numbers_of_tokens_and_rows_are_no_cold_calls(monkeypatch):
    """Descriptors are made once for each kind of call, not for each call, with a capacity or without."""
    problems = [problem(tokens, 5, 2, 64, 64, seed=i) for i, tokens in enumerate(([30, 30], [9, 7], [0, 12]))]

    def rank_program(rank, problems):
        plan = tw.Plan("tma", "inter_sm", (64, 128, 64), 2, comm_sms=2)
        return [
            there_and_back(p, rank, None, capacity=capacity, max_tokens=30, plan=plan)[0]
            for p in problems
            for capacity in (None, 130)
        ]

    with tw.virtual_world(2, device="cpu", sms=4) as world:
        world.run(lambda rank, group: rank_program(rank, problems[:1]))
        monkeypatch.setattr(descriptors, "describe", lambda *args: pytest.fail("a descriptor is made"))
        warm = world.run(lambda rank, group: rank_program(rank, problems))
    for rank, outs in enumerate(warm):
        assert_right(outs, [goal for p in problems for goal in [truth(p)[rank]] * 2])


def leaves(p, rank):
    """A rank's inputs, as leaves."""
    first, end = p.experts.of(rank)
    given = p.x[rank], p.weight[rank], p.w[first:end], p.gate[first:end], p.down[first:end]
    return [each.clone().requires_grad_() for each in given]


def gradients(p, rank, group, seeds, **options):
    """Gradients of x, weight, w, gate and down of a rank, of the sum of (result * seeds)."""
    x, weight, w, gate, down = mine = leaves(p, rank)
    h, route = tw.moe_dispatch_matmul(
        x, p.index[rank], w, group, topk_weight=weight, w_gate=gate, experts=p.experts.total, **options
    )
    out = tw.moe_matmul_combine(h, down, route)
    (out.float() * seeds[rank]).sum().backward()
    return [each.grad for each in mine]


def true_gradients(p, seeds):
    """The same in float32, of all ranks."""
    x, weight = ([each.float().clone().requires_grad_() for each in all_] for all_ in (p.x, p.weight))
    w, gate, down = (each.float().clone().requires_grad_() for each in (p.w, p.gate, p.down))
    from tileweave.ops.moe import reference

    outs = reference(x, p.index, weight, w, gate, None, down)
    total = sum((out * seed).sum() for out, seed in zip(outs, seeds, strict=True))
    inputs = [*x, *weight, w, gate, down]
    grads = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
    grads = [torch.zeros_like(each) if g is None else g for each, g in zip(inputs, grads, strict=True)]
    n = len(x)
    parts = [[g[slice(*p.experts.of(rank))] for g in grads[2 * n :]] for rank in range(n)]
    return [[grads[rank], grads[n + rank], *parts[rank]] for rank in range(n)]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", [None, 64])
def test_gradients_also_of_experts_and_ranks_without_tokens(routing, capacity):
    p = problem([7, 0, 4], 7, 2, routing=routing)
    seeds = [torch.randn(x.shape) for x in p.x]
    with tw.virtual_world(3, device="cpu") as world:
        got = world.run(lambda rank, group: gradients(p, rank, group, seeds, capacity=capacity))
    for mine, goal in zip(got, true_gradients(p, seeds), strict=True):
        for g, true in zip(mine, goal, strict=True):
            assert g is not None and g.shape == true.shape
            assert (g.float() - true).norm() <= 0.03 * true.norm() + 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(topk_index=torch.zeros(3, 2).long()), r"topk_index must be \[6, k\]"),
        (dict(topk_index=torch.zeros(6, 300).long()), "has 300 choices for each token, more than the 8 experts"),
        (dict(topk_index=torch.zeros(6, 2)), "int32 or int64"),
        (dict(topk_weight=torch.zeros(6, 3)), "topk_weight must be"),
        (dict(w=torch.zeros(4, 24, 16)), "must both be bfloat16"),
        (dict(w=torch.zeros(4, 16, 16).bfloat16()), r"x must be \[T, H\]"),
        (dict(w_gate=torch.zeros(4, 24, 8).bfloat16()), "w_gate must be as w"),
        (dict(activation="gelu"), "None or 'silu'"),
        (dict(capacity=0), "capacity must be from 1"),
        (dict(max_tokens=5), "must be at least that"),
        (dict(experts=12), "of 12 experts rank"),
        (dict(experts=1), "at least one for each of 2 ranks"),
    ],
)
def test_a_broken_contract_is_named(change, message):
    p = problem([6, 6], 8, 2)

    def rank_program(rank, group):
        arguments = dict(x=p.x[rank], topk_index=p.index[rank], w=p.w[:4]) | change
        with pytest.raises(ValueError, match=message):
            tw.moe_dispatch_matmul(**arguments)
        if "capacity" not in change:
            with pytest.raises(ValueError, match=message):
                tw.explain("moe_dispatch_matmul", **arguments)

    with tw.virtual_world(2, device="cpu") as world:
        world.run(rank_program)


def test_the_way_back_refuses_other_rows():
    p = problem([6], 8, 2)
    _, y, route = there_and_back(p, 0, None)
    with pytest.raises(TypeError, match="route must be what"):
        tw.moe_combine(y, None)
    with pytest.raises(ValueError, match="y must be"):
        tw.moe_combine(y[1:], route)
    with pytest.raises(ValueError, match="h must be"):
        tw.moe_matmul_combine(y.float(), p.down, route)


@pytest.mark.parametrize("wrong", [8, -2, 2**40])
def test_what_is_no_experts_number_is_dropped_and_told_to_all_ranks_in_debug_mode(wrong, monkeypatch):
    p = problem([6, 8], 8, 2)
    p.index[1][3, 1] = -1
    monkeypatch.setenv("TILEWEAVE_DEBUG", "0")
    with tw.virtual_world(2, device="cpu") as world:
        dropped = [out for out, *_ in run(world, p)]
        p.index[1][3, 1] = wrong
        assert all(torch.equal(a, b) for a, (b, *_) in zip(dropped, run(world, p), strict=True))
    monkeypatch.setenv("TILEWEAVE_DEBUG", "1")
    told = [None, None]

    def body(rank, group):
        try:
            there_and_back(p, rank, group)
        except ValueError as error:
            told[rank] = str(error)

    with tw.virtual_world(2, device="cpu") as world:
        world.run(body)
    assert (
        told[0]
        == told[1]
        == (
            "rank 1: moe_dispatch_matmul: topk_index must be experts' numbers, 0 to 7, or -1 for none, but 1 of 16 are "
            f"others, the first one {wrong}"
        )
    )
