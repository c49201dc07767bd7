"""tileweave: compute-communication kernels for NVIDIA GPUs joined by NVLink, which also run on a CPU to be checked."""

from tileweave.explain import explain
from tileweave.fabric import FabricTimeout, check, memory_report, virtual_world
from tileweave.ops.all_gather_matmul import all_gather_matmul
from tileweave.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from tileweave.ops.grouped_matmul import grouped_matmul
from tileweave.ops.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tileweave.ops.moe import TokenRoute, moe_combine, moe_dispatch_matmul, moe_matmul_combine
from tileweave.ops.ring_attention import ring_attention
from tileweave.ops.route import Route
from tileweave.ops.sequence.placement import place_sequence, unplace_sequence
from tileweave.ops.ulysses_attention import ulysses_attention
from tileweave.plan import plan
from tileweave.planner import Plan
from tileweave.tune import tune
from tileweave_command import __version__

__all__ = [
    "FabricTimeout",
    "Plan",
    "Route",
    "TokenRoute",
    "__version__",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "check",
    "explain",
    "grouped_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "memory_report",
    "moe_combine",
    "moe_dispatch_matmul",
    "moe_matmul_combine",
    "place_sequence",
    "plan",
    "reduce_scatter",
    "ring_attention",
    "tune",
    "ulysses_attention",
    "unplace_sequence",
    "virtual_world",
]
