"""Memory of all ranks in one range of addresses: CUDA's virtual-memory API, one physical block per rank.

Each rank creates its block, exports it, imports the peers' and maps all of them back to back. So a parallel tensor is a
plain strided tensor, one TMA descriptor spans all ranks, and a flag of any rank is at base + rank * stride.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from tileweave.fabric.handles import Gather, agree, exchange_descriptors

HANDLE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def call(function: Callable[..., tuple], *args: Any) -> Any:
    """Call the driver; RuntimeError with its words if it refuses."""
    status, *values = function(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"{function.__name__}: {text.decode() if text else status}")
    return values[0] if len(values) == 1 else tuple(values)


def attempt(rank: int, what: str, action: Callable[[], Any]) -> str | None:
    """What went wrong in `action` of a rank, if anything did, for `agree`."""
    try:
        action()
    except RuntimeError as failure:
        return f"rank {rank} cannot {what}: {failure}"
    return None


def allow(base: int, nbytes: int, device: torch.device) -> None:
    """Let a device read and write a range of addresses."""
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.index
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(driver.cuMemSetAccess, base, nbytes, [access], 1)


def granule_of(nbytes: int, world: int, device: torch.device, multicast: bool) -> int:
    """Bytes of which a rank's block for `nbytes` is a multiple."""
    recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    with torch.cuda.device(device):
        granule = call(driver.cuMemGetAllocationGranularity, _properties(device), recommended)
        if multicast:
            from tileweave.fabric.multicast import granularity

            granule = max(granule, granularity(world, nbytes))
    return granule


def whole_granules(nbytes: int, granule: int) -> int:
    """`nbytes`, rounded up; one granule at least."""
    return max(-(-nbytes // granule), 1) * granule


class PeerMemory:
    """`nbytes` of zeroed memory on every rank, seen by this one at `base + rank * stride`. Collective to make.

    The physical blocks live as long as somebody has them mapped: a killed rank's memory stays valid for its peers.
    `close` unmaps; tensors made from it must not be used afterwards. With `multicast` all blocks are also seen at one
    multicast address; RuntimeError on every rank where that is not to be had.
    """

    def __init__(
        self,
        nbytes: int,
        rank: int,
        world: int,
        device: torch.device,
        gather: Gather,
        timeout: float,
        multicast: bool = False,
    ):
        self.rank, self.world, self.device = rank, world, device
        self.base = 0
        self._mapped = 0
        self._handles: list[Any] = []
        self._descriptor = -1
        self._multicast: Any = None  # a Multicast
        if multicast:
            from tileweave.fabric.multicast import Multicast, permit

            permit(rank, device, gather)
        try:
            agree(gather(self._create(nbytes, multicast)))
            descriptors = exchange_descriptors(self._descriptor, rank, world, gather, timeout)
            agree(gather(self._map(descriptors)))
            if multicast:
                self._multicast = Multicast(self._handles[0], self.stride, rank, world, device, gather, timeout)
        except BaseException:
            self.close()
            raise
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
        self.tensor(torch.uint8)[rank].zero_()
        torch.cuda.synchronize(device)
        gather(None)  # nobody may write to a peer's block before that peer has cleared it

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, `[world, stride / itemsize]`."""
        span = _Span(self.base, self.stride * self.world, self)
        with torch.cuda.device(self.device):
            flat = torch.as_tensor(span, device=self.device)
        return flat.view(self.world, self.stride).view(dtype)

    def multicast_address(self, view: torch.Tensor) -> int | None:
        """Where all ranks' slices of `view` [world, ...], a view of `tensor`, are seen at once; None if nowhere."""
        return None if self._multicast is None else self._multicast.base + view.data_ptr() - self.base

    def close(self) -> None:
        """Unmap all blocks and let go of them. No kernel may be using them; calling it twice does nothing."""
        if self._multicast is not None:
            self._multicast.close()
        for rank in range(self._mapped):
            call(driver.cuMemUnmap, self.base + rank * self.stride, self.stride)
        if self.base:
            call(driver.cuMemAddressFree, self.base, self.stride * self.world)
        for handle in self._handles:
            call(driver.cuMemRelease, handle)
        self.base, self._mapped, self._handles = 0, 0, []

    def _create(self, nbytes: int, multicast: bool) -> str | None:
        """This rank's block and the descriptor that stands for it; what went wrong, if anything did."""
        try:
            self._granule = granule_of(nbytes, self.world, self.device, multicast)
            self.stride = whole_granules(nbytes, self._granule)
            with torch.cuda.device(self.device):
                self._handles.append(call(driver.cuMemCreate, self.stride, _properties(self.device), 0))
                self._descriptor = int(call(driver.cuMemExportToShareableHandle, self._handles[0], HANDLE, 0))
        except RuntimeError as failure:
            return f"rank {self.rank} cannot have {nbytes} bytes of peer memory: {failure}"
        return None

    def _map(self, descriptors: dict[int, int]) -> str | None:
        """Map the blocks of all ranks; what went wrong, if anything did. Closes the descriptors."""
        mine = self._handles[0]
        try:
            self.base = int(call(driver.cuMemAddressReserve, self.stride * self.world, self._granule, 0, 0))
            for rank in range(self.world):
                handle = mine
                if rank != self.rank:
                    handle = call(driver.cuMemImportFromShareableHandle, descriptors[rank], HANDLE)
                    self._handles.append(handle)
                call(driver.cuMemMap, self.base + rank * self.stride, self.stride, 0, handle, 0)
                self._mapped += 1
            allow(self.base, self.stride * self.world, self.device)
        except RuntimeError as failure:
            return f"rank {self.rank} cannot map its peers' memory: {failure}"
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return None


class _Span:
    """A range of device addresses for torch.as_tensor; the tensor keeps it, and so the memory's owner, alive."""

    def __init__(self, address: int, nbytes: int, owner: PeerMemory):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _properties(device: torch.device) -> Any:
    """What kind of memory: pinned on the device, exportable as a file descriptor."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device.index
    wanted.requestedHandleTypes = HANDLE
    return wanted
