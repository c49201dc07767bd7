"""The float32 truth that every path of all_gather_matmul is compared with.

A result is rounded once, whatever the world: `tolerance(dtype, 1, True)` of matmul_reduce_scatter bounds its
`relative_error`.
"""

import torch


def reference(a, b, bias=None, scale_a=None, scale_b=1.0) -> torch.Tensor:
    """[M, N] float32: all ranks' shards `a`, a list of [M / world, K], times one rank's `b` [K, N], plus `bias`.

    scale_a, scale_b: what each shard and `b` are multiplied with, a list and one: values, or columns and a row of them.
    """
    shards = [x.float() for x in a]
    if scale_a is not None:
        shards = [x * scale for x, scale in zip(shards, scale_a, strict=True)]
    product = torch.cat(shards) @ (b.float() * scale_b)
    return product if bias is None else product + bias.float()
