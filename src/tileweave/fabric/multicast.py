"""One address for the blocks of all ranks: a multicast object of NVLink's switches.

A store to a multicast address goes to every rank's block, a reducing load sums them on the way; only multimem
instructions may use one. A program that makes such an object where the machine's owner has forbidden it can put GPUs
out of service that others share. So the one class here that makes it asks every rank's environment first.
"""

import os
from typing import Any

import torch
from cuda.bindings import driver

from tileweave.fabric.capability import multicast_refusal
from tileweave.fabric.handles import Gather, agree, exchange_descriptors
from tileweave.fabric.peer_memory import HANDLE, allow, attempt, call


def granularity(world: int, nbytes: int) -> int:
    """What the size of a block must be a multiple of, in bytes. Creates nothing."""
    minimum = driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
    return call(driver.cuMulticastGetGranularity, _properties(world, nbytes), minimum)


def permit(rank: int, device: torch.device, gather: Gather) -> None:
    """RuntimeError on every rank unless every rank's environment and GPU allow multicast. Creates nothing."""
    refusal = multicast_refusal(device)
    agree(gather(refusal and f"rank {rank}: no multicast: {refusal}"))


class Multicast:
    """The blocks of `nbytes` bytes, a handle `memory` on each rank, seen at `base` at once. Collective to make.

    RuntimeError on every rank, before anything is created, unless every rank's environment and GPU allow it; and if the
    driver refuses. `close` unmaps it; no rank may have a kernel in flight that uses it.
    """

    def __init__(
        self, memory: Any, nbytes: int, rank: int, world: int, device: torch.device, gather: Gather, timeout: float
    ):
        permit(rank, device, gather)
        self.nbytes, self.device, self._granule = nbytes, device, granularity(world, nbytes)
        self.base = 0
        self._handle: Any = None
        self._mapped = self._bound = False
        try:
            self._share(rank, world, gather, timeout)
            agree(gather(attempt(rank, "join a multicast object", self._join)))
            # Only now: the driver makes whoever binds or maps wait until all have joined.
            agree(gather(attempt(rank, "bind its memory to a multicast object", lambda: self._map(memory))))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap, unbind and let go of it. Calling it twice does nothing."""
        if self._mapped:
            call(driver.cuMemUnmap, self.base, self.nbytes)
        if self.base:
            call(driver.cuMemAddressFree, self.base, self.nbytes)
        if self._bound:
            call(driver.cuMulticastUnbind, self._handle, self._device(), 0, self.nbytes)
        if self._handle is not None:
            call(driver.cuMemRelease, self._handle)
        self.base, self._handle, self._mapped, self._bound = 0, None, False, False

    def _share(self, rank: int, world: int, gather: Gather, timeout: float) -> None:
        """Rank 0 makes the object, the others import it."""
        own = -1
        theirs: dict[int, int] = {}

        def create() -> None:
            nonlocal own
            if rank == 0:
                self._handle = call(driver.cuMulticastCreate, _properties(world, self.nbytes))
                own = int(call(driver.cuMemExportToShareableHandle, self._handle, HANDLE, 0))

        def take() -> None:
            if rank != 0:
                self._handle = call(driver.cuMemImportFromShareableHandle, theirs[0], HANDLE)

        try:
            agree(gather(attempt(rank, "make a multicast object", create)))
            theirs = exchange_descriptors(own, rank, world, gather, timeout, givers=[0])
            agree(gather(attempt(rank, "import a multicast object", take)))
        finally:
            for descriptor in (own, *theirs.values()):
                if descriptor >= 0:
                    os.close(descriptor)

    def _join(self) -> None:
        """This rank's GPU takes part."""
        call(driver.cuMulticastAddDevice, self._handle, self._device())

    def _map(self, memory: Any) -> None:
        """Bind this rank's block, and map the object."""
        call(driver.cuMulticastBindMem, self._handle, 0, memory, 0, self.nbytes, 0)
        self._bound = True
        self.base = int(call(driver.cuMemAddressReserve, self.nbytes, self._granule, 0, 0))
        call(driver.cuMemMap, self.base, self.nbytes, 0, self._handle, 0)
        self._mapped = True
        allow(self.base, self.nbytes, self.device)

    def _device(self) -> Any:
        return call(driver.cuDeviceGet, self.device.index)


def _properties(world: int, nbytes: int) -> Any:
    wanted = driver.CUmulticastObjectProp()
    wanted.numDevices, wanted.size, wanted.handleTypes = world, nbytes, int(HANDLE)
    return wanted
