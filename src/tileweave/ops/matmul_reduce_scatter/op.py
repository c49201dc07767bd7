"""matmul_reduce_scatter: contract, checks, choice of path, launch."""

from dataclasses import dataclass

import torch

from tileweave.fabric import Fabric, fabric_of
from tileweave.lang import TensorDescriptor
from tileweave.ops.descriptors import as_operand, describe, parallel_view
from tileweave.ops.matmul_reduce_scatter.kernel import matmul_reduce_scatter_kernel
from tileweave.ops.route import Route
from tileweave.planner import Plan, Problem, plan_for, unsupported
from tileweave.planner.plan import GROUP_ROWS, WARPS

NAME = "matmul_reduce_scatter"
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call. m, n: the full product; k: this rank's inner size; rows: m / world.

    deterministic: the parts of the sources are kept apart. Two ranks always do that: a sum of one part needs no adding,
    and a place that is overwritten needs no zeroing.
    """

    op: str
    bias: torch.Tensor | None
    deterministic: bool
    out_dtype: torch.dtype
    m: int
    n: int
    k: int
    rows: int


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group=None,
    *,
    op: str = "sum",
    bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of `a @ b`: a matmul with the reduce-scatter inside its tile loop.

    Args:
        a: `[M, K_local]`, bfloat16 or float16, any strides; M divisible by the world size, 0 included.
        b: `[K_local, N]`, dtype and device of `a`; a transposed weight (`w.t()`) costs no copy. M, N and K_local are
            the same on every rank.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        op: "sum", or "avg" for the sum divided by the world size.
        bias: `[N]`, dtype of `a`, the same on all ranks; added once, after the reduction.
        deterministic: True: each source's part is kept apart and summed in a fixed order in float32, so that equal
            inputs give equal bits; always so for two ranks. False: parts are added in the result's dtype in order of
            arrival. None: True under torch.use_deterministic_algorithms.
        out_dtype: dtype of the result and of what travels: that of `a` (default) or float32.
        plan: a `Plan` to use instead of the planner's, the same on all ranks.

    Returns:
        `[M / world, N]`, a fresh contiguous tensor, ready on the current stream. Products are accumulated in float32.

    Where the fabric or the shape does not allow the fused kernel (`explain` says why) the same is computed by
    torch.matmul and the group's own reduce-scatter.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
        FabricTimeout: a peer did not take part within the group's timeout.
        NotImplementedError: an input requires a gradient; the backward pass is not there yet.
    """
    fabric = fabric_of(group, a.device if isinstance(a, torch.Tensor) else None)
    call = check(fabric, a, b, op, bias, deterministic, out_dtype)
    path = choose(fabric, call, a, plan)
    if call.rows == 0 or call.n == 0:
        return torch.empty(call.rows, call.n, dtype=call.out_dtype, device=a.device)
    if path.plan is None:
        return unfused(fabric, call, a, b)
    return fused(fabric, call, a, b, path.plan)


def route(a, b, group=None, *, op="sum", bias=None, deterministic=None, out_dtype=None, plan=None) -> Route:
    """What `matmul_reduce_scatter` would do with these arguments; launches nothing, raises what it would raise."""
    fabric = fabric_of(group, a.device if isinstance(a, torch.Tensor) else None)
    return choose(fabric, check(fabric, a, b, op, bias, deterministic, out_dtype), a, plan)


def check(fabric: Fabric, a, b, op, bias, deterministic, out_dtype) -> Call:
    """Hold the arguments to the contract."""
    for name, x in (("a", a), ("b", b)) + ((("bias", bias),) if bias is not None else ()):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{NAME}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(
            f"{NAME}: a and b must be matrices [M, K] and [K, N], got shapes {list(a.shape)} and {list(b.shape)}"
        )
    (m, k), (k_b, n), world = a.shape, b.shape, fabric.world_size
    if k != k_b:
        raise ValueError(f"{NAME}: a is [{m}, {k}] and b is [{k_b}, {n}]: a's columns must be as many as b's rows")
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise ValueError(f"{NAME}: a and b must both be bfloat16 or both float16, got {a.dtype} and {b.dtype}")
    if b.device != a.device:
        raise ValueError(f"{NAME}: a is on {a.device} and b on {b.device}: they must be on one device")
    if m % world:
        near = f"{m - m % world} or {m - m % world + world}"
        raise ValueError(f"{NAME}: a has {m} rows, not divisible by the world size {world}; {near} would be")
    if op not in ("sum", "avg"):
        raise ValueError(f"{NAME}: op must be 'sum' or 'avg', got {op!r}")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.dtype != a.dtype or bias.device != a.device):
        raise ValueError(
            f"{NAME}: bias must be [{n}] of {a.dtype} on {a.device}, "
            f"got {list(bias.shape)} of {bias.dtype} on {bias.device}"
        )
    if out_dtype not in (None, a.dtype, torch.float32):
        raise ValueError(f"{NAME}: out_dtype must be {a.dtype} or torch.float32, got {out_dtype}")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        raise NotImplementedError(f"{NAME} has no backward pass yet: call it under torch.no_grad(), or detach its inputs")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Call(op, bias, bool(deterministic) or world == 2, out_dtype or a.dtype, m, n, k, m // world)


def choose(fabric: Fabric, call: Call, a: torch.Tensor, plan: Plan | None) -> Route:
    """The path of a call. Decided from what all ranks share, never from one rank's strides, so that they agree."""
    refusal = fabric.refusal() or unaddressable(call)
    if refusal is None and a.device.type != fabric.device.type:
        refusal = f"a is on {a.device}, the ranks of this world are on {fabric.device}"
    problem = Problem(
        call.m,
        call.n,
        call.k,
        fabric.world_size,
        call.out_dtype.itemsize,
        max(fabric.sms, 1),
        call.deterministic,
        linked=fabric.backend == "processes",
    )
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(f"{NAME}: plan must be a tileweave.Plan, got {type(plan).__name__}")
        if why := unsupported(problem, plan):
            raise ValueError(f"{NAME}: {why}")
    if refusal:
        return Route(NAME, "fallback", False, f"{refusal}: torch.matmul, then the group's reduce-scatter")
    if call.rows == 0 or call.n == 0:
        return Route(NAME, fabric.backend, False, "the result is empty: nothing to launch")
    plan = plan or plan_for(problem)
    return Route(NAME, fabric.backend, True, plan.reason, plan)


def unaddressable(call: Call) -> str | None:
    """Why TMA cannot address these shapes; None if it can. Its strides are multiples of 16 bytes."""
    for name, size in (("N", call.n), ("K", call.k)):
        if size % 8:
            return f"{name} = {size} is not a multiple of 8, so rows are not 16-byte aligned as TMA needs"
    return None


def unfused(fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fallback: the whole product, then the group's reduce-scatter."""
    product = torch.matmul(a.float(), b.float()) if call.out_dtype == torch.float32 else torch.matmul(a, b)
    result = fabric.reduce_scatter(product.to(call.out_dtype).contiguous(), call.op)
    return result if call.bias is None else result + call.bias.to(call.out_dtype)


def fused(fabric: Fabric, call: Call, a: torch.Tensor, b: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Launch the kernel on the current stream."""
    world, (bm, bn, bk) = fabric.world_size, plan.tile
    if call.k == 0:  # there is no descriptor of an empty tensor: multiply zeros, so that this rank still takes part
        a, b, = a.new_zeros(call.m, 8), b.new_zeros(8, call.n)  # fmt: skip
    a, a_t = as_operand(a)
    b, b_t = as_operand(b)
    out = torch.empty(call.rows, call.n, dtype=call.out_dtype, device=a.device)
    shard_bytes = call.rows * call.n * out.element_size() if world > 1 else 0
    channel = fabric.channel(
        NAME, 0 if call.deterministic else shard_bytes, world * shard_bytes if call.deterministic else 0
    )
    slots, own, stride = parallel_slots(fabric, call, channel, out)
    bias = out if call.bias is None else call.bias.contiguous()
    args = (
        fabric.rank,
        describe(a, [bk, bm] if a_t else [bm, bk]),
        describe(b, [bn, bk] if b_t else [bk, bn]),
        describe(out, [bm, bn]),
        slots_descriptor(slots, bm, bn),
        own,
        stride,
        bias,
        channel.flags,
        channel.flags.stride(0),
        channel.state,
        channel.timeout_ns // 1000,
        call.rows,
        call.n,
        a.shape[0] if a_t else a.shape[1],
        world,
        bm,
        bn,
        bk,
        plan.stages,
        GROUP_ROWS,
        a_t,
        b_t,
        call.deterministic,
        call.bias is not None,
        call.op == "avg",
    )
    tiles = -(-call.rows // bm) * -(-call.n // bn) * world
    fabric.launch(matmul_reduce_scatter_kernel, min(fabric.sms, tiles), args, num_warps=WARPS)
    return out


def parallel_slots(fabric: Fabric, call: Call, channel, out: torch.Tensor):
    """The slots `[world, slots, rows, N]`, this rank's own as a tensor, and the distance of two slots in elements.

    The distance depends on the arena, not on the shape: call e + 1 may be of another shape while a slow peer is still
    in call e.
    """
    if fabric.world_size == 1:
        return out[None, None], out, 0
    arena = channel.staging if call.deterministic else channel.adding
    count = 2 * fabric.world_size if call.deterministic else 2
    slots, stride = parallel_view(arena, count, (call.rows, call.n), call.out_dtype)
    return slots, slots[fabric.rank], stride


def slots_descriptor(slots: torch.Tensor, bm: int, bn: int) -> TensorDescriptor:
    """TMA descriptor of the slots of all ranks. Out of bounds it reads NaN: what an aborted wait makes a result of."""
    return describe(slots, [1, 1, bm, bn], padding="nan")
