"""The registered operators' library, and what the operators that communicate tell the compiler of themselves.

All ranks make their calls in one order. Inductor puts a graph's calls into the order that needs least memory, which
depends on sizes: ranks with shards of different sizes would each get another order, and wait for each other in vain. It
leaves torch.distributed's own collectives in the program's order, which it knows by their type. Operators of others are
to it like any function, so each of ours is lowered with a dependence on the call before it, and so is each of
torch.distributed's, behind ours.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch

LIBRARY = torch.library.Library("tileweave", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag,)
_LOWERING = "torch._inductor.lowering"
_DISTRIBUTED = "_c10d_functional"  # the namespace of torch.distributed's collectives
_latest: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by Inductor's graph: the buffer of its latest call
_ordered: set[torch._ops.OpOverload] = set()
_registering = threading.Lock()  # a call that is put behind itself would wait for ever


def register_shape_of_collective(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the shape function ("fake") of the operator tileweave::`name`, all calls of
    which, on whatever group, take part in the order of calls. A compiled graph then keeps them in its program's order.
    """

    def register(shape: Callable) -> Callable:
        @wraps(shape)
        def fake(*args: Any, **kwargs: Any) -> Any:
            _keep_order(getattr(torch.ops.tileweave, name).default)
            return shape(*args, **kwargs)

        torch.library.register_fake(f"tileweave::{name}", fake, lib=LIBRARY)
        return shape

    return register


def _keep_order(operator: torch._ops.OpOverload) -> None:
    """Have Inductor, where it is at work, lower the operator as it would, but behind the call before it."""
    if operator in _ordered or _LOWERING not in sys.modules:  # nobody else has to wait for its import
        return
    lowering = importlib.import_module(_LOWERING)  # which another thread may not be through with yet
    with _registering:
        if operator in _ordered:
            return
        if operator not in lowering.lowerings:
            lowering.make_fallback(operator, warn=False)
        others = [each for each in lowering.lowerings if _of_distributed(each) and each not in _ordered]
        for each in (operator, *others):
            lowering.lowerings[each] = _in_order(each, lowering.lowerings[each], lowering)
            _ordered.add(each)


def _of_distributed(operator: Any) -> bool:
    """Whether it is a collective of torch.distributed in a compiled graph, and no wait for one."""
    name = operator.name() if isinstance(operator, torch._ops.OpOverload) else ""
    return name.startswith(f"{_DISTRIBUTED}::") and name != f"{_DISTRIBUTED}::wait_tensor"


def _in_order(operator: torch._ops.OpOverload, lower: Callable, lowering: Any) -> Callable:
    """`lower` of an operator, behind the call before it. RuntimeError where Inductor has no such thing for ours."""

    @wraps(lower)
    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        graph = lowering.V.graph
        earlier = len(graph.operations)
        result = lower(*args, **kwargs)
        made = [(each, getattr(each, "op_overload", None)) for each in graph.operations[earlier:]]
        calls = [each for each, overload in made if overload is operator or _of_distributed(overload)]
        if calls and hasattr(graph, "additional_buffer_deps"):
            if graph in _latest:
                graph.additional_buffer_deps[calls[0].get_operation_name()].add(_latest[graph])
            _latest[graph] = calls[-1].get_name()
        elif not _of_distributed(operator):
            raise RuntimeError(
                f"{operator}: Inductor of torch {torch.__version__} cannot be told to keep the order of calls, without "
                "which ranks may wait for each other in vain; torch.compile(..., backend='aot_eager') keeps it"
            )
        return result

    return lower_in_order
