"""The roles of a CTA of the attention template: by wgmma, or by tcgen05 where a query's boxes have the rows of its consumers."""

from tileweave import lang as gl
from tileweave.tiles.attention import TENSOR_ROWS, consume_role, load_role, store_role
from tileweave.tiles.attention_tcgen05 import issue_role, make_products, weigh_role


@gl.jit
def run_attention(
    work, LOCATE: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT: gl.constexpr, BEFORE_Q: gl.constexpr,
    LOAD_Q: gl.constexpr, BEFORE_KV: gl.constexpr, LOAD_KV: gl.constexpr, EPILOGUE: gl.constexpr, STORE: gl.constexpr,
    END: gl.constexpr, COMMUNICATE: gl.constexpr,
):  # fmt: skip
    """Run the roles. A consumer of 64 rows needs 232 registers for O, S and P of 128 columns, which leaves 40 for each
    thread of the worker warps. By tcgen05 it needs fewer, as it has S and P alone, and there are more warps."""
    CONSUMERS: gl.constexpr = work.attention.CONSUMERS
    if gl.program_id(0) < work.attention.COMM_SMS:
        COMMUNICATE(work)
    elif work.attention.ROWS == TENSOR_ROWS:
        products = make_products(work.attention)
        if CONSUMERS == 1:
            gl.warp_specialize(
                [
                    (weigh_role, (work, products, 0, LOCATE, SEGMENTS, SEGMENT, EPILOGUE)),
                    (load_role, (work, LOCATE, SEGMENTS, SEGMENT, BEFORE_Q, LOAD_Q, BEFORE_KV, LOAD_KV)),
                    (issue_role, (work, products, 0, LOCATE, SEGMENTS, SEGMENT)),
                    (store_role, (work, 0, LOCATE, STORE, END)),
                ],
                [1, 1, 1],
                [64, 64, 64],
            )
        else:
            gl.warp_specialize(
                [
                    (weigh_role, (work, products, 0, LOCATE, SEGMENTS, SEGMENT, EPILOGUE)),
                    (weigh_role, (work, products, 1, LOCATE, SEGMENTS, SEGMENT, EPILOGUE)),
                    (load_role, (work, LOCATE, SEGMENTS, SEGMENT, BEFORE_Q, LOAD_Q, BEFORE_KV, LOAD_KV)),
                    (issue_role, (work, products, 0, LOCATE, SEGMENTS, SEGMENT)),
                    (issue_role, (work, products, 1, LOCATE, SEGMENTS, SEGMENT)),
                    (store_role, (work, 0, LOCATE, STORE, END)),
                    (store_role, (work, 1, LOCATE, STORE, END)),
                ],
                [4, 1, 1, 1, 1, 1],
                [200, 56, 56, 56, 56, 56],
            )
    elif CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume_role, (work, 0, LOCATE, SEGMENTS, SEGMENT, EPILOGUE)),
                (load_role, (work, LOCATE, SEGMENTS, SEGMENT, BEFORE_Q, LOAD_Q, BEFORE_KV, LOAD_KV)),
                (store_role, (work, 0, LOCATE, STORE, END)),
            ],
            [1, 1],
            [64, 64],
        )
    else:
        gl.warp_specialize(
            [
                (consume_role, (work, 0, LOCATE, SEGMENTS, SEGMENT, EPILOGUE)),
                (consume_role, (work, 1, LOCATE, SEGMENTS, SEGMENT, EPILOGUE)),
                (load_role, (work, LOCATE, SEGMENTS, SEGMENT, BEFORE_Q, LOAD_Q, BEFORE_KV, LOAD_KV)),
                (store_role, (work, 0, LOCATE, STORE, END)),
                (store_role, (work, 1, LOCATE, STORE, END)),
            ],
            [4, 1, 1, 1],
            [232, 40, 40, 40],
        )
