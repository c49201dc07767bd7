"""Multicast: offered in emulated worlds, never among virtual ranks, and between processes only where nobody forbids it.

The driver is a fake one that writes down what it is asked, so that no test here makes a multicast object.
"""

import contextlib
import importlib
import os
import sys
import threading
import types

import pytest
import torch

from tests.fabric.test_processes import exchange
from tileweave.fabric import fabric_of, virtual_world
from tileweave.fabric.capability import multicast_forbidden, multicast_refusal
from tileweave.fabric.processes import Facts, ProcessFabric
from tileweave.fabric.virtual import VirtualFabric

FORBIDDING = [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")]
GRANULE = 1 << 21
HANDLES = ("cuMemCreate", "cuMulticastCreate", "cuMemImportFromShareableHandle")
CREATES = ("cuMemCreate", "cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem", "cuMemAddressReserve")


class Driver(types.ModuleType):
    """A driver of GPUs that offer multicast, or not; `asked`: the calls of all ranks, with their arguments."""

    def __init__(self, offers=True, fails=()):
        super().__init__("cuda.bindings.driver")
        self.asked, self.offers, self.fails, self._lock = [], offers, fails, threading.Lock()
        self.CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
        for name in ("CUmemAllocationProp", "CUmemAccessDesc", "CUmulticastObjectProp"):
            setattr(self, name, lambda: types.SimpleNamespace(location=types.SimpleNamespace()))
        for enumeration, member in (
            ("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
            ("CUmemAllocationGranularity_flags", "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED"),
            ("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED"),
            ("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE"),
            ("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"),
            ("CUmulticastGranularity_flags", "CU_MULTICAST_GRANULARITY_MINIMUM"),
            ("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED"),
        ):
            setattr(self, enumeration, types.SimpleNamespace(**{member: 1}))
        for name, answer in (
            ("cuDeviceGet", lambda index: index),
            ("cuDeviceGetAttribute", lambda attribute, device: int(self.offers)),
            ("cuMemGetAllocationGranularity", lambda *_: GRANULE // 2),
            ("cuMulticastGetGranularity", lambda *_: GRANULE),
            ("cuMemExportToShareableHandle", lambda *_: os.open(os.devnull, os.O_RDONLY)),
            ("cuMemAddressReserve", lambda *_: 1 << 40),
            *((name, lambda *_: object()) for name in HANDLES),
            *((name, None) for name in ("cuMulticastAddDevice", "cuMulticastBindMem", "cuMulticastUnbind", "cuMemMap")),
            *((name, None) for name in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuMemSetAccess")),
        ):
            setattr(self, name, self._function(name, answer))

    def cuGetErrorString(self, status):
        return 0, b"the fake driver refuses"

    def _function(self, name, answer):
        def function(*args):
            with self._lock:
                self.asked.append((name, args))
            if name in self.fails:
                return (1,)
            return (0,) if answer is None else (0, answer(*args))

        function.__name__ = name
        return function

    def calls(self, *names):
        """How often each was called."""
        return [sum(name == asked for asked, _ in self.asked) for name in names]


@pytest.fixture
def install(monkeypatch):
    """A function that puts a fake driver, and an environment without a say, under the fabric's own code."""
    for name, _ in FORBIDDING:
        monkeypatch.delenv(name, raising=False)

    def put(driver):
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = driver
        package = types.ModuleType("cuda")
        for name, module in (("cuda", package), ("cuda.bindings", bindings), (driver.__name__, driver)):
            monkeypatch.setitem(sys.modules, name, module)
        for name in ("peer_memory", "multicast"):
            monkeypatch.delitem(sys.modules, f"tileweave.fabric.{name}", raising=False)
        memory = importlib.import_module("tileweave.fabric.peer_memory")
        monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(memory.PeerMemory, "tensor", lambda self, _: torch.ones(self.world, 64, dtype=torch.uint8))
        return memory.PeerMemory

    yield put
    for name in ("peer_memory", "multicast"):
        sys.modules.pop(f"tileweave.fabric.{name}", None)


def made(PeerMemory, world=2):
    """What each rank has of asking for memory with multicast: the memory or its error."""

    def body(rank, gather):
        return PeerMemory(100, rank, world, torch.device("cuda", rank), gather, 5.0, multicast=True)

    return exchange(world, body)


def test_all_ranks_blocks_are_bound_to_one_object(install):
    driver = Driver()
    before = len(os.listdir("/proc/self/fd"))
    for memory in made(install(driver), 3):
        assert memory.stride == GRANULE, "a multiple of both granularities"
        view = types.SimpleNamespace(data_ptr=lambda memory=memory: memory.base + 48)
        assert memory.multicast_address(view) == (1 << 40) + 48
        memory.close()
        memory.close()
    assert driver.calls("cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem") == [1, 3, 3]
    order = [name for name, _ in driver.asked if name in ("cuMulticastAddDevice", "cuMulticastBindMem")]
    assert order == ["cuMulticastAddDevice"] * 3 + ["cuMulticastBindMem"] * 3, "who binds would wait for all to join"
    assert driver.calls("cuMulticastUnbind") == [3] and driver.calls("cuMemMap") == driver.calls("cuMemUnmap")
    assert driver.calls("cuMemRelease") == [sum(driver.calls(*HANDLES))]
    assert driver.calls("cuMemAddressFree") == driver.calls("cuMemAddressReserve")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("name", "value"), FORBIDDING)
def test_where_the_environment_forbids_it_nothing_is_created_nor_asked(install, monkeypatch, name, value):
    driver = Driver()
    PeerMemory = install(driver)
    monkeypatch.setenv(name, value)
    assert all(f"{name}={value} in the environment" in str(error) for error in made(PeerMemory))
    multicast = importlib.import_module("tileweave.fabric.multicast")

    def directly(rank, gather):
        return multicast.Multicast(object(), GRANULE, rank, 2, torch.device("cuda", rank), gather, 5.0)

    assert all(f"{name}={value} in the environment" in str(error) for error in exchange(2, directly))
    assert driver.asked == []


@pytest.mark.parametrize(("name", "value"), FORBIDDING)
def test_one_rank_whose_environment_forbids_it_is_enough(install, monkeypatch, name, value):
    """Ranks here are threads of one process, so rank 1's answer is put in its mouth."""
    driver = Driver()
    PeerMemory = install(driver)

    def body(rank, gather):
        def answered(mine):
            return gather(f"rank 1: no multicast: {name}={value} in the environment" if rank == 1 else mine)

        return PeerMemory(100, rank, 2, torch.device("cuda", rank), answered, 5.0, multicast=True)

    assert all(isinstance(error, RuntimeError) and name in str(error) for error in exchange(2, body))
    assert not any(driver.calls(*CREATES))


def test_gpus_without_multicast_are_not_asked_to_make_an_object(install):
    driver = Driver(offers=False)
    assert all("does not support multicast" in str(error) for error in made(install(driver)))
    assert not any(driver.calls(*CREATES))


@pytest.mark.parametrize("fails", ["cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem", "cuMemSetAccess"])
def test_a_driver_that_refuses_is_an_error_on_every_rank_and_leaves_nothing(install, fails):
    driver = Driver(fails=(fails,))
    before = len(os.listdir("/proc/self/fd"))
    for error in made(install(driver)):
        assert isinstance(error, RuntimeError) and "the fake driver refuses" in str(error)
    created = driver.calls(*HANDLES)
    refused = driver.calls("cuMulticastCreate")[0] if fails == "cuMulticastCreate" else 0
    assert driver.calls("cuMemRelease") == [sum(created) - refused]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("name", "value", "forbids"),
    [
        *((name, value, True) for name, value in FORBIDDING),
        ("NCCL_NVLS_ENABLE", " 0", True),
        ("NCCL_NVLS_ENABLE", "no", True),
        ("NCCL_NVLS_ENABLE", "1", False),
        ("NCCL_NVLS_ENABLE", "2", False),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "true", True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", False),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "", False),
    ],
)
def test_what_the_environment_says(install, monkeypatch, name, value, forbids):
    driver = Driver()
    install(driver)
    monkeypatch.setenv(name, value)
    assert (multicast_forbidden() is not None) is forbids
    assert (multicast_refusal(torch.device("cuda", 0)) is not None) is forbids
    assert bool(driver.asked) is not forbids, "the environment is asked first"


def facts(gpu, multicast=None):
    return Facts(None, None, "machine", gpu, 1.0, None, False, multicast, ["wgmma"], 1)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([facts("a"), facts("b")], None),
        ([facts("a"), facts("a")], "share a GPU"),
        ([facts("a"), facts("b", "X=1 in the environment")], "rank 1: X=1"),
        ([facts("a")], "one rank"),
    ],
)
def test_what_a_group_of_processes_refuses_before_it_tries(ranks, why):
    refusal = ProcessFabric._one_by_one(ranks)
    assert refusal is None if why is None else why in refusal


def test_emulated_ranks_have_it_and_virtual_ranks_never():
    from tileweave.emulator import Multicast
    from tileweave.fabric.workspace import Workspace

    def body(rank, group):
        fabric = fabric_of(group)
        return fabric.multicast_refusal(), fabric.channel("op", 0, 64).multicast

    with virtual_world(2, device="cpu") as world:
        assert world.run(body) == [(None, Multicast)] * 2
    virtual = object.__new__(VirtualFabric)
    assert "virtual ranks share one GPU" in virtual.multicast_refusal()
    workspace = Workspace(2, torch.device("cpu"), 1)  # as a virtual world makes it
    workspace.grow("op", 0, 64)
    assert workspace.find("op", 0, 0, 64).multicast is None


def test_what_has_no_kernels_has_no_multicast():
    assert fabric_of(None).multicast_refusal() == fabric_of(None).refusal() is not None
