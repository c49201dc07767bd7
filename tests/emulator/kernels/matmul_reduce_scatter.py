"""matmul + reduce-scatter: tiles are added by TMA into the zeroed results of their owners; one counter per rank.

Single use: the host zeroes results and counters. MODE 0 adds; MODE 1 stores, which is a race between ranks.
"""

from tileweave import lang as gl
from tileweave.tiles.matmul import grouped_order


@gl.jit
def loader(
    rank, W: gl.constexpr, a_desc, b_desc, a_bufs, b_bufs, ready, empty, nm, nn, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    it = 0
    nms = nm // W
    per = nms * nn
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        dst = (t // per + rank + 1) % W
        pm, pn = grouped_order(t % per, nms, nn, GROUP)
        for k in range(0, K, BK):
            s = it % S
            gl.mbarrier_wait(empty.index(s), ((it // S) & 1) ^ 1)
            gl.mbarrier_expect(ready.index(s), (BM + BN) * BK * 2)
            gl.tma_load(a_desc, [(dst * nms + pm) * BM, k], ready.index(s), a_bufs.index(s))
            gl.tma_load(b_desc, [pn * BN, k], ready.index(s), b_bufs.index(s))
            it += 1


@gl.jit
def consumer(
    rank, W: gl.constexpr, outs, a_bufs, b_bufs, c_buf, ready, empty, nm, nn, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr, NW: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    it = 0
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BN, 16])
    nms = nm // W
    per = nms * nn
    for t in range(gl.program_id(0), nm * nn, gl.num_programs(0)):
        dst = (t // per + rank + 1) % W
        pm, pn = grouped_order(t % per, nms, nn, GROUP)
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
        c_buf.reshape([BM, BN]).store(c)
        gl.fence_async_shared()
        gl.barrier()
        if MODE == 0:
            gl.store_add_async(outs, dst, [pm * BM, pn * BN], c_buf)
        else:
            gl.store_async(outs, dst, [pm * BM, pn * BN], c_buf)
    gl.store_read_wait(0)
    gl.store_wait(0)


@gl.jit
def matmul_reduce_scatter(
    rank, a_desc, b_desc, outs, counters, M, N, K, W: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], b_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [1, BM, BN], outs.layout)
    ready = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], gl.MBarrierLayout())
    for i in gl.static_range(S):
        gl.mbarrier_init(ready.index(i), count=1)
        gl.mbarrier_init(empty.index(i), count=1)
    nm = gl.cdiv(M, BM)
    nn = gl.cdiv(N, BN)
    gl.warp_specialize([
        (consumer, (rank, W, outs, a_bufs, b_bufs, c_buf, ready, empty, nm, nn, K, BM, BN, BK, S, GROUP, gl.num_warps(), MODE)),
        (loader, (rank, W, a_desc, b_desc, a_bufs, b_bufs, ready, empty, nm, nn, K, BM, BN, BK, S, GROUP)),
    ], [1], [24])  # fmt: skip
    # All adds of this CTA are performed: tell every rank, then wait for every rank's CTAs.
    gl.barrier()
    for d in gl.static_range(W):
        gl.atomic_add(counters + d * 64, 1, sem="release", scope="sys")
    want = W * gl.num_programs(0)
    while gl.atomic_add(counters + rank * 64, 0, sem="acquire", scope="sys") < want:
        pass
