"""Small kernels that wait for their peers, for the tests of worlds."""

from tileweave import lang as gl


@gl.jit(do_not_specialize=["rank", "stride", "timeout_us", "epoch", "silent"])
def meet_kernel(rank, flags_ptr, stride, timeout_us, epoch, silent, out, WORLD: gl.constexpr):
    """Every CTA signals all ranks (those of rank `silent` do not), then waits for all; out[CTA]: whether all came."""
    flags = gl.Flags(flags_ptr, stride, rank, WORLD, timeout_us)
    if rank != silent:
        gl.signal_all(flags, rank, epoch)
    met = epoch == epoch
    for peer in range(WORLD):
        met = met & gl.wait(flags, peer, epoch)
    gl.atomic_xchg(out + gl.program_id(0), gl.where(met, 1, 0))


@gl.jit(do_not_specialize=["rank", "stride", "timeout_us", "box_stride"])
def pass_on_kernel(rank, flags_ptr, stride, timeout_us, state, boxes, box_stride, out, WORLD: gl.constexpr):
    """One CTA: leave 100 * epoch + rank in the next rank's box, then copy one's own to `out` and advance the epoch."""
    flags = gl.Flags(flags_ptr, stride, rank, WORLD, timeout_us)
    epoch = gl.load(state) + 1
    slot = epoch & 1
    gl.atomic_xchg(boxes + ((rank + 1) % WORLD).to(gl.int64) * box_stride + slot, 100 * epoch + rank, scope="sys")
    gl.barrier()
    gl.signal_all(flags, rank, epoch)
    for peer in range(WORLD):
        gl.wait(flags, peer, epoch)
    gl.atomic_xchg(out, gl.atomic_add(boxes + rank.to(gl.int64) * box_stride + slot, 0, scope="sys"))
    gl.atomic_xchg(state, epoch)
