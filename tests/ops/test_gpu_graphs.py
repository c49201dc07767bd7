"""The op in CUDA graphs, on virtual ranks of a real GPU."""

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.problems import assert_right, operands
from tileweave.fabric import fabric_of

pytestmark = pytest.mark.gpu
REPLAYS, SAMPLE, EAGER = 10_000, 21, 25  # every 21st result is checked; an eager call comes after every 25th replay


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ten_thousand_replays_with_new_data_between_eager_calls(world, deterministic):
    data = [operands(world, world * 136, 520, 264, seed=i, bias=True, device="cuda") for i in range(50)]
    other = [operands(world, world * 72, 264, 64, seed=100 + i, device="cuda") for i in range(10)]

    def call(group, a, b, bias=None):
        return tw.matmul_reduce_scatter(a, b, group, bias=bias, deterministic=deterministic)

    def rank_program(rank, group):
        fabric = fabric_of(group)
        a, b, bias = data[0][0][rank].clone(), data[0][1][rank].clone(), data[0][2].clone()
        call(group, a, b, bias)
        call(group, other[0][0][rank], other[0][1][rank])
        torch.cuda.synchronize()
        fabric.rendezvous()
        graph, out = capture(lambda: call(group, a, b, bias))
        replayed, eager = [], []
        for i in range(REPLAYS):
            chosen = data[7 * i % len(data)]
            for static, new in zip((a, b, bias), (chosen[0][rank], chosen[1][rank], chosen[2]), strict=True):
                static.copy_(new)
            fabric.rendezvous()
            graph.replay()
            if i % SAMPLE == 0:
                replayed.append(out.clone())
            if i % EAGER == 0:
                x, y, _ = other[i // EAGER % len(other)]
                eager.append(call(group, x[rank], y[rank]))
        return replayed, eager

    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        by_rank = w.run(rank_program)
    replayed, eager = ([list(outs) for outs in zip(*kind, strict=True)] for kind in zip(*by_rank, strict=True))
    assert (len(replayed), len(eager)) == (len(range(0, REPLAYS, SAMPLE)), REPLAYS // EAGER)
    for j, outs in enumerate(replayed):
        a, b, bias = data[7 * j * SAMPLE % len(data)]
        assert_right(outs, a, b, bias=bias, deterministic=deterministic)
    for j, outs in enumerate(eager):
        a, b, _ = other[j % len(other)]
        assert_right(outs, a, b, deterministic=deterministic)


def test_a_graph_outlives_the_growth_of_the_workspace():
    """A larger eager call after the capture makes new slots; replays go on in the old ones."""
    a, b, _ = operands(2, 272, 264, 128, seed=0, device="cuda")
    big = operands(2, 8192, 4096, 64, seed=1, device="cuda")

    def rank_program(rank, group):
        call = lambda x, y: tw.matmul_reduce_scatter(x[rank], y[rank], group)  # noqa: E731
        call(a, b)
        torch.cuda.synchronize()
        fabric_of(group).rendezvous()
        graph, out = capture(lambda: call(a, b))
        large, copies = [], []
        for _ in range(3):
            large.append(call(big[0], big[1]))
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(255)  # whoever takes freed memory
            out.fill_(float("nan"))
            fabric_of(group).rendezvous()
            graph.replay()
            copies.append(out.clone())
        return large, copies

    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        (large0, copies0), (large1, copies1) = w.run(rank_program)
    for outs in zip(large0, large1, strict=True):
        assert_right(outs, big[0], big[1], deterministic=True)
    for outs in zip(copies0, copies1, strict=True):
        assert_right(outs, a, b, deterministic=True)


def test_a_process_alone_captures_as_usual():
    data = [operands(1, 264, 520, 136, seed=i, device="cuda") for i in range(10)]
    (a,), (b,), _ = operands(1, 264, 520, 136, seed=0, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tw.matmul_reduce_scatter(a, b)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.matmul_reduce_scatter(a, b)
    for i in range(100):
        (x,), (y,), _ = data[i % len(data)]
        a.copy_(x)
        b.copy_(y)
        graph.replay()
        if i % 5 == 0:
            assert_right([out], [x], [y])
            assert_right([tw.matmul_reduce_scatter(x, y)], [x], [y])


@pytest.mark.parametrize(
    "called_before, advice",
    [(False, r"workspace must grow.*warm up"), (True, r"cannot be loaded while a CUDA graph .*warm up")],
)
def test_first_use_inside_a_capture_is_refused_with_advice(called_before, advice):
    """What is missing is the workspace, or, when another variant has been called before, the kernel."""
    a, b, bias = operands(2, 1024, 264, 72, seed=1, bias=True, device="cuda")

    def rank_program(rank, group):
        if called_before:
            tw.matmul_reduce_scatter(a[rank], b[rank], group, out_dtype=torch.float32)
        torch.cuda.synchronize()
        fabric_of(group).rendezvous()
        capture(lambda: tw.matmul_reduce_scatter(a[rank], b[rank], group, bias=bias, op="avg"))

    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        with pytest.raises(RuntimeError, match=advice):
            w.run(rank_program)
        outs = w.run(lambda rank, group: tw.matmul_reduce_scatter(a[rank], b[rank], group, bias=bias))
    assert_right(outs, a, b, bias=bias)
