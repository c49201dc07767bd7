"""Expert parallelism under torch.compile, as registered operators."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tests.ops.moe.problems import problem
from tests.ops.moe.test_moe import leaves
from tileweave.fabric import group_name

CAPACITY = 40


def layer(x, index, weight, w, gate, down, group, total):
    """There, experts, and back; and what `moe_combine` makes of the rows."""
    h, route = tw.moe_dispatch_matmul(
        x, index, w, group, topk_weight=weight, w_gate=gate, experts=total, capacity=CAPACITY, max_tokens=8
    )
    return tw.moe_matmul_combine(torch.tanh(h), down, route, group) * 2, tw.moe_combine(h, route, group)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_is_one_graph_with_the_same_results_and_gradients(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=False)

    def rank_program(rank, group):
        found = []
        for seed in range(2):
            p = problem([8, 8], 4, 2, seed=seed)
            for call in (layer, compiled):
                x, weight, w, gate, down = mine = leaves(p, rank)
                outs = call(x, p.index[rank], weight, w, gate, down, group, 4)
                sum((out.float() ** 2).sum() for out in outs).backward()
                found.append([*(out.detach() for out in outs), *(each.grad for each in mine)])
        return found

    with tw.virtual_world(2, device="cpu") as world:
        for found in world.run(rank_program):
            for plain, by_compiler in (found[:2], found[2:]):
                for a, b in zip(plain, by_compiler, strict=True):
                    torch.testing.assert_close(a, b)
            assert any(not torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert counter.frame_count == 1


def test_without_a_capacity_the_compiler_is_told_so():
    def call(x, index, w, group):
        return tw.moe_dispatch_matmul(x, index, w, group)[0]

    p = problem([6], 4, 2)
    with pytest.raises(Exception, match="give a capacity"):
        torch.compile(call, fullgraph=True, backend="eager")(p.x[0], p.index[0], p.w, None)


def test_fake_tensors_have_the_results_shapes():
    with tw.virtual_world(2, device="cpu") as world:
        name = world.run(lambda rank, group: group_name(group))[0]
        ops = torch.ops.tileweave
        with FakeTensorMode():
            index, x, w = torch.zeros(6, 3).long(), torch.zeros(6, 24).half(), torch.zeros(4, 24, 16).half()
            fields = ops.moe_route.default(index, torch.zeros(6, 3), 8, 4, 30, 6, name)
            offsets, token_slot, _, owner, place, home, rows, *lists, _ = fields
            shapes = [list(each.shape) for each in fields]
            assert shapes[:6] == [[4], [6, 2], [], [6, 3], [6, 3], [6, 3]]
            assert shapes[6:] == [[4, 32], [2, 2, 6], [2], [2, 5], [4]]
            row_first, row_slot, row_home, weight = rows[:, :30]
            lists = row_first, *lists
            assert ops.moe_row_weight.default(torch.zeros(6, 3), weight, owner, place, 30, name).shape == (30,)
            y = ops.moe_dispatch_matmul.default(
                x, w, None, offsets, row_slot, token_slot, *lists, 8, 6, 30, False, name, ""
            )
            assert y.shape == (30, 16) and y.dtype == torch.half
            down = torch.zeros(4, 16, 24).half()
            out = ops.moe_matmul_combine.default(
                y, down, weight, offsets, row_slot, row_home, token_slot, home, 6, 18, 8, name, ""
            )
            assert out.shape == (6, 24) and out.dtype == torch.half


def test_the_operators_keep_pytorchs_rules():
    p = problem([6], 4, 2)
    h, route = tw.moe_dispatch_matmul(p.x[0], p.index[0], p.w, topk_weight=p.weight[0], capacity=20)
    name, ops = group_name(None), torch.ops.tileweave
    asked = p.index[0], p.weight[0], 4, 4, 20, 6, name
    torch.library.opcheck(ops.moe_route.default, asked)
    torch.library.opcheck(ops.moe_route.default, (p.index[0], None, *asked[2:]))
    *_, owner, place, _, rows, sends, sent, bounds, _ = ops.moe_route.default(*asked)
    row_first = rows[0, :20]
    weighted = p.weight[0].clone().requires_grad_(), route.row_weight, owner, place, 20, name
    torch.library.opcheck(ops.moe_row_weight.default, weighted)
    x, w, gate, down, h, weight = (
        each.clone().requires_grad_() for each in (p.x[0], p.w, p.gate, p.down, h, route.row_weight)
    )
    r = route
    lists = r.offsets, r.row_slot, r.token_slot, row_first, sends, sent, bounds, 4, r.slots
    loose = dict(atol=1e-1, rtol=1e-1)
    torch.library.opcheck(ops.moe_dispatch_matmul.default, (x, w, gate, *lists, 20, False, name, ""), **loose)
    lists = r.offsets, r.row_slot, r.row_home, r.token_slot, r.home, r.slots, r.homes, 4
    torch.library.opcheck(ops.moe_matmul_combine.default, (h, down, weight, *lists, name, ""), **loose)
