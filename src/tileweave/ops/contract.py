"""What decides the path of a call, as plain values: `Like` for a tensor, `Site` for a fabric.

So a decision is made once and then found again, and all ranks come to the same one: a rank's strides or addresses have
no part in it.
"""

from typing import NamedTuple

import torch

from tileweave.fabric import Fabric

DTYPES = (torch.bfloat16, torch.float16)  # of operands of a fused matmul
FP8 = torch.float8_e4m3fn


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which `x` reaches the operator: autocast, where it is on, casts it as it does for torch.matmul."""
    device = x.device.type
    castable = x.is_floating_point() and x.dtype not in (torch.float64, FP8)
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
    multicast addresses, if so."""

    backend: str
    world: int
    sms: int
    device: torch.device
    refusal: str | None
    unicast: str | None = None

    @classmethod
    def of(cls, fabric: Fabric) -> "Site":
        """That of a fabric."""
        return cls(
            fabric.backend, fabric.world_size, fabric.sms, fabric.device, fabric.refusal(), fabric.multicast_refusal()
        )
