"""Launches of kernels that wait for no peer: each rank's own affair, while virtual ranks launch others together."""

import contextlib
import threading
import time
import types

import torch

from tileweave.fabric import fabric_of, local_fabric, variants, virtual
from tileweave.fabric.virtual import VirtualWorld


class Kernel:
    """Stands for a kernel of Triton and for what it compiles to."""

    def __init__(self, name):
        self.__name__ = self.name = name
        self.module, self.loads = None, 0

    def warmup(self, *args, **options):
        return self

    def _init_handles(self):
        self.loads += 1
        time.sleep(0.05)
        self.module = object()


def without_a_gpu(monkeypatch, enqueued):
    """A world of virtual ranks whose launches are written down."""
    stream = types.SimpleNamespace(
        cuda_stream=1, record_event=lambda: None, wait_event=lambda _: None, wait_stream=lambda _: None
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(variants, "launched_ahead", lambda kernel: False)
    monkeypatch.setattr(virtual, "enqueue", lambda compiled, *_: enqueued.append(compiled.name))
    return VirtualWorld(3, torch.device("cpu"), 4, 5.0)


def test_virtual_ranks_need_not_agree_on_them(monkeypatch):
    enqueued = []
    together, local = Kernel("together"), Kernel("local")

    def body(rank, group):
        own = local_fabric(torch.device("cpu"))
        assert (own.world_size, own.sms, own.memory_bytes) == (1, 4, 80 << 30)
        for _ in range(rank):  # rank 0 none, before the meeting and after it
            own.launch(local, 4, (), num_warps=1)
        fabric_of(group).launch(together, 4, (), num_warps=1)
        for _ in range(2 - rank):
            own.launch(local, 4, (), num_warps=1)

    world = without_a_gpu(monkeypatch, enqueued)
    world.run(body)
    assert enqueued.count("together") == 3 and enqueued.count("local") == 6
    assert together.loads == local.loads == 1


def test_ranks_that_load_one_kernel_at_a_time_load_it_once(monkeypatch):
    kernel = Kernel("local")
    threads = [threading.Thread(target=variants.load, args=(kernel, False)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernel.loads == 1
