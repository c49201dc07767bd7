"""Groups of real processes that reach each other's GPU memory; on one GPU they share it."""

import os
import signal
import socket
import struct
import threading
import time
from multiprocessing import get_context

import pytest
import torch

from tests.fabric import process_program
from tileweave.fabric import Channel, FabricTimeout
from tileweave.fabric.handles import exchange_descriptors
from tileweave.fabric.processes import Memories, ProcessFabric, timeout_seconds


def run(situation, world, tmp_path, *, dies=(), stops=(), timeout=20.0):
    """Run a situation in `world` processes; those in `dies` are killed on the way, those in `stops` stopped."""
    context = get_context("spawn")
    init = f"file://{tmp_path}/init"
    processes = [
        context.Process(target=process_program.member, args=(rank, situation, world, init, timeout))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    try:
        for rank, process in enumerate(processes):
            if rank in stops:
                continue
            process.join(max(deadline - time.monotonic(), 0.1))
            expected = -signal.SIGKILL if rank in dies else 0
            assert process.exitcode == expected, f"{situation}: rank {rank} ended with {process.exitcode}"
        for rank in stops:
            os.kill(processes[rank].pid, signal.SIGCONT)
            processes[rank].join(30)
            assert processes[rank].exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "situation", ["right", "matmuls", "gathers", "collectives", "no_leaks", "graphs", "wrapping", "disagreeing"]
)
def test_processes(situation, world, tmp_path):
    run(situation, world, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [3, 4])  # two ranks store instead of adding; four may be two on each of two GPUs
def test_no_add_is_lost(world, tmp_path):
    run("exact_adds", world, tmp_path)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_beside_nccl(tmp_path):
    run("beside_nccl", 2, tmp_path)


@pytest.mark.gpu
def test_plans_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path / "cache"))
    run("tuned", 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_the_plain_way_is_measured_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_CACHE", str(tmp_path / "cache"))
    run("tuned_with_nccl", 2, tmp_path)


@pytest.mark.gpu
def test_overlapping_subgroups(tmp_path):
    run("subgroups", 3, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_rank_is_named(world, tmp_path):
    run("killed", world, tmp_path, dies=(1,), timeout=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["ring_attention", "ulysses_attention", "experts"])
def test_survivors_of_any_op_are_told(op, tmp_path):
    run(f"killed_before_{op}", 3, tmp_path, dies=(1,), timeout=1.0)


@pytest.mark.gpu
def test_a_stopped_rank_is_named(tmp_path):
    run("stopped", 3, tmp_path, stops=(1,), timeout=1.0)


@pytest.mark.gpu
def test_a_rank_that_skips_a_call_is_named_and_all_go_on(tmp_path):
    run("skipped", 3, tmp_path, timeout=1.0)


@pytest.mark.gpu
def test_the_watchdog_sees_what_a_graph_replay_hides(tmp_path):
    run("watched", 2, tmp_path, timeout=1.0)


class Threads:
    """`gather` among threads, for the exchange of descriptors without processes."""

    def __init__(self, world):
        self.values, self.barrier = [None] * world, threading.Barrier(world)

    def gather(self, rank):
        def gather(value):
            self.barrier.wait(10)
            self.values[rank] = value
            self.barrier.wait(10)
            return list(self.values)

        return gather


def exchange(world, body):
    """Run body(rank, gather) on a thread per rank; returns results or exceptions in rank order."""
    threads, results = Threads(world), [None] * world

    def work(rank):
        try:
            results[rank] = body(rank, threads.gather(rank))
        except Exception as error:
            results[rank] = error

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def test_descriptors_reach_every_rank_and_none_is_left_open(tmp_path):
    world = 4
    files = [os.open(tmp_path / str(rank), os.O_CREAT | os.O_RDWR) for rank in range(world)]
    for rank, file in enumerate(files):
        os.write(file, f"rank {rank}".encode())
    before = len(os.listdir("/proc/self/fd"))
    results = exchange(world, lambda rank, gather: exchange_descriptors(files[rank], rank, world, gather, 5.0))
    for rank, received in enumerate(results):
        assert sorted(received) == [peer for peer in range(world) if peer != rank], received
        for peer, fd in received.items():
            assert os.pread(fd, 20, 0) == f"rank {peer}".encode()
            os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stranger_without_the_secret_is_turned_away(tmp_path):
    file = os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)
    intruded = []

    def body(rank, gather):
        def spied(value):
            values = gather(value)
            if rank == 0 and values[0] is None and not intruded:  # both listen now: intrude before rank 1 does
                name = names[0]
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                    stranger.connect(f"\0{name}-0")
                    socket.send_fds(stranger, [bytes(16) + struct.pack("<I", 1)], [file])
                intruded.append(True)
            elif isinstance(values[0], list):
                names.append(values[0][0])
            return values

        names = []
        return exchange_descriptors(file, rank, 2, spied, 5.0)

    results = exchange(2, body)
    assert intruded and [sorted(r) for r in results] == [[1], [0]]
    for received in results:
        for fd in received.values():
            os.close(fd)


def test_a_process_of_another_user_is_turned_away(tmp_path, monkeypatch):
    """By either side: it is given no descriptor, and none is taken from it. The credentials here are a stranger's."""
    file = os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)
    before = len(os.listdir("/proc/self/fd"))
    mine, real = os.geteuid(), socket.socket.getsockopt

    def credentials(connection, level, option, *size):
        value = real(connection, level, option, *size)
        return struct.pack("3i", os.getpid(), mine + 1, 0) if option == socket.SO_PEERCRED else value

    monkeypatch.setattr(socket.socket, "getsockopt", credentials)
    for outcome in exchange(2, lambda rank, gather: exchange_descriptors(file, rank, 2, gather, 0.5)):
        assert isinstance(outcome, RuntimeError)
        assert str(outcome).count(f"the socket's other end belongs to user {mine + 1}, not to {mine}") == 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_that_does_not_come_is_an_error_on_every_rank(tmp_path):
    file = os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR)
    before = len(os.listdir("/proc/self/fd"))

    def body(rank, gather):
        if rank == 0:
            return exchange_descriptors(file, rank, 2, gather, 0.5)
        name = gather(None)[0][0]
        gather(None)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(f"\0{name}-1")
            server.listen(1)
            return gather(None)

    results = exchange(2, body)
    assert isinstance(results[0], RuntimeError) and "rank 0 could not exchange memory handles" in str(results[0])
    assert len(os.listdir("/proc/self/fd")) == before


class NoMemory:
    """Stands for peer memory."""

    stride = 256

    def close(self):
        pass


def test_a_timeout_is_told_once_and_rightly_while_the_watchdog_looks_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    fabric = object.__new__(ProcessFabric)
    fabric.device, fabric._ops, fabric._captured, fabric._failed = torch.device("cpu"), {}, [], None
    fabric._nodes = None
    fabric._lock = threading.Lock()
    for i in range(20):
        channel = Channel("op", *[torch.zeros(1)] * 4, 10**6)
        channel.captured = i % 2 == 1
        report = torch.tensor([1, 1, 5, 4, 2, 0, 0, 0], dtype=torch.int32)
        fabric._ops["op"] = Memories(channel, NoMemory(), NoMemory(), NoMemory(), report)
        watchdog = threading.Thread(target=fabric.look)
        watchdog.start()
        time.sleep(0.001 * (i % 4))
        with pytest.raises(
            FabricTimeout, match="rank 2 waited in vain for its flag 1: expected at least 5, last seen 4"
        ):
            fabric.check()
        watchdog.join()
        assert fabric._failed is None and not fabric._ops and len(fabric._captured) == (i + 1) // 2
        fabric.check()  # there is nothing more to tell


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "1e9"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", text)
    with pytest.raises(ValueError, match="TILEWEAVE_TIMEOUT"):
        timeout_seconds()
