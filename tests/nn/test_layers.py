"""The layers in emulated worlds, against the same model in one process."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tileweave as tw
from tests.nn.models import PLAN, REPLICATED, Block, assert_equal_to, data, loss_of, make, step, truth
from tileweave.nn import (
    Column,
    ColumnParallelLinear,
    Row,
    RowParallelLinear,
    column_parallel,
    layers,
    parallelize,
    reduce_gradients,
)
from tileweave.ops.matmul_reduce_scatter import relative_error


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("shape, dim", [((24, 24), -2), ((1, 12, 24), 1), ((3, 24, 24), -2), ((12, 2, 24), 0)])
def test_sequence_parallel(world, shape, dim):
    model, (x, target) = make(gate_bias=world % 2), data(*shape)
    plan = {"gate": Column(sequence_dim=dim), "up": Column(sequence_dim=dim), "down": Row(sequence_dim=dim)}
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        results = w.run(lambda rank, group: step(model, x, target, rank, group, plan, dim))
    assert_equal_to(truth(model, x, target), results, dim)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 24), (2, 7, 24)])
def test_replicated_activations(world, shape):
    """Any number of tokens; every gradient is complete on every rank."""
    model, (x, target) = make(), data(*shape)
    with tw.virtual_world(world, device="cpu", sms=2) as w:
        results = w.run(lambda rank, group: step(model, x, target, rank, group, REPLICATED, None))
    assert_equal_to(truth(model, x, target), results, None)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_token_comes_to_its_place(world, dim):
    """With weights that copy features, column gathers and row scatters exactly, whatever precedes the sequence."""
    shape = [2, 3, 2, 8]
    shape[dim] = 6
    whole = torch.arange(2**8).repeat(10)[: torch.Size(shape).numel()].view(shape).bfloat16()

    def rank_program(rank, group):
        column = ColumnParallelLinear(8, 8 * world, False, dtype=torch.bfloat16, group=group, sequence_dim=dim)
        row = RowParallelLinear(8 * world, 8, False, dtype=torch.bfloat16, group=group, sequence_dim=dim)
        with torch.no_grad():
            column.weight.copy_(torch.eye(8))
            row.weight.copy_(torch.eye(8) if rank == 0 else torch.zeros(8, 8))
            mine = whole.chunk(world, dim)[rank]
            gathered = column(mine)
            assert torch.equal(gathered, whole)
            assert torch.equal(row(gathered), mine)
            assert torch.equal(row(whole.clone()), mine)
        return True

    with tw.virtual_world(world, device="cpu") as w:
        assert all(w.run(rank_program))


def recorded(monkeypatch, name):
    """The keyword arguments, and the second argument, of each call that the layers make of an op."""
    calls, op = [], getattr(layers, name)

    def record(a, b, group, **options):
        calls.append((b, options))
        return op(a, b, group, **options)

    monkeypatch.setattr(layers, name, record)
    return calls


def test_projections_share_a_gather(monkeypatch):
    calls = recorded(monkeypatch, "all_gather_matmul")
    x = torch.randn(2, 4, 16).bfloat16()

    def rank_program(rank, group):
        torch.manual_seed(rank)
        q, k, v = (ColumnParallelLinear(16, n, dtype=torch.bfloat16, group=group) for n in (32, 16, 48))
        together = column_parallel(x[rank : rank + 1], q, k, v)
        alone = [layer(x[rank : rank + 1]) for layer in (q, k, v)]
        assert all(relative_error(a, b) < 0.005 for a, b in zip(together, alone, strict=True))

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)
    assert sorted(len(b) for b, _ in calls) == [1] * 6 + [3] * 2


def test_options_reach_the_ops(monkeypatch):
    names = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    gather, scatter, reduce = (recorded(monkeypatch, name) for name in names)
    x = torch.randn(4, 16).bfloat16()

    def rank_program(rank, group):
        options = dict(dtype=torch.bfloat16, group=group, max_sms=2)
        gathered = ColumnParallelLinear(16, 16, regather=True, **options)(x)
        RowParallelLinear(16, 16, **options)(gathered)
        RowParallelLinear(16, 16, sequence_parallel=False, **options)(gathered)

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)
    for calls in (gather, scatter, reduce):
        assert [options["max_sms"] for _, options in calls] == [2, 2]
    assert all(options["regather"] for _, options in gather)


def test_plain_layers_may_take_their_place():
    x, linears = torch.randn(3, 8), [nn.Linear(8, 4), nn.Linear(8, 2)]
    for out, linear in zip(column_parallel(x, *linears), linears, strict=True):
        assert torch.equal(out, linear(x))
    with pytest.raises(TypeError, match="all be ColumnParallelLinear, or none, got Linear, ColumnParallelLinear"):
        column_parallel(x, linears[0], ColumnParallelLinear(8, 4))
    with pytest.raises(ValueError, match="the same sequence_dim, got -2, 0"):
        column_parallel(x, ColumnParallelLinear(8, 4), ColumnParallelLinear(8, 4, sequence_dim=0))


def test_autocast_takes_float32_parameters():
    model, (x, target) = make(dtype=torch.float32), data(2, 8, 24, dtype=torch.float32)

    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    true = truth(model, x, target)
    for plan, dim in ((PLAN, -2), (REPLICATED, None)):
        with tw.virtual_world(2, device="cpu") as w:
            results = w.run(lambda rank, group, p=plan, d=dim: step(model, x, target, rank, group, p, d, call))
        assert all(grad.dtype == torch.float32 for _, _, named in results for grad in named.values())
        assert_equal_to(true, results, dim)


@pytest.mark.parametrize("regather", [False, True])
def test_checkpointing_and_regathering_give_the_same_gradients(regather):
    model, (x, target) = make(gate_bias=True), data(2, 8, 24)
    plan = {**PLAN, "gate": Column(regather=regather), "up": Column(regather=regather)}

    def rank_program(rank, group):
        plain = step(model, x, target, rank, group)
        call = lambda model, x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
        other = step(model, x, target, rank, group, plan, call=call)
        for name, grad in plain[2].items():
            assert grad.any() and torch.equal(grad, other[2][name])
        assert torch.equal(plain[1], other[1])

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)


def test_gradients_accumulate_over_micro_batches():
    model, (x, target) = make(), data(4, 8, 24)

    def rank_program(rank, group):
        mine = parallelize(copy.deepcopy(model), PLAN, group)
        pairs = [each.chunk(2, 1)[rank].chunk(4) for each in (x, target)]
        for part, goal in zip(*pairs, strict=True):
            loss_of(mine(part), goal, target.numel()).backward()
        reduce_gradients(mine)
        return {name: p.grad for name, p in mine.named_parameters()}

    true = truth(model, x, target)
    with tw.virtual_world(2, device="cpu") as w:
        results = w.run(rank_program)
    outs = [(each, each) for each in (true[0].chunk(2, 1), true[1].chunk(2, 1))]
    assert_equal_to(true, [(outs[0][0][r], outs[1][0][r], results[r]) for r in range(2)], 1)


@pytest.mark.parametrize("plan, dim", [(PLAN, -2), (REPLICATED, None)])
def test_compiled_in_a_full_graph(plan, dim):
    torch._dynamo.reset()
    model, (x, target) = make(gate_bias=True), data(2, 8, 24)
    call = lambda model, x: torch.compile(model, fullgraph=True, backend="aot_eager")(x)  # noqa: E731
    with tw.virtual_world(2, device="cpu") as w:
        results = w.run(lambda rank, group: step(model, x, target, rank, group, plan, dim, call))
    assert_equal_to(truth(model, x, target), results, dim)
    torch._dynamo.reset()


def test_a_world_of_one_is_a_linear_layer():
    torch.manual_seed(3)
    linear = nn.Linear(8, 6)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(3)
        layer = kind(8, 6)
        x = torch.randn(5, 8)
        assert torch.equal(layer(x), linear(x))
        layer = kind.from_linear(linear.eval())
        assert torch.equal(layer(x), linear(x)) and not layer.training


@pytest.mark.parametrize("kind, sizes", [(ColumnParallelLinear, (8, 12)), (RowParallelLinear, (12, 8))])
def test_initial_weights_are_parts_of_those_of_one_linear_layer(kind, sizes):
    torch.manual_seed(5)
    linear = nn.Linear(*sizes)

    def seeded(rank, group):
        torch.manual_seed(100 + rank)
        return kind(*sizes, group=group, seed=5).state_dict()

    def in_step(rank, group):
        torch.manual_seed(5)
        return kind(*sizes, group=group).state_dict()

    for make_one in (seeded, in_step):
        with tw.virtual_world(4, device="cpu") as w:
            parts = w.run(make_one)
        for name, whole in linear.state_dict().items():
            dim = kind.SPLIT.get(name)
            got = parts[0][name] if dim is None else torch.cat([part[name] for part in parts], dim)
            assert torch.equal(got, whole)
            assert all(not torch.equal(part[name], parts[0][name]) for part in parts[1:]) == (dim is not None)


@pytest.mark.parametrize(
    "kind, options, shape, words",
    [
        (
            ColumnParallelLinear,
            dict(out_features=10),
            None,
            "out_features = 10 is not divisible .* size 4; 8 or 12 would",
        ),
        (
            RowParallelLinear,
            dict(in_features=2),
            None,
            "in_features = 2 is not divisible by the world size 4; 4 would be",
        ),
        (ColumnParallelLinear, {}, (2, 6), r"ColumnParallelLinear: input must be \[\.\.\., tokens, 8\], got \[2, 6\]"),
        (RowParallelLinear, {}, (2,), r"input must be \[\.\.\., tokens, 2\], got \[2\]"),
        (RowParallelLinear, {}, (2, 6, 2), r"dimension 1, the sequence, must be divisible by the world size 4"),
        (RowParallelLinear, dict(sequence_dim=1), (4, 2), r"sequence_dim = 1 must be .* 0 to 0 or -2 to -2"),
        (ColumnParallelLinear, {}, (2, 8), "must be bfloat16 or float16, .*got torch.float32"),
    ],
)
def test_errors_name_the_argument_the_rule_and_the_values(kind, options, shape, words):
    def rank_program(rank, group):
        layer = kind(**{"in_features": 8, "out_features": 8, **options}, group=group)
        layer(torch.ones(shape))

    with tw.virtual_world(4, device="cpu") as w, pytest.raises(ValueError, match=words):
        w.run(rank_program)


def test_copies_belong_to_the_same_group():
    def rank_program(rank, group):
        layer = ColumnParallelLinear(8, 8, group=group)
        twin = copy.deepcopy(nn.Sequential(layer))[0]
        assert twin.group is layer.group and twin.weight is not layer.weight
        assert torch.equal(twin.weight, layer.weight)

    with tw.virtual_world(2, device="cpu") as w:
        w.run(rank_program)


def test_print_says_which_part_it_is():
    def rank_program(rank, group):
        return str(parallelize(Block(), PLAN, group).down)

    with tw.virtual_world(2, device="cpu") as w:
        text = w.run(rank_program)[1]
    assert text == "RowParallelLinear(in_features=48, out_features=24, bias=True, rank=1 of 2, sequence_parallel=True)"
