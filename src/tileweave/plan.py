"""`plan`: what the planner would choose for a shape on a machine, and why, with nothing launched."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tileweave.fabric import MAX_RANKS, fabric_of, local_fabric
from tileweave.fabric.bound import workspace_bound
from tileweave.fabric.capability import BLACKWELL, CORES, refusal_of
from tileweave.ops.contract import Site
from tileweave.ops.plans import FIND, FLOAT8, LOCAL, SIZES, check_dtype, check_shares, check_sizes, rounded
from tileweave.planner import profile
from tileweave.planner.decision import Decision, Question, settle
from tileweave.planner.hardware import H200, SHIPPED, Hardware

META = torch.device("meta")


def plan(
    op: str,
    shape: Mapping[str, int],
    dtype: torch.dtype = torch.bfloat16,
    group=None,
    *,
    gpu: str | None = None,
    ranks: int | None = None,
) -> Decision:
    """What the planner chooses for a call, what comes next, and what it rejects, each with its reason in numbers.

    Args:
        op: the name of any op but `moe_combine`, which is PyTorch's sums and an all_to_all.
        shape: sizes of the whole problem, of which each rank has its share: m, n, k of the whole product; batch, heads,
            kv_heads, seq, dim and causal (0 or 1; a ring then has its pieces in zigzag); tokens, hidden, inner,
            experts, topk; rows, hidden, inner, experts of one rank's grouped_matmul; m, n of what a collective gathers,
            sums, or cuts by columns. What is left out has a default, rounded up so that the
            ranks can share it.
        dtype: torch.bfloat16 or torch.float16, of the operands; torch.float8_e4m3fn with one scale each of
            matmul_reduce_scatter and all_gather_matmul, with scales of blocks (mxfp8) of matmul_all_reduce, without any
            of all_gather and all_to_all.
        group: the ranks of a call, as the op takes it: the plan is then that of a call of this rank. Not with `ranks`.
        gpu: a profile that ships, "h100", "h200", "b200" or "gb200-nvl72", or the file of one that `tileweave probe`
            wrote; None: that of this machine's GPU, or "h200", also with a group, as ops plan for an H200. Without a
            group, plans are for the tensor cores of that GPU, and TILEWEAVE_EXPERIMENTAL counts as if it ran there.
        ranks: how many, all joined by links; None, without a group: as many as the profile has. If there are more than
            links join, no kernel can run, and the plain way is all there is.

    Returns:
        A `Decision`: `verdict`, what the op's own route is, "fused", "plain" (torch's product and NCCL are predicted
        to be faster), "composed" (over several nodes) or "fallback" (no kernel can serve it), and the `reason`; `plan`,
        `runner_up` and `rejected`, plans with `predicted_us` in microseconds and a `reason`; `cost`, the terms of the
        prediction; `to_dict()`. The plain way is a candidate where NCCL joins the ranks and the profile says what it
        takes, and has the mechanism "nccl". In a fallback `plan` is None, or the plain way where that is what the op
        falls back to. `unmeasured`: why the predictions rest on no measurement of a kernel, if so; `untried`: on a
        Blackwell GPU without TILEWEAVE_EXPERIMENTAL, what there would be with it. `workspace_bytes`: of the plan's
        slots on each rank; plans with more than the GPU has, or TILEWEAVE_WORKSPACE allows, are rejected for that
        reason, and what the op takes all the same tells of it. Nothing is launched.

    Raises:
        ValueError, TypeError: an unknown op, size, dtype or profile, or sizes that break the op's contract.
    """
    sizes = check_sizes("plan", op, shape, SIZES)
    check_dtype("plan", op, dtype, FLOAT8)
    if group is not None and ranks is not None:
        raise ValueError(f"plan: ranks={ranks} goes without a group, which has its own")
    if gpu is not None and not isinstance(gpu, str):
        raise TypeError(f"plan: gpu must be the name of a profile or of a file, got {gpu!r}")
    hardware = profile(gpu if gpu is not None else here() if group is None else H200.name)
    site = _site(op, group, hardware, ranks)
    hardware = site.on(hardware)
    sizes = rounded(op, sizes, shape, site.world)
    check_shares("plan", op, sizes, site.world)
    name = str(dtype).removeprefix("torch.")
    asked = Question(op, hardware, site.world, sizes, name, site.sms or hardware.sms, workspace_bound())

    def decide(site: Site) -> Decision:
        return settle(asked, FIND[op](op, site, sizes, dtype, hardware))

    refusal = refusal_of(hardware.gpu, hardware.of_capability) if group is None and site.refusal is None else None
    if refusal is None:
        return decide(site)
    untried = decide(site) if hardware.of_capability == BLACKWELL else None
    return replace(decide(site._replace(refusal=refusal)), untried=untried)


def here() -> str:
    """The name of the profile of this machine's first GPU; that of an H200 where it is no other that ships."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((each for each in reversed(SHIPPED) if each.split("-")[0] in name), "h200")


def _site(op: str, group: Any, hardware: Hardware, ranks: int | None) -> Site:
    """Where the call would run: in a group, or on so many GPUs of a profile, joined by links and NCCL."""
    if group is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Site.of(local_fabric(device) if op in LOCAL else fabric_of(group, device))
    ranks = (1 if op in LOCAL else hardware.ranks) if ranks is None else ranks
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"plan: ranks must be an int, got {ranks!r}")
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"plan: ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    beyond = f"{ranks} ranks are more than the {hardware.ranks} that links join, so no kernel reaches all"
    refusal = beyond if ranks > hardware.ranks else None
    unicast = None if hardware.multicast else "the profile has no multicast"
    several, cores = ranks > 1, (CORES.get(hardware.of_capability, "wgmma"),)
    return Site("processes", ranks, hardware.sms, META, refusal, unicast, linked=several, nccl=several, cores=cores)
