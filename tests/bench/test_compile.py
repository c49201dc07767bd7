"""`compile_report`: what it says of a kernel, and what it refuses. The ops' kernels: tests/lang/test_compile.py."""

import runpy

import pytest
import torch

from tests.tiles.kernels.ring import copy_kernel, order_kernel
from tileweave import lang
from tileweave.emulator import World
from tileweave.ops.descriptors import describe

if not lang.HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from tileweave.bench.compile import compile_report


def tiles(dtype=torch.bfloat16):
    """A descriptor of a tensor without memory."""
    return describe(torch.empty(256, 64, dtype=dtype, device="meta"), [64, 64])


def test_a_report():
    found = compile_report(copy_kernel, (tiles(), tiles(), 4, 3, True, 1), num_warps=4)
    assert (found["target"], found["stack"], found["STL"], found["LDL"]) == ("sm_90a", 0, 0, 0)
    assert found["UTMALDG"] >= 1 and found["UTMASTG"] >= 1 and found["UTMAREDG"] == found["HGMMA"] == 0
    assert 3 * 64 * 64 * 2 <= found["shared"] < 3 * 64 * 64 * 2 + 1024
    assert 40 in found["setmaxnreg"] and found["registers"] > 0


def test_a_number_that_is_1_is_a_constant_unless_it_must_not_be():
    out = torch.empty(8, dtype=torch.int32, device="meta")
    assert compile_report(order_kernel, (out, 1, 8, 4), num_warps=4)["target"] == "sm_90a"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((tiles(), tiles(), 4), r"args: copy_kernel takes 6 \(source, out, tiles, STAGES, BY_TMA, CONSUMERS\), got 3"),
        ((tiles(), "out", 4, 3, True, 1), "out: expected a tensor, a TensorDescriptor or a number, got str"),
        (
            (torch.empty(1, dtype=torch.complex64), tiles(), 4, 3, True, 1),
            "source: expected a tensor of one of .*complex64",
        ),
    ],
)
def test_what_is_no_argument(args, message):
    with pytest.raises(TypeError, match=message):
        compile_report(copy_kernel, args, num_warps=4)


REFUSAL = "power of 2|global variable|AST node|comprehension|not defined|Unsupported function|Loop-carried|int\\(\\)"
REFUSED = {
    "a plain global": "gl.store(out, NUMBER)",
    "a size that is no power of two": "gl.store(out + gl.arange(0, 48, gl.BlockedLayout([1], [32], [4], [0])), n)",
    "try": "try:\n        gl.store(out, n)\n    finally:\n        pass",
    "a dict": "gl.store(out, {'a': 1}['a'])",
    "a list comprehension": "gl.store(out, [i for i in range(3)][1])",
    "break": "for i in range(n):\n        gl.store(out, i)\n        break",
    "continue": "for i in range(n):\n        gl.store(out, i)\n        continue",
    "a plain function": "gl.store(out, plain(n))",
    "a lambda": "gl.store(out, (lambda x: x + 1)(n))",
    "a name from one branch": "if n > 2:\n        x = n\n    gl.store(out, x)",
    "a type that changes": "x = 0\n    for i in range(n):\n        x = x + 1.5\n    gl.store(out, x)",
    "int": "gl.store(out, int(n))",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_emulator_takes_and_the_compiler_refuses(what, tmp_path):
    """docs/writing-a-kernel.md lists these."""
    file = tmp_path / "kernel.py"
    file.write_text(
        "from tileweave import lang as gl\nNUMBER = 3\ndef plain(x):\n    return x\n"
        f"@gl.jit(do_not_specialize=['n'])\ndef kernel(out, n):\n    {REFUSED[what]}\n"
    )
    kernel = runpy.run_path(str(file))["kernel"]
    out = torch.zeros(64, dtype=torch.int32)
    world = World(1, seed=0)
    world.run(lambda rank: world.launch(kernel, (1,), out, 4, num_warps=4))
    with pytest.raises(Exception, match=REFUSAL):
        compile_report(kernel, (out, 4), num_warps=4)


def test_warps_are_a_power_of_two():
    with pytest.raises(AssertionError, match="power of 2"):
        compile_report(copy_kernel, (tiles(), tiles(), 4, 3, True, 1), num_warps=6)
