"""Words of tensor memory (tcgen05): a space of its own, and products that read and write it late."""

from __future__ import annotations

import math
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
SCALE_COLUMNS = 32  # of which scales take a multiple
BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # integers by their size


class TensorMemory(Memory):
    """So many columns of tensor memory; `written_bytes` tells which bytes have been written: all their bits are set."""

    def __init__(self, world, name: str, tensor: torch.Tensor, columns: int):
        super().__init__(world, name, "tensor", tensor)
        self.columns = columns
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
    kind = DTYPES[element_ty]
    t = torch.full(sizes, float("nan") if kind.is_floating_point else 0, dtype=kind)
    name, place = new_memory(me)
    if isinstance(layout, lang.TensorMemoryScalesLayout):
        if len(sizes) != 2 or sizes[0] % TENSOR_LANES or sizes[1] % 4:
            raise ProtocolError(f"scales {sizes} in tensor memory, multiples of {TENSOR_LANES} x 4 are legal: {place}")
        columns = math.ceil(t.numel() / TENSOR_LANES / SCALE_COLUMNS) * SCALE_COLUMNS
    elif sizes[-2] in (64, TENSOR_LANES):
        columns = t.numel() // sizes[-2] * t.element_size() // 4
    else:
        raise ProtocolError(f"tensor memory of {sizes[-2]} rows, 64 or {TENSOR_LANES} are legal: {place}")
    me.cta.shared.append(TensorMemory(me.world, name, t, columns))
    used = sum(m.columns for m in me.cta.shared if m.space == "tensor")
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


class TensorOp(AsyncOp):
    """What a commit tells of. A partition's are executed in the order of their issue, of which the clocks know less.

    read: by lane, the writes whose data this one and the partition's earlier ones have read.
    """

    __slots__ = ("earlier", "read")

    def __init__(self, part: Partition):
        self.earlier, self.read = part.product, dict[int, int]()
        super().__init__(part, part.product)
        part.product = self
        part.issued[self.lane] = self.base + self.steps

    def _operand(self, view: View) -> torch.Tensor:
        """What is read."""
        if isinstance(view, TensorView):
            return view.read(self, self.place)
        view.memory.access("read", view.region, self, self.place)
        return view.t

    def _has_read(self, *views: View) -> None:
        if self.earlier is not None:
            self.read.update(self.earlier.read)
        for x in (x for view in views for x in view.memory.writers(view.region)):
            self.read[x.lane] = max(x.count, self.read.get(x.lane, 0))
        self.earlier = None


class Product(TensorOp):
    """One tcgen05.mma: reads its operands and writes its accumulator at any moment until a commit tells of it.

    Products of a partition into one accumulator, of one kind, take place in the order of their issue, and behind the
    copies of scales before them; of others nothing is known.
    """

    kind = "tcgen05.mma"
    __slots__ = ("a", "acc", "ahead", "b", "copied", "scales", "use_acc")

    def __init__(self, part: Partition, a: View, b: View, acc: TensorView, use_acc: bool, *scales: TensorView):
        self.a, self.b, self.acc, self.use_acc, self.scales = a, b, acc, use_acc, scales
        pipeline = acc.memory, acc.region, a.t.element_size(), bool(scales)
        self.ahead, self.copied = part.products.get(pipeline), part.copied
        super().__init__(part)
        part.products[pipeline] = self

    def run(self, n: int) -> None:
        """Multiply."""
        a, b, acc, ahead = self.a, self.b, self.acc, self.ahead
        if ahead is not None:
            self.clock.join(ahead.clock)
            self.clock.see(ahead.lane, ahead.base + ahead.steps)
        if self.copied is not None:
            for lane, count in self.copied.copies.items():
                self.clock.see(lane, count)
        left, right = self._operand(a), self._operand(b)
        if self.scales:
            of_a, of_b = (each.read(self, self.place) for each in self.scales)
            left, right = scaled(left, of_a), scaled(right.T, of_b).T
        product = left.float() @ right.float()
        if self.use_acc:
            product += acc.read(self, self.place)
        acc.write(product, self, self.place)
        self._has_read(a, b)
        self.ahead = self.copied = None


class ScalesCopy(TensorOp):
    """A copy of scales from shared to tensor memory, behind all that its partition has issued before. copies: by lane,
    the partition's copies so far."""

    kind = "tcgen05.cp"
    __slots__ = ("before", "copies", "dst", "src")

    def __init__(self, part: Partition, src: View, dst: TensorView):
        self.src, self.dst, self.before = src, dst, dict(part.issued)
        super().__init__(part)
        self.copies = (part.copied.copies if part.copied else {}) | {self.lane: self.base + self.steps}
        part.copied = self

    def run(self, n: int) -> None:
        """Copy."""
        for lane, count in self.before.items():
            self.clock.see(lane, count)
        rows, columns = self.dst.shape
        blocks = self._operand(self.src).reshape(rows // 128, columns // 4, 32, 4, 4)
        self.dst.write(blocks.permute(0, 3, 2, 1, 4).reshape(rows, columns), self, self.place)
        self._has_read(self.src)


def scaled(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of float8, or of bytes with two float4 each, times a scale for each block along them, in float32."""
    if x.dtype is torch.uint8:
        code = torch.stack((x & 15, x >> 4), -1).flatten(1).int()
        exponent, mantissa = code >> 1 & 3, code & 1
        size = torch.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)
        x = torch.where(code > 7, -size, size)
    of = scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales
    return (x.float().unflatten(1, (scales.shape[1], -1)) * of.float()[..., None]).flatten(1)


class Commit(AsyncOp):
    """An arrival at an mbarrier when all that the partition has issued is done, products and copies. It tells of these,
    and so of the writes whose data they have read: who overwrites such an operand comes after both."""

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
    _multiply(a, b, acc, use_acc, mbarriers)


def tcgen05_mma_scaled(a, b, acc, a_scales, b_scales, *, use_acc=True, mbarriers=()):
    """The same of operands with scales, [M, S] and [N, S] in tensor memory."""
    (m, n), place = acc.shape, Place(getcurrent(), "tcgen05.mma")
    kinds = {lang.float8e4nv: (lang.uint8, 32), lang.uint8: (lang.float8e4nv, 16)}
    if a.dtype not in kinds or b.dtype is not a.dtype:
        raise ProtocolError(
            f"products with scales of {a.dtype} and {b.dtype}: {' or '.join(map(str, kinds))} are legal: {place}"
        )
    packed = 2 if a.dtype is lang.uint8 else 1
    scales, block = kinds[a.dtype]
    for name, each, rows in (("a_scales", a_scales, m), ("b_scales", b_scales, n)):
        if each.dtype is not scales or each.shape != [rows, a.shape[1] * packed // block] or m != TENSOR_LANES:
            raise ProtocolError(
                f"{name} {each.shape} of {each.dtype} for products of {a.dtype} {a.shape} into {acc.shape}: expected "
                f"{[rows, a.shape[1] * packed // block]} of {scales}, and {TENSOR_LANES} rows of a: {place}"
            )
    _multiply(a, b, acc, use_acc, mbarriers, a_scales, b_scales)


def tcgen05_copy_scales(src, dst):
    """Start a copy of blocks of scales from shared memory to tensor memory."""
    me = getcurrent()
    if src.t.numel() != dst.t.numel() or src.t.dtype != dst.t.dtype:
        raise ProtocolError(f"copy of {src.shape} to {dst.shape} in tensor memory: {Place(me, 'tcgen05.cp')}")
    me.touch(src.memory, "read")
    ScalesCopy(me, src, dst)


def _multiply(a, b, acc, use_acc, mbarriers, *scales: TensorView) -> None:
    me: Any = getcurrent()
    (m, k), (k2, n) = a.shape, b.shape
    if not isinstance(acc, TensorView) or acc.dtype is not lang.float32 or k != k2 or acc.shape != [m, n]:
        raise ProtocolError(
            f"tcgen05.mma of {a.shape} and {b.shape} into {acc.shape} of {acc.dtype}: expected [M, K], [K, N] and an "
            f"accumulator [M, N] of fp32 in tensor memory: {Place(me, 'tcgen05.mma')}"
        )
    for operand in (a, b):
        me.touch(operand.memory, "read")
    Product(me, a, b, acc, bool(use_acc), *scales)
    for bar in mbarriers:
        tcgen05_commit(bar)


def tcgen05_commit(bar):
    """Let an mbarrier be arrived at when all products that this partition has started are done."""
    Commit(getcurrent(), bar.barrier_for("tcgen05.commit"))
