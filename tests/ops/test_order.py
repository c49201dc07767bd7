"""Calls of a compiled graph are made in one order on all ranks, whatever sizes their own tensors have."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config, lowering
from torch._inductor.scheduler import Scheduler

import tileweave as tw
from tileweave.ops import library


def program(x, large, local):
    """Two collectives that do not depend on each other, the second on something whose size is a rank's own."""
    first = tw.all_gather(large)
    square = local @ local.t()
    second = tw.all_gather(x * square.sum())
    return second.sum() + first.sum() * square.mean()


def calls(monkeypatch, rows):
    """The names that Inductor gives to the results of both calls, in the order in which it makes them."""

    class Ordered(Exception):
        pass

    order = []

    def ordered(scheduler):
        operators = [getattr(each.node, "op_overload", None) for each in scheduler.nodes]
        places = [at for at, each in enumerate(operators) if each is torch.ops.tileweave.all_gather.default]
        order.extend(scheduler.nodes[at].node.get_name() for at in places)
        raise Ordered  # there is nothing more to see

    torch._dynamo.reset()
    monkeypatch.setattr(Scheduler, "codegen", ordered)
    args = torch.randn(64, 64, requires_grad=True), torch.randn(512, 512), torch.randn(rows, 8)
    uncached = config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False)
    with uncached[0], uncached[1], pytest.raises(Exception, match="Ordered"):
        torch.compile(program, fullgraph=True, dynamic=False)(*args)
    return order


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_the_order_of_calls_does_not_depend_on_sizes(monkeypatch):
    """Inductor would have the second first where `local` is small: that takes less memory at a time."""
    small, large = (calls(monkeypatch, rows) for rows in (8, 4096))
    assert len(small) == 2 and small == large == sorted(small)


def test_an_operator_is_lowered_in_order_once_whoever_comes_first(monkeypatch):
    """Threads that trace it at a time, where Inductor knows it already: in order twice, it would be behind itself."""
    operator, registered = torch.ops.tileweave.all_gather.default, []
    monkeypatch.setattr(library, "_ordered", set())
    monkeypatch.setitem(lowering.lowerings, operator, lambda: None)
    monkeypatch.setattr(library, "_in_order", lambda *args: registered.append(args) or threading.Event().wait(0.05))
    threads = [threading.Thread(target=library._keep_order, args=(operator,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registered) == 1 and operator in library._ordered


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
