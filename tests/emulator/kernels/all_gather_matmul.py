"""all-gather + matmul: communicator CTAs push this rank's rows to the peers, a counter per row block and K split.

Single use of the gathered rows: a second call must not begin before all ranks have ended the first.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import grouped_order


@gl.jit
def communicate(
    rank, W: gl.constexpr, a_desc, g_desc, flags, fstride, bufs, bars, nblk, K, ncomm, KSPLIT: gl.constexpr,
    BM: gl.constexpr, BK: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    it = 0
    kpart = K // KSPLIT
    nk = kpart // BK
    for job in range(gl.program_id(0), nblk * KSPLIT, ncomm):
        blk = job // KSPLIT
        k0 = (job % KSPLIT) * kpart
        for j in range(0, gl.minimum(nk, S - 1)):
            s = (it + j) % S
            gl.mbarrier_expect(bars.index(s), BM * BK * 2)
            gl.tma_load(a_desc, [blk * BM, k0 + j * BK], bars.index(s), bufs.index(s).reshape([BM, BK]))
        for j in range(0, nk):
            s = it % S
            gl.mbarrier_wait(bars.index(s), (it // S) & 1)
            for d in gl.static_range(W - 1):
                p = (rank + 1 + d) % W
                gl.store_async(g_desc, p, [(rank * nblk + blk) * BM, k0 + j * BK], bufs.index(s))
            n = j + S - 1
            if n < nk:
                gl.store_read_wait(W - 1)
                s2 = (it + S - 1) % S
                gl.mbarrier_expect(bars.index(s2), BM * BK * 2)
                gl.tma_load(a_desc, [blk * BM, k0 + n * BK], bars.index(s2), bufs.index(s2).reshape([BM, BK]))
            it += 1
        gl.store_read_wait(0)
        gl.store_wait(0)
        gl.barrier()
        for d in gl.static_range(W - 1):
            p = (rank + 1 + d) % W
            gl.atomic_add(flags + p * fstride + rank * nblk + blk, 1, sem="release", scope="sys")


@gl.jit
def loader(
    rank, W: gl.constexpr, a_desc, g_desc, b_desc, flags, fstride, target, a_bufs, b_bufs, ready, empty, nblk, nn, K,
    ncomm, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    it = 0
    per = nblk * nn
    for t in range(gl.program_id(0) - ncomm, per * W, gl.num_programs(0) - ncomm):
        owner = (rank + t // per) % W
        pm, pn = grouped_order(t % per, nblk, nn, GROUP)
        if owner != rank:
            while gl.atomic_add(flags + rank * fstride + owner * nblk + pm, 0, sem="acquire", scope="sys") < target:
                pass
            gl.fence_proxy_async()
        for k in range(0, K, BK):
            s = it % S
            gl.mbarrier_wait(empty.index(s), ((it // S) & 1) ^ 1)
            gl.mbarrier_expect(ready.index(s), (BM + BN) * BK * 2)
            if owner == rank:
                gl.tma_load(a_desc, [pm * BM, k], ready.index(s), a_bufs.index(s).reshape([BM, BK]))
            else:
                gl.load_async(g_desc, rank, [(owner * nblk + pm) * BM, k], a_bufs.index(s), ready.index(s))
            gl.tma_load(b_desc, [pn * BN, k], ready.index(s), b_bufs.index(s))
            it += 1


@gl.jit
def consumer(
    rank, W: gl.constexpr, c_desc, a_bufs, b_bufs, c_buf, ready, empty, nblk, nn, K, ncomm,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    it = 0
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BN, 16])
    per = nblk * nn
    for t in range(gl.program_id(0) - ncomm, per * W, gl.num_programs(0) - ncomm):
        owner = (rank + t // per) % W
        pm, pn = grouped_order(t % per, nblk, nn, GROUP)
        acc = gl.zeros([BM, BN], gl.float32, L)
        for k in range(0, K // BK):
            s = it % S
            gl.mbarrier_wait(ready.index(s), (it // S) & 1)
            a = a_bufs.index(s).reshape([BM, BK])
            tok = gl.warpgroup_mma(a, b_bufs.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            acc = gl.warpgroup_mma_wait(num_outstanding=1, deps=[tok])
            gl.mbarrier_arrive(empty.index((it - 1) % S), count=1, pred=k > 0)
            it += 1
        acc = gl.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        gl.mbarrier_arrive(empty.index((it - 1) % S), count=1)
        gl.store_read_wait(0)
        gl.barrier()
        c_buf.store(acc.to(gl.bfloat16))
        gl.fence_async_shared()
        gl.barrier()
        gl.tma_store(c_desc, [(owner * nblk + pm) * BM, pn * BN], c_buf)
    gl.store_read_wait(0)


@gl.jit
def all_gather_matmul(
    rank, a_desc, g_desc, b_desc, c_desc, flags, fstride, target, nblk, N, K, ncomm,
    W: gl.constexpr, KSPLIT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, 1, BM, BK], g_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], b_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], c_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    for i in gl.static_range(S):
        gl.mbarrier_init(ready.index(i), count=1)
        gl.mbarrier_init(empty.index(i), count=1)
    nn = gl.cdiv(N, BN)
    if gl.program_id(0) < ncomm:
        communicate(rank, W, a_desc, g_desc, flags, fstride, a_bufs, ready, nblk, K, ncomm, KSPLIT, BM, BK, S)
    else:
        gl.warp_specialize([
            (consumer, (rank, W, c_desc, a_bufs, b_bufs, c_buf, ready, empty, nblk, nn, K, ncomm, BM, BN, BK, S, GROUP, gl.num_warps())),
            (loader, (rank, W, a_desc, g_desc, b_desc, flags, fstride, target, a_bufs, b_bufs, ready, empty, nblk, nn, K, ncomm, BM, BN, BK, S, GROUP)),
        ], [1], [24])  # fmt: skip
