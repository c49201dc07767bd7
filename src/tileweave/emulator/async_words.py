"""Words of the asynchronous machinery of one SM: mbarriers, TMA, wgmma, shared memory, warp specialization."""

from __future__ import annotations

import linecache
import re

import torch
from greenlet import getcurrent

from tileweave.emulator.agents import AsyncOp, Partition
from tileweave.emulator.clocks import GLOBAL, SHARED, Clock
from tileweave.emulator.errors import ProtocolError
from tileweave.emulator.mbarrier import MBarrier
from tileweave.emulator.memory import Memory
from tileweave.emulator.places import Place
from tileweave.emulator.tiles import DTYPES, Tile
from tileweave.emulator.views import Descriptor, View, region_of

SHARED_LIMIT = 227 * 1024  # bytes of shared memory that a CTA can have


def allocate_shared_memory(element_ty, shape, layout, value=None):
    """Shared memory of the CTA, filled with NaN (floats) or -1 until written."""
    me, dtype = getcurrent(), DTYPES[element_ty]
    fill = float("nan") if dtype.is_floating_point else -1
    t = torch.full([int(n) for n in shape], fill, dtype=dtype)
    name, place = new_memory(me)
    memory = Memory(me.world, name, "shared", t)
    me.cta.shared.append(memory)
    used = sum(m.tensor.nbytes for m in me.cta.shared if m.space == "shared")
    if used > SHARED_LIMIT:
        raise ProtocolError(f"{used} bytes of shared memory, of which a CTA can have {SHARED_LIMIT}: {place}")
    view = View(memory, t)
    if value is not None:
        view.store(value)
    return view


def new_memory(me: Partition) -> tuple[str, Place]:
    """The name of what a kernel is allocating, that of the variable it goes to, and where."""
    place = Place(me, "allocation")
    name = re.match(r"\s*(\w+)\s*=", linecache.getline(place.code.co_filename, place.line)) if place.code else None
    return name.group(1) if name else f"of line {place.line}", place


def reinterpret(buf, dtype, shape, layout):
    """The same bytes of shared memory as a tile of another type and shape."""
    return buf.reinterpret(dtype, shape)


def column_block(buf, index, width):
    """`width` columns of a matrix, from index * width on."""
    return buf.slice(int(index) * int(width), width, 1)


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Run the first function in this partition and each other one in a partition of its own; returns the first's."""
    me = getcurrent()
    me.sync()
    (first, args), *workers = functions_and_args
    started = [
        Partition(me.cta, f"{i} ({fn.__name__})", me.clock.copy(), fn, fn_args, warps)
        for i, ((fn, fn_args), warps) in enumerate(zip(workers, worker_num_warps, strict=True), 1)
    ]
    me.tick()
    name, me.name = me.name, f"0 ({first.__name__})"
    result = first(*args)
    me.name = name
    for part in started:
        while not part.done:
            me.block(part.waiters, lambda part: f"partition {part.name} to end", part)
        me.join(part.clock)
    me.sync()
    return result


def barrier():
    """Barrier among the threads of the partition."""
    getcurrent().sync()


def fence_async_shared(cluster=False):
    """Order what each thread did with what the async proxy does to shared memory from here on."""
    getcurrent().fence(SHARED)


def fence_proxy_async():
    """Order what each thread did with what the async proxy does to global memory from here on."""
    getcurrent().fence(GLOBAL)


# ---------------------------------------------------------------- mbarriers


def mbarrier_init(mbarrier, count):
    """Give the barrier its number of arrivals a phase."""
    me, memory, offset = getcurrent(), mbarrier.memory, mbarrier.t.storage_offset()
    place = Place(me, "mbarrier_init")
    former = memory.barriers.get(offset)
    if former is not None:
        former.end(place)
    name = f"{memory.name}[{offset}]" if memory.tensor.numel() > 1 else memory.name
    memory.barriers[offset] = MBarrier(memory, name, int(count), Clock.starting(me.cta.final.past[0]), place)


def mbarrier_invalidate(mbarrier):
    """End the barrier's life."""
    mbarrier.barrier_for("mbarrier_invalidate").end(Place(getcurrent(), "mbarrier_invalidate"))


def mbarrier_expect(mbarrier, bytes, pred=True):
    """Arrive once and expect so many bytes."""
    if pred:
        me = getcurrent()
        me.sync()
        mbarrier.barrier_for("mbarrier_expect").update(me, 1, int(bytes))


def mbarrier_arrive(mbarrier, *, count=1, pred=True):
    """Arrive `count` times."""
    if pred:
        me = getcurrent()
        me.sync()
        mbarrier.barrier_for("mbarrier_arrive").update(me, int(count))


def mbarrier_wait(mbarrier, phase, pred=True, deps=()):
    """Wait until the phase of this parity has completed."""
    if pred:
        mbarrier.barrier_for("mbarrier_wait").wait(int(phase) & 1)


# ---------------------------------------------------------------- TMA


class TmaLoad(AsyncOp):
    """Global to shared memory; completes bytes of an mbarrier."""

    kind = "TMA load"
    __slots__ = ("bar", "box", "desc", "view")

    def __init__(self, part, desc, coord, bar, view):
        self.desc, self.box, self.bar, self.view = desc, desc.box(coord), bar, view
        super().__init__(part)

    def run(self, n):
        source, inside, whole, region = self.box
        desc, view = self.desc, self.view
        desc.memory.access("read", region, self, self.place)
        view.memory.access("write", view.region, self, self.place)
        block = view.tensor.view(desc.block)
        if whole:
            block.copy_(source)
        else:
            block.fill_(float("nan") if desc.padding == "nan" else 0)
            block[inside] = source
        self.bar.update(self, tx=-desc.nbytes)


class TmaStore(AsyncOp):
    """Shared to global memory: reads its buffer at one moment, and lands at a later one."""

    kind, access, steps = "TMA store", "write", 2
    __slots__ = ("box", "data", "desc", "view")

    def __init__(self, part, desc, coord, view):
        self.desc, self.box, self.view, self.data = desc, desc.box(coord), view, None
        super().__init__(part)

    def run(self, n):
        target, inside, whole, region = self.box
        if n == 0:
            view = self.view
            view.memory.access("read", view.region, self, self.place)
            block = view.tensor.reshape(self.desc.block)
            self.data = (block if whole else block[inside]).clone()
        else:
            self.desc.memory.access(self.access, region, self, self.place, self.world.reduce_scope)
            self.land(target)
            self.data = None

    def land(self, target):
        """Let the destination have the data."""
        target.copy_(self.data)


class TmaAdd(TmaStore):
    """TMA reduce-add: each element is added atomically."""

    kind, access = "TMA reduce-add", "add"
    __slots__ = ()

    def land(self, target):
        if target.dtype is torch.float32:
            target.add_(self.data)
        else:
            target.copy_(target.float().add_(self.data.float()))


def _check_transfer(me, desc, view) -> None:
    if not isinstance(desc, Descriptor):
        raise ProtocolError(f"TMA needs a descriptor, not a {type(desc).__name__}: {Place(me, 'TMA')}")
    if view.t.numel() != desc.numel or view.t.dtype is not desc.torch_dtype:
        raise ProtocolError(
            f"TMA of a block {list(desc.block)} of {desc.torch_dtype} with a buffer {view.shape} of {view.t.dtype}: "
            f"sizes and types must agree: {Place(me, 'TMA')}"
        )


def tma_load(desc, coord, bar, buf, pred=True):
    """Start a bulk tensor copy from global memory of this rank into shared memory."""
    if pred:
        me = getcurrent()
        _check_transfer(me, desc, buf)
        me.sync()
        TmaLoad(me, desc, coord, bar.barrier_for("TMA load"), buf)


def _put(kind, desc, coord, buf) -> None:
    me = getcurrent()
    _check_transfer(me, desc, buf)
    if min(map(int, coord)) < 0:  # seen on an H200, though loads may begin there
        where = Place(me, kind.kind)
        raise ProtocolError(
            f"a {kind.kind} to {list(map(int, coord))}, before the tensor: an illegal instruction: {where}"
        )
    me.touch(buf.memory, "read")
    me.stores.append(kind(me, desc, coord, buf))


def tma_store(desc, coord, buf):
    """Start a bulk tensor copy from shared memory to global memory of this rank."""
    _put(TmaStore, desc, coord, buf)


def load_async(pt, rank, coord, buf, bar, pred=True):
    """`tma_load` from `rank`'s slice of a parallel tensor."""
    tma_load(pt, [rank, *coord], bar, buf, pred)


def store_async(pt, rank, coord, buf):
    """`tma_store` into `rank`'s slice of a parallel tensor."""
    _put(TmaStore, pt, [rank, *coord], buf)


def store_add_async(pt, rank, coord, buf):
    """A TMA reduce-add into `rank`'s slice of a parallel tensor."""
    _put(TmaAdd, pt, [rank, *coord], buf)


def broadcast_async(pt, world, coord, buf):
    """`store_async` into every rank's slice."""
    for rank in range(world):
        _put(TmaStore, pt, [rank, *coord], buf)


def store_read_wait(pending):
    """All but the newest `pending` bulk stores have read their buffers; a partition barrier follows."""
    me = getcurrent()
    for op in me.stores[: max(len(me.stores) - int(pending), 0)]:
        if not op.observed:
            op.wait(1)
    me.sync()


def store_wait(pending):
    """All but the newest `pending` bulk stores are performed, as the elected thread alone knows."""
    me = getcurrent()
    while len(me.stores) > int(pending):
        me.stores[0].wait(2, all_threads=False)
        me.stores.pop(0)


# ---------------------------------------------------------------- wgmma


class Wgmma(AsyncOp):
    """One warpgroup matrix product: reads its shared-memory operands until it is waited for."""

    kind = "wgmma"
    __slots__ = ("a", "acc", "b", "left", "out")

    def __init__(self, part, a, b, acc, out, after):
        self.a, self.b, self.acc, self.out = a, b, acc, out
        self.left = a.t
        super().__init__(part, after)

    def run(self, n):
        a, b = self.a, self.b
        if type(a) is View:
            a.memory.access("read", a.region, self, self.place)
        b.memory.access("read", b.region, self, self.place)
        left, right = self.left.float(), b.tensor.float()
        self.out._t = left @ right if self.acc is None else torch.addmm(self.acc._t, left, right)
        self.a = self.b = self.acc = self.left = self.out = None


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    """acc + a @ b in float32; asynchronous results must not be used before `warpgroup_mma_wait`."""
    me = getcurrent()
    if acc.op is not None and acc.op not in me.mmas:
        acc.t  # noqa: B018  (registers that another wgmma still writes are a race)
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or acc.shape != [m, n]:
        raise ProtocolError(f"wgmma of {a.shape} and {b.shape} into {acc.shape}: {Place(me, 'wgmma')}")
    for operand in (a, b):
        if type(operand) is View:
            me.touch(operand.memory, "read")
    out = Tile(acc._t)
    out.op = Wgmma(me, a, b, acc if use_acc else None, out, me.mmas[-1] if me.mmas else None)
    me.mmas.append(out.op)
    return out if is_async else warpgroup_mma_wait(0, [out])


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """Wait until at most so many wgmma are in flight; returns the tiles of `deps`."""
    me = getcurrent()
    while len(me.mmas) > num_outstanding:
        me.mmas[0].wait(1)
        me.mmas.pop(0)
    return deps[0] if len(deps) == 1 else tuple(deps)


def warpgroup_mma_init(value):
    """An accumulator that starts from `value`."""
    return value


def release_shared_memory(me: Partition) -> None:
    """At the end of a CTA its shared and tensor memory goes to others: whatever still uses it is a race."""
    for memory in me.cta.shared:
        place = Place(me, f"release of {memory.space} memory at the end of the CTA")
        memory.access("write", region_of(memory.tensor), me, place)
