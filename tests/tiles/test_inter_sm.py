"""The inter-SM schedule of the matmul template: communicator CTAs, a wait before a load, own rows first."""

import pytest
import torch

import tileweave as tw
from tests.ops.problems import operands
from tests.tiles.all_gather import all_gather_matmul
from tests.tiles.kernels import all_gather_matmul as source
from tests.tiles.mutants import mutant
from tileweave.emulator import RaceError
from tileweave.fabric import fabric_of
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance

ROWS, N, K = 136, 136, 200  # no tile divides them; a communicator's ring of three wraps, and so does a loader's
CALLS = 3  # as slots alternate, the third is the first that overwrites one


def run(world, calls, **options):
    """The results of all ranks by call. No rank waits for the others between its calls."""

    def rank_program(rank, group):
        fabric = fabric_of(group)
        return [all_gather_matmul(fabric, a[rank], b[rank], **options) for a, b in calls]

    return list(zip(*world.run(rank_program), strict=True))


def problem(world, *shapes, device="cpu"):
    """Fresh operands for each call: of these shapes (rows, N, K) in turn."""
    shapes = shapes or [(ROWS, N, K)] * CALLS
    return [operands(world, *shape, seed=i, b_t=False, device=device)[:2] for i, shape in enumerate(shapes)]


def assert_right(results, calls):
    """All ranks' results of all calls are near the float32 product of the gathered rows."""
    for outs, (a, b) in zip(results, calls, strict=True):
        whole = torch.cat(a).float()
        for out, mine in zip(outs, b, strict=True):
            assert relative_error(out, whole @ mine.float()) <= tolerance(out.dtype, 1, True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_calls_back_to_back_under_several_schedules(ranks):
    calls = problem(ranks)
    for seed in range(4):
        with tw.virtual_world(ranks, device="cpu", seed=seed) as world:
            assert_right(run(world, calls), calls)


@pytest.mark.parametrize("delayed", [0, 1])
def test_other_rows_and_sizes_than_the_slots_were_made_for(delayed):
    """Slots of calls of different shapes lie apart, though a peer is a call behind (flux #17: another M)."""
    calls = problem(2, (264, 64, 136), (8, 72, 520), (136, 64, 64), (8, 8, 8), (256, 72, 136), (1, 64, 640))
    for seed in range(3):
        with tw.virtual_world(2, device="cpu", seed=seed, delayed=(delayed,)) as world:
            assert_right(run(world, calls), calls)


MUTANTS = {
    "flag raised when the stores have been read": ("    gl.store_wait(0)\n", ""),
    "flag raised by the first communicator": ("== mm.COMM_SMS - 1:", "== 0:"),
    "loads without a proxy fence after the wait": ("    gl.fence_proxy_async()\n", ""),
    "one slot for all calls": ("(epoch & 1) * slot_rows", "(epoch & 0) * slot_rows"),
    "a buffer refilled while a broadcast reads it": ("(mm.ring.STAGES - 2) *", "(mm.ring.STAGES - 1) *"),
    "waits for its own rows only": ("gl.wait(work.flags, owner, ", "gl.wait(work.flags, work.flags.rank, "),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_noticed(name, tmp_path):
    kernel = mutant(source, *MUTANTS[name], tmp_path).all_gather_matmul_kernel
    with pytest.raises(RaceError):
        for seed in range(8):
            with tw.virtual_world(2, device="cpu", seed=seed) as world:
                run(world, problem(2), kernel=kernel)


@pytest.mark.gpu
def test_on_virtual_ranks_of_a_gpu():
    calls = problem(4, *[(520, 776, 520)] * 3, (1000, 264, 136), (8, 776, 1032), device="cuda")
    with tw.virtual_world(4, device="cuda", timeout=5.0) as world:
        assert_right(run(world, calls, grid=world.sms), calls)
