"""Every op and schedule with slots and ranks 64 GiB and more apart, and flags that pass the end of their 32 bits.

The arena is a sparse file: only what is touched takes memory. A kernel that works a place out in 32 bits ends up in
another rank's slot, or in none.
"""

import pytest
import torch

import tileweave as tw
from tileweave.checker.problems import PROBLEMS
from tileweave.checker.setups import setups
from tileweave.fabric.base import HEADER_WORDS
from tileweave.fabric.workspace import Workspace
from tileweave.ops.collectives.launch import CHANNEL as COLLECTIVES
from tileweave.ops.collectives.launch import STEPS as COLLECTIVE_STEPS
from tileweave.ops.matmul_reduce_scatter import relative_error
from tileweave.ops.moe.kernel import STEPS as DISPATCH_STEPS

FAR = 36 << 30  # bytes of a slot: beyond 2**31 lines of 16 bytes, and so beyond 2**32 bytes and 2**31 elements
RANKS = 2
SIZES = {
    "m": RANKS * 16, "n": 72, "k": RANKS * 64, "heads": 2, "kv_heads": 2, "seq": RANKS * 16, "dim": 64, "tokens": 8,
    "hidden": 64, "inner": 64, "experts": 4, "topk": 2,
}  # fmt: skip
FLAGS_PER_CALL = {"moe_dispatch_matmul": DISPATCH_STEPS.value, COLLECTIVES: COLLECTIVE_STEPS}  # by channel; others: 1
ALONE = ("attention", "grouped_matmul")  # they use no slots and no flags
CASES = [(op, case) for op in PROBLEMS if op not in ALONE for case in setups(op) if "split" not in case.variants]


@pytest.fixture
def far(monkeypatch, tmp_path):
    """Slots of `FAR` bytes, whatever is asked for."""

    def arena(workspace, size, old):
        if old is not None:
            return old
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        with path.open("wb") as file:
            file.truncate(workspace.world * 2 * FAR)
        whole = torch.from_file(str(path), shared=True, size=workspace.world * 2 * FAR, dtype=torch.uint8)
        return whole.view(workspace.world, 2 * FAR)

    monkeypatch.setattr(Workspace, "_arena", arena)


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{name}" for op, case in CASES for name in case.variants])
def test_places_and_flags(op, case, far):
    problem, (options,) = PROBLEMS[op], case.variants.values()
    sizes = {name: SIZES[name] for name in case.sizes}
    if options.get("scaled") in ("mxfp8", "nvfp4"):
        sizes["m"] = RANKS * 128  # whose scales lie together
    calls = [problem.operands(sizes, RANKS, call) for call in range(3)]

    def run(world, *which):
        return world.run(lambda rank, group: [problem.call(calls[i][rank], group, **options) for i in which])

    with tw.virtual_world(RANKS, device="cpu", sms=case.sms) as world:
        run(world, 0)  # so that there are flags
        for channel, shared in world.workspace.ops.items():
            shared.state[:, 0] = -1
            shared.flags[:, HEADER_WORDS:] = -FLAGS_PER_CALL.get(channel, 1)
        results = run(world, 1, 2)  # epochs 0 and 1: in both slots
        assert all((shared.state[:, 0] >= 1).all() for shared in world.workspace.ops.values())
    for at, call in enumerate((1, 2)):
        for rank, truth in enumerate(problem.truth(calls[call], options)):
            for got, true in zip(results[rank][at], truth, strict=True):
                assert relative_error(got, true) <= max(problem.tolerance(RANKS, False), 1e-6)
