"""The collectives: what users call."""

from collections.abc import Callable
from typing import Any

import torch

from tileweave.fabric import fabric_of, group_name
from tileweave.ops.collectives.check import check, check_kinds
from tileweave.ops.collectives.operator import OPERATORS, OPTIONS, run
from tileweave.ops.collectives.passes import choose
from tileweave.ops.contract import Site
from tileweave.ops.registration import is_plain, refuse_forward_mode
from tileweave.ops.route import Route


def all_gather(x: torch.Tensor, group=None, *, dim: int = 0) -> torch.Tensor:
    """The `x` of all ranks, put together along `dim` in rank order.

    Args:
        x: `[..., n, ...]` of any dtype, with at least one dimension; the same shape and dtype on all ranks. It is read
            as it lies if it is contiguous, else copied once.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        dim: any dimension of x, negative ones counted from the end.

    Returns:
        `[..., world * n, ...]`, a fresh contiguous tensor, ready on the current stream.

    One kernel writes every shard where it belongs, whatever `dim`: nothing is gathered first and reshaped afterwards.
    Where the fabric does not allow it (`explain` says why) the group's own collective is used; over several nodes it is
    composed of calls inside each. It is the registered
    operator `torch.ops.tileweave.all_gather`: it has gradients (of the sum of all ranks' losses: a `reduce_scatter`
    of the gradient, which every rank must run), torch.compile traces it without a graph break, and a CUDA graph can
    hold it once it has been called with the same shapes.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
        RuntimeError: the group's world is not running, or the workspace would have to grow while a CUDA graph is
            being captured.
        FabricTimeout: a peer did not take part within the group's timeout. Where nothing is fused, the process group's
            collective waits as long as it does, for instance NCCL's timeout, and fails in its own way.
    """
    return _call("all_gather", x, group, dim)


def reduce_scatter(
    x: torch.Tensor, group=None, *, dim: int = 0, op: str = "sum", deterministic: bool | None = None
) -> torch.Tensor:
    """This rank's part along `dim` of the sum over ranks of `x`.

    Args:
        x: `[..., n, ...]`, the same shape and dtype on all ranks, n in `dim` divisible by the world size. bfloat16,
            float16 and float32 are summed by the kernel, in rank order in float32, and rounded once; float64, int8,
            uint8, int32, int64 and complex numbers go through the group's own collective, others must be converted.
        group: as in `all_gather`.
        dim: any dimension of x, negative ones counted from the end.
        op: "sum", or "avg", for floating-point x: each rank's part divided by the world size before it is added, so
            that a mean that the dtype can hold does not overflow on the way.
        deterministic: whether equal inputs must give equal bits. The kernel's sums always do; True asks the fallback
            for a sum in rank order too. None: True under torch.use_deterministic_algorithms.

    Returns:
        `[..., n / world, ...]`, a fresh contiguous tensor, ready on the current stream.

    Path, gradients (an `all_gather` of the gradient), torch.compile, CUDA graphs and errors as in `all_gather`.
    """
    return _call("reduce_scatter", x, group, dim, op, _resolve(deterministic))


def all_reduce(x: torch.Tensor, group=None, *, op: str = "sum", deterministic: bool | None = None) -> torch.Tensor:
    """The sum over ranks of `x`, the same bits on every rank.

    Args:
        x: of any shape, the same shape and dtype on all ranks; dtypes as in `reduce_scatter`.
        group: as in `all_gather`.
        op, deterministic: as in `reduce_scatter`.

    Returns:
        A fresh contiguous tensor of the shape of x, ready on the current stream; x is left as it is.

    A small x is fetched from all ranks by every rank and summed there, in rank order in float32: one launch. Of a
    large one each rank sums a share and all gather the shares: two launches, less to send.

    Path, gradients (an `all_reduce` of the gradient), torch.compile, CUDA graphs and errors as in `all_gather`.
    """
    return _call("all_reduce", x, group, op, _resolve(deterministic))


def all_to_all(x: torch.Tensor, group=None, *, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Part d of `x` along `split_dim` goes to rank d; what comes is put together along `concat_dim` in rank order.

    Args:
        x: of any dtype, the same shape and dtype on all ranks, its size n in `split_dim` divisible by the world size.
        group: as in `all_gather`.
        split_dim, concat_dim: any dimensions of x, also the same one twice, negative ones counted from the end.

    Returns:
        The shape of x with n / world in `split_dim`, and then world times as much in `concat_dim`: a fresh contiguous
        tensor, ready on the current stream.

    Path, gradients (an `all_to_all` of the gradient with the dimensions exchanged), torch.compile, CUDA graphs and
    errors as in `all_gather`.
    """
    return _call("all_to_all", x, group, split_dim, concat_dim)


def _call(name: str, x: torch.Tensor, group: Any, *options: Any) -> torch.Tensor:
    """The operator, or, where PyTorch's dispatcher would do nothing but call it, its implementation."""
    if is_plain(x):
        return run(fabric_of(group, x.device), name, x, *options)
    if not torch.compiler.is_compiling():  # which traces no derivatives but those of backward()
        _refuse_transforms(name, x)
    check_kinds(name, x, **dict(zip(OPTIONS[name], options, strict=True)))
    return OPERATORS[name](x, group_name(group), *options)


def _refuse_transforms(name: str, x: Any) -> None:
    """NotImplementedError where a derivative is asked for that would silently be missing."""
    if isinstance(x, torch.Tensor):
        refuse_forward_mode(name, x)
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() != torch._C._functorch.TransformType.Vmap:
        raise NotImplementedError(
            f"{name} has no rules for torch.func's derivatives; its gradients are those of backward()"
        )


def _resolve(deterministic: bool | None) -> bool | None:
    """The caller's wish, else PyTorch's global setting."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _route(name: str, x: Any, group: Any, *options: Any) -> Route:
    """What a call would do; launches nothing, raises what it would raise."""
    check_kinds(name, x, **dict(zip(OPTIONS[name], options, strict=True)))
    fabric = fabric_of(group, x.device)
    return choose(Site.of(fabric), check(name, fabric.world_size, x, *options), x.device)


ROUTES: dict[str, Callable[..., Route]] = {
    "all_gather": lambda x, group=None, *, dim=0: _route("all_gather", x, group, dim),
    "reduce_scatter": lambda x, group=None, *, dim=0, op="sum", deterministic=None: _route(
        "reduce_scatter", x, group, dim, op, _resolve(deterministic)
    ),
    "all_reduce": lambda x, group=None, *, op="sum", deterministic=None: _route(
        "all_reduce", x, group, op, _resolve(deterministic)
    ),
    "all_to_all": lambda x, group=None, *, split_dim, concat_dim: _route("all_to_all", x, group, split_dim, concat_dim),
}
