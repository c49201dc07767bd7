"""The attention ops as PyTorch sees them: registered operators, torch.compile, autocast, processes of a gloo group."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tests.fabric.test_distributed import WORLD, start
from tests.ops.sequence.problems import assert_near, relative_error, run, shards, truth, whole
from tileweave.fabric import group_name
from tileweave.ops.ring_attention.operator import OPERATOR as RING
from tileweave.ops.ulysses_attention.operator import OPERATOR as ULYSSES

OPS = {"ring_attention": tw.ring_attention, "ulysses_attention": tw.ulysses_attention}
OPERATORS = {"ring_attention": (RING, ("contiguous",)), "ulysses_attention": (ULYSSES, ())}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", OPS)
def test_opcheck_in_a_world_of_one_and_in_an_emulated_world(name):
    operator, more = OPERATORS[name]

    def check(rank, group):
        q, k, v, _ = (x.requires_grad_() for x in whole(1, 4, 2, 4, 8, seed=rank))
        torch.library.opcheck(operator, (q, k, v, None, group_name(group), True, None, "bhsd", *more, ""))

    check(0, None)
    with tw.virtual_world(2, device="cpu") as w:
        w.run(check)


def test_fake_tensors_have_the_results_shapes_and_raise_the_same_errors():
    with tw.virtual_world(4, device="cpu") as w, FakeTensorMode():
        name = w.run(lambda rank, group: group_name(group))[0]
        q, k = torch.empty(2, 6, 8, 16, dtype=torch.half), torch.empty(2, 6, 4, 16, dtype=torch.half)
        out, lse = RING(q, k, k, None, name, True, None, "bshd", "zigzag", "")
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 8, 6), torch.float32)
        out, lse = ULYSSES(q, k, k, None, name, True, None, "bshd", "")
        assert (out.shape, lse.shape) == (q.shape, (2, 2, 24))
        with pytest.raises(ValueError, match="6 heads, not divisible by the world size 4"):
            ULYSSES(q, k, k, None, name, False, None, "bhsd", "")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_full_graphs(name, dynamic):
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def call(q, k, v, group, **options):
        return OPS[name](q * 1, k, v, group, **options)

    for rows in (8, 12):
        tensors = whole(2, 4, 2, rows, 8, seed=rows)
        options = dict(causal=True, grads=True, layout="bshd")
        with tw.virtual_world(2, device="cpu") as w:
            assert_near(run(w, call, tensors, **options), truth(tensors, **options), torch.float32, slack=5)


def test_compiled_with_an_attention_of_the_callers():
    def attention(q, k, v, causal, scale):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    call = torch.compile(functools.partial(tw.ulysses_attention, attention=attention), fullgraph=True, backend="eager")
    tensors = whole(2, 4, 4, 8, 8)
    with tw.virtual_world(2, device="cpu") as w:
        assert_near(run(w, call, tensors, causal=True), truth(tensors, causal=True), torch.float32)


@pytest.mark.parametrize("name", OPS)
def test_autocast_casts_as_torch_attention_does(name):
    tensors = whole(1, 4, 2, 16, 8)

    def rank_program(rank, group):
        q, k, v = (shards(x, 2)[rank].requires_grad_() for x in tensors[:3])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = OPS[name](q, k, v, group)
            assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        return out.detach(), q.grad, k.grad

    with tw.virtual_world(2, device="cpu") as w:
        results = w.run(rank_program)
    assert all(grad.dtype == torch.float32 for _, *grads in results for grad in grads)
    got = [torch.cat([r[0] for r in results], 2)]
    assert_near(got, truth([x.bfloat16() for x in tensors]), torch.bfloat16)


@pytest.mark.parametrize("name", OPS)
def test_inference_mode_and_no_grad(name):
    tensors = whole(1, 4, 2, 8, 8)
    for mode in (torch.inference_mode, torch.no_grad):
        with tw.virtual_world(2, device="cpu") as w, mode():
            parts = [shards(x, 2) for x in tensors]
            outs = w.run(lambda rank, group, parts=parts: OPS[name](*(x[rank] for x in parts[:3]), group))
        assert not outs[0].requires_grad
        assert_near([torch.cat(outs, 2)], truth(tensors), torch.float32)


def processes_body(rank):
    """Blocks that travel from process to process, and all-to-alls, in a group of all and in one of other ranks."""
    pair = dist.new_group([2, 1])
    for group in (None, pair):
        members = list(range(WORLD)) if group is None else [1, 2]
        if rank not in members:
            continue
        world, mine = len(members), members.index(rank)
        for placement in ("contiguous", "zigzag"):
            for name, op in OPS.items():
                more = dict(placement=placement) if name == "ring_attention" else {}
                where = more.get("placement", "contiguous")
                for dtype in (torch.float64, torch.bfloat16):
                    tensors = whole(2, 12, 6 if world == 3 else 1, 8 * world, 16, dtype=dtype, seed=world)
                    q, k, v, weights = (shards(x, world, placement=where)[mine] for x in tensors)
                    inputs = [x.requires_grad_() for x in (q, k, v)]
                    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
                    for call in (op, compiled) if dtype == torch.float64 else (op,):
                        out = call(*inputs, group, causal=True, **more)
                        got = [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
                        true = truth(tensors, causal=True, grads=True)
                        for x, y in zip(got, true, strict=True):
                            error = relative_error(x, shards(y, world, placement=where)[mine])
                            assert error < (1e-12 if dtype == torch.float64 else 8e-3), (name, placement, error)


def packed_body(rank):
    """Packed sequences, of which the processes have parts."""
    tensors = whole(1, 12, 6, 8 * WORLD, 16, dtype=torch.float64)
    for ends in ([0, 5, 5, 20, 24], [0, 24]):
        for name, op in OPS.items():
            where = dict(placement="zigzag") if name == "ring_attention" else {}
            options = dict(causal=True, cu_seqlens=torch.tensor(ends).int())
            q, k, v, weights = (shards(x, WORLD, **where)[rank] for x in tensors)
            inputs = [x.requires_grad_() for x in (q, k, v)]
            out = op(*inputs, **options, **where)
            got = [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
            for x, y in zip(got, truth(tensors, grads=True, **options), strict=True):
                assert relative_error(x, shards(y, WORLD, **where)[rank]) < 1e-12


def test_packed_sequences_between_processes(tmp_path):
    start(tmp_path, packed_body)


def test_the_fallback_between_processes(tmp_path):
    start(tmp_path, processes_body)
