"""The vocabulary where Triton is not installed: enough to define kernels, which then run in the emulator."""

from dataclasses import dataclass, field
from typing import Any


class DeviceFunction:
    """A kernel or device function whose source only the emulator runs."""

    def __init__(self, fn):
        self.fn, self.__name__, self.__doc__ = fn, fn.__name__, fn.__doc__

    def __getitem__(self, grid):
        raise RuntimeError(f"{self.__name__} needs Triton to run on a GPU; Triton is not installed")


def jit(fn=None, *, do_not_specialize=()):
    """Mark a device function."""
    return DeviceFunction(fn) if fn else DeviceFunction


def aggregate(cls):
    """Mark a class of values that device functions hand around together; `declaration` is the class as written."""
    cls.declaration = cls
    return cls


def constexpr_function(fn):
    """Mark a function that is evaluated at compile time."""
    return fn


class constexpr:
    """A compile-time value; also the annotation of arguments that are."""

    def __init__(self, value):
        self.value = value.value if isinstance(value, constexpr) else value


class DType:
    """A device data type."""

    def __init__(self, name, bits):
        self.name, self.primitive_bitwidth = name, bits

    def __repr__(self):
        return self.name


class Word:
    """A word of the vocabulary, known by its name."""

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a device word: it has meaning only inside a kernel")


@dataclass(frozen=True)
class NVMMASharedLayout:
    """Layout of a shared-memory tile for TMA and wgmma (widths in bytes and bits)."""

    swizzle_byte_width: int
    element_bitwidth: int
    rank: int = 2
    transposed: bool = False


@dataclass(frozen=True)
class MBarrierLayout:
    """Layout of mbarriers."""


@dataclass(frozen=True)
class NVMMADistributedLayout:
    """Register layout of a wgmma result."""

    version: Any
    warps_per_cta: Any
    instr_shape: Any


@dataclass(frozen=True)
class BlockedLayout:
    """Register layout in which threads own contiguous blocks."""

    size_per_thread: Any
    threads_per_warp: Any
    warps_per_cta: Any
    order: Any


@dataclass(frozen=True)
class SliceLayout:
    """A register layout with one dimension removed."""

    dim: Any
    parent: Any


@dataclass(frozen=True)
class DotOperandLayout:
    """Register layout of a wgmma's left operand."""

    operand_index: Any
    parent: Any
    k_width: Any


@dataclass(frozen=True)
class TensorMemoryLayout:
    """Layout of a matrix in tensor memory: sizes of its blocks, 32-bit columns between neighbours."""

    block: Any
    col_stride: int


@dataclass(frozen=True)
class TensorMemoryScalesLayout:
    """Layout of operands' scales in tensor memory."""


@dataclass
class TensorDescriptor:
    """Host side of a TMA descriptor; sizes and strides in elements."""

    base: Any
    shape: list
    strides: list
    block_shape: list
    layout: NVMMASharedLayout
    padding: str = "zero"
    round_f32_to_tf32: bool = field(default=False, repr=False)

    @classmethod
    def from_tensor(cls, tensor, block_shape, layout, padding="zero"):
        """Describe the whole of `tensor`."""
        return cls(tensor, list(tensor.shape), list(tensor.stride()), block_shape, layout, padding)


int1, uint8, int32, int64 = DType("int1", 1), DType("uint8", 8), DType("int32", 32), DType("int64", 64)
float16, bfloat16, float32 = DType("fp16", 16), DType("bf16", 16), DType("fp32", 32)
float8e4nv = DType("fp8e4nv", 8)
ABORT, RECORD, REPORT, HEADER_WORDS = constexpr(0), constexpr(1), constexpr(8), constexpr(16)


def __getattr__(name):
    """Every other word of the list: a placeholder that the emulator replaces."""
    from tileweave.lang._names import WORDS

    if name not in WORDS:
        raise AttributeError(name)
    return globals().setdefault(name, Word(name))
