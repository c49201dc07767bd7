"""What the processes of tests/fabric/test_processes.py do: one function per situation, run by every rank.

Each gets (rank, world) within an initialized gloo group, on a GPU of its own or shared. A failed assertion ends the
process with a non-zero code, which fails the test.
"""

import logging
import os
import signal
import time

import torch
import torch.distributed as dist

import tileweave as tw
from tests.ops.all_gather_matmul.problems import operands as gathered_operands
from tests.ops.collectives import inputs
from tests.ops.problems import operands
from tileweave.fabric import fabric_of
from tileweave.ops.all_gather_matmul import reference as gathered_product
from tileweave.ops.collectives import reference as collective
from tileweave.ops.matmul_reduce_scatter import reference, relative_error, tolerance

OP = "matmul_reduce_scatter"


def one_call(group, members, m, n, k, seed, **kw):
    """A call whose operands every rank can make; compares this rank's shard. Members: global ranks of the group."""
    a, b, bias = operands(len(members), m, n, k, seed, bias=True, device="cuda")
    mine = members.index(dist.get_rank())
    out = tw.matmul_reduce_scatter(a[mine], b[mine], group, bias=bias, **kw)
    assert_shard(out, a, b, bias, mine, kw)
    return out


def assert_shard(out, a, b, bias, mine, kw):
    world = len(a)
    truth = reference(a, b, kw.get("op", "sum"), bias).chunk(world)[mine]
    error = relative_error(out, truth)
    assert error <= 1.5 * tolerance(out.dtype, world, kw.get("deterministic", False)), error


def right(rank, world):
    """Both modes, changing shapes (the workspace grows), two calls in a row."""
    everybody = list(range(world))
    route = tw.explain(OP, torch.empty(world * 8, 8).bfloat16().cuda(), torch.empty(8, 8).bfloat16().cuda())
    assert route.fused and route.backend == "processes", route
    for i, (m, n, k, kw) in enumerate(
        [
            (8, 64, 64, {}),
            (256, 520, 128, dict(deterministic=True)),
            (1024, 776, 72, dict(op="avg")),
            (256, 128, 64, {}),
        ]
    ):
        for j in range(2):
            one_call(None, everybody, world * m, n, k, 10 * i + j, **kw)
    tw.check()
    report = tw.memory_report()[OP]
    assert report["mapped"] == world * report["own"] > 0
    a, b, _ = operands(1, world, 0, 8, 0, device="cuda")
    out = tw.matmul_reduce_scatter(a[0], b[0])
    assert out.shape == (1, 0)


def collectives(rank, world):
    """Each of them, on two dimensions, with changing sizes (the workspace grows), two calls in a row."""
    for n in (1, 40, 4096, 333):
        for seed in range(2):
            xs = inputs(world, (2 * world, n * world), seed, device="cuda")
            for name, options in (
                *(("all_gather", dict(dim=dim)) for dim in (0, 1)),
                *(("reduce_scatter", dict(dim=dim, op="avg")) for dim in (0, 1)),
                *(("all_to_all", dict(split_dim=dim, concat_dim=1 - dim)) for dim in (0, 1)),
                ("all_reduce", {}),
            ):
                assert tw.explain(name, xs[rank], **options).backend == "processes"
                out = getattr(tw, name)(xs[rank], **options)
                true = collective(name, xs, **options)[rank]
                torch.testing.assert_close(out.float(), true.float(), rtol=2**-8, atol=1e-5)
    tw.check()


def matmuls(rank, world):
    """The other two fused matmuls, with changing shapes, two calls in a row."""
    for i, (m, n, k) in enumerate([(8, 64, 64), (256, 520, 128), (1024, 776, 72), (40, 2048, 520)]):
        for j in range(2):
            a, b, bias = gathered_operands(world, m, [n], k, 10 * i + j, device="cuda")
            assert tw.explain("all_gather_matmul", a[rank], b[rank][0]).backend == "processes"
            out = tw.all_gather_matmul(a[rank], b[rank][0], bias=bias[rank][0])
            error = relative_error(out, gathered_product(a, b[rank][0], bias[rank][0]))
            assert error <= tolerance(out.dtype, 1, True), (m, n, k, error)
            a, b, bias = operands(world, m, n, k, 10 * i + j, bias=True, device="cuda")
            out = tw.matmul_all_reduce(a[rank], b[rank], bias=bias)
            error = relative_error(out, reference(a, b, "sum", bias))
            assert error <= 1.5 * tolerance(out.dtype, world, True), (m, n, k, error)
    tw.check()


def gathers(rank, world):
    """Register copies and the copy engine, whose workspace grows, and whose copies a graph holds."""

    def right(out, a, b, bias):
        error = relative_error(out, gathered_product(a, b[rank][0], bias[rank][0]))
        assert error <= tolerance(out.dtype, 1, True), error

    # Between GPUs the copy engine needs no SM; copies within one do, so ranks that share one leave some.
    engine = tw.Plan(mechanism="copy_engine", schedule="inter_sm", comm_sms=0 if fabric_of(None, "cuda").linked else 4)
    for i, (m, n, k) in enumerate([(8, 64, 64), (256, 520, 128), (2048, 776, 4096), (40, 2048, 520)]):
        for plan in (engine, engine, tw.Plan(mechanism="register", schedule="inter_sm", comm_sms=4)):
            a, b, bias = gathered_operands(world, m, [n], k, i, device="cuda")
            right(tw.all_gather_matmul(a[rank], b[rank][0], bias=bias[rank][0], plan=plan), a, b, bias)
    a, b, bias = gathered_operands(world, 264, [264], 256, 0, device="cuda")
    mine = a[rank].clone()
    graph = torch.cuda.CUDAGraph()
    tw.all_gather_matmul(mine, b[rank][0], bias=bias[rank][0], plan=engine)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = tw.all_gather_matmul(mine, b[rank][0], bias=bias[rank][0], plan=engine)
    for i in range(20):
        a = gathered_operands(world, 264, [264], 256, i, device="cuda")[0]
        mine.copy_(a[rank])
        graph.replay()
        right(out, a, b, bias)
    tw.check()


def exact_adds(rank, world):
    """Whole numbers that bf16 can hold: every add of several ranks to one tile counts, in whatever order."""
    for seed in range(20):
        g = torch.Generator("cuda").manual_seed(seed)
        a = torch.randint(-1, 2, (world, 12 * 44, 64), generator=g, device="cuda").bfloat16()
        b = torch.randint(-1, 2, (world, 64, 264), generator=g, device="cuda").bfloat16()
        truth = (a.float() @ b.float()).sum(0).chunk(world)[rank]
        assert truth.abs().max() <= 256
        for wide in (None, torch.float32):
            out = tw.matmul_reduce_scatter(a[rank], b[rank], out_dtype=wide)
            assert torch.equal(out.float(), truth), (seed, wide, (out.float() - truth).abs().max())
    tw.check()


def beside_nccl(rank, world):
    """NCCL works on another stream meanwhile."""
    nccl, side = dist.new_group(backend="nccl"), torch.cuda.Stream()
    foreign = torch.ones(1 << 22, device="cuda")
    dist.all_reduce(foreign, group=nccl)
    side.wait_stream(torch.cuda.current_stream())
    for seed in range(10):
        with torch.cuda.stream(side):
            for _ in range(5):
                foreign.fill_(1.0)
                dist.all_reduce(foreign, group=nccl)
        for _ in range(5):
            one_call(None, list(range(world)), world * 512, 1032, 256, seed=seed, max_sms=96)
    side.synchronize()
    assert (foreign == world).all()
    tw.check()


def subgroups(rank, world):
    """Overlapping groups made in another order than they are used, one of them without rank 0."""
    tail, pair = dist.new_group([1, 2]), dist.new_group([0, 2])
    for i in range(3):
        if rank in (0, 2):
            one_call(pair, [0, 2], 512, 264, 64, seed=i)
        one_call(None, [0, 1, 2], 3 * 136, 264, 64, seed=10 + i)
        if rank in (1, 2):
            one_call(tail, [1, 2], 512, 264, 64, seed=20 + i)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    one_call(mesh, [0, 1, 2], 3 * 40, 72, 64, seed=30)
    tw.check()


def open_files():
    return len(os.listdir("/proc/self/fd"))


class Ledger:
    """What the fabric holds of the driver's: `handles` of memory, bytes `mapped` and `reserved`.

    How much memory is free says less: other processes take and give, and the driver itself does.
    """

    def __init__(self):
        self.handles = self.mapped = self.reserved = 0

    def write(self, name, args):
        """Note a call of the driver."""
        if name in ("cuMemCreate", "cuMemImportFromShareableHandle", "cuMulticastCreate"):
            self.handles += 1
        elif name == "cuMemRelease":
            self.handles -= 1
        elif name in ("cuMemMap", "cuMemUnmap"):
            self.mapped += args[1] if name == "cuMemMap" else -args[1]
        elif name in ("cuMemAddressReserve", "cuMemAddressFree"):
            self.reserved += args[0] if name == "cuMemAddressReserve" else -args[1]

    def balance(self):
        """What is held now."""
        return self.handles, self.mapped, self.reserved

    @classmethod
    def of_this_process(cls):
        """One that is written from here on."""
        from tileweave.fabric import multicast, peer_memory

        ledger, ask = cls(), peer_memory.call

        def call(function, *args):
            answer = ask(function, *args)
            ledger.write(function.__name__, args)
            return answer

        peer_memory.call = multicast.call = call
        return ledger


def no_leaks(rank, world):
    """Destroying a group gives back descriptors, mappings and memory."""
    ledger = Ledger.of_this_process()
    one_call(None, list(range(world)), world * 128, 128, 64, seed=0)  # what is made once stays
    torch.cuda.synchronize()
    dist.barrier()
    files, held, tensors = open_files(), ledger.balance(), torch.cuda.memory_allocated()
    assert min(held) > 0, held
    for i in range(3):
        group = dist.new_group(list(range(world)))
        one_call(group, list(range(world)), world * 4096, 2048, 64, seed=i)
        one_call(group, list(range(world)), world * 4096, 4096, 64, seed=i, deterministic=True)
        report = tw.memory_report(group)[OP]
        assert report["own"] > 64 << 20 and ledger.mapped >= held[1] + report["mapped"]
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        assert ledger.balance() == held, (ledger.balance(), held)
        assert torch.cuda.memory_allocated() < tensors + (1 << 20)
    dist.barrier()
    assert open_files() <= files + 2, (files, open_files())


def expect_timeout(call, waiting, culprit):
    """The call, or the check after it, raises FabricTimeout within seconds, naming the flag of the culprit."""
    start = time.monotonic()
    try:
        call()
        tw.check()
    except tw.FabricTimeout as timeout:
        assert timeout.op == OP and timeout.index == culprit, timeout
        assert (timeout.expected - timeout.seen) % 2**32 == 1, timeout
        assert time.monotonic() - start < 10
        assert torch.ones(4, device="cuda").sum().item() == 4  # the context survives
        return
    raise AssertionError(f"no FabricTimeout on rank {dist.get_rank()}")


def killed(rank, world):
    """A rank dies between two calls; every survivor is told which."""
    everybody = list(range(world))
    one_call(None, everybody, world * 128, 128, 64, seed=0)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    a, b, _ = operands(world, world * 128, 128, 64, 1, device="cuda")
    kept = []
    expect_timeout(lambda: kept.append(tw.matmul_reduce_scatter(a[rank], b[rank])), rank, culprit=1)
    assert kept[0].isnan().all()
    os._exit(0)  # the group cannot be destroyed in order: a member is gone


def killed_before(rank, call):
    """A rank dies between two calls of whatever op; every survivor is told, and has no result that looks right."""
    assert call().isfinite().all()
    tw.check()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        out = call()
        assert out.isnan().any()
        tw.check()
    except tw.FabricTimeout as timeout:
        assert timeout.rank != 1 and time.monotonic() - start < 10, timeout
        assert torch.ones(4, device="cuda").sum().item() == 4  # the context survives
        os._exit(0)  # as in `killed`
    raise AssertionError(f"no FabricTimeout on rank {rank}")


def killed_before_ring_attention(rank, world):
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda").bfloat16() for _ in range(3))
    killed_before(rank, lambda: tw.ring_attention(q, k, v))


def killed_before_ulysses_attention(rank, world):
    q, k, v = (torch.randn(1, 2 * world, 128, 64, device="cuda").bfloat16() for _ in range(3))
    killed_before(rank, lambda: tw.ulysses_attention(q, k, v))


def killed_before_experts(rank, world):
    x, w, down = (torch.randn(*sizes, device="cuda").bfloat16() for sizes in ((64, 128), (2, 128, 128), (2, 128, 128)))
    index = torch.randint(0, 2 * world, (64, 2), device="cuda")

    def there_and_back():
        h, route = tw.moe_dispatch_matmul(x, index, w, capacity=1024, max_tokens=64)
        return tw.moe_matmul_combine(h, down, route)

    killed_before(rank, there_and_back)


def stopped(rank, world):
    """A rank is stopped for longer than the limit."""
    everybody = list(range(world))
    one_call(None, everybody, world * 128, 128, 64, seed=0)
    torch.cuda.synchronize()
    dist.barrier()
    a, b, _ = operands(world, world * 128, 128, 64, 1, device="cuda")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # the test wakes it up
    else:
        expect_timeout(lambda: tw.matmul_reduce_scatter(a[rank], b[rank]), rank, culprit=1)
    os._exit(0)


def skipped(rank, world):
    """A rank skips a call: the others are told; then all go on together with new memory."""
    everybody = list(range(world))
    a, b, _ = operands(world, world * 128, 128, 64, 1, device="cuda")
    one_call(None, everybody, world * 128, 128, 64, seed=0)
    if rank != 1:
        expect_timeout(lambda: tw.matmul_reduce_scatter(a[rank], b[rank]), rank, culprit=1)
    dist.barrier()
    if rank == 1:  # its own next call finds the group aborted
        try:
            tw.matmul_reduce_scatter(a[rank], b[rank])
            tw.check()
        except tw.FabricTimeout as timeout:
            assert timeout.index == 1
        else:
            raise AssertionError("rank 1 was not told")
    dist.barrier()
    for i in range(3):
        one_call(None, everybody, world * 128, 128, 64, seed=i)
    tw.check()


def watched(rank, world):
    """The watchdog notices a timeout in a graph replay, which runs no host code."""
    everybody = list(range(world))
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("tileweave").addHandler(handler)
    one_call(None, everybody, world * 128, 128, 64, seed=0)
    a, b, _ = operands(world, world * 128, 128, 64, 1, device="cuda")
    tw.matmul_reduce_scatter(a[rank], b[rank])  # loads the variant without a bias
    tw.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.matmul_reduce_scatter(a[rank], b[rank])
    dist.barrier()
    if rank != 1:
        graph.replay()
        torch.cuda.synchronize()
        time.sleep(0.5)
        assert any("waited in vain" in record.getMessage() for record in records), records
        assert out.isnan().all()
    os._exit(0)


def graphs(rank, world):
    """200 replays with new data, mixed with eager calls; first use inside a capture is refused."""
    a, b, _ = operands(world, world * 264, 264, 128, 0, device="cuda")
    mine_a, mine_b = a[rank].clone(), b[rank].clone()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            tw.matmul_reduce_scatter(mine_a, mine_b)
    except RuntimeError as error:
        assert "warm up" in str(error), error
    else:
        raise AssertionError("first use inside a capture was not refused")
    torch.cuda.synchronize()
    tw.matmul_reduce_scatter(mine_a, mine_b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.matmul_reduce_scatter(mine_a, mine_b)
    for i in range(200):
        check = i % 20 == 0
        if check:
            a, b, _ = operands(world, world * 264, 264, 128, i + 1, device="cuda")
            mine_a.copy_(a[rank])
            mine_b.copy_(b[rank])
        graph.replay()
        if check:
            assert_shard(out, a, b, None, rank, {})
        if i % 50 == 7:  # the second of these makes the workspace grow under the captured call
            rows = 264 if i < 50 else 4096
            one_call(None, list(range(world)), world * rows, 1032, 128, seed=1000 + i)
    tw.check()


def tuned(rank, world, group=None):
    """All plans in graphs; the ranks agree, no graph holds memory any more, and a call goes the fastest way."""
    found = tw.tune(OP, {"m": world * 512, "n": 1024, "k": world * 256}, group=group)
    fabric = fabric_of(group, "cuda")
    assert not found.cached and len(found.times) > 2 and all(0 < us < 1e5 for _, us in found.times), found
    assert fabric.gather_values(found.measured_us) == [found.measured_us] * world
    assert fabric.channels() and not any(channel.captured for channel in fabric.channels())
    one_call(group, list(range(world)), world * 512, 1024, 256, seed=0)
    tw.check(group)
    return found


def tuned_with_nccl(rank, world):
    """The plain way too, whose collective a graph holds."""
    found = tuned(rank, world, dist.new_group(backend="nccl"))
    assert "nccl" in {plan.mechanism for plan, _ in found.times}, found


def wrapping(rank, world):
    """Epochs and flags that pass 2^31 and 2^32."""
    everybody = list(range(world))
    one_call(None, everybody, world * 128, 128, 64, seed=0)
    channel = fabric_of(None, "cuda").channel(OP, 0, 0)
    for start in (2**31 - 4, -3):
        torch.cuda.synchronize()
        dist.barrier()
        channel.state[0] = start
        channel.flags[rank, 16 : 16 + world] = start
        torch.cuda.synchronize()
        dist.barrier()
        for i in range(8):
            one_call(None, everybody, world * 128, 128, 64, seed=i)
        tw.check()
        assert channel.state[0].item() == (start + 8 + 2**31) % 2**32 - 2**31


def disagreeing(rank, world):
    """Ranks that ask for different sizes when the workspace must grow are told so."""
    m = world * (128 if rank else 256)
    a, b, _ = operands(world, m, 128, 64, 0, device="cuda")
    try:
        tw.matmul_reduce_scatter(a[rank], b[rank])
    except RuntimeError as error:
        assert "same calls in the same order" in str(error), error
    else:
        raise AssertionError("the disagreement went unnoticed")


def member(rank, situation, world, init, timeout):
    """Entry of a process."""
    os.environ["TILEWEAVE_TIMEOUT"] = str(timeout)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    globals()[situation](rank, world)
    dist.barrier()
    dist.destroy_process_group()
