"""Small kernels beside which a copy engine works."""

from tileweave import lang as gl


@gl.jit
def takes(rank, W: gl.constexpr, inbox, out, flags_ptr, stride, expected, count, WAITS: gl.constexpr, N: gl.constexpr):
    """Wait for this rank's first `count` flags, then read what has been copied into its inbox."""
    flags = gl.Flags(flags_ptr, stride, rank, W, 1000)
    if WAITS:
        gl.wait_all(flags, 0, count, expected)
    i = gl.arange(0, N, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + rank * N + i, gl.load(inbox + rank * N + i))


@gl.jit
def fills(rank, x, value, N: gl.constexpr):
    """This rank's row of x."""
    i = gl.arange(0, N, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x + rank * N + i, i * 0 + value)
