"""Lesson 6: one product whose ranks are on several nodes.

Peer memory ends at the node. A group that spans nodes, equally many ranks on each, gets its ops composed: tileweave's
inside each node, and between nodes transfers by torch.distributed, of one chunk while the next is computed. Nothing in
the call says so; `explain` does.

Runs anywhere: four processes on the CPU, which are told by TILEWEAVE_NODE that they are on two nodes. On nodes with
GPUs leave that out, and start the ranks by torchrun with the backend "nccl".
"""

import os
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist

import tileweave as tw

NODES, EACH = 2, 2
WORLD, M, N, K = NODES * EACH, 256, 128, 512


def rank_program(task: tuple[int, str]) -> tuple[str, torch.Tensor, float]:
    """What a rank does: why the op goes its way, this rank's rows of A @ B, and the error of the way back."""
    rank, folder = task
    os.environ["TILEWEAVE_NODE"] = f"node {rank // EACH}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=WORLD)
    a, b = (x.chunk(WORLD, dim)[rank].clone().requires_grad_() for x, dim in zip(whole(), (1, 0), strict=True))

    route = tw.explain("matmul_reduce_scatter", a, b)
    shard = tw.matmul_reduce_scatter(a, b)

    shard.float().sum().backward()  # also over nodes: all_gather_matmul
    truth = b.detach().float().sum(1).expand(M, -1)  # a gradient of ones times b's transpose
    error = ((a.grad.float() - truth).norm() / truth.norm()).item()
    dist.barrier()
    dist.destroy_process_group()
    return route.reason, shard.detach(), error


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    """A [M, K] and B [K, N], which every process can make."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator).bfloat16() for shape in ((M, K), (K, N)))


def main() -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "tileweave"])
    with tempfile.TemporaryDirectory() as folder, context.Pool(WORLD) as pool:
        tasks = [(rank, folder) for rank in range(WORLD)]
        reasons, shards, errors = zip(*pool.map(rank_program, tasks, chunksize=1), strict=True)
    print(reasons[0])
    a, b = whole()
    product = a.float() @ b.float()
    error = (torch.cat(shards).float() - product).norm() / product.norm()
    print(f"each rank has {list(shards[0].shape)} of [{M}, {N}]; relative error against float32: {error:.1e}")
    print(f"relative error of the gradient of a: {max(errors):.1e}")


if __name__ == "__main__":
    main()
