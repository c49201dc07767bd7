"""Persistent warp-specialized matmuls, C [M, N] = A [M, K] @ B [N, K]^T: one consumer, or two that take turns."""

from tileweave import lang as gl
from tileweave.tiles.matmul import grouped_order


@gl.jit
def loader(
    a_desc, b_desc, a_bufs, b_bufs, ready, empty, nm, nn, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    it = 0
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        pm, pn = grouped_order(t, nm, nn, GROUP)
        for k in range(0, K, BK):
            s = it % S
            gl.mbarrier_wait(empty.index(s), ((it // S) & 1) ^ 1)
            gl.mbarrier_expect(ready.index(s), (BM + BN) * BK * 2)
            gl.tma_load(a_desc, [pm * BM, k], ready.index(s), a_bufs.index(s))
            gl.tma_load(b_desc, [pn * BN, k], ready.index(s), b_bufs.index(s))
            it += 1


@gl.jit
def consumer(
    c_desc, a_bufs, b_bufs, c_buf, ready, empty, nm, nn, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    it = 0
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BN, 16])
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        pm, pn = grouped_order(t, nm, nn, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, L)
        nk = K // BK
        for k in range(0, nk):
            s = it % S
            gl.mbarrier_wait(ready.index(s), (it // S) & 1)
            tok = gl.warpgroup_mma(a_bufs.index(s), b_bufs.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            acc = gl.warpgroup_mma_wait(num_outstanding=1, deps=[tok])
            gl.mbarrier_arrive(empty.index((it - 1) % S), count=1, pred=k > 0)
            it += 1
        acc = gl.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        gl.mbarrier_arrive(empty.index((it - 1) % S), count=1)
        c = acc.to(gl.bfloat16)
        gl.store_read_wait(0)
        gl.barrier()
        c_buf.store(c)
        gl.fence_async_shared()
        gl.barrier()
        gl.tma_store(c_desc, [pm * BM, pn * BN], c_buf)
    gl.store_read_wait(0)


@gl.jit
def matmul(
    a_desc, b_desc, c_desc, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], b_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], c_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    for i in gl.static_range(S):
        gl.mbarrier_init(ready.index(i), count=1)
        gl.mbarrier_init(empty.index(i), count=1)
    nm = gl.cdiv(M, BM)
    nn = gl.cdiv(N, BN)
    gl.warp_specialize([
        (consumer, (c_desc, a_bufs, b_bufs, c_buf, ready, empty, nm, nn, K, BM, BN, BK, S, GROUP, gl.num_warps())),
        (loader, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, nm, nn, K, BM, BN, BK, S, GROUP)),
    ], [1], [24])  # fmt: skip


@gl.jit
def pingpong_consumer(
    wg: gl.constexpr, c_desc, a_bufs, b_bufs, c_buf, ready, empty, turn, nm, nn, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    nk = K // BK
    it = wg * nk
    n = 0
    for t in range(gl.program_id(0) + wg * gl.num_programs(0), nm * nn, 2 * gl.num_programs(0)):
        pm, pn = grouped_order(t, nm, nn, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, L)
        if wg == 0:
            gl.mbarrier_wait(turn.index(0), (n & 1) ^ 1)
        else:
            gl.mbarrier_wait(turn.index(1), n & 1)
        for k in range(0, nk):
            s = it % S
            gl.mbarrier_wait(ready.index(s), (it // S) & 1)
            tok = gl.warpgroup_mma(a_bufs.index(s), b_bufs.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            acc = gl.warpgroup_mma_wait(num_outstanding=1, deps=[tok])
            gl.mbarrier_arrive(empty.index((it - 1) % S), count=1, pred=k > 0)
            it += 1
        if wg == 0:
            gl.mbarrier_arrive(turn.index(1), count=1)
        else:
            gl.mbarrier_arrive(turn.index(0), count=1)
        acc = gl.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        gl.mbarrier_arrive(empty.index((it - 1) % S), count=1)
        it += nk
        n += 1
        gl.store_read_wait(0)
        gl.barrier()
        c_buf.store(acc.to(gl.bfloat16))
        gl.fence_async_shared()
        gl.barrier()
        gl.tma_store(c_desc, [pm * BM, pn * BN], c_buf)
    gl.store_read_wait(0)


@gl.jit
def pingpong(
    a_desc, b_desc, c_desc, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], b_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [2, BM, BN], c_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], gl.MBarrierLayout())
    for i in gl.static_range(S):
        gl.mbarrier_init(ready.index(i), count=1)
        gl.mbarrier_init(empty.index(i), count=1)
    gl.mbarrier_init(turn.index(0), count=1)
    gl.mbarrier_init(turn.index(1), count=1)
    nm = gl.cdiv(M, BM)
    nn = gl.cdiv(N, BN)
    gl.warp_specialize([
        (pingpong_consumer, (0, c_desc, a_bufs, b_bufs, c_buf.index(0), ready, empty, turn, nm, nn, K, BM, BN, BK, S, GROUP)),
        (pingpong_consumer, (1, c_desc, a_bufs, b_bufs, c_buf.index(1), ready, empty, turn, nm, nn, K, BM, BN, BK, S, GROUP)),
        (loader, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, nm, nn, K, BM, BN, BK, S, GROUP)),
    ], [4, 1], [232, 24])  # fmt: skip
