"""What decides the path of a call, as plain values: `Like` for a tensor, `Site` for a fabric; and what ops ask alike.

So a decision is made once and then found again, and all ranks come to the same one: a rank's strides or addresses have
no part in it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tileweave.fabric import MAX_RANKS, Fabric
from tileweave.planner import H200, Hardware, Plan
from tileweave.planner.plan import AGREED
from tileweave.planner.tiling import CORES
from tileweave.planner.tuned import Tuned

DTYPES = (torch.bfloat16, torch.float16)  # of operands of a fused matmul
FP8 = torch.float8_e4m3fn
FP4 = torch.float4_e2m1fn_x2  # two values in an element


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which `x` reaches the operator: autocast, where it is on, casts it as it does for torch.matmul."""
    device = x.device.type
    castable = x.is_floating_point() and x.dtype not in (torch.float64, FP8, FP4)
    if castable and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


class Like(NamedTuple):
    """What the contract says of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor | None) -> "Like | None":
        """That of a tensor; None of None."""
        return None if x is None else cls(x.shape, x.dtype, x.device)

    @classmethod
    def autocast(cls, x: torch.Tensor | None) -> "Like | None":
        """That of a tensor as it reaches the operator."""
        return None if x is None else cls(x.shape, operand_dtype(x), x.device)


def check_dense(op: str, named: Iterable[tuple[str, Any]]) -> None:
    """TypeError unless each of the named arguments is a dense tensor of this rank's; ValueError if the first one has no
    data: the others are to be on its device."""
    named = tuple(named)
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if hasattr(x, "to_local"):  # a DTensor, by what makes it one: importing the class takes long
            raise TypeError(
                f"{op}: {name} must be this rank's tensor, got a {type(x).__name__}; {name}.to_local() would be"
            )
        if x.is_nested:
            raise TypeError(
                f"{op}: {name} must be a dense tensor, got a nested one; {name}.to_padded_tensor(0) would be"
            )
        if x.layout != torch.strided:
            raise TypeError(f"{op}: {name} must be a dense tensor, got {x.layout}; {name}.to_dense() would be")
    name, x = named[0]
    if x.is_meta:
        raise ValueError(f"{op}: {name} is on the meta device, without data: a tensor on a CPU or a GPU would do")


def check_plan(op: str, plan: Any) -> None:
    """TypeError unless it is a Plan or None."""
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{op}: plan must be a tileweave.Plan or None, got {type(plan).__name__}")


def check_nodes(op: str, site: "Site", unfit: Callable[["Site"], str | None]) -> None:
    """ValueError if calls inside some node cannot follow a plan, on all ranks, also those of nodes that could."""
    for node, each in enumerate(site.every):
        if why := unfit(each):
            raise ValueError(f"{op}: on node {node}: {why}")


def check_max_sms(op: str, max_sms: Any) -> None:
    """TypeError or ValueError unless it is a number of SMs or None."""
    if max_sms is None:
        return
    if not isinstance(max_sms, int) or isinstance(max_sms, bool):
        raise TypeError(f"{op}: max_sms must be an int or None, got {type(max_sms).__name__}")
    if not 1 <= max_sms < 2**31:
        raise ValueError(f"{op}: max_sms must be from 1 to 2**31 - 1, or None for all, got {max_sms}")


def check_matrices(op: str, a: Like, b: Like) -> tuple[int, int, int]:
    """(M, K, N) of a product; ValueError unless a is [M, K] and b [K, N], on one device."""
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ValueError(
            f"{op}: a and b must be matrices [M, K] and [K, N], got shapes {list(a.shape)} and {list(b.shape)}"
        )
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ValueError(f"{op}: a is [{m}, {k}] and b is [{k_b}, {n}]: a's columns must be as many as b's rows")
    if b.device != a.device:
        raise ValueError(f"{op}: a is on {a.device} and b on {b.device}: they must be on one device")
    return m, k, n


def check_scale(op: str, name: str, scale: Like | None, each: tuple[int, int], a: Like) -> None:
    """ValueError unless the scale `name` of an operand is float32 beside `a`: one value, or one in each place of shape
    `each`, a row of a or a column of b. Operands that are not float8 have none."""
    if a.dtype != FP8:
        if scale is not None:
            raise ValueError(f"{op}: {name} goes with float8_e4m3fn operands, but a is {a.dtype}")
        return
    if scale is None:
        raise ValueError(f"{op}: float8_e4m3fn operands need {name}: one float32 value, or {list(each)} of them")
    if scale.dtype != torch.float32 or scale.device != a.device:
        raise ValueError(f"{op}: {name} must be float32 on {a.device}, got {scale.dtype} on {scale.device}")
    if scale.shape.numel() != 1 and tuple(scale.shape) != each:
        raise ValueError(f"{op}: {name} must be one value or {list(each)}, got shape {list(scale.shape)}")


class Site(NamedTuple):
    """What the path of a call depends on in a rank's fabric; fields as those of `Fabric`. unicast: why there are no
    multicast addresses, if so; nodes: how many there are, if ops are composed over them, else 1; inside: then the site
    of calls inside this one, and `every` those inside each, where they may differ."""

    backend: str
    world: int
    sms: int
    device: torch.device
    refusal: str | None
    unicast: str | None = None
    linked: bool = False
    nccl: bool = False
    cores: tuple[str, ...] = ("wgmma",)
    memory_bytes: int = 0
    tuned: tuple[Tuned, ...] = ()
    nodes: int = 1
    inside: "Site | None" = None
    every: "tuple[Site, ...]" = ()

    @classmethod
    def of(cls, fabric: Fabric) -> "Site":
        """That of a fabric; collective at the first use of a group."""
        nodes, refusal = fabric.nodes, fabric.refusal()
        if refusal and fabric.uneven:
            refusal = f"{refusal}; {fabric.uneven}"
        site = cls(
            fabric.backend, fabric.world_size, fabric.sms, fabric.device, refusal, fabric.multicast_refusal(),
            fabric.linked, fabric.nccl, fabric.cores, fabric.memory_bytes, fabric.tuned,
        )  # fmt: skip
        if nodes is None:
            return site
        inside = cls.of(nodes.inside)
        every = tuple(inside._replace(**{**each, "cores": tuple(each["cores"])}) for each in nodes.sites)
        return site._replace(nodes=nodes.count, inside=inside, every=every)

    def measured(self, op: str, problem: Any) -> Tuned | None:
        """What `tileweave.tune` has found for a problem of this group."""
        return next((each for each in self.tuned if each.op == op and each.problem == problem), None)

    def on(self, hardware: Hardware) -> Hardware:
        """A profile with the memory that the GPUs here have, where there are some."""
        return _with_memory(hardware, self.memory_bytes) if self.memory_bytes else hardware

    def usable(self, max_sms: int) -> int:
        """SMs of a kernel that takes `max_sms` of a rank at most; 0 stands for all."""
        sms = self.sms or H200.sms
        return min(sms, max_sms) if max_sms else sms


@lru_cache(maxsize=64)
def _with_memory(hardware: Hardware, memory_bytes: int) -> Hardware:
    return replace(hardware, memory_bytes=memory_bytes)


def out_of_reach(site: Site, device: torch.device, name: str = "a", cores: tuple[str, ...] = CORES) -> str | None:
    """Why no kernel of a world can serve the operand `name`, which is on `device`; None if one can. cores: those that
    the op has kernels for; () if these do not multiply."""
    if site.refusal:
        return site.refusal
    if why := coreless(cores, site.cores):
        return why
    if site.world > MAX_RANKS:
        return f"the group has {site.world} ranks, more than the {MAX_RANKS} that a channel has words for"
    if device.type != site.device.type:
        return f"{name} is on {device}, the ranks of this world are on {site.device}"
    return None


def coreless(kernels: tuple[str, ...], there: tuple[str, ...]) -> str | None:
    """Why no tensor cores of those that are `there` can multiply as any of the `kernels` does; None if some can."""
    if not kernels or set(kernels) & set(there):
        return None
    return f"the kernel multiplies by {' or '.join(kernels)}, this GPU by {' or '.join(there)}"


def unaligned(*sizes: tuple[str, int, int]) -> str | None:
    """Why TMA, whose strides are multiples of 16 bytes, cannot address rows of these sizes; None if it can. `sizes`: a
    name, the size, and how many elements 16 bytes are."""
    for name, size, unit in sizes:
        if size % unit:
            return f"{name} = {size} is not a multiple of {unit}, so rows are not 16-byte aligned as TMA needs"
    return None


class Agreement(NamedTuple):
    """What of a call all ranks must agree on.

    op: its name; call: what it asks for, a dataclass or what `asks` makes; way: how it is computed, a plan,
    or whether by a fused kernel.
    """

    op: str
    call: Any
    way: Plan | bool | None

    def facts(self) -> dict[str, str]:
        """All of it as text, by name."""
        plan = self.way if isinstance(self.way, Plan) else None
        agreed = {name: getattr(plan, name) for name in AGREED} if plan else {}
        fused = ("fused", bool(self.way))
        return {"call": self.op} | {
            name: str(x) for name, x in (*_leaves("", self.call), fused, *_leaves("plan.", agreed))
        }


def asks(**facts: Any) -> tuple[tuple[str, Any], ...]:
    """Facts of a call for an `Agreement`."""
    return tuple(facts.items())


def _leaves(prefix: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Names and values in a dataclass, named tuple, dictionary or tuple of pairs, also within each other."""
    if is_dataclass(x):
        pairs: Any = ((each.name, getattr(x, each.name)) for each in fields(x))
    elif hasattr(x, "_asdict"):
        pairs = x._asdict().items()
    else:
        pairs = x.items() if isinstance(x, dict) else x
    for name, value in pairs:
        if is_dataclass(value) or hasattr(value, "_asdict"):
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
