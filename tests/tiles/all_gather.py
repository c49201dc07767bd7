"""Host side of kernels/all_gather_matmul.py, on any fabric."""

import torch

from tests.tiles.kernels.all_gather_matmul import all_gather_matmul_kernel
from tileweave.ops.descriptors import describe

TILE = BM, BN, BK = 128, 64, 64
STAGES, WARPS, COMM_SMS = 3, 8, 2


def all_gather_matmul(fabric, a, b, grid=4, tile=TILE, kernel=all_gather_matmul_kernel):
    """[world * rows, N]: the ranks' `a` [rows, K] one below the other, times this rank's `b` [K, N]. Collective."""
    (bm, bn, bk), (rows, k), n, world = tile, a.shape, b.shape[1], fabric.world_size
    padded = -(-rows // bm) * bm
    channel = fabric.channel("all_gather_matmul", 0, (world * padded + 1) * k * a.element_size())
    # Rows of K elements from the arena's start; the second slot begins with the first row in the arena's second half,
    # wherever calls of another shape begin theirs.
    half = channel.staging.shape[1] // 2 // a.element_size()
    slot_rows = -(-half // k)
    pitch = channel.staging.stride(0) // a.element_size()
    slots = channel.staging.view(a.dtype).as_strided((world, slot_rows + world * padded, k), (pitch, k, 1))
    out = torch.full((world, rows, n), float("nan"), dtype=a.dtype, device=a.device)
    args = (
        fabric.rank, describe(a, (bm, bk)), describe(slots[fabric.rank], (bm, bk)), describe(slots, (1, bm, bk)),
        slot_rows, describe(b, (bk, bn)), describe(out, (1, bm, bn)), channel.flags, channel.flags.stride(0),
        channel.state, channel.timeout_us, rows, n, k, world, bm, bn, bk, STAGES, COMM_SMS,
    )  # fmt: skip
    fabric.launch(kernel, grid, args, num_warps=WARPS)
    return out.view(world * rows, n)
