"""The matmul template's multiplication by wgmma, whose accumulators are in registers."""

from tileweave import lang as gl


@gl.jit
def multiply_tile(mm, at, steps, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The accumulator of `steps` K steps from `at` on, and the next place. One wgmma stays in flight while the next
    operands arrive."""
    acc = gl.zeros([mm.ROWS, mm.ACC], gl.float32, LAYOUT)
    last = mm.ring.start()  # not `at`: Triton would take the two for one variable of the loop
    for step in range(0, steps):
        mm.ring.consumer_wait(at)
        a = mm.a_bufs.index(at.slot)
        b = mm.b_bufs.index(at.slot)
        if mm.A_T:
            a = a.slice(HALF * mm.ROWS, mm.ROWS, 1).permute((1, 0))
        else:
            a = a.slice(HALF * mm.ROWS, mm.ROWS, 0)
        if mm.B_T:
            b = b.permute((1, 0))
        pending = gl.warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        acc = gl.warpgroup_mma_wait(num_outstanding=1, deps=[pending])
        mm.ring.release(last, pred=step > 0)
        last = at
        at = mm.ring.next(at)
    acc = gl.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mm.ring.release(last, pred=steps > 0)
    return acc, at


@gl.jit
def pass_over(mm, at, steps):
    """The place behind `steps` K steps from `at` on, which a multiplier leaves out."""
    for step in range(0, steps):
        mm.ring.consumer_wait(at)
        mm.ring.release(at)
        at = mm.ring.next(at)
    return at
