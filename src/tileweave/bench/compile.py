"""What a kernel compiles to for a Hopper or Blackwell GPU, on a machine that need not have one. Needs Triton."""

import inspect
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tileweave import lang

ELEMENT_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Machine instructions: wgmma of 16-bit and of 8-bit operands, tcgen05.mma of both and of 4-bit ones, tcgen05.cp,
# TMA loads, stores and reduce-adds, register budgets, and what spilled registers leave.
INSTRUCTIONS = (
    "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCCP", "UTMALDG", "UTMASTG", "UTMAREDG", "USETMAXREG", "STL",
    "LDL",
)  # fmt: skip


def compile_report(kernel: Any, args: Sequence[Any], num_warps: int, capability: int = 90) -> dict[str, Any]:
    """Compile a `lang.jit` kernel for sm_90a, or with `capability` 100 for sm_100a, and count what came out; no GPU is
    needed and nothing is launched.

    `args` are what a launch would get, constexprs included, in order: tensors, of which only the dtype counts (those of
    device "meta" have no memory), TensorDescriptors of such, numbers. What Triton's launcher would specialize (a number
    that is 1 or a multiple of 16, unless the kernel says do_not_specialize) is specialized.

    The report: `triton` its version, `target`, `shared` memory of a CTA and `stack` of a thread in bytes (a stack means
    spilled registers), `tensor_columns` of tensor memory that a CTA takes, `registers` of a thread at launch,
    `setmaxnreg` the partitions' register budgets, `multimem` the multimem instructions in the PTX, and for each of
    INSTRUCTIONS how often it occurs in the machine code.

    TypeError unless there is an argument for each parameter of a kind that kernels take; Triton's CompilationError,
    with the line, for what the compiler refuses.
    """
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(_source(kernel, args), target=target, options={"num_warps": num_warps})
    ptx = compiled.asm["ptx"]
    usage, sass = _disassembled(compiled.asm["cubin"])
    return {
        "triton": triton.__version__,
        "target": _found(r"\.target (\w+)", ptx),
        "shared": compiled.metadata.shared,
        "stack": int(_found(r"STACK:(\d+)", usage)),
        "tensor_columns": compiled.metadata.tmem_size,
        "registers": int(_found(r"REG:(\d+)", usage)),
        "multimem": sorted(set(re.findall(r"multimem\.\w+", ptx))),
        "setmaxnreg": sorted({int(n) for n in re.findall(r"setmaxnreg\S+\s+(\d+)", ptx)}),
        **{name: len(re.findall(rf"\b{name}\b", sass)) for name in INSTRUCTIONS},
    }


def _source(kernel: Any, args: Sequence[Any]) -> GluonASTSource:
    """What Triton's launcher would compile for these arguments."""
    parameters = inspect.signature(kernel.fn).parameters
    if len(args) != len(parameters):
        raise TypeError(f"args: {kernel.__name__} takes {len(parameters)} ({', '.join(parameters)}), got {len(args)}")
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list] = {}
    for i, ((name, parameter), value) in enumerate(zip(parameters.items(), args, strict=True)):
        specialized = name not in kernel.do_not_specialize
        if value is None or "constexpr" in str(parameter.annotation):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, int) and value == 1 and specialized:
            signature[name], constants[(i,)] = "constexpr", 1
        else:
            signature[name] = _type_of(name, value)
        if isinstance(value, torch.Tensor) or (signature[name] in ("i32", "i64") and specialized and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return GluonASTSource(kernel, signature, constants, attributes)


def _type_of(name: str, value: Any) -> str:
    """Triton's name of an argument's type."""
    tensor = value.base if isinstance(value, lang.TensorDescriptor) else value
    if isinstance(tensor, torch.Tensor):
        if tensor.dtype not in ELEMENT_TYPES:
            known = ", ".join(str(dtype) for dtype in ELEMENT_TYPES)
            raise TypeError(f"{name}: expected a tensor of one of {known}, got {tensor.dtype}")
        element = ELEMENT_TYPES[tensor.dtype]
        if tensor is value:
            return "*" + element
        return f"tensordesc<{element}[{','.join(map(str, value.block_shape))}],{value.layout!r}>"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"{name}: expected a tensor, a TensorDescriptor or a number, got {type(value).__name__}")


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """What Triton's cuobjdump says of a cubin: resource usage, machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    return usage, sass


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"{pattern} is not in what the compiler said"
    return match.group(1)
