"""Modules of sequence parallelism: as the ops they are made of, and the two composed between processes of a mesh."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import tileweave as tw
from tests.ops.sequence.problems import assert_near, relative_error, run, truth, whole
from tileweave.nn import RingAttention, RingUlyssesAttention, UlyssesAttention


@pytest.mark.parametrize("options", [dict(causal=True, layout="bshd"), dict(scale=0.2)])
def test_modules_are_their_ops(options):
    tensors = whole(2, 4, 2, 16, 8)
    kinds = [(RingAttention, dict(placement="zigzag")), (UlyssesAttention, {})]
    for kind, more in kinds:
        given = {**options, **more}

        def call(q, k, v, group, kind=kind, **given):
            return kind(group, **given)(q, k, v)

        with tw.virtual_world(2, device="cpu") as w:
            got = run(w, call, tensors, grads=True, **given)
        assert_near(got, truth(tensors, grads=True, **options), torch.float32, slack=5)
    assert "layout='bshd'" in repr(RingAttention(layout="bshd"))


def body(rank, init):
    """Two ranks of a ring, of two ranks of Ulysses each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    for placement in ("contiguous", "zigzag"):
        tensors = whole(1, 4, 2, 32, 8, dtype=torch.float64)
        module = RingUlyssesAttention(mesh, causal=True, placement=placement)
        q, k, v, weights = (module.place(x, 2).clone() for x in tensors)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = module(*inputs)
        got = [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
        for x, y in zip(got, truth(tensors, causal=True, grads=True), strict=True):
            assert relative_error(x, module.place(y, 2)) < 1e-12
    dist.barrier()
    dist.destroy_process_group()


def test_ring_across_and_ulysses_within(tmp_path):
    mp.spawn(body, (f"file://{tmp_path}/init",), nprocs=4)


def test_a_mesh_of_other_dimensions_is_refused():
    class Line:
        ndim = 1

    with pytest.raises(ValueError, match="mesh must have two dimensions, ring and Ulysses, got 1"):
        RingUlyssesAttention(Line())
