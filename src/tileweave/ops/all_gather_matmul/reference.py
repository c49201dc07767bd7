"""The float32 truth that every path of all_gather_matmul is compared with.

A result is rounded once, whatever the world: `tolerance(dtype, 1, True)` of matmul_reduce_scatter bounds its
`relative_error`.
"""

import torch


def reference(a, b, bias=None) -> torch.Tensor:
    """[M, N] float32: all ranks' shards `a`, a list of [M / world, K], times one rank's `b` [K, N], plus `bias`."""
    product = torch.cat(list(a)).float() @ b.float()
    return product if bias is None else product + bias.float()
