"""grouped_matmul on a real GPU."""

import pytest
import torch

import tileweave as tw
from tests.ops.grouped_matmul.test_grouped_matmul import SIZES, WRONG, assert_right, problem
from tileweave import Plan
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance
from tileweave.planner.tiling import TILINGS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_ragged_experts(name, dtype, transposed):
    given = problem(SIZES[name], 200, 520, beyond=7, transposed=transposed, dtype=dtype, device="cuda")
    assert tw.explain("grouped_matmul", *given).fused
    for _ in range(2):
        assert_right(tw.grouped_matmul(*given), *given)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda each: f"{each.tile}, {each.stages}")
def test_tilings(tiling):
    given = problem([1000, 1, 0, 333, 64, 129], 1032, 776, device="cuda")
    plan = Plan(tile=tiling.tile, stages=tiling.stages)
    assert_right(tw.grouped_matmul(*given, plan=plan), *given)


@pytest.mark.parametrize("experts", [8, 128, 512])
def test_random_routing(experts):
    sizes = torch.multinomial(torch.rand(experts) ** 3, 20000, True).bincount(minlength=experts).tolist()
    given = problem(sizes, 512, 1024, device="cuda", transposed=experts == 128)
    assert_right(tw.grouped_matmul(*given), *given)


def test_a_graph_is_replayed_with_other_offsets():
    x, w, offsets = problem([300, 200, 524], 256, 264, device="cuda")
    tw.grouped_matmul(x, w, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.grouped_matmul(x, w, offsets)
    for split in ([0, 0, 1024], [1, 700, 900], [1024, 1024, 1024]):
        offsets.copy_(torch.tensor(split))
        graph.replay()
        assert_right(out, x, w, offsets)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(compiled):
    call = torch.compile(tw.grouped_matmul, fullgraph=True) if compiled else tw.grouped_matmul
    x, w, offsets = problem([300, 0, 200, 37, 0], 256, 264, device="cuda")
    weights = torch.randn(x.shape[0], 264, device="cuda").bfloat16()
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    (call(*leaves, offsets) * weights).sum().backward()
    start, grad_x, grad_w = 0, torch.zeros_like(x).float(), torch.zeros_like(w).float()
    for expert, end in enumerate(offsets.tolist()):
        grad_x[start:end] = weights[start:end].float() @ w[expert].t().float()
        grad_w[expert] = x[start:end].t().float() @ weights[start:end].float()
        start = end
    for leaf, truth in zip(leaves, (grad_x, grad_w), strict=True):
        assert relative_error(leaf.grad, truth) <= tolerance(torch.bfloat16, 1, True)
    assert not leaves[1].grad[1].any()


def test_wrong_offsets_leave_the_context_usable_and_are_told_in_debug_mode(monkeypatch):
    x, w, offsets = problem([40, 10, 10], device="cuda")
    for name, ends in WRONG.items():
        wrong = torch.tensor(ends, dtype=torch.int32, device="cuda")
        monkeypatch.setenv("TILEWEAVE_DEBUG", "0")
        with tw.virtual_world(1, device="cuda") as world:
            world.run(lambda rank, group: tw.grouped_matmul(x, w, wrong))  # noqa: B023
        monkeypatch.setenv("TILEWEAVE_DEBUG", "1")
        if name != "negative":
            with tw.virtual_world(1, device="cuda") as world, pytest.raises(ValueError, match="must not decrease"):
                world.run(lambda rank, group: tw.grouped_matmul(x, w, wrong))  # noqa: B023
    assert_right(tw.grouped_matmul(x, w, offsets), x, w, offsets)


def test_beyond_two_to_the_31_elements():
    """Rows of the result whose place takes 64 bits, stored from registers."""
    x, w, offsets = problem([70001, 12], 64, 32768, device="cuda")
    out = tw.grouped_matmul(x, w, offsets)
    assert (
        relative_error(out[-40:], torch.cat([x[-40:-12].float() @ w[0].float(), x[-12:].float() @ w[1].float()])) < 4e-3
    )
