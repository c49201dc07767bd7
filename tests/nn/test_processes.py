"""Layers in groups of real processes (gloo): meshes, and FSDP over the other dimension of one."""

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.nn.models import PLAN, assert_equal_to, data, loss_of, make, step, truth
from tileweave.nn import full_state_dict, parallelize, reduce_gradients


def start(tmp_path, world, body):
    """Run body(rank) in `world` processes that form a group; any failure fails the test."""
    mp.spawn(member, (world, f"file://{tmp_path}/init", body), nprocs=world)


def member(rank, world, init, body):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    body(rank)
    dist.barrier()  # gloo aborts a process that still receives from one which has left
    dist.destroy_process_group()


def one_dimension(rank):
    """A 1-D mesh; results of all ranks are compared on each."""
    model, (x, target) = make(), data(2, 8, 24)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    mine = step(model, x, target, rank, mesh)
    every = [None] * 4
    dist.all_gather_object(every, mine)
    assert_equal_to(truth(model, x, target), every, 1)
    whole = full_state_dict(parallelize(copy.deepcopy(model), PLAN, mesh))
    assert all(torch.equal(whole[key], value) for key, value in model.state_dict().items())


def two_dimensions(rank):
    """Two ranks of tensor parallelism times two of FSDP, which sees plain parameters. Two steps of SGD."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    model, (x, target) = make(), data(4, 8, 24)
    single = copy.deepcopy(model).float()
    mine = fully_shard(parallelize(copy.deepcopy(model), PLAN, tp), mesh=dp)
    pick = lambda whole: whole.chunk(2)[dp.get_local_rank()].chunk(2, 1)[tp.get_local_rank()]  # noqa: E731
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (mine, single))
    for _ in range(2):
        loss = loss_of(mine(pick(x)), pick(target), target.numel() / 2)  # FSDP averages over dp
        loss.backward()
        reduce_gradients(mine)
        ours.step(), ours.zero_grad()
        total = loss.detach() / 2
        dist.all_reduce(total)
        true = loss_of(single(x.float()), target, target.numel())
        true.backward()
        theirs.step(), theirs.zero_grad()
        torch.testing.assert_close(total, true.detach(), rtol=0.01, atol=0)
    moved = 0.0
    for name, parameter in mine.named_parameters():
        got, goal = parameter.full_tensor().detach().float(), dict(single.named_parameters())[name].detach()
        for dim in range(goal.dim()):
            if got.shape[dim] != goal.shape[dim]:
                goal = goal.chunk(2, dim)[tp.get_local_rank()]
        torch.testing.assert_close(got, goal, rtol=0.02, atol=0.004)
        moved += (got - dict(parallelize(copy.deepcopy(model), PLAN, tp).named_parameters())[name]).abs().sum().item()
    assert moved > 0


def both(rank):
    one_dimension(rank)
    two_dimensions(rank)


def test_meshes_and_fsdp_over_the_other_dimension(tmp_path):
    start(tmp_path, 4, both)
