"""Debug mode: ranks whose calls differ are told so, each of them, before anything waits."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tileweave as tw
import tileweave.fabric.distributed as distributed
import tileweave.fabric.world as world_module
from tests.fabric.groups_program import RANKS, uneven_calls
from tests.ops.problems import operands
from tileweave.fabric import fabric_of, virtual_world
from tileweave.fabric.base import debug_mode
from tileweave.fabric.world import WorldFabric

WORLD = 3
M, N, K = 6 * WORLD, 8, 16
DISAGREEMENTS = {  # what they are told: rank 0's value and rank 1's
    "shape": ("m", "18", "36"),
    "dtype": ("dtype", "torch.bfloat16", "torch.float16"),
    "bias": ("bias", "False", "True"),
    "options": ("op", "sum", "avg"),
    "result dtype": ("out_dtype", "torch.bfloat16", "torch.float32"),
    "plan": ("plan.stages", "3", "2"),
    "order": ("m", "18", "36"),
}
AS_WELL = {"shape": {"rows"}, "order": {"rows"}, "dtype": {"out_dtype"}}


def calls(rank, situation, device="cpu"):
    """The calls that a rank makes, each as arguments of the op: rank 1 is the one that differs."""
    odd = rank == 1
    dtype = torch.float16 if odd and situation == "dtype" else torch.bfloat16
    small, large = (operands(1, m, N, K, rank, dtype, bias=True, device=device) for m in (M, 2 * M))
    options = {}
    if odd and situation == "bias":
        options["bias"] = small[2]
    if odd and situation == "options":
        options["op"] = "avg"
    if odd and situation == "result dtype":
        options["out_dtype"] = torch.float32
    if situation == "plan":
        options["plan"] = tw.Plan(tile=(128, 64, 64), stages=2 if odd else 3)
    if situation == "order":
        return [(x[0][0], x[1][0], {}) for x in ([large, small] if odd else [small, large])]
    a, b, _ = large if odd and situation == "shape" else small
    return [(a[0], b[0], options)]


def told(rank, group, situation, device="cpu"):
    """What a rank is told when it makes its calls."""
    try:
        for a, b, options in calls(rank, situation, device):
            tw.matmul_reduce_scatter(a, b, group, **options)
    except RuntimeError as error:
        return str(error)
    return ""


def assert_told(text, situation):
    """The text says that the calls differ, and of what they ask only that in which they do."""
    head, _, told = text.partition("matmul_reduce_scatter differs: ")
    assert head == "the ranks of a group must make the same calls in the same order, but "
    word, usual, odd = DISAGREEMENTS[situation]
    of_word = dict(part.split(" is ", 1) for part in told.split("; "))
    assert of_word[word] == f"{usual} on ranks 0 and 2, {odd} on rank 1"
    assert of_word.keys() <= {word} | AS_WELL.get(situation, set())


@pytest.mark.parametrize("situation", DISAGREEMENTS)
def test_emulated_ranks_are_told(situation, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_DEBUG", "1")
    with virtual_world(WORLD, "cpu") as world:
        for text in world.run(lambda rank, group: told(rank, group, situation)):
            assert_told(text, situation)
        a, b, _ = operands(WORLD, M, N, K, 0)
        world.run(lambda rank, group: tw.matmul_reduce_scatter(a[rank], b[rank], group))  # and can go on


@pytest.mark.gpu
@pytest.mark.parametrize("situation", DISAGREEMENTS)
def test_virtual_ranks_are_told(situation, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_DEBUG", "1")
    with virtual_world(WORLD, "cuda") as world:
        for text in world.run(lambda rank, group: told(rank, group, situation, "cuda")):
            assert_told(text, situation)


def test_without_the_variable_nothing_is_exchanged(monkeypatch):
    monkeypatch.delenv("TILEWEAVE_DEBUG", raising=False)
    met = []
    exchange = WorldFabric.exchange
    monkeypatch.setattr(WorldFabric, "exchange", lambda self, *args: (met.append(args[0]), exchange(self, *args))[1])
    a, b, _ = operands(WORLD, M, N, K, 0)
    with virtual_world(WORLD, "cpu") as world:
        world.run(lambda rank, group: [tw.matmul_reduce_scatter(a[rank], b[rank], group) for _ in range(2)])
        assert [label.split("(")[0] for label in met] == ["channel"] * WORLD  # the workspace grew once
        world.run(lambda rank, group: fabric_of(group).agree("this"))
    assert len(met) == WORLD


def test_calls_of_two_ops_are_told_by_their_names(monkeypatch):
    monkeypatch.setenv("TILEWEAVE_DEBUG", "1")
    ops = tw.all_reduce, tw.all_gather, tw.all_reduce
    told = r"but the call is all_reduce on ranks 0 and 2, all_gather on rank 1$"
    with virtual_world(WORLD, "cpu") as world, pytest.raises(RuntimeError, match=told):
        world.run(lambda rank, group: ops[rank](torch.ones(8, 8), group))


@pytest.mark.parametrize("situation", DISAGREEMENTS)
def test_ranks_of_one_process_are_compared_without_debug_mode(situation, monkeypatch):
    """Also after warm calls, when nothing else would make the ranks meet; whoever comes second is told."""
    monkeypatch.delenv("TILEWEAVE_DEBUG", raising=False)
    a, b, _ = operands(WORLD, 4 * M, 4 * N, K, 0)
    with virtual_world(WORLD, "cpu") as world:

        def differ(rank, group):
            tw.matmul_reduce_scatter(a[rank], b[rank], group)
            for x, y, options in calls(rank, situation):
                tw.matmul_reduce_scatter(x, y, group, **options)

        with pytest.raises(RuntimeError, match="the same calls in the same order, but in call 1 of this run") as caught:
            world.run(differ)
        word, *values = DISAGREEMENTS[situation]
        assert f"{word} is " in str(caught.value) and f"{values[1]} on rank 1" in str(caught.value)
        world.run(lambda rank, group: tw.matmul_reduce_scatter(a[rank], b[rank], group))  # and can go on


@pytest.mark.parametrize("op", sorted(uneven_calls(3)))
def test_emulated_ranks_with_shards_of_unequal_lengths_are_told(op):
    with (
        virtual_world(RANKS, "cpu") as world,
        pytest.raises(RuntimeError, match=f"must make the same calls .*{op} differ"),
    ):
        world.run(lambda rank, group: uneven_calls(4 if rank == 0 else 3)[op](group))


def test_plans_that_say_other_reasons_agree(monkeypatch):
    """And predictions: what the ranks must agree on is how the kernel runs."""
    monkeypatch.delenv("TILEWEAVE_DEBUG", raising=False)
    a, b, _ = operands(WORLD, M, N, K, 0)
    plans = [tw.Plan(tile=(128, 64, 64), predicted_us=float(rank), reason=f"of {rank}") for rank in range(WORLD)]
    with virtual_world(WORLD, "cpu") as world:
        world.run(lambda rank, group: tw.matmul_reduce_scatter(a[rank], b[rank], group, plan=plans[rank]))


def test_calls_that_all_ranks_have_made_are_forgotten(monkeypatch):
    monkeypatch.setattr(world_module, "CALLS", 4)
    with virtual_world(2, "cpu") as world:
        world.run(lambda rank, group: [fabric_of(group).agree(i) for i in range(50)])
        assert len(world._calls) <= 4
        with pytest.raises(RuntimeError, match=r"call 30 of this run the call is 3[01] on rank ., 3[01] on rank ."):
            world.run(lambda rank, group: [fabric_of(group).agree(i + (rank and i >= 30)) for i in range(50)])


@pytest.mark.parametrize("text", ["2", "yes"])
def test_other_values_are_refused(text, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_DEBUG", text)
    with pytest.raises(ValueError, match="TILEWEAVE_DEBUG: expected 0 or 1"):
        debug_mode()


def member(rank, init, device, debug, situations):
    """A process: makes the calls of each situation, holds what it is told."""
    torch.set_num_threads(1)
    os.environ["TILEWEAVE_DEBUG"] = debug
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD)
    for situation in situations:
        assert_told(told(rank, None, situation, device), situation)
    assert_equal_calls_are_made(rank, device)  # the first use of a group tells the nodes of its ranks
    gathered = []
    gather = distributed.gather_values
    distributed.gather_values = lambda *args: (gathered.append(args), gather(*args))[1]
    assert_equal_calls_are_made(rank, device)
    distributed.gather_values = gather
    if device == "cpu":
        assert len(gathered) == 1
    dist.barrier()
    dist.destroy_process_group()


def assert_equal_calls_are_made(rank, device):
    a, b, _ = operands(WORLD, M, N, K, 0, device=device)
    out = tw.matmul_reduce_scatter(a[rank], b[rank])
    truth = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True)).chunk(WORLD)[rank]
    torch.testing.assert_close(out.float(), truth, rtol=3e-2, atol=0.2)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_processes_that_fall_back_are_told(debug, tmp_path):
    """On CPUs with debug mode or without. There are no fused kernels, hence no plan to disagree on."""
    mp.spawn(member, (f"file://{tmp_path}/init", "cpu", debug, sorted(DISAGREEMENTS.keys() - {"plan"})), nprocs=WORLD)


@pytest.mark.gpu
def test_processes_are_told(tmp_path):
    mp.spawn(member, (f"file://{tmp_path}/init", "cuda", "1", sorted(DISAGREEMENTS)), nprocs=WORLD)
