"""What Gluon makes of two CTAs that multiply together (tcgen05, cta_group::2): a tile of 256 rows by roles, in words of
Gluon, as `lang` has none for pairs. Compiled only, see test_pairs.py; imported by tests/compile_server.py.
"""

import contextlib
import os
import re
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as g
from triton.experimental.gluon.language.nvidia import blackwell as bw
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileweave import lang
from tileweave.bench import compile as compiler

STAGES, N = g.constexpr(4), g.constexpr(256)


@gluon.jit
def load(a, b, a_bufs, b_bufs, there, free, steps):
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(there.index(slot), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, i * 64], there.index(slot), a_bufs.index(slot))
        tma.async_load(b, [i * 64, 0], there.index(slot), b_bufs.index(slot))


@gluon.jit
def issue(a_bufs, b_bufs, acc, there, free, done, steps):
    for i in range(steps):
        slot = i % STAGES
        mbarrier.wait(there.index(slot), (i // STAGES) & 1)
        bw.tcgen05_mma(a_bufs.index(slot), b_bufs.index(slot), acc, use_acc=i > 0, mbarriers=[free.index(slot)])
    bw.tcgen05_commit(done)


@gluon.jit
def finish(out, acc, done, buf, state, WAITS: g.constexpr):
    mbarrier.wait(done, 0)
    if WAITS:
        one = g.to_tensor(1)
        lang.wait(lang.Flags(state, one, one, 2, one), 0, 1)
    buf.store(acc.load().to(out.dtype))
    g.barrier()
    tma.async_store(out, [0, 0], buf)
    tma.store_wait(0)


@gluon.jit
def by_roles(a, b, out, steps, state, ACC: g.constexpr, WAITS: g.constexpr):
    a_bufs = g.allocate_shared_memory(a.dtype, [STAGES, 256, 64], a.layout)
    b_bufs = g.allocate_shared_memory(b.dtype, [STAGES, 64, N], b.layout)
    buf = g.allocate_shared_memory(out.dtype, [256, N], out.layout)
    there, free = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True), mbarrier.allocate_mbarrier(batch=STAGES)
    done = mbarrier.allocate_mbarrier()
    for i in g.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(done, count=1)
    acc = bw.allocate_tensor_memory(g.float32, [256, N], ACC)
    g.warp_specialize(
        [
            (finish, (out, acc, done, buf, state, WAITS)),
            (load, (a, b, a_bufs, b_bufs, there, free, steps)),
            (issue, (a_bufs, b_bufs, acc, there, free, done, steps)),
        ],
        [1, 1],
        [64, 64],
    )


@gluon.jit
def barriers(LAYOUT: g.constexpr):
    """An mbarrier of each CTA of the pair, all that Triton 3.6 could say of one."""
    mbarrier.init(g.allocate_shared_memory(g.int64, [2], LAYOUT), count=1)


def _described(block, basis):
    layout = g.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=[basis])
    return TensorDescriptor.from_tensor(torch.empty(512, 512, dtype=torch.bfloat16, device="meta"), block, layout)


def report(name: str) -> dict:
    """To which tcgen05 instructions "roles", "roles that wait for a flag" or "barriers" compile, or why they do not."""
    if name == "barriers":
        kernel, args = barriers, (mbarrier.MBarrierLayout([[1]]),)
    else:
        acc = bw.TensorMemoryLayout([128, N.value], 1, cga_layout=[[1, 0]], two_ctas=True)
        operands = _described([256, 64], [1, 0]), _described([64, N.value], [0, 1]), _described([256, N.value], [1, 0])
        state = torch.empty(64, dtype=torch.int32, device="meta")
        kernel, args = by_roles, (*operands, 8, state, acc, "wait" in name)
    found = {"triton": triton.__version__}
    with _told() as told:
        try:
            options = {"num_warps": 4, "num_ctas": 2}
            made = triton.compile(compiler._source(kernel, args), target=GPUTarget("cuda", 100, 32), options=options)
        except Exception:
            told.seek(0)
            return found | {"refused": told.read().decode()}
    return found | {"tcgen05": sorted(set(re.findall(r"tcgen05\.\w+\.cta_group::\d", made.asm["ptx"])))}


@contextlib.contextmanager
def _told():
    """A file that gets what is written to standard error meanwhile, where the compiler says why."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(before, 2)
            os.close(before)
