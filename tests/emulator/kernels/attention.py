"""Attention forward, not causal: two consumer warp groups share K/V tiles that one loader brings.

Layout conversions of the wgmma operand in registers are left out: layouts mean nothing to the emulator.
"""

from tileweave import lang as gl


@gl.jit
def loader(
    q_desc, k_desc, v_desc, q_buf, k_bufs, v_bufs, qr, kr, ke, vr, ve, S,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, NQ: gl.constexpr,
):  # fmt: skip
    qt = gl.program_id(0)
    base = gl.program_id(1) * S
    gl.mbarrier_expect(qr, NQ * BM * D * 2)
    for i in gl.static_range(NQ):
        gl.tma_load(q_desc, [base + (qt * NQ + i) * BM, 0], qr, q_buf.index(i))
    n = S // BN
    for j in range(0, n):
        s = j % ST
        ph = ((j // ST) & 1) ^ 1
        gl.mbarrier_wait(ke.index(s), ph)
        gl.mbarrier_expect(kr.index(s), BN * D * 2)
        gl.tma_load(k_desc, [base + j * BN, 0], kr.index(s), k_bufs.index(s))
        gl.mbarrier_wait(ve.index(s), ph)
        gl.mbarrier_expect(vr.index(s), BN * D * 2)
        gl.tma_load(v_desc, [base + j * BN, 0], vr.index(s), v_bufs.index(s))


@gl.jit
def consumer(
    i: gl.constexpr, o_desc, q_buf, k_bufs, v_bufs, o_buf, qr, kr, ke, vr, ve, S, scale,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr, NQ: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    LS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, D, 16])
    qt = gl.program_id(0)
    bh = gl.program_id(1)
    m = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, LS))
    o = gl.zeros([BM, D], gl.float32, LO)
    gl.mbarrier_wait(qr, 0)
    q = q_buf.index(i)
    n = S // BN
    gl.mbarrier_wait(kr.index(0), 0)
    empty = gl.zeros([BM, BN], gl.float32, LS)
    st = gl.warpgroup_mma(q, k_bufs.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    s = gl.warpgroup_mma_wait(0, deps=[st])
    gl.mbarrier_arrive(ke.index(0), count=1)
    mn = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - mn[:, None])
    m = mn
    total = gl.sum(p, 1)
    pb = p.to(gl.bfloat16)
    for j in range(1, n):
        sidx = j % ST
        pidx = (j - 1) % ST
        gl.mbarrier_wait(kr.index(sidx), (j // ST) & 1)
        empty = gl.zeros([BM, BN], gl.float32, LS)
        st = gl.warpgroup_mma(q, k_bufs.index(sidx).permute((1, 0)), empty, use_acc=False, is_async=True)
        gl.mbarrier_wait(vr.index(pidx), ((j - 1) // ST) & 1)
        ot = gl.warpgroup_mma(pb, v_bufs.index(pidx), o, is_async=True)
        s = gl.warpgroup_mma_wait(1, deps=[st])
        gl.mbarrier_arrive(ke.index(sidx), count=1)
        mn = gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - mn[:, None])
        al = gl.exp2(m - mn)
        m = mn
        total = total * al + gl.sum(p, 1)
        o = gl.warpgroup_mma_wait(0, deps=[ot])
        gl.mbarrier_arrive(ve.index(pidx), count=1)
        o = o * gl.convert_layout(al, gl.SliceLayout(1, LO))[:, None]
        pb = p.to(gl.bfloat16)
    pidx = (n - 1) % ST
    gl.mbarrier_wait(vr.index(pidx), ((n - 1) // ST) & 1)
    ot = gl.warpgroup_mma(pb, v_bufs.index(pidx), o, is_async=True)
    o = gl.warpgroup_mma_wait(0, deps=[ot])
    o = o * gl.convert_layout(1.0 / total, gl.SliceLayout(1, LO))[:, None]
    o_buf.index(i).store(o.to(gl.bfloat16))
    gl.fence_async_shared()
    gl.barrier()
    gl.tma_store(o_desc, [bh * S + (qt * NQ + i) * BM, 0], o_buf.index(i))
    gl.store_read_wait(0)


@gl.jit
def attention(
    q_desc, k_desc, v_desc, o_desc, S, scale,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    NQ: gl.constexpr = 2
    q_buf = gl.allocate_shared_memory(gl.bfloat16, [NQ, BM, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, D], v_desc.layout)
    qr = gl.allocate_shared_memory(gl.int64, [1], gl.MBarrierLayout())
    kr = gl.allocate_shared_memory(gl.int64, [ST, 1], gl.MBarrierLayout())
    ke = gl.allocate_shared_memory(gl.int64, [ST, 1], gl.MBarrierLayout())
    vr = gl.allocate_shared_memory(gl.int64, [ST, 1], gl.MBarrierLayout())
    ve = gl.allocate_shared_memory(gl.int64, [ST, 1], gl.MBarrierLayout())
    gl.mbarrier_init(qr, count=1)
    for i in gl.static_range(ST):
        gl.mbarrier_init(kr.index(i), count=1)
        gl.mbarrier_init(vr.index(i), count=1)
        gl.mbarrier_init(ke.index(i), count=NQ)
        gl.mbarrier_init(ve.index(i), count=NQ)
    gl.warp_specialize([
        (consumer, (0, o_desc, q_buf, k_bufs, v_bufs, q_buf, qr, kr, ke, vr, ve, S, scale, BM, BN, D, ST, NQ, gl.num_warps())),
        (consumer, (1, o_desc, q_buf, k_bufs, v_bufs, q_buf, qr, kr, ke, vr, ve, S, scale, BM, BN, D, ST, NQ, gl.num_warps())),
        (loader, (q_desc, k_desc, v_desc, q_buf, k_bufs, v_bufs, qr, kr, ke, vr, ve, S, BM, BN, D, ST, NQ)),
    ], [4, 1], [240, 24])  # fmt: skip
