"""A kernel that says every communication primitive that no op says yet, to see that all compile."""

from tileweave import lang as gl


@gl.jit(do_not_specialize=["rank"])
def every_primitive(rank, pt, x, address, stride, flags_ptr, flags_stride, timeout_us, WORLD: gl.constexpr):
    """Broadcast a tile, meet, reduce over peers' memory and through multicast addresses. One CTA of four warps."""
    flags = gl.Flags(flags_ptr, flags_stride, rank, WORLD, timeout_us)
    buf = gl.allocate_shared_memory(pt.dtype, [1, 64, 64], pt.layout)
    gl.broadcast_async(pt, WORLD, [0, 0], buf)
    gl.store_wait(0)
    gl.barrier_all(flags, 0, 1)
    gl.signal_all(flags, WORLD, 1)
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, 1024, L)
    total = gl.reduce(x + i, stride, WORLD)
    total += gl.all_reduce(x + i, stride, WORLD)
    multicast = gl.multicast_pointer(address, gl.bfloat16)
    gl.fence_proxy_alias()
    total += gl.multimem_load_reduce(multicast + i).to(gl.float32)
    gl.multimem_store(multicast + i, total.to(gl.bfloat16))
    gl.multimem_add(multicast + i, total.to(gl.bfloat16))
