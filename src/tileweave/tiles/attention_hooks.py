"""Defaults of the attention template's hooks: what a kernel says whose ends are local, and ends that most kernels share."""

from tileweave import lang as gl


@gl.jit
def one_segment(work, row):
    """SEGMENTS of a kernel whose K and V lie in one piece."""
    return 1


@gl.jit
def nothing_before_q(work, batch, head, row, known):
    """BEFORE_Q of a kernel whose queries are local."""
    return known == known, known


@gl.jit
def nothing_before_kv(work, batch, head, source, known):
    """BEFORE_KV of a kernel whose K and V are local."""
    return known == known, known


@gl.jit
def load_q(work, buf, bar, batch, head, row, there):
    """LOAD_Q from `q_desc` [batch, heads, rows, D]."""
    gl.tma_load(work.attention.q_desc, [batch, head, row, 0], bar, buf)


@gl.jit
def load_kv(work, buf, bar, IS_V: gl.constexpr, batch, head, source, row, there):
    """LOAD_KV from `k_desc` and `v_desc` [batch, heads of K and V, rows, D]."""
    att = work.attention
    if IS_V:
        gl.tma_load(att.v_desc, [batch, head // att.group, row, 0], bar, buf)
    else:
        gl.tma_load(att.k_desc, [batch, head // att.group, row, 0], bar, buf)


@gl.jit
def normalize(work, o, peak, total, MINE: gl.constexpr, batch, head, row, LAYOUT: gl.constexpr):
    """EPILOGUE: O divided by the sums; 0 for rows that saw nothing."""
    return o * gl.where(total == 0.0, 0.0, 1.0 / total)[:, None]


@gl.jit
def log_sum_exp(work, peak, total):
    """Natural logarithm of the sums of exponentials; -inf for rows that saw nothing."""
    log2 = gl.where(total == 0.0, float("-inf"), peak * work.attention.scale + gl.log2(total))
    return log2 * 0.6931471805599453


@gl.jit
def nothing_at_the_end(work):
    """END of a kernel whose results stay where they are."""
    pass


@gl.jit
def no_communicator(work):
    """COMMUNICATE of a kernel without communicator CTAs."""
    pass
