"""Groups of real processes (gloo): the fallback."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from tileweave.fabric import fabric_of

WORLD = 3


def start(tmp_path, body):
    """Run body(rank) in WORLD processes that form a group; any failure fails the test."""
    mp.spawn(member, (f"file://{tmp_path}/init", body), nprocs=WORLD)


def member(rank, init, body):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD)
    body(rank)
    dist.barrier()  # gloo aborts a process that still receives from one which has left
    dist.destroy_process_group()


def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def data(rank, rows, dtype):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_reduce_scatter(group, members):
    """Every dtype against a float32 sum over `members`, the ranks of the group in order."""
    fabric = fabric_of(group, "cpu")
    n, mine = len(members), fabric.rank
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (0, 2 * n, 10 * n):
            xs = [data(r, rows, dtype) for r in members]
            total = torch.stack(xs).float().sum(0)
            x = xs[mine].t().contiguous().t()  # strided input
            share = fabric.reduce_scatter(x)
            expected = total.chunk(n)[mine] if rows else total
            assert share.dtype == dtype and share.shape == expected.shape
            torch.testing.assert_close(share.float(), expected, rtol=2e-2, atol=2e-2)
            assert torch.equal(x, xs[mine])


def world_body(rank):
    fabric = fabric_of(None, "cpu")
    assert (fabric.backend, fabric.rank, fabric.world_size) == ("fallback", rank, WORLD)
    assert "CPU tensors outside an emulated world" in fabric.refusal()
    check_reduce_scatter(None, list(range(WORLD)))
    check_reduce_scatter(dist.group.WORLD, list(range(WORLD)))
    raises(
        ValueError, "multiple of the world size 3, got shape (4, 2)", lambda: fabric.reduce_scatter(torch.ones(4, 2))
    )


def test_the_default_group(tmp_path):
    start(tmp_path, world_body)


def subgroup_body(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        raises(ValueError, "not a member", lambda: fabric_of(group, "cpu"))
        return
    fabric = fabric_of(group, "cpu")
    assert (fabric.rank, fabric.world_size) == (rank - 1, 2)
    check_reduce_scatter(group, [1, 2])
    assert fabric.gather_values(f"from {rank}") == ["from 1", "from 2"]


def test_a_subgroup_without_rank_0(tmp_path):
    start(tmp_path, subgroup_body)


def mesh_body(rank):
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    check_reduce_scatter(mesh, list(range(WORLD)))
    plane = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    raises(ValueError, "expected a 1-D DeviceMesh, got 2 dimensions ('dp', 'tp')", lambda: fabric_of(plane, "cpu"))
    assert fabric_of(plane["tp"], "cpu").world_size == WORLD


def test_device_meshes(tmp_path):
    start(tmp_path, mesh_body)


def values_body(rank):
    fabric = fabric_of(None, "cpu")
    assert fabric.rendezvous() is None
    mine = [None, "ü" * (1 + 100 * rank), {"rank": rank, "half": rank / 2}, ""]
    assert fabric.gather_values(mine) == [
        [None, "ü" * (1 + 100 * r), {"rank": r, "half": r / 2}, ""] for r in range(WORLD)
    ]
    raises(TypeError, "not JSON serializable", lambda: fabric.gather_values(object()))  # all of them, before they meet
    fabric.rendezvous()


def test_values_of_any_length_go_to_all(tmp_path):
    start(tmp_path, values_body)
