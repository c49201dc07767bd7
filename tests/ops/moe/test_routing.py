"""Routes of expert parallelism, held against what their words say, choice by choice; how many operators make one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tileweave as tw
from tests.ops.moe.problems import problem
from tileweave.fabric import group_name, named_fabric
from tileweave.ops.moe.launch import travel_of
from tileweave.ops.moe.routing import Experts, find_route, make_route

MOST_OPERATORS = {"route": 47, "exchanges": 2, "around it": 1, "travel": 12}  # without views, which launch nothing


class Counted(TorchDispatchMode):
    """Counts the operators of PyTorch within, but for views of what is there."""

    def __init__(self):
        super().__init__()
        self.count = self.exchanges = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        self.exchanges += func.namespace == "tileweave"
        return func(*args, **(kwargs or {}))


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


def test_a_route_takes_few_operators():
    """They are most of what a decoding step takes. Experts that the world divides take 3 fewer; two are exchanges, for
    which ranks meet."""
    p, experts = problem([12, 9], 9, 4), Experts(9, 2)

    def rank_program(rank, group):
        name, found, fabric = group_name(group), {}, named_fabric(group_name(group), p.index[rank].device)
        with Counted() as counted:
            route, lists, _ = make_route(name, group, p.index[rank], p.weight[rank], experts, 5 - rank, 64, 12)
        found["around it"] = counted.count - counted.exchanges  # of which the route is the only one
        with Counted() as counted:
            find_route(fabric, name, p.index[rank], p.weight[rank], experts, 64, 12)
        found["route"], found["exchanges"] = counted.count, counted.exchanges
        with Counted() as counted:
            travel_of(rank, route.row_slot, route.token_slot, lists, 64)
        found["travel"] = counted.count
        return found

    with tw.virtual_world(2, device="cpu") as world:
        for found in world.run(rank_program):
            assert all(0 < found[what] <= most for what, most in MOST_OPERATORS.items()), found
