"""attention of one GPU: the host side of its kernel."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from tileweave.fabric import Fabric, Variant
from tileweave.ops.attention.check import (
    LAYOUTS,
    NAME,
    Call,
    Tiling,
    check,
    check_tiling,
    tiling_for,
    unsupported,
)
from tileweave.ops.attention.kernel import attention_kernel
from tileweave.ops.descriptors import ALIGN, Box
from tileweave.ops.registration import kind, recall, remember
from tileweave.planner.attention import ROWS, padded_dim
from tileweave.tiles.attention import NO_MASK

WARPS = 4
L2_BYTES = 32 << 20  # of K and V that stay in the L2 cache beside all else


def attention(
    fabric: Fabric,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T, masked) v on one GPU, for each batch and head.

    Args:
        fabric: of this rank; in a world of several ranks all make the call, as for every launch.
        q: `[B, H, S, D]` ("bhsd") or `[B, S, H, D]` ("bshd"), bfloat16 or float16, D a multiple of 8 up to 256 (128 on
            Blackwell). Strides that TMA can address cost nothing, others a copy: the last is 1, the others multiples of
            16 bytes.
        k, v: of q's layout, dtype, batch and D; H is a multiple of their heads, their S may differ from q's. 0 is legal
            for every size but D.
        causal: row i sees the first `i + offset + 1` columns; else all.
        scale: positive, 1 / sqrt(D) by default.
        return_lse: return the log-sum-exp too.
        tiling: another than the default.

    Returns:
        out, like q, fresh and contiguous; with `return_lse` also `[B, H, S]` float32, the natural logarithm of the sum
        of exp(scale * q k^T) over what a row sees. Rows that see nothing are 0 and -inf. On the current stream.

    Raises:
        TypeError, ValueError: the arguments break these rules, or the kernel cannot run on this fabric.
    """
    kinds = kind(q), kind(k), kind(v), causal, offset, scale, layout, return_lse, tiling
    prepared = recall(fabric, NAME, kinds, q)
    if prepared is None:
        call = check(q, k, v, causal, offset, scale, layout, return_lse)
        if why := unsupported(fabric, call):
            raise ValueError(f"{NAME}: {why}")
        tiling = tiling or tiling_for(call, fabric.cores[0])
        check_tiling(call, tiling, fabric.cores)
        if call.batch * call.heads * call.rows == 0 or call.cols == 0:
            return _nothing(call, q)
        prepared = prepare(fabric, call, tiling, layout, q, k, v)
        remember(fabric, NAME, kinds, None, prepared)
    return prepared.launch(fabric, q, k, v)


def _nothing(call: Call, q: torch.Tensor):
    """The result where there are no rows, or no columns to see."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((call.batch, call.heads, call.rows), -math.inf, device=q.device)
    return (out, lse) if call.return_lse else out


def as_heads(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` as `[B, H, S, D]` with strides that TMA can address: a view if it has such, else a copy."""
    x = x.permute(LAYOUTS[layout])
    per_line = ALIGN // x.element_size()
    lies = [n == 1 or (step > 0 and step % per_line == 0) for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    if not (all(lies) and x.stride(3) == 1 and x.data_ptr() % ALIGN == 0):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    # The stride of a dimension of size 1 means nothing, but TMA wants a legal one.
    strides = [step if n > 1 else per_line for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return x.as_strided(x.shape, (*strides, 1))


@dataclass(slots=True)
class Prepared:
    """A call but for its tensors' data. operands: of q, k and v the descriptor, and whether it is that of a copy; tail:
    the kernel's arguments behind `next`."""

    call: Call
    layout: str
    operands: tuple[tuple[Box, bool], ...]
    out: Box
    next: torch.Tensor
    tail: tuple[Any, ...]
    grid: int
    variant: Variant = field(default_factory=Variant)

    def launch(self, fabric: Fabric, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """Launch the kernel on the current stream; returns the result."""
        call = self.call
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(
            (call.batch, call.heads, call.rows) if call.return_lse else 1, dtype=torch.float32, device=q.device
        )
        given = (
            box.at(as_heads(x, self.layout) if copied else x)
            for (box, copied), x in zip(self.operands, (q, k, v), strict=True)
        )
        args = (*given, self.out.at(out), lse, self.next, *self.tail)
        fabric.launch(attention_kernel, self.grid, args, num_warps=WARPS, variant=self.variant)
        return (out, lse) if call.return_lse else out


def prepare(
    fabric: Fabric, call: Call, tiling: Tiling, layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Prepared:
    """Everything of a launch but the tensors' data."""
    channel = fabric.channel(NAME, 0, 0)
    dim, rows = padded_dim(call.dim), ROWS[tiling.core]
    tiles = math.ceil(call.rows / (tiling.consumers * rows)) * call.batch * call.heads
    sizes = [(call.batch, call.heads, call.rows, call.dim)[i] for i in LAYOUTS[layout]]
    out = torch.empty(sizes, dtype=call.dtype, device=q.device).permute(LAYOUTS[layout])
    group = call.heads // call.kv_heads
    tail = (
        tiles,
        call.scale * math.log2(math.e),
        call.heads,
        group,
        call.batch * call.heads,
        call.rows,
        call.cols,
        NO_MASK.value if call.offset is None else call.offset,
        heads_together(call),
        call.return_lse,
        tiling.consumers,
        tiling.stages,
        tiling.q_bufs,
        tiling.take_turns,
    )
    blocks = (1, 1, rows, dim), (1, 1, tiling.bn, dim), (1, 1, tiling.bn, dim)
    seen = [as_heads(x, layout) for x in (q, k, v)]
    operands = tuple(
        (Box(view, block), view.data_ptr() != x.data_ptr())
        for x, view, block in zip((q, k, v), seen, blocks, strict=True)
    )
    result = Box(as_heads(out, "bhsd"), blocks[0])
    return Prepared(call, layout, operands, result, channel.state, tail, min(fabric.sms, tiles))


def heads_together(call: Call) -> int:
    """How many query heads are worked at in turn. Without a mask one: all its tiles take as long. With one, so many as
    have their K and V in L2, since the longest tiles of all of them come first."""
    if call.offset is None:
        return 1
    kv_bytes = 2 * call.cols * padded_dim(call.dim) * call.dtype.itemsize
    return max(1, L2_BYTES // kv_bytes) * (call.heads // call.kv_heads)
