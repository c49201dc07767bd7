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


class Site(NamedTuple):
    """What the path of a call depends on in a rank's fabric; fields as those of `Fabric`."""

    backend: str
    world: int
    sms: int
    device: torch.device
    refusal: str | None

    @classmethod
    def of(cls, fabric: Fabric) -> "Site":
        """That of a fabric."""
        return cls(fabric.backend, fabric.world_size, fabric.sms, fabric.device, fabric.refusal())
