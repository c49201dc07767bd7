"""ring_attention as an operator of PyTorch, as of `tileweave.ops.sequence.operator`.

    tileweave::ring_attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, str group_name, bool causal,
                              float? scale, str layout, str placement, str plan) -> (Tensor, Tensor)

The results are out and lse [B, H, S]. In the backward pass, with P = exp(scores - lse), which is right for each block
since lse is that of all,

    dV = P^T dO        dS = P * (dO V^T - rowsum(dO * O)) * scale        dQ = dS K        dK = dS^T Q
"""

from tileweave.ops.ring_attention.check import CHANNELS, NAME, check, settle
from tileweave.ops.ring_attention.launch import prepare, unfused, unfused_backward
from tileweave.ops.sequence.operator import Attention, register

RING = Attention(
    NAME,
    CHANNELS,
    "bool causal, float? scale, str layout, str placement",
    check,
    settle,
    prepare,
    unfused,
    unfused_backward,
)
OPERATOR, run = register(RING), RING.run
