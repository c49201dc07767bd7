"""Lesson 1: a row-parallel linear layer's matmul and reduce-scatter, as one kernel.

A [M, K] and B [K, N] are split along K: rank r holds a[r] = A[:, K_r] and b[r] = B[K_r, :]. Each rank computes a
partial product of the whole [M, N]; the op sums them and leaves rank r with its M / world rows. On a GPU the finished
tiles travel while the next ones are computed.

Runs anywhere: on virtual ranks where there is a Hopper GPU, otherwise in the emulator.
"""

import torch

import tileweave as tw

WORLD, M, N, K = 4, 256, 128, 512


def main() -> None:
    torch.manual_seed(0)
    with tw.virtual_world(WORLD, device="auto") as world:
        a = [torch.randn(M, K // WORLD, dtype=torch.bfloat16, device=world.device) for _ in range(WORLD)]
        b = [torch.randn(K // WORLD, N, dtype=torch.bfloat16, device=world.device) for _ in range(WORLD)]

        # What would happen, and why; nothing is launched.
        routes = world.run(lambda rank, group: tw.explain("matmul_reduce_scatter", a[rank], b[rank], group))
        print(f"backend {routes[0].backend}: {routes[0].reason}")

        # The op itself: once per rank, a thread each. Under torchrun the same call takes a process group.
        shards = world.run(lambda rank, group: tw.matmul_reduce_scatter(a[rank], b[rank], group))

    product = torch.cat(a, dim=1).float() @ torch.cat(b, dim=0).float()
    error = (torch.cat(shards).float() - product).norm() / product.norm()
    print(f"each rank has {list(shards[0].shape)} of [{M}, {N}]; relative error against float32: {error:.1e}")


if __name__ == "__main__":
    main()
