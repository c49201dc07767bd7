"""What the processes of tests/ops/test_nodes.py do: ranks that are told which node they are on.

    python -m tests.ops.nodes_program INIT_METHOD [DEVICE BACKEND RANKS [FIRST LAST]]

Each situation is run by every rank, behind each other, and rank 0 prints the name of each that all have come through.
FIRST and LAST are the ranks to start here, where others are started elsewhere.
"""

import gc
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import tileweave as tw
from tests.fabric.groups_program import gpus_by_a_fake_driver
from tests.fabric.process_program import Ledger
from tests.ops.all_gather_matmul.problems import operands as gathered_operands
from tests.ops.collectives import MOVING, inputs
from tests.ops.problems import operands
from tests.ops.test_block_scales import operands as block_operands
from tileweave.bench import nodes as bench
from tileweave.fabric import fabric_of, processes
from tileweave.fabric.nodes import Nodes
from tileweave.fabric.processes import ProcessFabric
from tileweave.ops.all_gather_matmul import check as gather_check
from tileweave.ops.all_gather_matmul import reference as gathered_product
from tileweave.ops.collectives import reference as collective
from tileweave.ops.contract import Like, Site
from tileweave.ops.matmul_all_reduce import check as reduce_check
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance
from tileweave.ops.matmul_reduce_scatter.check import settle

COLLECTIVES = (
    *(("all_gather", dict(dim=dim)) for dim in (0, 1)),
    *(("reduce_scatter", dict(dim=dim, op=op)) for dim in (0, 1) for op in ("sum", "avg")),
    ("all_reduce", dict(op="avg")),
    *(("all_to_all", dict(split_dim=i, concat_dim=j)) for i in (0, 1) for j in (0, 1)),
)


def on_nodes(nodes):
    """A group of the ranks from 0 on, the node of each a letter of `nodes`; None to ranks that are not in it."""
    rank, members = dist.get_rank(), list(range(len(nodes)))
    group = dist.new_group(members)
    if rank not in members:
        return None
    os.environ["TILEWEAVE_NODE"] = nodes[rank]
    composed = fabric_of(group, DEVICE).nodes is not None
    assert composed == (sorted(nodes) == list(nodes) and len({nodes.count(each) for each in nodes}) == 1)
    return group


def near(out, truth, world=2):
    error = relative_error(out, truth)
    assert out.is_contiguous() and error <= 1.5 * tolerance(out.dtype, world, False), error


def scatters(group, mine, world):
    for seed, options in enumerate(
        ({}, dict(op="avg"), dict(deterministic=True), dict(out_dtype=torch.float32), dict(dtype=torch.float16))
    ):
        dtype = options.pop("dtype", torch.bfloat16)
        a, b, bias = operands(world, 8 * world, 40, 16, seed, dtype, bias=True, device=DEVICE)
        bias = bias if seed % 2 else None
        for _ in range(2):
            out = tw.matmul_reduce_scatter(a[mine], b[mine], group, bias=bias, **options)
            near(out, reference(a, b, options.get("op", "sum"), bias).chunk(world)[mine], world)
    a, b, _ = operands(world, 8 * world, 48, 32, 9, a_t=True, device=DEVICE)
    eights = [x.to(torch.float8_e4m3fn) for x in (*a, *b)]
    a, b = eights[:world], eights[world:]
    scales = [(each.float().abs().mean(1, True), torch.tensor(0.5, device=DEVICE)) for each in a]
    out = tw.matmul_reduce_scatter(a[mine], b[mine], group, scale_a=scales[mine][0], scale_b=scales[mine][1])
    near(out, reference(a, b, scales=scales).chunk(world)[mine], world)


def scales(group, mine, world):
    """Scales of blocks are not cut between nodes: a fallback."""
    a, b, of, truth = block_operands(world, 24 * world, 24, 128, torch.float8_e4m3fn, device=DEVICE)
    kw = dict(scale_a=of[mine][0], scale_b=of[mine][1])
    route = tw.explain("matmul_reduce_scatter", a[mine], b[mine], group, **kw)
    assert route.verdict == "fallback" and "operands times their scales" in route.reason, route
    near(tw.matmul_reduce_scatter(a[mine], b[mine], group, **kw), truth.to(DEVICE).chunk(world)[mine], world)


def gathers(group, mine, world):
    for seed, ns in enumerate(((24,), (8, 40))):
        a, b, bias = gathered_operands(world, 8, ns, 16, seed, device=DEVICE)
        outs, rows = tw.all_gather_matmul(a[mine], b[mine], group, bias=bias[mine], return_gathered=True)
        assert torch.equal(rows, torch.cat(a))
        for out, x, y in zip(outs, b[mine], bias[mine], strict=True):
            near(out, gathered_product(a, x, y))
    a, b, _ = gathered_operands(world, 8, (48,), 32, 5, device=DEVICE)
    a, w = [x.to(torch.float8_e4m3fn) for x in a], b[mine][0].to(torch.float8_e4m3fn)
    by_row, one = [x.float().abs().mean(1, True) for x in a], torch.tensor(0.5, device=DEVICE)
    out = tw.all_gather_matmul(a[mine], w, group, scale_a=by_row[mine], scale_b=one)
    near(out, torch.cat([x.float() * s for x, s in zip(a, by_row, strict=True)]) @ (w.float() * one))
    empty = tw.all_gather_matmul(torch.zeros(0, 16, device=DEVICE).bfloat16(), b[0][0][:16], group)
    assert empty.shape == (0, 48)


def reduces(group, mine, world):
    """Of few rows, whose sum goes between nodes as it is, and of so many that it goes in ragged pieces."""
    for seed, (m, n) in enumerate(((5, 40), (1031, 264))):
        for ordered in (False, True):
            a, b, bias = operands(world, m, n, 16, seed, bias=True, device=DEVICE)
            residual, weight = torch.ones(m, n).to(a[0]), torch.full((n,), 2.0).to(a[0])
            options = dict(bias=bias, residual=residual, norm_weight=weight, deterministic=ordered)
            out, total = tw.matmul_all_reduce(a[mine], b[mine], group, **options)
            truth = reference(a, b, "sum", bias) + 1
            near(total, truth, world)
            near(out, torch.nn.functional.rms_norm(truth, (n,)) * 2, 2 * world)
            every = tw.all_gather(total.unsqueeze(0), group)
            assert (every == total).all()  # the same bits everywhere


def moves(group, mine, world):
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.int64, torch.bool)):
        for name, options in COLLECTIVES:
            options = dict(options)
            if name not in MOVING and (dtype == torch.bool or (dtype == torch.int64 and DEVICE != "cpu")):
                continue  # no kernel sums these, and gloo sums no shards on a GPU
            if not dtype.is_floating_point and "op" in options:
                options["op"] = "sum"
            xs = inputs(world, (2 * world, 3 * world), seed, dtype, device=DEVICE)
            out = getattr(tw, name)(xs[mine].t().contiguous().t(), group, **options)
            true = collective(name, xs, **options)[mine]
            if name in MOVING:
                assert torch.equal(out, true), (name, options)
            else:
                torch.testing.assert_close(out.float(), true.float(), rtol=2**-6, atol=2**-6)
    xs = inputs(world, (1237, 331), 9, device=DEVICE)  # in pieces
    for options in ({}, dict(op="avg"), dict(deterministic=True)):
        out = tw.all_reduce(xs[mine], group, **options)
        near(out, collective("all_reduce", xs, op=options.get("op", "sum"))[mine], world)


def gradients(group, mine, world):
    """Those of what is composed, against autograd's of the same in float32 in one process. The loss is all ranks'."""
    a, b, bias = operands(world, 8 * world, 24, 16, 3, bias=True, device=DEVICE)
    rows, w, _ = gathered_operands(world, 8, (24,), 16, 4, device=DEVICE)
    weight = torch.randn(8 * world, 24, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    wide = [[x.float().requires_grad_() for x in xs] for xs in (a, b, rows, [each[0] for each in w])]
    sums = sum(x @ y for x, y in zip(*wide[:2], strict=True)) + bias.float()
    products = [torch.cat(wide[2]) @ x for x in wide[3]]
    ((sums * weight).sum() + sum((x * weight).sum() for x in products)).backward()
    mine_of = [x[mine].clone().detach().requires_grad_() for x in (a, b, rows, [each[0] for each in w])]
    out = tw.matmul_reduce_scatter(*mine_of[:2], group, bias=bias)
    (out.float() * weight.chunk(world)[mine]).sum().backward()
    (tw.all_gather_matmul(*mine_of[2:], group).float() * weight).sum().backward()
    for got, true in zip(mine_of, wide, strict=True):
        near(got.grad.contiguous(), true[mine].grad, world)
    x = torch.randn(4, 2 * world, device=DEVICE).requires_grad_()
    tw.all_gather(x, group, dim=1).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, world))


def compiled(group, mine, world):
    """A graph of calls, and of its gradients, gives what the calls give."""
    a, b, _ = operands(world, 8 * world, 24, 16, 6, device=DEVICE)

    def both(x, y):
        return tw.all_gather_matmul(tw.matmul_reduce_scatter(x, y, group), y.t().contiguous(), group).float().sum()

    grads = []
    for call in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        x = a[mine].clone().requires_grad_()
        call(x, b[mine]).backward()
        grads.append(x.grad)
    assert grads[0].any() and torch.equal(*grads)


def says(group, mine, world):
    """`explain`, also of what is not composed, and errors on every rank, after which the group goes on."""
    count = fabric_of(group, DEVICE).nodes.count
    a, b, _ = operands(world, 8 * world, 40, 16, 0, device=DEVICE)
    x = torch.ones(2 * world, 8, device=DEVICE)
    ops = {"matmul_reduce_scatter": (a[mine], b[mine]), "matmul_all_reduce": (a[mine], b[mine])}
    ops |= {"all_gather_matmul": (a[mine], b[mine]), "all_gather": (x,), "reduce_scatter": (x,), "all_reduce": (x,)}
    for op, tensors in ops.items():
        route = tw.explain(op, *tensors, group)
        assert route.reason.startswith(f"{count} nodes of {world // count}: "), route
        assert (route.backend, route.verdict, route.predicted_us) == ("nodes", "composed", None), route
        assert route.inside.op in (op, "reduce_scatter") and route.to_dict()["inside"]["reason"] in route.reason
    q = torch.ones(1, 2, 8, 8, device=DEVICE)
    assert tw.explain("ring_attention", q, q, q, group).verdict == "fallback"
    decision = tw.plan("matmul_reduce_scatter", {"m": 8 * world, "n": 40, "k": 16 * world}, group=group)
    assert decision.verdict == "composed" and f"{count} nodes of" in decision.reason
    for call in (
        lambda: tw.matmul_reduce_scatter(a[mine][1:], b[mine], group),
        lambda: tw.all_gather_matmul(a[mine], b[mine].t(), group),
        lambda: tw.matmul_reduce_scatter(a[mine], b[mine], group, plan=tw.Plan(tile=(72, 64, 64))),
        lambda: tw.all_to_all(x[1:], group, split_dim=0, concat_dim=1),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("no ValueError")
    scatters(group, mine, world)


def sends(group, mine, world):
    """What crosses between nodes, in bytes of a rank: no more than has to, cut where it is large."""
    count, sent, real = fabric_of(group, DEVICE).nodes.count, [], (Nodes.exchange, Nodes.gather, Nodes.all_reduce)

    def exchange(self, x, to, source):
        sent.append(x.nbytes)
        return real[0](self, x, to, source)

    def gather(self, x):
        sent.append((count - 1) * x.nbytes)
        return real[1](self, x)

    def all_reduce(self, x):
        sent.append(2 * (count - 1) * x.nbytes / count)
        return real[2](self, x)

    Nodes.exchange, Nodes.gather, Nodes.all_reduce = exchange, gather, all_reduce
    try:
        a, b, _ = operands(world, 1024 * world, 520, 8, 0, device=DEVICE)
        rows, w, _ = gathered_operands(world, 1030, (0, 8), 512, 1, device=DEVICE)
        few = [x[:2] for x in b]
        share, cut, whole = 1024 * 520 * 2, 2 if count < 4 else 1, reference(a, b)
        for call, expected, messages, truth in (
            (
                lambda: tw.matmul_reduce_scatter(a[mine], b[mine], group),
                (count - 1) * share, (count - 1) * cut, whole.chunk(world)[mine],
            ),
            (
                lambda: tw.all_gather_matmul(rows[mine], w[mine], group)[1],
                (count - 1) * rows[mine].nbytes, (count - 1) * cut, gathered_product(rows, w[mine][1]),
            ),
            (lambda: tw.matmul_all_reduce(a[mine], b[mine], group), 2 * (count - 1) * share, 4, whole),
            (  # of few bytes each place sums the whole itself: a group's sum may have other bits at each
                lambda: tw.matmul_all_reduce(a[mine][:8], b[mine], group), (count - 1) * 8 * 520 * 2, 1, whole[:8],
            ),
            (
                lambda: tw.all_reduce(few[mine], group), (count - 1) * few[0].nbytes, 1,
                collective("all_reduce", few)[mine],
            ),
        ):  # fmt: skip
            sent.clear()
            near(call(), truth, world)
            assert (sum(sent), len(sent)) == (expected, messages), (sent, expected)
    finally:
        Nodes.exchange, Nodes.gather, Nodes.all_reduce = real


ALL = (scatters, scales, gathers, reduces, moves, gradients, says, sends)


def composed(nodes, parts, rank):
    """These parts in a group on these nodes."""
    group = on_nodes(nodes)
    if group is not None:
        for part in parts:
            part(group, rank, len(nodes))


def uneven(rank):
    """Nodes of different numbers of ranks, and ranks of a node that are no neighbours: a fallback, which says so."""
    for nodes, why in (("aab", "the nodes have 2 and 1 ranks"), ("abab", "not one behind the other")):
        group = on_nodes(nodes)
        if group is not None:
            scatters(group, rank, len(nodes))
            route = tw.explain("all_reduce", torch.ones(8, device=DEVICE), group)
            assert (route.backend, route.verdict) == ("fallback", "fallback") and why in route.reason, route


def groups_come_and_go(rank):
    """Two more groups for each group, once; they go with it, and another of the same ranks can be made."""
    before = dict(c10d._world.pg_names)
    for _ in range(2):
        group = on_nodes("aabb")
        if group is not None:
            calls = [fabric_of(group, DEVICE).nodes for _ in range(3)]
            assert len({(each.across, each.inside.group) for each in calls}) == 1
            moves(group, rank, 4)
            assert len(c10d._world.pg_names) == len(before) + 3
            assert calls[0].inside.group.rank() == rank % 2 and calls[0].across.rank() == rank // 2
            dist.barrier(group)
            dist.destroy_process_group(group)
            del group, calls
            gc.collect()
        assert dict(c10d._world.pg_names) == before
        dist.barrier()


def groups_of_ranks_in_many_groups(rank):
    """Ranks that are in groups the others are not in."""
    for _ in range(2):
        dist.new_group([0, 1, 2])
    composed("aabb" if dist.get_world_size() < 6 else "aabbcc", (scatters,), rank)


def kernels_inside(rank):
    """Ranks that think they have a GPU each: kernels can run inside a node, and leave SMs to NCCL between them. Memory
    inside goes with the group."""
    left, joins = processes.NCCL_SMS, processes.by_nccl
    for by_nccl, sms in ((False, 8), (True, 5)):
        processes.NCCL_SMS, processes.by_nccl = 3, lambda group, answer=by_nccl: answer
        with gpus_by_a_fake_driver([f"gpu {rank}"]) as device:
            ledger = Ledger.of_this_process()
            group = on_nodes("aabb")
            if group is not None:
                os.environ |= {
                    "TILEWEAVE_WORKSPACE": str((1 + rank // 2) << 30),
                    "TILEWEAVE_TIMEOUT": str(7 + rank // 2),
                }
                outer = ProcessFabric.of(group, device)
                del os.environ["TILEWEAVE_WORKSPACE"], os.environ["TILEWEAVE_TIMEOUT"]
                inside = outer.nodes.inside
                assert (inside.bound, inside.timeout) == (1 << 30, 7.0)  # of the first rank of all
                assert outer is ProcessFabric.of(group, device) and inside is outer.nodes.inside
                assert (inside.backend, inside.rank, inside.world_size) == ("processes", rank % 2, 2)
                assert (outer.backend, inside.sms, Site.of(outer).inside.sms) == ("fallback", sms, sms)
                assert "the ranks are on 2 machines" in outer.refusal() and inside.refusal() is None
                inside.channel("op", 1 << 10, 0)
                assert outer.memory() == inside.memory() and outer.memory()["op"]["own"] > 0
                a, b = (Like(torch.Size(shape), torch.bfloat16, device) for shape in ((512, 64), (64, 256)))
                _, route = settle(Site.of(outer), a, b, "sum", None, False, None, None, 0)
                assert (route.fused, route.verdict, route.plan, route.predicted_us) == (True, "composed", None, None)
                assert f"of its 2 calls the first is predicted to take {route.inside.predicted_us} us" in route.reason
                assert min(ledger.balance()) > 0
                dist.barrier(group)
                dist.destroy_process_group(group)
                del group, outer, inside
                gc.collect()
                assert ledger.balance() == (0, 0, 0), ledger.balance()
            dist.barrier()
    processes.NCCL_SMS, processes.by_nccl = left, joins


def plans_that_one_node_cannot_follow(rank):
    """Its GPUs have fewer SMs: all ranks are told, not only its own."""
    with gpus_by_a_fake_driver([f"gpu {rank}"], 8 if rank < 2 else 5) as device:
        group = on_nodes("aabb")
        if group is not None:
            outer = ProcessFabric.of(group, device)
            site = Site.of(outer)
            assert [each.sms for each in site.every] == [8, 5] and site.inside == site.every[rank // 2]
            a, b = (Like(torch.Size(shape), torch.bfloat16, device) for shape in ((512, 64), (64, 256)))
            no, plan = (None, None, None), tw.Plan("tma", "inter_sm", (128, 128, 64), 3, comm_sms=4)
            for call in (
                lambda plan: settle(site, a, b, "sum", None, False, None, plan, 0),
                lambda plan: gather_check.settle(site, a, (b,), (), False, plan, 0),
                lambda plan: reduce_check.settle(site, a, b, *no, reduce_check.Options(False, 0.0, 0), plan),
            ):
                _, route = call(plan)
                assert route.fused and route.inside.plan.comm_sms == 4
                try:
                    call(replace(plan, comm_sms=6))
                except ValueError as error:
                    assert "on node 1: plan.comm_sms=6" in str(error), error
                else:
                    raise AssertionError("a node with 5 SMs has 6 that communicate")
            dist.barrier(group)
            dist.destroy_process_group(group)
            del group, outer
            gc.collect()
        dist.barrier()


def ranks_that_give_up(rank):
    """A kernel that waited in vain in one node, then a transfer for a rank that does not come: all ranks of all nodes
    are told of the same, long before the group's own timeout, and the next call works."""
    with gpus_by_a_fake_driver([f"gpu {rank}"]) as device:
        os.environ["TILEWEAVE_TIMEOUT"] = "2"
        group = on_nodes("aabb")
        if group is not None:
            outer = ProcessFabric.of(group, device)
            for told in (a_kernel_gives_up, a_transfer_gives_up):
                nodes, start = outer.nodes, time.monotonic()
                try:
                    told(outer, nodes, rank)
                except tw.FabricTimeout as error:
                    texts = outer.gather_values(str(error))
                else:
                    raise AssertionError("nobody told this rank")
                assert set(texts) == {told.__doc__}, texts
                assert time.monotonic() - start < 20
                outer.check()  # it comes once
                other = 1 - nodes.index
                for seed in range(2):
                    x = torch.full((8,), 10 * seed + rank)
                    assert outer.nodes.exchange(x, other, other)().tolist() == [10 * seed + (rank + 2) % 4] * 8
                assert outer.nodes is not nodes
            dist.barrier(group)
            dist.destroy_process_group(group)
            del group, outer, nodes
            gc.collect()
        del os.environ["TILEWEAVE_TIMEOUT"]
        dist.barrier()


def a_kernel_gives_up(outer, nodes, rank):
    """op: rank 0 of node 0 waited in vain for its flag 1: expected at least 7, last seen 6"""
    nodes.inside.channel("op", 1 << 10, 0)
    outer.rendezvous()
    if rank == 0:
        nodes.inside._ops["op"].told[:5] = [1, 1, 7, 6, 0]  # what its kernel writes
        nodes.inside.check()
    x = torch.full((8,), rank)
    if rank == 1:
        nodes.exchange(x, 1, 1)()  # which rank 3 has taken part in
        time.sleep(1)
        nodes.inside.check()  # though no kernel of its own has waited
    nodes.exchange(x, 1 - nodes.index, 1 - nodes.index)()
    nodes.gather(x)()


def a_transfer_gives_up(outer, nodes, rank):
    """transfer between nodes: rank 1 of node 1 waited in vain for that of node 0"""
    outer.rendezvous()
    if rank == 1:
        time.sleep(3)
        nodes.inside.check()
    nodes.exchange(torch.full((8,), rank), 1 - nodes.index, 1 - nodes.index)()
    if rank != 3:
        time.sleep(3)
        nodes.inside.check()


def ranks_that_disagree(rank):
    """In debug mode a `plan` that only one node gives, by which other pieces would go between nodes, is told."""
    os.environ["TILEWEAVE_DEBUG"] = "1"
    group = on_nodes("aabb")
    if group is not None:
        a, b, _ = operands(4, 1024, 512, 8, 0)
        plan = tw.Plan(tile=(64, 64, 64)) if rank < 2 else None
        try:
            tw.matmul_all_reduce(a[rank], b[rank], group, plan=plan)
        except RuntimeError as error:
            assert "matmul_all_reduce differs: " in str(error) and "plan.tile" in str(error), error
        else:
            raise AssertionError("one node has a plan")
    del os.environ["TILEWEAVE_DEBUG"]


def a_measurement_beside_gloo(rank):
    """All contenders of `bench.nodes` are right, and what is wrong is found."""
    group = on_nodes("aabb")
    if group is not None:
        for runs, truth in bench.contenders(64, 32, 64, group).values():
            times = bench.measured(runs, truth, 1, group)
            assert times.keys() == {"tileweave", "gloo"} and min(times.values()) > 0
        try:
            bench.measured({"gloo": lambda: truth * 1.1}, truth, 1, group)
        except AssertionError:
            return
        raise RuntimeError("a wrong result was measured")


def situations(ranks, device="cpu"):
    """Those for so many ranks on such a device, by name."""
    layouts = [nodes for nodes in ("ab", "aabb", "aabbcc") if len(nodes) <= ranks]
    named = {f"composed_{nodes}": partial(composed, nodes, ALL) for nodes in layouts}
    named["compiled"] = partial(composed, "ab", (compiled,))
    others = [uneven, groups_come_and_go, groups_of_ranks_in_many_groups]
    if device == "cpu":
        others += [
            kernels_inside,
            plans_that_one_node_cannot_follow,
            ranks_that_give_up,
            ranks_that_disagree,
            a_measurement_beside_gloo,
        ]
    return named | ({each.__name__: each for each in others} if ranks >= 4 else {})


DEVICE = "cpu"


def member(rank, init, device, backend, ranks, every=True):
    """A rank: all situations, one behind the other; or that of two nodes alone."""
    global DEVICE
    DEVICE = device
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    todo = (
        situations(ranks, device) if every else {"two_nodes": partial(composed, "aabb", (scatters, gathers, reduces))}
    )
    for name, situation in todo.items():
        situation(rank)
        dist.barrier()
        if rank == 0:
            print(name, flush=True)
    dist.destroy_process_group()


def main(init, device="cpu", backend="gloo", ranks="6", *range_of_ranks):
    """Start the ranks and wait for them."""
    first, last = map(int, range_of_ranks or (0, int(ranks) - 1))
    context = get_context("fork" if device == "cpu" else "spawn")
    args = init, device, backend, int(ranks), not range_of_ranks
    processes = [context.Process(target=member, args=(rank, *args)) for rank in range(first, last + 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        if process.is_alive():
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


if __name__ == "__main__":
    main(*sys.argv[1:])
