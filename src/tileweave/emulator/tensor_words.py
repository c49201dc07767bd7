"""Words of tensor memory (tcgen05): a space of its own, and products that read and write it late."""

from __future__ import annotations

from typing import Any

import torch
from greenlet import getcurrent

from tileweave import lang
from tileweave.emulator.agents import AsyncOp, Partition
from tileweave.emulator.async_words import new_memory
from tileweave.emulator.errors import ProtocolError
from tileweave.emulator.mbarrier import MBarrier
from tileweave.emulator.memory import Memory
from tileweave.emulator.places import Place
from tileweave.emulator.tiles import DTYPES, Tile
from tileweave.emulator.views import View

TENSOR_COLUMNS = 512  # of 32 bits and TENSOR_LANES rows: the tensor memory of an SM
TENSOR_LANES = 128


BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # integers by their size


class TensorMemory(Memory):
    """An allocation in tensor memory; `written_bytes` tells which bytes have been: all their bits are set."""

    def __init__(self, world, name: str, tensor: torch.Tensor):
        super().__init__(world, name, "tensor", tensor)
        self.written_bytes = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.int8)


class TensorView(View):
    """A descriptor of tensor memory; reached by the tcgen05 words alone."""

    __slots__ = ()

    def slice(self, start, length, dim=None) -> View:
        """`length` columns."""
        return super().slice(start, length, self.t.ndim - 1)

    def _written(self) -> torch.Tensor:
        """What `written_bytes` has for the elements."""
        assert isinstance(self.memory, TensorMemory)
        t = self.t
        return self.memory.written_bytes.view(BYTES[t.element_size()]).as_strided(
            t.shape, t.stride(), t.storage_offset()
        )

    def read(self, agent, place: Place) -> torch.Tensor:
        """An agent's read. ProtocolError where nothing has been written."""
        self.memory.access("read", self.region, agent, place)
        if not bool((self._written() == -1).all()):
            raise ProtocolError(f"tensor memory {self.memory.name} is read before anything has written it: {place}")
        return self.t

    def write(self, value: torch.Tensor, agent, place: Place) -> None:
        """An agent's write."""
        self.memory.access("write", self.region, agent, place)
        self.t.copy_(value)
        self._written().fill_(-1)


def allocate_tensor_memory(element_ty, shape, layout):
    """Tensor memory of the CTA. ProtocolError for more columns than it has."""
    me = getcurrent()
    sizes = [int(n) for n in shape]
    t = torch.full(sizes, float("nan"), dtype=DTYPES[element_ty])
    name, place = new_memory(me)
    if sizes[-2] not in (64, TENSOR_LANES):
        raise ProtocolError(f"tensor memory of {sizes[-2]} rows, 64 or {TENSOR_LANES} are legal: {place}")
    me.cta.shared.append(TensorMemory(me.world, name, t))
    tensors = [m.tensor for m in me.cta.shared if m.space == "tensor"]
    used = sum(t.numel() // t.shape[-2] * t.element_size() // 4 for t in tensors)
    if used > TENSOR_COLUMNS:
        raise ProtocolError(f"{used} columns of tensor memory, of which an SM has {TENSOR_COLUMNS}: {place}")
    return TensorView(me.cta.shared[-1], t)


def tensor_memory_registers(rows, columns, warps):
    """Layouts do not matter here."""
    return None


def tcgen05_load(buf, layout=None):
    """Read tensor memory into registers; the word waits for its own completion."""
    me = getcurrent()
    return Tile(buf.read(me, Place(me, "tcgen05.ld")).clone())


def tcgen05_store(buf, value):
    """Write tensor memory from registers; the word waits for its own completion."""
    me = getcurrent()
    place = Place(me, "tcgen05.st")
    if list(value.shape) != buf.shape:
        raise ProtocolError(f"store of a tile of {value.shape} into tensor memory of {buf.shape}: {place}")
    buf.write(value.t, me, place)


class Product(AsyncOp):
    """One tcgen05.mma: reads its operands and writes its accumulator at any moment until a commit tells of it.

    Products of a partition into one accumulator, of one kind, are executed in the order of their issue; of others
    nothing is known. read: by lane, the writes whose data this product and the partition's earlier ones have read.
    """

    kind = "tcgen05.mma"
    __slots__ = ("a", "acc", "ahead", "b", "earlier", "read", "use_acc")

    def __init__(self, part: Partition, a: View, b: View, acc: TensorView, use_acc: bool):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        pipeline = acc.memory, acc.region, a.t.element_size()
        self.ahead = part.products.get(pipeline)
        self.earlier, self.read = part.product, dict[int, int]()
        super().__init__(part, part.product)
        part.product = part.products[pipeline] = self
        part.issued[self.lane] = self.base + self.steps

    def run(self, n: int) -> None:
        """Multiply."""
        a, b, acc, ahead = self.a, self.b, self.acc, self.ahead
        if ahead is not None:
            self.clock.join(ahead.clock)
            self.clock.see(ahead.lane, ahead.base + ahead.steps)
        left = a.read(self, self.place) if isinstance(a, TensorView) else self._operand(a)
        product = left.float() @ self._operand(b).float()
        if self.use_acc:
            product += acc.read(self, self.place)
        acc.write(product, self, self.place)
        if self.earlier is not None:
            self.read.update(self.earlier.read)
        for x in (*a.memory.writers(a.region), *b.memory.writers(b.region)):
            self.read[x.lane] = max(x.count, self.read.get(x.lane, 0))
        self.ahead = self.earlier = None

    def _operand(self, view: View) -> torch.Tensor:
        view.memory.access("read", view.region, self, self.place)
        return view.t


class Commit(AsyncOp):
    """An arrival at an mbarrier when all products that the partition has issued are done. It tells of these, and so of
    the writes whose data they have read: who overwrites such an operand comes after both."""

    kind = "tcgen05.commit"
    __slots__ = ("bar", "product", "told")

    def __init__(self, part: Partition, bar: MBarrier):
        self.bar, self.told, self.product = bar, dict(part.issued), part.product
        super().__init__(part, part.product)

    def run(self, n: int) -> None:
        """Arrive."""
        for lane, count in self.told.items():
            self.bar.clock.see(lane, count)
        for lane, count in self.product.read.items() if self.product else ():
            self.bar.clock.follow(lane, count)
        self.bar.update(self, arrivals=1)


def tcgen05_mma(a, b, acc, *, use_acc=True, mbarriers=()):
    """Start acc = a @ b, plus acc with `use_acc`; then a commit to each of `mbarriers`."""
    me: Any = getcurrent()
    (m, k), (k2, n) = a.shape, b.shape
    if not isinstance(acc, TensorView) or acc.dtype is not lang.float32 or k != k2 or acc.shape != [m, n]:
        raise ProtocolError(
            f"tcgen05.mma of {a.shape} and {b.shape} into {acc.shape} of {acc.dtype}: expected [M, K], [K, N] and an "
            f"accumulator [M, N] of fp32 in tensor memory: {Place(me, 'tcgen05.mma')}"
        )
    for operand in (a, b):
        me.touch(operand.memory, "read")
    Product(me, a, b, acc, bool(use_acc))
    for bar in mbarriers:
        tcgen05_commit(bar)


def tcgen05_commit(bar):
    """Let an mbarrier be arrived at when all products that this partition has started are done."""
    Commit(getcurrent(), bar.barrier_for("tcgen05.commit"))
