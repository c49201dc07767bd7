"""Words that access global memory from registers: loads, stores, atomics, multimem."""

from __future__ import annotations

import torch
from greenlet import getcurrent

from tileweave.emulator.clocks import ALIAS
from tileweave.emulator.errors import ProtocolError
from tileweave.emulator.memory import BITS
from tileweave.emulator.places import Place
from tileweave.emulator.regions import EMPTY
from tileweave.emulator.tiles import DTYPES, Tile, raw, scalar, wrapped
from tileweave.emulator.views import Pointer

SEMANTICS, SCOPES = ("relaxed", "acquire", "release", "acq_rel"), ("cta", "gpu", "sys")


def _unicast(ptr, what: str) -> Pointer:
    if not isinstance(ptr, Pointer):
        raise ProtocolError(f"{what} needs a pointer, not a {type(ptr).__name__}: {Place(getcurrent(), what)}")
    if ptr.slices:
        raise ProtocolError(
            f"{what} on a multicast address of {ptr.memory.name}; only multimem words may use it: "
            f"{Place(getcurrent(), what)}"
        )
    return ptr


def _everybody(me, is_tile: bool):
    """Who takes part: all threads in a tile-wide access, the first in one to a single element.

    The crowd comes first: a write takes the place of what it is checked against, and the crowd knows least.
    """
    return (me.crowd, me) if is_tile else (me,)


def load(pointer, mask=None, other=None, volatile=False, **_):
    """Elements at a pointer, or at a tile of pointers; masked ones are `other`. A volatile load is a strong read."""
    me = getcurrent()
    ptr = _unicast(pointer, "load")
    if volatile and mask is None and not isinstance(ptr.offset, torch.Tensor):
        return _strong_read(me, ptr, "volatile load", "relaxed", "sys", everybody=True)
    me.pause()
    offsets, keep, region, pattern = ptr.elements(mask, "load")
    place = Place(me, "load")
    for who in _everybody(me, True):  # a single element, too, is loaded by every thread
        ptr.memory.access("volatile read" if volatile else "read", region, who, place, pattern=pattern)
    dtype = ptr.torch_dtype
    if keep is None and not isinstance(ptr.offset, torch.Tensor):
        return scalar(ptr.flat[ptr.offset].item(), dtype)
    # Numbers as bits, by NumPy: it takes a quarter of the time that torch needs to gather a few.
    bits, offsets = ptr.memory.bits(dtype.itemsize), offsets.numpy()
    if keep is None:
        return Tile(torch.from_numpy(bits[offsets]).view(dtype))
    found = torch.as_tensor(raw(0 if other is None else other)).to(dtype).expand(offsets.shape).clone()
    kept = keep.numpy()
    found.view(BITS[dtype.itemsize]).numpy()[kept] = bits[offsets[kept]]
    return Tile(found) if isinstance(ptr.offset, torch.Tensor) else scalar(found.item(), dtype)


def store(pointer, value, mask=None, **_):
    """Write an element at a pointer, or a tile's at a tile of pointers."""
    me = getcurrent()
    ptr = _unicast(pointer, "store")
    me.pause()
    offsets, keep, region, pattern = ptr.elements(mask, "store")
    place = Place(me, "store")
    for who in _everybody(me, isinstance(ptr.offset, torch.Tensor)):
        ptr.memory.access("write", region, who, place, pattern=pattern)
    if region is EMPTY:
        return
    size = ptr.torch_dtype.itemsize
    values = torch.as_tensor(raw(value)).to(ptr.torch_dtype).expand(offsets.shape).view(BITS[size]).numpy()
    bits, offsets = ptr.memory.bits(size), offsets.numpy()
    if keep is None:
        bits[offsets] = values
    else:
        kept = keep.numpy()
        bits[offsets[kept]] = values[kept]


# ---------------------------------------------------------------- atomics


def _checked(what: str, sem, scope) -> tuple[str, str]:
    sem, scope = sem or "acq_rel", scope or "gpu"
    if sem not in SEMANTICS or scope not in SCOPES:
        raise ProtocolError(f"{what}: sem {sem!r} and scope {scope!r}; legal are {SEMANTICS} and {SCOPES}")
    return sem, scope


def _atomic(name: str, compute, pointer, operands, mask, sem, scope, used):
    """A read-modify-write: the new value is `compute(old, *operands)`, of tensors.

    Releases accumulate at the location; an acquire takes those of mutual scope. `used`: whether somebody uses the
    result, which the first thread then tells the others.
    """
    me = getcurrent()
    sem, scope = _checked(name, sem, scope)
    ptr = _unicast(pointer, name)
    if isinstance(ptr.offset, torch.Tensor):
        return _atomic_tile(me, ptr, name, compute, operands, mask, sem, scope, used)
    if mask is not None and not bool(raw(mask)):
        return 0
    if name == "atomic_add" and isinstance(operands[0], int) and operands[0] == 0 and sem in ("relaxed", "acquire"):
        found = _strong_read(me, ptr, f"{name} of 0, {sem}, scope {scope}", sem, scope, everybody=False)
        if used:
            me.sync()
        return found
    region = ptr.elements(None, name)[2]
    memory, flat, byte, offset = ptr.memory, ptr.flat, region.lo, int(ptr.offset)
    place = Place(me, f"{name}, {sem}, scope {scope}")
    poll = _poll(me, memory, flat, byte, offset, place)
    old = flat[offset].item()
    new = compute(old, *operands)
    memory.access("atomic", region, me, place, scope)
    who, releases = (me.cta, me.lane, me.count), sem in ("release", "acq_rel")
    location = memory.location(byte, old) if new != old or releases else None
    if new == old:
        me.polled = (*poll, memory.version(byte))
    else:
        new = flat[offset] = wrapped(new) if flat.dtype is torch.int32 else new
        memory.changed(byte)
        me.polled = None
    if "acq" in sem:
        memory.acquire(byte, me, scope, everybody=False)
    if releases:
        memory.release(byte, me, scope)
    if location is not None:
        location.write(new, dict(memory.released.get(byte, ())), who)
    if used:
        me.sync()
    return scalar(old, flat.dtype)


def _strong_read(me, ptr, what: str, sem: str, scope: str, *, everybody: bool):
    """One element by a relaxed or acquire load, by every thread or the first one. What it returns may be old.

    An atomic addition of 0 is taken to be one, as compilers do.
    """
    region = ptr.elements(None, what)[2]
    memory, flat, byte, offset = ptr.memory, ptr.flat, region.lo, int(ptr.offset)
    place = Place(me, what)
    poll = _poll(me, memory, flat, byte, offset, place)
    for who in _everybody(me, everybody):
        memory.access("volatile read" if everybody else "atomic", region, who, place, scope)
    value, newest = memory.strong_read(byte, me, flat[offset].item(), scope, sem == "acquire", everybody)
    me.polled = (*poll, memory.version(byte)) if newest else None
    return scalar(value, flat.dtype)


def _poll(me, memory, flat, byte: int, offset: int, place: Place) -> tuple:
    """Let others run; who polls again at this place what has not changed sleeps until it has. Returns the place."""
    poll = memory, byte, place.code, place.instruction
    if me.polled == (*poll, memory.version(byte)):
        while me.polled == (*poll, memory.version(byte)):
            me.block(memory.watch(byte), _describe_poll, memory, flat, offset)
    else:
        me.pause()
    return poll


def _describe_poll(memory, flat, offset) -> str:
    return f"element {offset} of {memory.name} to change from {flat[offset].item()}"


def _atomic_tile(me, ptr, name, compute, operands, mask, sem, scope, used):
    """Every thread its elements; one after the other, as several may name one element."""
    me.pause()
    offsets, keep, region, pattern = ptr.elements(mask, name)
    place = Place(me, f"{name}, {sem}, scope {scope}")
    for who in _everybody(me, True):
        ptr.memory.access("atomic", region, who, place, scope, pattern=pattern)
    memory, flat, size = ptr.memory, ptr.flat, ptr.flat.element_size()
    keep = torch.ones(offsets.shape, dtype=torch.bool) if keep is None else keep
    old = torch.zeros(offsets.shape, dtype=flat.dtype)
    columns = [torch.as_tensor(raw(x)).to(flat.dtype).expand(offsets.shape)[keep].tolist() for x in operands]
    found = []
    for i, offset in enumerate(offsets[keep].tolist()):
        before = flat[offset].item()
        found.append(before)
        after = compute(before, *(column[i] for column in columns))
        flat[offset] = wrapped(after) if flat.dtype is torch.int32 else after
        byte = offset * size
        if "acq" in sem:
            memory.acquire(byte, me, scope, everybody=True)
        if sem in ("release", "acq_rel"):
            memory.release(byte, me, scope)
        memory.locations.pop(byte, None)
        memory.changed(byte)
    old[keep] = torch.tensor(found, dtype=flat.dtype)
    if used:
        me.sync()
    return Tile(old)


def atomic_add(pointer, val, mask=None, sem=None, scope=None, used=True):
    """Add; returns what was there before."""
    return _atomic("atomic_add", lambda old, x: old + x, pointer, (val,), mask, sem, scope, used)


def atomic_xchg(pointer, val, mask=None, sem=None, scope=None, used=True):
    """Replace; returns what was there before."""
    return _atomic("atomic_xchg", lambda old, x: x, pointer, (val,), mask, sem, scope, used)


def atomic_cas(pointer, cmp, val, sem=None, scope=None, used=True):
    """Replace what equals `cmp`; returns what was there before."""

    def compute(old, expected, x):
        return x if old == expected else old

    return _atomic("atomic_cas", compute, pointer, (cmp, val), None, sem, scope, used)


def atomic_max(pointer, val, mask=None, sem=None, scope=None, used=True):
    """Raise to at least `val`; returns what was there before."""
    return _atomic("atomic_max", max, pointer, (val,), mask, sem, scope, used)


# ---------------------------------------------------------------- multicast addresses


def _slices(ptr, what: str):
    """`Pointer.elements` of the elements in every rank's slice."""
    if not isinstance(ptr, Pointer) or not ptr.slices:
        raise ProtocolError(
            f"{what} on a unicast address: only a multicast address (host: Multicast(tensor)) is legal: "
            f"{Place(getcurrent(), what)}"
        )
    if ptr.torch_dtype not in (torch.float16, torch.bfloat16):
        raise ProtocolError(f"{what} takes 16-bit floats, not {ptr.torch_dtype}: {Place(getcurrent(), what)}")
    start, n, distance = ptr.slices
    offsets = torch.as_tensor(ptr.offset)
    low, high = int(offsets.min()) - start, int(offsets.max()) - start
    if low < 0 or high >= distance:
        raise ProtocolError(
            f"{what} at elements {low} to {high} of a slice of {ptr.memory.name}, which has {distance}: "
            f"{Place(getcurrent(), what)}"
        )
    return [Pointer(ptr.memory, ptr.torch_dtype, offsets + rank * distance).elements(None, what) for rank in range(n)]


def _multimem(ptrs, what: str, kind: str):
    me = getcurrent()
    me.pause()
    slices = _slices(ptrs, what)
    place = Place(me, what)
    for _, _, region, pattern in slices:
        for who in _everybody(me, True):
            ptrs.memory.access(kind, region, who, place, multicast=True, pattern=pattern)
    return slices


def multicast_pointer(address, dtype):
    """Pointer to elements of `dtype` at a multicast address."""
    _slices(address, "multicast_pointer")
    if address.dtype.element_ty is not dtype:
        place = Place(getcurrent(), "multicast_pointer")
        raise ProtocolError(f"a multicast address of {address.torch_dtype}, not of {dtype}: {place}")
    return address


def multimem_load_reduce(ptrs):
    """Sum over all ranks, float32 accumulation, of 16-bit floats at multicast addresses."""
    slices = _multimem(ptrs, "multimem_load_reduce", "read")
    total = sum(ptrs.flat[offsets].float() for offsets, *_ in slices)
    return Tile(total.to(ptrs.torch_dtype))


def multimem_store(ptrs, value):
    """Store to every rank at once."""
    for offsets, *_ in _multimem(ptrs, "multimem_store", "write"):
        ptrs.flat[offsets] = value.t.to(ptrs.torch_dtype)


def multimem_add(ptrs, value):
    """Add to every rank's memory at once, atomically."""
    for offsets, *_ in _multimem(ptrs, "multimem_add", "add"):
        ptrs.flat[offsets] += value.t.to(ptrs.torch_dtype)


def fence_proxy_alias():
    """Order accesses through multicast and unicast addresses of the same memory."""
    me = getcurrent()
    me.world.multicast = True
    me.fence(ALIAS)


# ---------------------------------------------------------------- sums over ranks


def reduce(ptrs, stride, world):
    """Sum over all ranks of the elements at `ptrs` (into rank 0's slice), in float32, in rank order."""
    total = load(ptrs).to(_FLOAT32)
    for peer in range(1, world):
        total += load(ptrs + stride * peer).to(_FLOAT32)
    return total


def all_reduce(ptrs, stride, world):
    """`reduce`, the rounded sum then stored back to every rank's slice; returns it in float32."""
    total = reduce(ptrs, stride, world)
    for peer in range(world):
        store(ptrs + stride * peer, total.to(ptrs.dtype.element_ty))
    return total


_FLOAT32 = next(word for word, dtype in DTYPES.items() if dtype is torch.float32)
