"""Which fabric a group has, and the errors of what has none."""

import pytest
import torch

from tileweave.fabric import cuda_refusal, fabric_of, virtual_world
from tileweave.fabric.virtual import Launch, launch_all


def test_a_process_alone():
    fabric = fabric_of(None, "cpu")
    assert (fabric.backend, fabric.rank, fabric.world_size, fabric.sms) == ("fallback", 0, 1, 0)
    assert "CPU tensors outside an emulated world" in fabric.refusal()
    x = torch.randn(4, 3)
    share = fabric.reduce_scatter(x)
    assert torch.equal(share, x) and share.data_ptr() != x.data_ptr()
    assert fabric.gather_values(5) == [5]


def test_the_fallback_has_no_channels_and_no_kernels():
    fabric = fabric_of(None, "cpu")
    with pytest.raises(RuntimeError, match="op: no fused kernels here: CPU tensors outside"):
        fabric.channel("op", 1, 1)
    with pytest.raises(RuntimeError, match="kernel: no fused kernels here"):
        fabric.launch(FakeKernel("kernel", []), 1, (), num_warps=4)


@pytest.mark.parametrize("group", [3, "world", object(), torch.device("cpu")])
def test_what_is_no_group(group):
    with pytest.raises(TypeError, match=f"group: expected .* ProcessGroup.* got {type(group).__name__}"):
        fabric_of(group, "cpu")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"n": 0}, "n: expected 1 to 1024 ranks, got 0"),
        ({"n": 2**40}, "n: expected 1 to 1024 ranks, got 1099511627776"),
        ({"n": 2, "timeout": 0}, "timeout: expected a positive number of seconds, up to 2000, got 0"),
        ({"n": 2, "sms": 0}, "sms: expected at least 1 SM per rank, got 0"),
        ({"n": 2, "device": "meta"}, "device: expected auto, cpu or cuda, got 'meta'"),
        ({"n": 2, "timeout": float("nan")}, "timeout: expected a positive number of seconds, up to 2000, got nan"),
        ({"n": 2, "timeout": float("inf")}, "timeout: expected a positive number of seconds, up to 2000, got inf"),
        ({"n": 2, "seed": -1}, "seed: expected a whole number from 0 up, got -1"),
        ({"n": 2, "device": "foo"}, "device: expected auto, cpu or cuda, got 'foo'"),
        ({"n": 2, "delayed": (0, 2)}, r"delayed: expected ranks from 0 to 1, got \[2\]"),
    ],
)
def test_impossible_worlds(arguments, message):
    with pytest.raises(ValueError, match=message):
        virtual_world(**{"device": "cpu", **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"n": 2.5}, "n: expected 1 to 1024 ranks, as an int, got 2.5"),
        ({"n": "2"}, "n: expected 1 to 1024 ranks, as an int, got '2'"),
        ({"n": True}, "n: expected 1 to 1024 ranks, as an int, got True"),
        ({"n": 2, "timeout": "5"}, "timeout: expected a number of seconds, got '5'"),
        ({"n": 2, "seed": "x"}, "seed: expected a whole number from 0 up, as an int, got 'x'"),
        ({"n": 2, "sms": 2.5}, "sms: expected at least 1 SM per rank, as an int, got 2.5"),
        ({"n": 2, "delayed": 1}, r"delayed: expected a sequence of ranks, such as \(0,\), got 1"),
        ({"n": 2, "delayed": ("1",)}, "delayed: expected ranks from 0 to 1, as an int, got '1'"),
        ({"n": 2, "device": 0}, "device: expected 'auto', 'cpu' or 'cuda', got 0"),
    ],
)
def test_arguments_of_other_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        virtual_world(**{"device": "cpu", **arguments})


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device: expected cuda:0 to cuda:1, .* got 'cuda:2'"):
        virtual_world(2, "cuda:2")


def test_numbers_of_other_kinds_are_taken():
    world = virtual_world(torch.tensor(2), torch.device("cpu"), seed=torch.tensor(3), timeout=1, delayed=[1])
    assert (world.size, world.seed, world.timeout, world.delayed) == (2, 3, 1.0, (1,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="PyTorch sees no CUDA GPU; device='cpu' emulates them"):
        virtual_world(2, "cuda")
    assert virtual_world(2).backend == "emulated"
    assert cuda_refusal("cuda") == "PyTorch sees no CUDA GPU"


class FakeKernel:
    """Stands for a compiled kernel; logs what is done with it."""

    def __init__(self, name, log, loaded=False):
        self.name = self.__name__ = name
        self.log, self.module = log, loaded or None

    def _init_handles(self):
        self.module = True
        self.log.append(f"load {self.name}")

    def __getitem__(self, grid):
        return lambda *args, stream: self.log.append(f"launch {self.name} {grid} {args} on {stream}")


def test_all_variants_are_loaded_before_any_is_launched():
    log = []
    first, second = FakeKernel("k1", log), FakeKernel("k2", log)
    launch_all(
        [Launch(first, 2, (7,), 10, False), Launch(second, 2, (8,), 11, False), Launch(first, 2, (9,), 12, False)]
    )
    assert log == [
        "load k1",
        "load k2",
        "launch k1 (2, 1, 1) (7,) on 10",
        "launch k2 (2, 1, 1) (8,) on 11",
        "launch k1 (2, 1, 1) (9,) on 12",
    ]


def test_nothing_is_loaded_during_a_capture():
    log = []
    with pytest.raises(RuntimeError, match=r"k: .* captured: .* \(warm up\)"):
        launch_all([Launch(FakeKernel("k", log), 1, (), 1, True)])
    launch_all([Launch(FakeKernel("k", log, loaded=True), 1, (), 1, True)])
    assert log == ["launch k (1, 1, 1) () on 1"]
