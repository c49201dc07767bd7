"""Problems for the tests of attention: operands in any layout, comparison with the float32 truth."""

import torch

from tileweave.fabric import fabric_of
from tileweave.ops.attention import attention, reference, tolerance
from tileweave.ops.attention.reference import relative_error


def operands(
    batch, heads, kv_heads, rows, cols, dim, seed=0, dtype=torch.bfloat16, layout="bhsd", times=1, device="cpu"
):
    """Fresh random q, k, v in a layout, contiguous; q and k `times` a number: large logits."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for h, s, factor in ((heads, rows, times), (kv_heads, cols, times), (kv_heads, cols, 1)):
        x = (torch.randn(batch, h, s, dim, generator=g) * factor).to(dtype).to(device)
        made.append(x if layout == "bhsd" else x.transpose(1, 2).contiguous())
    return made


def assert_right(result, q, k, v, layout="bhsd", **options):
    """Out and log-sum-exp are near the truth, as a whole and in each row."""
    out, lse = result
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous() and not out.isnan().any()
    if layout == "bshd":
        out, q, k, v = (x.transpose(1, 2) for x in (out, q, k, v))
    truth, true_lse = reference(q, k, v, **options)
    error = relative_error(out, truth)
    assert error <= tolerance(q.dtype), error
    scale = truth.norm(dim=-1)
    apart = (out.float() - truth).norm(dim=-1)
    assert (apart <= 8 * tolerance(q.dtype) * scale.clamp(min=1e-2)).all(), (apart / scale).max()
    assert lse.shape == true_lse.shape and lse.dtype == torch.float32
    assert torch.equal(lse.isinf(), true_lse.isinf()) and (out[lse.isinf()] == 0).all()
    seen = ~true_lse.isinf()
    torch.testing.assert_close(lse[seen], true_lse[seen], rtol=1e-5, atol=1e-4)


def run(world, *calls, **options):
    """The results of several calls, one after the other, of (q, k, v)s in a world of one."""
    return world.run(
        lambda rank, group: [attention(fabric_of(group), *call, return_lse=True, **options) for call in calls]
    )[0]
