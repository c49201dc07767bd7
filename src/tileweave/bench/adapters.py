"""Other libraries as contenders between GPUs, where they are installed: Flux with Comet, Triton-Distributed, yunchang,
xDiT.

Written after their own tests; what does not run here, or is wrong, is told and left out of the race. CUTLASS's
distributed GEMM is an example in C++ and no library: of it there are published figures only (`bench.published`).
"""

import math
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from tileweave.bench.attention_case import DIM, Case
from tileweave.bench.rivals import RIVALS
from tileweave.ops.sequence.local import attend

# These count calls on the host, which a graph would freeze.
EAGER = ("flux", "comet", "triton-distributed")
FLUX_ROWS = 1024  # of which Flux's buffers have a multiple
Run = Callable[[], Any]
Makers = dict[str, Callable[[], Run]]  # by contender, what prepares it


def joined(runs: dict[str, Run], makers: Makers) -> dict[str, Run]:
    """All contenders, those of `makers` prepared if their library is installed; one that fails at that fails again
    when it is called."""
    for name, make in makers.items():
        if RIVALS[name].version is None:
            continue
        try:
            runs[name] = make()
        except Exception as failure:
            runs[name] = _failing(failure)
    return runs


def _failing(failure: Exception) -> Run:
    """A contender that raises what was raised before."""

    def run() -> None:
        raise failure

    return run


def products(op: str, a: torch.Tensor, b: torch.Tensor) -> Makers:
    """For `a` and `b` as a rank has them; b [K, N] is the transpose of a contiguous matrix."""
    makers: dict[str, Makers] = {
        "matmul_reduce_scatter": {
            "flux": lambda: _flux_reduce_scatter(a, b),
            "triton-distributed": lambda: _triton_reduce_scatter(a, b),
        },
        "all_gather_matmul": {
            "flux": lambda: _flux_all_gather(a, b),
            "triton-distributed": lambda: _triton_all_gather(a, b),
        },
    }
    return makers.get(op, {})


@cache
def _flux() -> Any:
    flux = import_module("flux")
    flux.init_flux_shm(dist.group.WORLD)
    return flux


def _flux_reduce_scatter(a: torch.Tensor, b: torch.Tensor) -> Run:
    rows = math.ceil(a.shape[0] / FLUX_ROWS) * FLUX_ROWS
    made = _flux().GemmRS(dist.group.WORLD, 1, rows, b.shape[1], a.dtype, a.dtype, transpose_weight=False)
    return lambda: made.forward(a, b.t())


def _flux_all_gather(a: torch.Tensor, b: torch.Tensor) -> Run:
    flux, rows = _flux(), dist.get_world_size() * a.shape[0]
    made = flux.AGKernel(dist.group.WORLD, 1, rows, b.shape[1], a.shape[1], a.dtype, output_dtype=a.dtype)
    out, option = a.new_empty(rows, b.shape[1]), flux.AllGatherOption()

    def run() -> torch.Tensor:
        made.forward(a, b.t(), output=out, transpose_weight=False, all_gather_option=option)
        return out

    return run


def experts(x: torch.Tensor, index: torch.Tensor, w: torch.Tensor, total: int, rows: int) -> Makers:
    """For tokens x [T, H], all ranks' choices index [T of all, k] among `total` experts, of which w [E, H, I] are this
    rank's; the result [rows, I] is sorted by expert, then by token and choice."""
    return {"comet": lambda: _comet(x, index, w, total, rows)}


def _comet(x: torch.Tensor, index: torch.Tensor, w: torch.Tensor, total: int, rows: int) -> Run:
    flux = _flux()
    arguments = flux.MoeArguments(
        max_ntokens=index.shape[0], hidden=x.shape[1], ffn_hidden=w.shape[2], nexperts=total, topk=index.shape[1],
        input_dtype=x.dtype, output_dtype=x.dtype,
    )  # fmt: skip
    ranks = flux.DistEnvTPWithEP(tp_group=dist.group.WORLD, nnodes=1, ep_group=dist.group.WORLD)
    made = flux.GemmGroupedV3AGScatter(tp_env=ranks, moe_args=arguments)
    flat, weights, out = index.reshape(-1), w.transpose(1, 2).contiguous(), x.new_empty(rows, w.shape[2])
    places = flat.argsort(stable=True).argsort().int().view_as(index)
    counts = flat.bincount(minlength=total).int()

    def run() -> torch.Tensor:
        made.clear_buffers()
        made.forward(
            inputs_shard=x, weights=weights, splits_gpu=counts, scatter_index=places, outputs_buf=out,
            fast_accum=False, sm_margin=0,
        )  # fmt: skip
        return out

    return run


@cache
def _triton_distributed() -> Any:
    """Its kernels, with NVSHMEM started among the ranks, which it exchanges names by a group of gloo for."""
    import_module("triton_dist.utils").init_nvshmem_by_torch_process_group(dist.new_group(backend="gloo"))
    return import_module("triton_dist.kernels.nvidia")


def _ranks() -> tuple[int, int, int]:
    world = dist.get_world_size()
    return dist.get_rank(), world, int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _triton_reduce_scatter(a: torch.Tensor, b: torch.Tensor) -> Run:
    kernels = _triton_distributed()
    context = kernels.create_gemm_rs_context(a.shape[0], b.shape[1], *_ranks(), a.dtype, torch.cuda.Stream())
    return lambda: kernels.gemm_rs(a, b, context, autotune=True)


def _triton_all_gather(a: torch.Tensor, b: torch.Tensor) -> Run:
    kernels, (rank, world, local) = _triton_distributed(), _ranks()
    whole = world * a.shape[0], world * b.shape[1], a.shape[1]
    context = kernels.create_ag_gemm_context(*whole, a.dtype, rank, world, local)
    return lambda: kernels.ag_gemm(a, b, ctx=context, autotune=True)


def attentions(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Makers:
    """For a rank's rows [B, H, S / world, D]; results likewise.

    Blocks of attention are computed by the kernel that the other contenders take, but for yunchang's zigzag ring, which
    takes its own only: FlashAttention-3 if `flash_attn_interface` is there, else PyTorch's FlashAttention-2.
    """
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    makers: Makers = {"yunchang": lambda: _yunchang(case, rows)}
    if case.placement == "contiguous" and not (case.op == "ring_attention" and case.causal):
        makers["xdit"] = lambda: _xdit(case, rows)
    return makers


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, causal: bool = False, **__: Any) -> Any:
    """Attention to one block, as yunchang calls it: [B, S, H, D]; and lse [B, H, S]."""
    out, lse = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, DIM**-0.5)
    return out.transpose(1, 2), lse


@cache
def _groups(ulysses: int, ring: int) -> tuple[Any, Any]:
    """yunchang's groups of these degrees."""
    import_module("yunchang").set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())
    current = import_module("yunchang.globals").PROCESS_GROUP
    return current.ULYSSES_PG, current.RING_PG


def _take_groups(case: Case) -> None:
    """Make those of the op current that the next module of yunchang's takes."""
    world = dist.get_world_size()
    current = import_module("yunchang.globals").PROCESS_GROUP
    current.ULYSSES_PG, current.RING_PG = _groups(*((1, world) if case.op == "ring_attention" else (world, 1)))


def _yunchang(case: Case, rows: list[torch.Tensor]) -> Run:
    _take_groups(case)
    kinds, options = import_module("yunchang.kernels"), {"attn_type": "custom", "attn_processor": _block}
    if zigzag := case.placement == "zigzag":
        own = kinds.AttnType.FA3 if kinds.HAS_FLASH_ATTN_HOPPER else kinds.AttnType.TORCH_FLASH
        options = {"attn_type": own}
    made = import_module("yunchang").LongContextAttention(ring_impl_type="zigzag" if zigzag else "basic", **options)
    return lambda: made(*rows, causal=case.causal).transpose(1, 2)


def _xdit(case: Case, rows: list[torch.Tensor]) -> Run:
    # Releases of it import a name that yunchang has dropped.
    utils: Any = import_module("yunchang.ring.utils")
    utils.update_npu_out = getattr(utils, "update_npu_out", None)
    _take_groups(case)
    kind = import_module("xfuser.core.long_ctx_attention").xFuserLongContextAttention
    made = kind(attn_type="custom", attn_processor=_block)
    return lambda: made(None, *rows, causal=case.causal).transpose(1, 2)
