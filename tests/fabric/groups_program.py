"""What the processes of tests/fabric/test_groups.py do: forks of one interpreter, in a gloo group of all.

    python -m tests.fabric.groups_program INIT_METHOD

Each situation is run by every rank, behind each other, and rank 0 prints the name of each that all have come through.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import types
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist

import tileweave as tw
from tests.fabric.process_program import Ledger
from tests.fabric.test_multicast import Driver
from tests.ops.problems import operands
from tileweave.fabric import group_name, processes
from tileweave.fabric.processes import ProcessFabric

RANKS = 7


def assert_right(group, members, seed):
    """Calls of three ops in a group of these global ranks, each of which can make the operands of all."""
    world, mine = len(members), members.index(dist.get_rank())
    a, b, _ = operands(world, world * 4, 6, 5, seed)
    whole = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    out = tw.matmul_reduce_scatter(a[mine], b[mine], group)
    torch.testing.assert_close(out.float(), whole.chunk(world)[mine], rtol=3e-2, atol=0.1)
    out = tw.all_gather_matmul(a[mine], b[0], group)
    torch.testing.assert_close(out.float(), torch.cat(list(a)).float() @ b[0].float(), rtol=3e-2, atol=0.1)
    out = tw.all_to_all(a[mine], group, split_dim=0, concat_dim=1)
    assert torch.equal(out, torch.cat([x.chunk(world)[mine] for x in a], 1))


def groups_of_five_to_seven(rank):
    for world in (5, 6, 7):
        members = list(range(RANKS - world, RANKS))  # the smaller ones without rank 0
        group = dist.new_group(members)
        if rank in members:
            assert_right(group, members, world)


def groups_made_before_and_after_others(rank):
    """Overlapping groups, used in another order than they were made, across the end of one and the start of another."""
    of = {"ends": [0, 3, 6], "tail": [4, 5, 6], "pair": [3, 4]}
    groups = {name: dist.new_group(members) for name, members in of.items()}

    def use(name, seed):
        if rank in of[name]:
            assert_right(groups[name], of[name], seed)

    for seed, name in enumerate(("tail", "pair", "ends", "tail")):
        use(name, seed)
    assert_right(None, list(range(RANKS)), 10)
    if rank in of["pair"]:
        dist.destroy_process_group(groups["pair"])
    of["late"] = [2, 3, 4]
    groups["late"] = dist.new_group(of["late"])
    for seed, name in enumerate(("late", "ends", "tail")):
        use(name, 20 + seed)


def threads_with_a_group_each(rank):
    """Two threads of each rank make calls at once, each in a group of its own."""
    everybody = list(range(RANKS))
    groups, failures = [dist.new_group(everybody) for _ in range(2)], []

    def calls(of_thread):
        try:
            for seed in range(8):
                assert_right(groups[of_thread], everybody, 100 * of_thread + seed)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=calls, args=(each,)) for each in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures


def a_fork_of_a_process_that_has_run_a_world(rank):
    """The parent has run one: threads, locks and remembered launches of its time are no burden here."""
    a, b, _ = operands(2, 8, 16, 16, rank)
    with tw.virtual_world(2, device="cpu") as world:
        outs = world.run(lambda r, group: tw.matmul_reduce_scatter(a[r], b[r], group))
    whole = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    torch.testing.assert_close(torch.cat(outs).float(), whole, rtol=3e-2, atol=0.1)


@contextlib.contextmanager
def gpus_by_a_fake_driver(visible, sms=8, gib=64):
    """Processes that think they have GPUs, of which this one sees those in `visible`, in this order, as cuda:0 on."""
    driver, bindings, package = Driver(), types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
    bindings.driver = driver
    sys.modules |= {"cuda": package, "cuda.bindings": bindings, driver.__name__: driver}
    from tileweave.fabric import peer_memory

    zeros, device = torch.zeros, torch.device("cpu")
    numbers = dict(multi_processor_count=sms, major=9, minor=0, total_memory=gib << 30)
    properties = types.SimpleNamespace(uuid=visible[0], **numbers)
    fakes = [
        (torch.cuda, "device", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_properties", lambda _: properties),
        (torch, "zeros", lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options)),
        (processes, "process_refusal", lambda _: None),
        (peer_memory.PeerMemory, "tensor", lambda self, dtype: zeros(self.world, self.stride // 8, dtype=dtype)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in fakes]
    for owner, name, fake in fakes:
        setattr(owner, name, fake)
    try:
        yield device
    finally:
        for owner, name, real in before:
            setattr(owner, name, real)


def memory_of_a_destroyed_group(rank):
    """Handles, mappings, ranges and descriptors are given back when the group goes, also those that graphs hold."""
    with gpus_by_a_fake_driver([f"gpu {rank}"]) as device:
        ledger = Ledger.of_this_process()
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            group = dist.new_group(list(range(RANKS)))
            fabric = ProcessFabric.of(group, device)
            assert fabric.refusal() is None and fabric.linked and fabric.sms == 8
            fabric.channel("op", 1 << 20, 1 << 10).captured = True
            fabric.channel("op", 1 << 22, 1 << 10)
            fabric.channel("another", 0, 0)
            report = fabric.memory()
            assert report["op"]["own"] >= 8 << 20 and report["op"]["mapped"] == RANKS * report["op"]["own"]
            assert min(ledger.balance()) > 0 and ledger.mapped > report["op"]["mapped"]
            dist.barrier()
            dist.destroy_process_group(group)
            del group, fabric
            gc.collect()
            assert ledger.balance() == (0, 0, 0), ledger.balance()
        dist.barrier()
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def permuted_devices(rank):
    """Every rank calls its GPU cuda:0; whether ranks share one is told by the GPU, not by its number."""
    gpus = [f"gpu {i}" for i in range(RANKS)]
    for visible, sharing in ((gpus[rank:] + gpus[:rank], 1), ([gpus[rank // 2]], 2)):
        with gpus_by_a_fake_driver(visible, gib=5 + rank) as device:
            group = dist.new_group(list(range(RANKS)))
            fabric = ProcessFabric.of(group, device)
            assert fabric.refusal() is None and fabric.linked == (sharing == 1) and fabric.sms == 8 // sharing
            assert fabric.memory_bytes == 5 << 30  # of the smallest GPU
            dist.barrier()
            dist.destroy_process_group(group)


def first_use_inside_a_capture(rank):
    """What would make the ranks meet is refused with advice: a group's first use, an op's first call, a larger one."""
    with gpus_by_a_fake_driver([f"gpu {rank}"]) as device:
        group = dist.new_group(list(range(RANKS)))

        def refused(use):
            torch.cuda.is_current_stream_capturing = lambda: True
            try:
                use()
            except RuntimeError as error:
                assert "cannot be captured in a CUDA graph" in str(error) and "(warm up)" in str(error), error
            else:
                raise AssertionError("captured")
            torch.cuda.is_current_stream_capturing = lambda: False

        refused(lambda: ProcessFabric.of(group, device))
        fabric = ProcessFabric.of(group, device)
        refused(lambda: fabric.channel("op", 1 << 20, 0))
        fabric.channel("op", 1 << 20, 0)
        refused(lambda: fabric.channel("op", 1 << 22, 0))
        torch.cuda.is_current_stream_capturing = lambda: True
        assert fabric.channel("op", 1 << 10, 0).captured  # what has been warmed up is taken
        torch.cuda.is_current_stream_capturing = lambda: False
        dist.barrier()
        dist.destroy_process_group(group)


def a_bound_of_the_workspace(rank):
    """That of the first rank counts on all; what goes beyond it is refused on all, and changes nothing."""
    with gpus_by_a_fake_driver([f"gpu {rank}"]) as device:
        ledger = Ledger.of_this_process()
        os.environ["TILEWEAVE_WORKSPACE"] = str(17 << 20) if rank == 0 else str(1 << 40)
        group = dist.new_group(list(range(RANKS)))
        fabric = ProcessFabric.of(group, device)
        del os.environ["TILEWEAVE_WORKSPACE"]
        fabric.channel("op", 1 << 20, 1 << 20).captured = rank == 3  # of which one rank keeps more than the others
        fabric.channel("op", 1 << 22, 1 << 20)
        before, mapped = fabric.memory(), ledger.mapped
        assert before["op"]["own"] == (11 if rank != 3 else 13) << 20, before
        for op, adding in (("op", 1 << 23), ("another", 1 << 22)):
            try:
                fabric.channel(op, adding, 0)
            except RuntimeError as error:
                assert f"which hold {13 << 20} already, and TILEWEAVE_WORKSPACE allows {17 << 20}" in str(error)
            else:
                raise AssertionError(f"{op} is beyond the bound")
        assert fabric.memory() == before and ledger.mapped == mapped
        assert fabric.channel("another", 1 << 20, 0).adding.numel()  # what fits, to the last byte
        dist.barrier()
        dist.destroy_process_group(group)


def shards_of_unequal_lengths(rank):
    """A length that the ranks cannot share evenly, cut all the same: every rank is told, of every op."""
    rows = 4 if rank == 0 else 3
    for name, call in uneven_calls(rows).items():
        try:
            call(None)
        except RuntimeError as error:
            assert "the ranks of a group must make the same calls" in str(error) and name in str(error), error
            assert "4 on rank 0" in str(error) or "(4" in str(error), error
        else:
            raise AssertionError(f"{name} took shards of 4 and of 3 rows")


def uneven_calls(rows):
    """A call of each op that shares rows between ranks, by name: this rank has so many. It takes a group."""
    q, a, b = torch.randn(1, RANKS, rows, 8), torch.randn(rows, 14).bfloat16(), torch.randn(14, 8).bfloat16()
    return {
        "ring_attention": lambda group: tw.ring_attention(q, q, q, group),
        "ulysses_attention": lambda group: tw.ulysses_attention(q, q, q, group),
        "all_gather_matmul": lambda group: tw.all_gather_matmul(a, b, group),
        "matmul_reduce_scatter": lambda group: tw.matmul_reduce_scatter(a.repeat(RANKS, 1), b, group),
        "matmul_all_reduce": lambda group: tw.matmul_all_reduce(a, b, group),
        "all_gather": lambda group: tw.all_gather(a, group),
        "reduce_scatter": lambda group: tw.reduce_scatter(a.repeat(RANKS, 1), group),
        "all_reduce": lambda group: tw.all_reduce(a, group),
        "all_to_all": lambda group: tw.all_to_all(a, group, split_dim=1, concat_dim=0),
    }


SITUATIONS = (
    a_fork_of_a_process_that_has_run_a_world, groups_of_five_to_seven, groups_made_before_and_after_others,
    threads_with_a_group_each, shards_of_unequal_lengths, memory_of_a_destroyed_group, first_use_inside_a_capture,
    a_bound_of_the_workspace, permuted_devices,
)  # fmt: skip


def member(rank, init):
    """A rank: all situations, one behind the other."""
    torch.set_num_threads(1)  # a fork's first touch of PyTorch's pool: that of two threads at once fails there
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=RANKS)
    assert group_name(None) == f"{RANKS}:{dist.group.WORLD.group_name}"
    for situation in SITUATIONS:
        situation(rank)
        dist.barrier()
        if rank == 0:
            print(situation.__name__, flush=True)
    dist.destroy_process_group()


def a_killed_process_is_an_error_to_the_others(rank, init):
    """A rank of another group, of three, dies; calls of attention and of experts then end in an error on the others."""
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=3, timeout=timedelta(seconds=3))
    q, x, w = torch.randn(1, 3, 4, 8), torch.randn(4, 8).bfloat16(), torch.randn(1, 8, 8).bfloat16()
    index = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]])
    calls = (
        lambda: tw.ring_attention(q, q, q),
        lambda: tw.ulysses_attention(q, q, q),
        lambda: tw.moe_combine(*tw.moe_dispatch_matmul(x, index, w)),
    )
    for call in calls:
        call()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in calls:
        try:
            call()
        except RuntimeError:
            continue
        os._exit(1)
    if rank == 0:
        print("a_killed_process_is_an_error_to_the_others", flush=True)
    os._exit(0)  # the group cannot be destroyed in order


def run(body, ranks, init):
    """The exit codes of forks that call `body(rank, init)`."""
    context = get_context("fork")
    forks = [context.Process(target=body, args=(rank, init)) for rank in range(ranks)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join(60)
        if fork.is_alive():
            fork.kill()
            fork.join()
    return [fork.exitcode for fork in forks]


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # of multicast other tests tell
    a_fork_of_a_process_that_has_run_a_world(0)
    assert run(member, RANKS, sys.argv[1]) == [0] * RANKS
    assert run(a_killed_process_is_an_error_to_the_others, 3, f"{sys.argv[1]}-3") == [0, -signal.SIGKILL, 0]
