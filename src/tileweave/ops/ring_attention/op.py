"""ring_attention: what users call."""

import torch

from tileweave.fabric import fabric_of, group_name
from tileweave.ops.contract import Like, Site
from tileweave.ops.registration import is_plain
from tileweave.ops.ring_attention.check import check_kinds, settle
from tileweave.ops.ring_attention.operator import OPERATOR, run
from tileweave.ops.route import Route
from tileweave.ops.sequence.contract import check_words
from tileweave.planner import Plan


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group=None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    placement: str = "contiguous",
    return_lse: bool = False,
    plan: Plan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys and values of all ranks, whose shards pass by.

    Args:
        q: this rank's tokens, `[B, H, S / world, D]` in layout "bhsd", `[B, S / world, H, D]` in "bshd"; bfloat16,
            float16, float32 or float64, any strides. All sizes are the same on every rank.
        k, v: likewise with G heads, H a multiple of G (grouped and multi-query heads: only the G real ones travel), and
            T / world tokens. T may differ from S unless `causal`.
        group: a ProcessGroup, a 1-D DeviceMesh, the group that `virtual_world` hands out, or None: the thread's
            virtual world, else torch.distributed's WORLD, else a world of one.
        cu_seqlens: of several sequences packed one behind the other, in a batch of one: int32 `[n + 1]` on q's device,
            the same on every rank, from 0 to the length of the whole: sequence i is the tokens `cu_seqlens[i]` to
            `cu_seqlens[i + 1] - 1`, which see each other only. A rank has its shard of the whole, as without, and k as
            many tokens as q. On a GPU the values are trusted except in debug mode, as reading them would wait for it.
        causal: a token sees those up to itself in the whole sequence.
        scale: of the scores before the softmax; None: 1 / sqrt(D).
        layout: of q, k, v and the result.
        placement: which tokens a rank has: "contiguous" or "zigzag", as `tileweave.place_sequence` cuts them. Zigzag
            gives all ranks the same work under a causal mask; a rank's number of tokens must be even then.
        return_lse: also return the log-sum-exp of the scores.
        plan: a `Plan` to use instead of the planner's, the same on all ranks. Its tile is (queries, keys, D padded to
            64, 128 or 256, by "tcgen05" 64 or 128), its schedule "inter_sm": `comm_sms` SMs push this rank's k and v to
            the peers while the others attend, to own keys first. One kernel; the keys of all peers are in the workspace
            meanwhile, twice. With "two_blocks" only those of two blocks of heads are, together as many as two ranks
            have, or of one head each where k has fewer heads than there are peers; the planner takes it where all would
            be more than 16 GiB.

    Returns:
        `out`, shape, dtype and layout of q, a fresh contiguous tensor, ready on the current stream; with `return_lse` a
        pair of that and `lse` `[B, H, S / world]`, the natural log, float32 (float64 of float64). Scores, sums and the
        merging of blocks are in float32. A token that sees nothing (T = 0) has out 0 and lse -inf.

    The kernel takes bfloat16 and float16, D a multiple of 8 up to 256 (128 on Blackwell) and a positive scale; strides
    that TMA takes (the last 1, the others multiples of 16 bytes) cost no copy. Anything else, and where the fabric does
    not allow it (`explain` says why): keys and values go round by torch.distributed, at most two blocks beyond the own
    one, each travelling while the one before it is used by PyTorch's own attention; on virtual and emulated ranks, and
    GPUs without NCCL, all blocks are gathered first.

    It is the registered operator `torch.ops.tileweave.ring_attention` behind a function that resolves defaults:

    - Gradients of q, k and v exist, none through lse. The backward pass is a collective, so every rank must run it, and
      on all or none some input must require a gradient. Keys and values go round once more and their gradients, in
      float32, with them; the local part is PyTorch's flash or cuDNN kernel on CUDA, a launch for each packed sequence,
      whose ends the host waits for. No second derivatives.
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
    options = causal, scale, layout, placement
    check_kinds(q, k, v, cu_seqlens, causal, scale, plan, return_lse)
    check_words("ring_attention", layout=layout, placement=placement)
    if is_plain(q, k, v, cu_seqlens):
        out, lse = run(fabric_of(group, q.device), q, k, v, cu_seqlens, *options, plan)
    else:
        text = "" if plan is None else plan.to_json()
        out, lse = OPERATOR(q, k, v, cu_seqlens, group_name(group), *options, text)
    return (out, lse) if return_lse else out


def route(
    q, k, v, group=None, *, cu_seqlens=None, causal=False, scale=None, layout="bhsd", placement="contiguous",
    return_lse=False, plan=None,
) -> Route:  # fmt: skip
    """What `ring_attention` would do with these arguments; launches nothing, raises what it would raise."""
    check_kinds(q, k, v, cu_seqlens, causal, scale, plan, return_lse)
    check_words("ring_attention", layout=layout, placement=placement)
    like = Like.autocast(q), Like.autocast(k), Like.autocast(v), Like.of(cu_seqlens)
    return settle(Site.of(fabric_of(group, q.device)), *like, causal, scale, layout, placement, plan)[1]
