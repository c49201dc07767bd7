"""Expert parallelism: tokens to the ranks of their experts, the experts' matmuls, and the way back."""

from tileweave.ops.moe.op import (
    explain_combine,
    explain_dispatch,
    explain_way_back,
    moe_combine,
    moe_dispatch_matmul,
    moe_matmul_combine,
)
from tileweave.ops.moe.reference import reference
from tileweave.ops.moe.routing import Experts, TokenRoute

__all__ = [
    "Experts",
    "TokenRoute",
    "explain_combine",
    "explain_dispatch",
    "explain_way_back",
    "moe_combine",
    "moe_dispatch_matmul",
    "moe_matmul_combine",
    "reference",
]
