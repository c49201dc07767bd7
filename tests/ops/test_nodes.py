"""Ops on groups whose ranks are on several nodes: processes that are told so, on this machine."""

import os
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from tests.ops.nodes_program import situations
from tileweave.bench.nodes import ADDRESSES, PORT, namespaces
from tileweave.fabric.nodes import Nodes, unevenness
from tileweave.ops.nodes import cut_for, gathered, padded, pieces, reduced, scattered

PROGRAM = [sys.executable, "-m", "tests.ops.nodes_program"]


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def started(tmp_path, *arguments):
    command = [*PROGRAM, f"file://{tmp_path}/init", *arguments]
    env = os.environ | ({} if "cuda" in arguments else NO_GPU)
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The program's process: one for all situations, as importing PyTorch takes longer than they."""
    return started(tmp_path_factory.mktemp("nodes"))


@pytest.mark.parametrize("situation", situations(6))
def test_all_ranks_come_through(ran, situation):
    assert situation in ran.stdout.split(), ran.stderr


def test_the_program_ends_well(ran):
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
def test_ranks_that_share_a_gpu(tmp_path):
    """Kernels inside, gloo between."""
    done = started(tmp_path, "cuda", "gloo", "4")
    assert done.returncode == 0 and set(done.stdout.split()) == set(situations(4, "cuda")), done.stderr


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_kernels_inside_and_nccl_between(ranks, tmp_path):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    done = started(tmp_path, "cuda", "nccl", str(ranks))
    assert done.returncode == 0 and set(done.stdout.split()) == set(situations(ranks, "cuda")), done.stderr


@pytest.fixture
def two():
    """Two network namespaces that a pair of virtual devices joins: names and devices."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces())
        except RuntimeError as failure:
            pytest.skip(f"network namespaces cannot be made here: {failure}")
        yield made


def test_network_namespaces_as_nodes(two):
    """Two ranks in each, which share a file system but no network but the pair of devices."""
    init = f"tcp://{ADDRESSES[0]}:{PORT}"
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *PROGRAM, init, "cpu", "gloo", "4", str(2 * i), str(2 * i + 1)],
            env=os.environ | NO_GPU | {"GLOO_SOCKET_IFNAME": device},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, (name, device) in enumerate(two)
    ]
    try:
        told = [each.communicate(timeout=200) for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], told
    assert told[0][0].split() == ["two_nodes"]


def test_what_is_composed():
    for names in ("ab", "aabb", "aabbcc", "bbaa"):
        assert unevenness(names) is None
    assert "the nodes have 3 and 1 ranks" in unevenness("aaab")
    assert "the nodes have 1, 2 and 1 ranks" in unevenness("abbc")
    assert "not one behind the other" in unevenness("abab")


class Work:
    """A transfer that is done after so many looks, and who must not be asked before."""

    def __init__(self, looks):
        self.looks = looks

    def is_completed(self):
        return self.looks < 1

    def wait(self, timeout=None):
        if timeout is not None and self.looks > 1:
            self.looks -= 1
            raise RuntimeError("it takes longer")
        self.looks = 0

    def heard(self):
        assert self.looks, "asked without need"
        self.asked = True


@pytest.mark.parametrize(("looks", "asked"), [(0, False), (1, False), (3, True)])
def test_the_store_is_asked_only_while_a_transfer_takes_long(looks, asked):
    work = Work(looks)
    nodes = Nodes(SimpleNamespace(timeout=60.0, world_size=2), Group(), alarm=work)
    assert nodes._after(work, torch.ones(2), torch.ones(2))().tolist() == [1, 1]
    assert hasattr(work, "asked") == asked and work.looks == 0


def test_the_host_waits_for_no_transfer_of_nccl(monkeypatch):
    monkeypatch.setattr("tileweave.fabric.nodes.by_nccl", lambda group: True)
    work = Work(2)
    monkeypatch.setattr(work, "is_completed", lambda: pytest.fail("the host looks whether it is done"))
    nodes = Nodes(SimpleNamespace(timeout=60.0, world_size=2), Group(), alarm=work)
    nodes._after(work, torch.ones(2), SimpleNamespace(is_cuda=True))()


class Group:
    """The ranks of one place on two nodes, as the first sees them."""

    def size(self):
        return 2

    def rank(self):
        return 0


class Told:
    """Nodes of which this rank is on one, and what it does in what order. What comes from node i is i."""

    def __init__(self, count, index):
        self.count, self.index, self.log = count, index, []

    def exchange(self, x, to, source):
        self.log.append(f"{int(x)} to {to}")

        def arrived():
            self.log.append(f"from {source}")
            return torch.tensor(source)

        return arrived

    def gather(self, x):
        return lambda: torch.stack([x + i for i in range(self.count)])

    def all_reduce(self, x):
        return lambda: x * self.count


def test_a_part_travels_while_the_next_is_computed():
    nodes = Told(3, 1)

    def part_for(node, piece):
        nodes.log.append(f"make {node} {piece.start}")
        return torch.tensor(10 + node)

    assert scattered(nodes, part_for) == [[0], [11], [2]]
    assert nodes.log == ["make 2 None", "12 to 2", "make 0 None", "10 to 0", "make 1 None", "from 0", "from 2"]
    nodes = Told(2, 0)
    assert scattered(nodes, part_for, [slice(0, 1), slice(1, 2)]) == [[10], [1, 1]]
    assert nodes.log == ["make 1 0", "11 to 1", "make 1 1", "11 to 1", "make 0 None", "from 1", "from 1"]


def test_all_shards_travel_while_the_own_is_used():
    nodes = Told(3, 1)

    def use(node, piece, shards):
        nodes.log.append(f"use {[int(shard) for shard in shards]} of {node} {piece.start}")

    gathered(nodes, [torch.tensor([1]), torch.tensor([7])], use)
    first = ["1 to 0", "7 to 0", "1 to 2", "7 to 2", "use [1, 7] of 1 None"]
    others = [["from 2", "from 2", "use [2, 2] of 2 None"], ["from 0", "from 0", "use [0, 0] of 0 None"]]
    assert nodes.log == [*first, *others[0], *others[1]]
    nodes = Told(2, 0)
    gathered(nodes, [torch.tensor([[5], [6]])], lambda *told: nodes.log.append(told[:2]), [slice(0, 1), slice(1, 2)])
    arrivals = ["from 1", (1, slice(0, 1)), "from 1", (1, slice(1, 2))]
    assert nodes.log == ["5 to 1", "6 to 1", (0, slice(None)), *arrivals]


def test_sums_of_shares():
    x = torch.tensor([4.0, 8.0])
    assert reduced(Told(2, 0), x, mean=True, ordered=False)().tolist() == [4.5, 8.5]  # in order
    assert reduced(Told(4, 0), x, mean=False, ordered=True)().tolist() == [22.0, 38.0]
    assert reduced(Told(4, 0), x, mean=True, ordered=False)().tolist() == [4.0, 8.0]
    assert reduced(Told(4, 0), x[:0], mean=True, ordered=False)().tolist() == []


def test_pieces_are_whole_shares():
    for size in (1, 7, 8, 100, 4099):
        for each in (1, 2, 8):
            for count in (0, 1, 3):
                cut = pieces(size, each, count)
                assert [i for part in cut for i in range(size)[part]] == list(range(size))
                assert all((part.stop - part.start) % each == 0 for part in cut[:-1]) and len(cut) <= max(count, 1)
            assert padded(torch.ones(size, 2), each).shape[0] % each == 0
    assert [len(cut_for(nodes, 1 << 12, 1 << 20)) for nodes in (2, 3, 4, 9)] == [2, 2, 1, 1]
    assert len(cut_for(2, 1 << 12, (1 << 20) - 1)) == 1
