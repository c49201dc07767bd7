"""ulysses_attention as an operator of PyTorch, as of `tileweave.ops.sequence.operator`.

    tileweave::ulysses_attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, str group_name, bool causal,
                                 float? scale, str layout, str plan) -> (Tensor, Tensor)

The results are out and, for the backward pass, lse [B, H / world, S] of this rank's heads. That pass moves q, k, v and
out to the heads again.
"""

from tileweave.ops.sequence.operator import Attention, register
from tileweave.ops.ulysses_attention.check import NAME, check, settle
from tileweave.ops.ulysses_attention.launch import prepare, unfused, unfused_backward

ULYSSES = Attention(
    NAME, (NAME,), "bool causal, float? scale, str layout", check, settle, prepare, unfused, unfused_backward
)
OPERATOR, run = register(ULYSSES), ULYSSES.run
