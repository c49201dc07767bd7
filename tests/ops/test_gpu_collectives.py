"""The collectives on virtual ranks of a real GPU, against the truth."""

import threading

import pytest
import torch

import tileweave as tw
from tests.fabric.test_virtual import capture
from tests.ops.collectives import assert_right, inputs, run_calls
from tileweave import FabricTimeout
from tileweave.fabric import fabric_of
from tileweave.ops.collectives import passes, reference

pytestmark = pytest.mark.gpu
ONE_SHOT, TWO_SHOTS = 1 << 40, 0


def every_collective(world, seed, width, dtype):
    """Calls of each collective on different dimensions."""
    make = lambda shape, i: inputs(world, shape, seed + i, dtype, "cuda")  # noqa: E731
    return [
        ("all_gather", make((3, width, 7), 0), dict(dim=1)),
        ("all_gather", make((width, 128), 1), {}),
        ("reduce_scatter", make((5, 2 * world, width), 2), dict(dim=1)),
        ("reduce_scatter", make((4, width * world), 3), dict(dim=-1, op="avg")),
        ("all_to_all", make((3 * world, 64, width), 4), dict(split_dim=0, concat_dim=2)),
        ("all_to_all", make((16, 8 * world, 64), 5), dict(split_dim=1, concat_dim=0)),
        ("all_reduce", make((11, width), 6), {}),
    ]


@pytest.mark.parametrize("shots", [ONE_SHOT, TWO_SHOTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 16])
def test_world_sizes_ragged_shapes_many_calls(world, dtype, shots, monkeypatch):
    monkeypatch.setattr(passes, "ONE_SHOT_BYTES", shots)
    calls = [
        c for i, width in enumerate((40, 1000, 8, 4096, 333)) for c in every_collective(world, 10 * i, width, dtype)
    ]
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for _ in range(2):  # the second time the memory has its size and all is warm
            for outs, (name, xs, kw) in zip(run_calls(w, calls), calls, strict=True):
                assert_right(name, outs, xs, **kw)


@pytest.mark.parametrize("nbytes", [1 << 20, 64 << 20, (16 << 20) + 2])
@pytest.mark.parametrize("world", [2, 8])
def test_large_messages(world, nbytes):
    """Several steps, and all CTAs."""
    n = nbytes // 2 // world * world
    calls = [
        ("all_gather", inputs(world, (n // world,), 1, device="cuda"), {}),
        ("reduce_scatter", inputs(world, (n,), 2, device="cuda"), {}),
        ("all_reduce", inputs(world, (n,), 3, device="cuda"), {}),
        ("all_to_all", inputs(world, (n,), 4, device="cuda"), dict(split_dim=0, concat_dim=0)),
    ]
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for _ in range(2):
            for outs, (name, xs, kw) in zip(run_calls(w, calls), calls, strict=True):
                assert_right(name, outs, xs, **kw)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.complex128, torch.float8_e4m3fn])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 41])
def test_any_dtype_is_moved_whatever_the_length_of_rows(dtype, n):
    world = 3
    xs, parts = inputs(world, (500, n), n, dtype, "cuda"), inputs(world, (world, 50, n), n, dtype, "cuda")
    calls = [("all_gather", xs, dict(dim=1)), ("all_to_all", parts, dict(split_dim=0, concat_dim=2))]
    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        for outs, (name, given, kw) in zip(run_calls(w, calls), calls, strict=True):
            true = reference(name, [x.view(torch.uint8) if dtype.itemsize == 1 else x for x in given], **kw)
            for out, y in zip(outs, true, strict=True):
                assert out.dtype == dtype and torch.equal(out.view(torch.uint8) if dtype.itemsize == 1 else out, y)


def test_strided_misaligned_and_empty_inputs():
    wide = inputs(2, (64, 40), 1, device="cuda")
    views = [[x[:, ::2] for x in wide], [x.t() for x in wide], [x.view(-1)[1:-31].view(-1, 8) for x in wide]]
    views += [[x[:0] for x in wide], [x[:, :0] for x in wide]]
    calls = [
        (name, xs, kw)
        for xs in views
        for name, kw in (
            *(("all_gather", dict(dim=1)), ("reduce_scatter", {}), ("all_reduce", {})),
            ("all_to_all", dict(split_dim=0, concat_dim=1)),
        )
        if xs[0].shape[0] % 2 == 0
    ]
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        for outs, (name, xs, kw) in zip(run_calls(w, calls), calls, strict=True):
            assert_right(name, outs, xs, **kw)


def test_equal_inputs_give_equal_bits():
    xs = inputs(4, (4096, 333), 1, device="cuda")
    calls = [(name, xs, {}) for _ in range(10) for name in ("reduce_scatter", "all_reduce")]
    with tw.virtual_world(4, device="cuda", timeout=5.0) as w:
        results = run_calls(w, calls)
    for i in range(2, 20):
        assert all(torch.equal(x, y) for x, y in zip(results[i], results[i % 2], strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_replay_with_new_data_between_eager_calls(world):
    data = [every_collective(world, 10 * i, 520, torch.bfloat16) for i in range(8)]

    def rank_program(rank, group):
        statics = [(name, xs[rank].clone(), kw) for name, xs, kw in data[0]]
        call = lambda: [getattr(tw, name)(x, group, **kw) for name, x, kw in statics]  # noqa: E731
        call()
        torch.cuda.synchronize()
        fabric_of(group).rendezvous()
        graph, outs = capture(call)
        kept = []
        for i in range(200):
            chosen = data[3 * i % len(data)]
            for (_, static, _), (_, xs, _) in zip(statics, chosen, strict=True):
                static.copy_(xs[rank])
            fabric_of(group).rendezvous()
            graph.replay()
            if i % 20 == 0:
                kept.append([out.clone() for out in outs])
                name, xs, kw = chosen[i // 20 % len(chosen)]
                kept[-1].append(getattr(tw, name)(xs[rank], group, **kw))
        return kept

    with tw.virtual_world(world, device="cuda", timeout=5.0) as w:
        by_rank = w.run(rank_program)
    for j, of_ranks in enumerate(zip(*by_rank, strict=True)):
        chosen = data[60 * j % len(data)]
        for outs, (name, xs, kw) in zip(zip(*of_ranks, strict=True), [*chosen, chosen[j % len(chosen)]], strict=True):
            assert_right(name, outs, xs, **kw)


def test_first_use_inside_a_capture_is_refused_with_advice():
    xs = inputs(2, (64, 64), 1, device="cuda")
    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        with pytest.raises(RuntimeError, match=r"workspace must grow.*warm up"):
            w.run(lambda rank, group: capture(lambda: tw.all_gather(xs[rank], group)))
        assert_right("all_gather", w.run(lambda rank, group: tw.all_gather(xs[rank], group)), xs)


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_an_absent_rank_gives_a_timeout_nan_and_the_world_works_again(name):
    xs = inputs(3, (3, 1024), 1, device="cuda")
    with tw.virtual_world(3, device="cuda", timeout=1.0) as w:
        w.run(lambda rank, group: getattr(tw, name)(xs[rank], group))
        kept, lock = {}, threading.Lock()

        def rank_program(rank, group):
            out = getattr(tw, name)(xs[rank], group)
            with lock:
                kept[rank] = out

        w.workspace.ops["collectives"].state[1, 0] -= 1  # rank 1 has fallen a call behind for good
        with pytest.raises(FabricTimeout, match=r"collectives: rank [02] waited") as caught:
            w.run(rank_program)
        assert caught.value.index % 3 == 1
        assert kept[0].isnan().any() and kept[2].isnan().any()
        assert_right(name, w.run(lambda rank, group: getattr(tw, name)(xs[rank], group)), xs)


def test_gradients_and_compiled_calls():
    def layer(x, group):
        x = tw.all_to_all(torch.tanh(x), group, split_dim=1, concat_dim=0)
        x = tw.reduce_scatter(tw.all_gather(x, group, dim=1) * 2, group, dim=1, op="avg")
        return tw.all_reduce(torch.tanh(x), group)

    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True)
    xs = inputs(2, (64, 4, 40), 1, torch.float32, "cuda")

    def rank_program(rank, group, call):
        x = xs[rank].clone().requires_grad_()
        out = call(x, group)
        (out**2).sum().backward()
        return out.detach(), x.grad

    with tw.virtual_world(2, device="cuda", timeout=5.0) as w:
        plain, compiled = (w.run(lambda rank, group, c=c: rank_program(rank, group, c)) for c in (layer, run))
    leaves = [x.clone().requires_grad_() for x in xs]
    mid = reference("all_to_all", [torch.tanh(x) for x in leaves], split_dim=1, concat_dim=0)
    mid = [x * 2 for x in reference("all_gather", mid, dim=1)]
    mid = reference("reduce_scatter", mid, dim=1, op="avg")
    truth = reference("all_reduce", [torch.tanh(x) for x in mid])
    sum((out**2).sum() for out in truth).backward()
    for results in (plain, compiled):
        for (out, grad), true, leaf in zip(results, truth, leaves, strict=True):
            torch.testing.assert_close(out, true.detach(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(grad, leaf.grad, rtol=1e-4, atol=1e-4)


def test_parts_beyond_two_to_the_31_elements():
    """All offsets take 64 bits. The third call reuses the first one's slot."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 90:
        pytest.skip(f"needs 90 GiB of GPU memory, {free} are free")
    n = (1 << 31) + (1 << 20)
    xs = [torch.randint(-100, 100, (n,), dtype=torch.int8, device="cuda") for _ in range(2)]
    places = [0, 1, 1 << 30, (1 << 31) - 1, 1 << 31, n - 1]

    def rank_program(rank, group):
        for _ in range(3):
            out = tw.all_gather(xs[rank], group)
        return torch.equal(out[:n], xs[0]), torch.equal(out[n:], xs[1]), out[places]

    with tw.virtual_world(2, device="cuda", timeout=20.0) as w:
        for first, second, sample in w.run(rank_program):
            assert first and second and torch.equal(sample, xs[0][places])
    torch.cuda.empty_cache()
