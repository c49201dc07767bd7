"""Routes of expert parallelism, held against what their words say, choice by choice; how many operators make one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tileweave as tw
from tests.ops.moe.problems import problem
from tileweave.fabric import group_name, named_fabric
from tileweave.ops.moe import routing_launch
from tileweave.ops.moe.launch import travel_of
from tileweave.ops.moe.routing import Experts, find_route, make_route

MOST = {"route": (15, 3), "travel": (3, 2)}  # operators of PyTorch but for views, which launch nothing, and launches


class Counted(TorchDispatchMode):
    """Counts the operators of PyTorch within, but for views of what is there."""

    def __init__(self):
        super().__init__()
        self.count = self.exchanges = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        self.exchanges += func.namespace == "tileweave"
        return func(*args, **(kwargs or {}))


class Launched:
    """Counts the launches of a fabric within."""

    def __init__(self, fabric):
        self.fabric, self.count, self.launch = fabric, 0, fabric.launch

    def __enter__(self):
        self.fabric.launch = self
        return self

    def __call__(self, *args, **options):
        self.count += 1
        return self.launch(*args, **options)

    def __exit__(self, *_):
        self.fabric.launch = self.launch


def rows_of(index, experts, rank):
    """(expert, source, token, choice) of each row of a rank, in order."""
    first, end = experts.of(rank)
    return sorted(
        (e, source, t, j)
        for source, chosen in enumerate(index)
        for t, row in enumerate(chosen.tolist())
        for j, e in enumerate(row)
        if first <= e < end
    )


def aligned(rows, align):
    """Where rows, given as `rows_of` does, lie if each expert's begin at a multiple of `align`."""
    places, at = [], 0
    for i, row in enumerate(rows):
        if i and row[0] != rows[i - 1][0]:
            at = -(-at // align) * align
        places.append(at)
        at += 1
    return places


@pytest.mark.parametrize("capacity", [None, 7, 60])
@pytest.mark.parametrize(
    "tokens, experts, k, routing",
    [([6, 0, 9], 7, 3, "random"), ([8, 5], 8, 8, "skewed"), ([5, 4], 4, 2, "same"), ([3, 3], 5, 2, "one")],
)
def test_a_route_is_what_its_words_say(tokens, experts, k, routing, capacity):
    p, align = problem(tokens, experts, k, routing=routing), 4
    world, divided = len(tokens), Experts(experts, len(tokens))

    def rank_program(rank, group):
        own, name = divided.of(rank)[1] - divided.of(rank)[0], group_name(group)
        index = p.index[rank].t().contiguous().t()  # any strides will do
        route, lists, _ = make_route(name, group, index, p.weight[rank], divided, own, capacity, max(tokens))
        return route, travel_of(named_fabric(name, index.device), route.row_slot, lists, align)

    with tw.virtual_world(world, device="cpu") as virtual:
        routes, travels = zip(*virtual.run(rank_program), strict=True)
    kept = [rows_of(p.index, divided, rank)[:capacity] for rank in range(world)]
    places = [aligned(rows_of(p.index, divided, rank), align) for rank in range(world)]
    homes = [sorted(row for rows in kept for row in rows if row[1] == source) for source in range(world)]
    totals = [
        sum(row[0] == e for rank in range(world) for row in rows_of(p.index, divided, rank)) for e in range(experts)
    ]
    for rank, (route, travel) in enumerate(zip(routes, travels, strict=True)):
        assert route.totals.tolist() == totals and route.totals.dtype == torch.int64
        assert not route.row_home[len(kept[rank]) :].any() and (route.row_slot[len(kept[rank]) :] == -1).all()
        assert route.dropped == sum((i >= 0).sum() for i in p.index[rank]) - len(homes[rank])
        for place, row in enumerate(kept[rank]):
            _, source, t, j = row
            slot = int(routes[source].token_slot[t, rank])
            first = min(i for i, other in enumerate(kept[rank]) if other[1:3] == (source, t))
            assert route.row_slot[place] == source * route.slots + slot
            assert route.row_home[place] == routes[source].home[t, j] == homes[source].index(row)
            assert route.row_weight[place] == p.weight[source][t, j] and routes[source].place[t, j] == place
            tokens_sent = travels[source].send_token.view(2, world, -1)[0, rank]
            sent = tokens_sent, travels[source].send_place.view(world, -1)[rank]
            assert [int(each[slot]) for each in sent] == [t, places[rank][first]]
            assert travel.from_row.view(-1)[place] == places[rank][first]
        for d in range(world):
            order = list(dict.fromkeys(row[2] for row in kept[d] if row[1] == rank))
            assert travel.sent[d] == len(order)
            assert [int(route.token_slot[t, d]) for t in order] == list(range(len(order)))
            assert (route.token_slot[:, d] >= 0).sum() == len(order)


def test_the_way_back_asks_for_no_operator_of_its_own():
    """How many experts there are is known on the host."""
    p = problem([6], 4, 2)
    _, route = tw.moe_dispatch_matmul(p.x[0], p.index[0], p.w)
    rows = torch.zeros(route.row_slot.shape[0], p.down.shape[1], dtype=p.down.dtype)
    with Counted() as counted:
        tw.explain("moe_matmul_combine", rows, p.down, route)
    assert counted.count == 0


def test_a_route_takes_few_launches():
    """They are most of what a decoding step takes."""
    p, experts = problem([12, 9], 9, 4), Experts(9, 2)

    def rank_program(rank, group):
        name, found, fabric = group_name(group), {}, named_fabric(group_name(group), p.index[rank].device)
        with Counted() as counted:
            route, lists, _ = make_route(name, group, p.index[rank], p.weight[rank], experts, 5 - rank, 64, 12)
        found["around it"] = counted.count - counted.exchanges  # of which the route is the only one
        for what, call in (
            ("route", lambda: routing_launch.find_route(fabric, p.index[rank], p.weight[rank], experts, 64, 12)),
            ("travel", lambda: travel_of(fabric, route.row_slot, lists, 64)),
        ):
            with Counted() as counted, Launched(fabric) as launched:
                call()
            found[what] = counted.count, launched.count
        return found

    with tw.virtual_world(2, device="cpu") as world:
        for found in world.run(rank_program):
            assert found["around it"] <= 1, found
            for what, most in MOST.items():
                assert all(0 < n <= m for n, m in zip(found[what], most, strict=True)), found


@pytest.mark.parametrize("capacity", [None, 9, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_kernels_and_operators_make_the_same_route(capacity, weighted):
    """Several chunks of choices, calls of other experts and choices in turn."""
    problems = [problem([90, 0, 31], experts, k, seed=k) for experts, k in ((7, 3), (40, 8), (3, 1), (9, 5))]

    def rank_program(rank, group):
        name, found = group_name(group), []
        for p, experts in zip(problems, (7, 40, 3, 9), strict=True):
            weight = p.weight[rank] if weighted else None
            asked = p.index[rank].int(), weight, Experts(experts, 3), capacity, 90
            fabric = named_fabric(name, p.index[rank].device)
            found.append((find_route(fabric, name, *asked), routing_launch.find_route(fabric, *asked)))
        return found

    with tw.virtual_world(3, device="cpu") as world:
        for found in world.run(rank_program):
            for theirs, ours in found:
                *_, rows, sends, sent, _, sizes = theirs
                assert torch.equal(sizes, ours[-1])
                there = torch.arange(sends.shape[2]) < sent[:, None]
                for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
                    if a is rows:
                        a, b = a[:, : sizes[0]], b[:, : sizes[0]]
                    if a is sends:
                        a, b = a[:, there], b[:, there]
                    assert a.dtype == b.dtype and torch.equal(a, b), i


def test_choices_that_no_kernel_has_room_for():
    """More of a token than a chunk has are routed by operators."""
    assert routing_launch.fits(128, Experts(512, 2)) and not routing_launch.fits(129, Experts(512, 2))
    assert not routing_launch.fits(1, Experts(64 * 1024, 64))
    index = torch.stack([torch.randperm(200)[:130] for _ in range(3)])
    x, w = torch.randn(3, 64).bfloat16(), torch.randn(200, 64, 64).bfloat16()
    y, route = tw.moe_dispatch_matmul(x, index, w)
    assert y.shape[0] == 390 and route.offsets[-1] == 390
