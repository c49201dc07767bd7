"""Calls of a compiled graph are made in one order on all ranks, whatever sizes their own tensors have."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch._inductor import config, lowering
from torch._inductor.scheduler import Scheduler

import tileweave as tw
from tileweave.ops import library


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def group_name():
    return dist.group.WORLD.group_name


def ours(x):
    return tw.all_gather(x)


def gathered(x):
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 1, group_name()))


def reduced(x):
    """In place, to Inductor."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group_name()))


def program(one, other, x, large, local):
    """Two collectives that do not depend on each other, the second on something whose size is a rank's own."""
    first = one(large)
    square = local @ local.t()
    second = other(x * square.sum())
    return second.sum() + first.sum() * square.mean()


OPERATORS = (
    torch.ops.tileweave.all_gather.default, torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_reduce_.default,
)  # fmt: skip


def calls(monkeypatch, rows, one, other):
    """The names that Inductor gives to the results of both calls, in the order in which it makes them."""

    class Ordered(Exception):
        pass

    order = []

    def ordered(scheduler):
        nodes = [each.node for each in scheduler.nodes]
        order.extend(node.get_name() for node in nodes if getattr(node, "op_overload", None) in OPERATORS)
        raise Ordered  # there is nothing more to see

    torch._dynamo.reset()
    monkeypatch.setattr(Scheduler, "codegen", ordered)
    args = torch.randn(64, 64, requires_grad=one is other is ours), torch.randn(512, 512), torch.randn(rows, 8)
    uncached = config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with uncached[0], uncached[1], pytest.raises(Exception, match="Ordered"):
        torch.compile(partial(program, one, other), fullgraph=True, dynamic=False)(*args)
    return order


@pytest.mark.parametrize(
    "one, other", [(ours, ours), (ours, gathered), (gathered, ours), (ours, reduced), (reduced, ours)]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_the_order_of_calls_does_not_depend_on_sizes(one, other, process_group, monkeypatch):
    """Inductor would have the second first where `local` is small: that takes less memory at a time."""
    small, large = (calls(monkeypatch, rows, one, other) for rows in (8, 4096))
    assert len(small) == 2 and small == large == sorted(small)


def test_an_operator_is_lowered_in_order_once_whoever_comes_first(monkeypatch):
    """Threads that trace it at a time, where Inductor knows it already: in order twice, it would be behind itself."""
    operator, registered = torch.ops.tileweave.all_gather.default, []
    monkeypatch.setattr(library, "_ordered", set())
    monkeypatch.setitem(lowering.lowerings, operator, lambda: None)
    monkeypatch.setattr(library, "_in_order", lambda *args: registered.append(args) or threading.Event().wait(0.005))
    threads = [threading.Thread(target=library._keep_order, args=(operator,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(args[0] is operator for args in registered) == 1 and operator in library._ordered
    assert len({args[0] for args in registered}) == len(registered) > 1  # those of torch.distributed too


@pytest.mark.parametrize("graph", [{"operations": []}, {"operations": [], "additional_buffer_deps": {}}])
def test_an_inductor_that_cannot_keep_the_order_is_refused(graph):
    """One that has no such attribute, one that makes calls of another kind."""
    operator, graph = torch.ops.tileweave.all_gather.default, SimpleNamespace(**graph)
    made = [] if hasattr(graph, "additional_buffer_deps") else [SimpleNamespace(op_overload=operator)]
    lower = library._in_order(
        operator, lambda: graph.operations.extend(made), SimpleNamespace(V=SimpleNamespace(graph=graph))
    )
    with pytest.raises(RuntimeError, match="cannot be told to keep the order of calls"):
        lower()
