"""`explain`: what a call would do, without doing it."""

from collections.abc import Callable
from inspect import signature

from tileweave.ops import all_gather_matmul as _all_gather_matmul
from tileweave.ops import collectives as _collectives
from tileweave.ops import grouped_matmul as _grouped_matmul
from tileweave.ops import matmul_all_reduce as _matmul_all_reduce
from tileweave.ops import matmul_reduce_scatter as _matmul_reduce_scatter
from tileweave.ops import moe as _moe
from tileweave.ops import ring_attention as _ring_attention
from tileweave.ops import ulysses_attention as _ulysses_attention
from tileweave.ops.route import Route

ROUTES: dict[str, Callable[..., Route]] = {
    "all_gather_matmul": _all_gather_matmul.route,
    "grouped_matmul": _grouped_matmul.route,
    "matmul_all_reduce": _matmul_all_reduce.route,
    "matmul_reduce_scatter": _matmul_reduce_scatter.route,
    "moe_combine": _moe.explain_way_back,
    "moe_dispatch_matmul": _moe.explain_dispatch,
    "moe_matmul_combine": _moe.explain_combine,
    "ring_attention": _ring_attention.route,
    "ulysses_attention": _ulysses_attention.route,
    **_collectives.ROUTES,
}


def explain(op: str, /, *args, **kwargs) -> Route:
    """The path that `op` would take with these arguments: backend, fused or not, reason, plan, predicted time; where
    `tileweave.tune` has measured it the measured time too, and the error of the prediction.

    Takes the arguments of the op itself, launches nothing, and raises what the op would raise; TypeError, with the op's
    signature, unless the arguments fit it.
    """
    if not isinstance(op, str) or op not in ROUTES:
        raise ValueError(f"explain: no op named {op!r}; there is {', '.join(sorted(ROUTES))}")
    takes = signature(ROUTES[op])
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {error}; the op is {op}{takes.replace(return_annotation=takes.empty)}") from None
    return ROUTES[op](*args, **kwargs)
