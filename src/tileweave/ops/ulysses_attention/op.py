"""ulysses_attention: what users call."""

from collections.abc import Callable

import torch

from tileweave.fabric import fabric_of, group_name, group_size
from tileweave.ops.contract import Like, Site
from tileweave.ops.registration import is_plain
from tileweave.ops.route import Route
from tileweave.ops.sequence.contract import check_words, likes
from tileweave.ops.ulysses_attention.check import NAME, check, check_kinds, settle
from tileweave.ops.ulysses_attention.launch import with_attention
from tileweave.ops.ulysses_attention.operator import OPERATOR, run
from tileweave.planner import Plan


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group=None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    attention: Callable[..., torch.Tensor] | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys and values of all ranks; each rank computes a share of the heads.

    Args:
        q: this rank's tokens, the r-th of `world` equal pieces of the sequence, `[B, H, S / world, D]` in layout
            "bhsd", `[B, S / world, H, D]` in "bshd"; bfloat16, float16, float32 or float64, any strides. H is a
            multiple of the world size. All sizes are the same on every rank.
        k, v: likewise with G heads, H a multiple of G, and T / world tokens; T may differ from S unless `causal`. G is
            a multiple of the world size, or the world size one of G: then each head goes to several ranks.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        cu_seqlens: of several sequences packed one behind the other, in a batch of one: int32 `[n + 1]` on q's device,
            the same on every rank, from 0 to the length of the whole: sequence i is the tokens `cu_seqlens[i]` to
            `cu_seqlens[i + 1] - 1`, which see each other only. A rank has its shard of the whole, as without, and k as
            many tokens as q. On a GPU the values are trusted except in debug mode, as reading them would wait for it.
        causal: a token sees those up to itself in the whole sequence. All ranks have the same work nevertheless.
        scale: of the scores before the softmax; None: 1 / sqrt(D).
        layout: of q, k, v and the result.
        attention: the attention of a rank's heads to all tokens, in place of the library's:
            `attention(q, k, v, causal=causal, scale=scale)` of q `[B, H / world, S, D]`, k and v with their share of
            the heads, one at least, all in `layout`, returns a tensor like q. Between two all-to-alls; gradients are
            the callable's. `ring_attention` in another group makes the two kinds of sequence parallelism one.
        plan: a `Plan` to use instead of the planner's, the same on all ranks. Its tile is (queries, keys, D padded to
            64 or 128), its schedule "inter_sm": `comm_sms` SMs push q, k and v to the ranks of their heads and bring
            the result's rows from where these have stored them, while the others attend.

    Returns:
        `out`, shape, dtype and layout of q, a fresh contiguous tensor, ready on the current stream. Scores and sums are
        in float32.

    The kernel takes bfloat16 and float16, D a multiple of 8 up to 128 and a positive scale; strides that TMA takes (the
    last 1, the others multiples of 16 bytes) cost no copy. Anything else, and where the fabric does not allow it
    (`explain` says why): q, k and v go to the heads and the result back by `all_to_all`, and PyTorch's own attention is
    between them.

    It is the registered operator `torch.ops.tileweave.ulysses_attention` behind a function that resolves defaults:

    - Gradients of q, k and v exist. The backward pass is a collective, so every rank must run it, and on all or none
      some input must require a gradient. It moves q, k, v and the result once more rather than keeping them twice,
      between NCCL processes some heads while others are worked at; the local part is PyTorch's flash or cuDNN kernel
      on CUDA, a launch for each packed sequence, whose ends the host waits for. No second derivatives.
    - torch.compile traces it without a graph break, whatever the kind of `group`.
    - A CUDA graph can hold it once it has been called with the same arguments but for the data.
    - Under torch.autocast inputs are cast as those of scaled_dot_product_attention.

    Raises:
        ValueError, TypeError: the arguments break the rules above; nothing has been launched.
        RuntimeError: the group's world is not running, or the workspace would have to grow while a CUDA graph is
            being captured.
        FabricTimeout: a peer did not take part within the group's timeout. Where nothing is fused, the process group's
            collective waits as long as it does, for instance NCCL's timeout, and fails in its own way.
    """
    check_kinds(q, k, v, cu_seqlens, causal, scale, plan, attention)
    check_words(NAME, layout=layout)
    if attention is not None:
        name = group_name(group)
        call = check(group_size(name), *likes(q, k, v), causal, scale, layout)
        return with_attention(call, q, k, v, name, attention, scale)
    if is_plain(q, k, v, cu_seqlens):
        return run(fabric_of(group, q.device), q, k, v, cu_seqlens, causal, scale, layout, plan)[0]
    text = "" if plan is None else plan.to_json()
    return OPERATOR(q, k, v, cu_seqlens, group_name(group), causal, scale, layout, text)[0]


def route(
    q, k, v, group=None, *, cu_seqlens=None, causal=False, scale=None, layout="bhsd", attention=None, plan=None
) -> Route:
    """What `ulysses_attention` would do with these arguments; launches nothing, raises what it would raise."""
    check_kinds(q, k, v, cu_seqlens, causal, scale, plan, attention)
    check_words(NAME, layout=layout)
    site = Site.of(fabric_of(group, q.device))
    like = Like.autocast(q), Like.autocast(k), Like.autocast(v), Like.of(cu_seqlens)
    found = settle(site, *like, causal, scale, layout, plan)[1]
    if attention is None:
        return found
    return Route(NAME, site.backend, False, "the caller's attention between two all-to-alls of the group")
