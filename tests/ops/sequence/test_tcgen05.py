# ruff: noqa: E501  (a mutant per row)
"""The attention ops by tcgen05 in emulated worlds: right and clean under several schedules, and some edits are found; those
of the core alone are in tests/ops/attention/test_tcgen05.py."""

import pytest
import torch

import tileweave as tw
from tests.ops.sequence.fused import assert_right, plan, run_calls
from tests.ops.sequence.mutants import judge, put_edited
from tests.ops.sequence.problems import whole
from tileweave.ops.contract import Like, Site
from tileweave.ops.ring_attention import check as ring
from tileweave.ops.ulysses_attention import check as ulysses

RING, ULYSSES = "ring_attention", "ulysses_attention"


def tensor(tile, stages=3, comm_sms=1, **changes):
    """A plan by tcgen05."""
    return plan(tile, stages, comm_sms, core="tcgen05", **changes)


ENDS = torch.tensor([0, 90, 91, 280], dtype=torch.int32)
# op, world, sizes of q and k, options
CALLS = {
    "ring, zigzag": (RING, 2, (1, 2, 1, 2 * 140, 64), dict(causal=True, placement="zigzag", plan=tensor((128, 32, 64)))),
    "ring, contiguous, two consumers": (RING, 3, (1, 3, 3, 3 * 100, 64), dict(causal=True, plan=tensor((256, 64, 64), comm_sms=2))),
    "ring, two blocks": (RING, 3, (1, 3, 3, 3 * 72, 64), dict(plan=tensor((128, 64, 64), schedule="two_blocks"))),
    "ring, packed": (RING, 2, (1, 2, 1, 280, 64), dict(causal=True, cu_seqlens=ENDS, plan=tensor((128, 32, 64)))),
    "Ulysses, causal": (ULYSSES, 2, (1, 4, 2, 2 * 140, 64), dict(causal=True, plan=tensor((128, 128, 64)))),
    "Ulysses, two consumers": (ULYSSES, 3, (1, 3, 3, 3 * 100, 128), dict(plan=tensor((256, 128, 128), comm_sms=2))),
}  # fmt: skip


def calls(name, seed=0):
    """Two calls with new data."""
    op, world, sizes, kw = CALLS[name]
    return op, world, [(whole(*sizes, dtype=torch.bfloat16, seed=2 * seed + i), kw) for i in range(2)]


@pytest.mark.parametrize("name", CALLS)
def test_right_and_clean(name):
    for seed in range(2):
        op, world, made = calls(name, seed)
        with tw.virtual_world(world, device="cpu", seed=seed, sms=3) as w:
            assert_right(run_calls(w, op, made), made)


WAIT = "gl.wait(work.flags, block * work.flags.world + source, work.epoch)"
MUTANTS = {
    "ring: keys not waited for": ("ring, zigzag", [(WAIT, "source >= 0")], "R"),
    "ring: a block less issued": ("ring, zigzag", [("for j in range(1, blocks):\n            v_at", "for j in range(2, blocks):\n            v_at")], "RDPW"),
    "ring: credits before P V has read": ("ring, two blocks", [("    gl.mbarrier_wait(products.added.index(MINE), parity ^ 1)\n    o =", "    o =")], "R"),
    "Ulysses: keys not waited for": ("Ulysses, causal", [(WAIT, "source >= 0")], "R"),
    "Ulysses: rows of 64 counted": ("Ulysses, causal", [("(work.padded // att.ROWS) - 1:", "(work.padded // 64) - 1:")], "D"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    of, edits, expected = MUTANTS[name]
    op, world, made = calls(of)
    put_edited(op, edits, monkeypatch, tmp_path)
    judge(op, [made], expected, world=world)


def settled(op, dim, rows=1024, chosen=None):
    """The route of a call of a rank of four on a GPU that has tcgen05 alone."""
    gpu = torch.device("cuda", 0)
    q = Like(torch.Size((1, 8, rows, dim)), torch.bfloat16, gpu)
    more = ("contiguous",) if op is ring else ()
    return op.settle(
        Site("virtual", 4, 132, gpu, None, cores=("tcgen05",)), q, q, q, None, True, None, "bhsd", *more, chosen
    )[1]


@pytest.mark.parametrize("op", [ring, ulysses])
def test_the_plan_is_of_the_core_that_there_is(op):
    for dim, rows, tile, stages in (
        (128, 1024, (256, 128, 128), 3),
        (40, 1024, (256, 128, 64), 8),
        (64, 128, (128, 128, 64), 8),
    ):
        route = settled(op, dim, rows)
        assert route.fused and (route.plan.core, route.plan.tile, route.plan.stages) == ("tcgen05", tile, stages)
    wide = settled(op, 256)
    assert not wide.fused and "heads have dimension 256, the kernel takes multiples of 8 up to 128" in wide.reason


@pytest.mark.parametrize(
    "op, chosen, message",
    [
        (ring, plan((128, 64, 64)), r"plan\.core='wgmma': ring_attention has 'tcgen05' here"),
        (ring, tensor((64, 64, 64)), r"query rows are 128 or 256, keys 16, 32, 64 or 128, the head dimension 64"),
        (ulysses, tensor((128, 64, 64)), r"plan\.tile=\(128, 64, 64\): ulysses_attention has 128 keys"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(op, chosen, message):
    with pytest.raises(ValueError, match=message):
        settled(op, 64, chosen=chosen)


def test_a_wide_head_is_refused_where_the_emulator_has_both_cores():
    tensors = whole(1, 2, 2, 2 * 8, 256, dtype=torch.bfloat16)
    with (
        tw.virtual_world(2, device="cpu") as w,
        pytest.raises(ValueError, match="heads have dimensions up to 128, not 256"),
    ):
        run_calls(w, RING, [(tensors, dict(plan=tensor((128, 64, 256))))])
