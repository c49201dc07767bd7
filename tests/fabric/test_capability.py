"""What a device is refused for, on any machine: PyTorch's answers are replaced."""

import pytest
import torch

from tileweave import Plan, lang
from tileweave.fabric import _alone, cuda_refusal, virtual_world
from tileweave.fabric.capability import tensor_cores
from tileweave.fabric.processes import Facts, ProcessFabric
from tileweave.ops.all_gather_matmul import check as gather
from tileweave.ops.contract import Like, Site, coreless, out_of_reach
from tileweave.ops.grouped_matmul import check as grouped
from tileweave.ops.matmul_all_reduce import check as reduce
from tileweave.ops.matmul_reduce_scatter import check as scatter
from tileweave.ops.moe import check as moe
from tileweave.ops.moe.routing import Experts
from tileweave.ops.ring_attention import check as ring
from tileweave.ops.ulysses_attention import check as ulysses
from tileweave.planner.tiling import CORES


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes PyTorch tell of one GPU of a name and a capability."""

    def pretend(name, capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize(
    ("name", "capability", "architecture"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "sm_80"),
        ("NVIDIA L40S", (8, 9), "sm_89"),
        ("NVIDIA B300", (10, 3), "sm_103"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "sm_120"),
    ],
)
def test_another_architecture_is_refused_by_name(gpu, name, capability, architecture):
    """Kernels for sm_90a run on nothing else, newer GPUs included (pytorch #162917: garbage instead of a refusal)."""
    gpu(name, capability)
    assert cuda_refusal("cuda:0") == f"{name} is {architecture}, not sm_90 (Hopper)"
    with pytest.raises(RuntimeError, match=f"{name} is {architecture}.*device='cpu' emulates them"):
        virtual_world(2, "cuda")
    assert virtual_world(2).backend == "emulated"


@pytest.mark.parametrize("said", ["", "1", "sm90"])
def test_blackwell_is_refused_unless_the_environment_says_to_try_it(gpu, monkeypatch, said):
    gpu("NVIDIA B200", (10, 0))
    monkeypatch.setattr(lang, "HAS_TRITON", True)
    monkeypatch.setenv("TILEWEAVE_EXPERIMENTAL", said)
    assert cuda_refusal("cuda:0") == (
        "NVIDIA B200 is sm_100, not sm_90 (Hopper); TILEWEAVE_EXPERIMENTAL=sm100 tries kernels that have never run on "
        "such a GPU" + (f" ({said!r}, as it is, means nothing)" if said else "")
    )
    monkeypatch.setenv("TILEWEAVE_EXPERIMENTAL", "sm100")
    assert cuda_refusal("cuda:0") is None and tensor_cores(torch.device("cuda:0")) == ("tcgen05",)


def test_the_environment_lets_no_other_architecture_in(gpu, monkeypatch):
    gpu("NVIDIA GeForce RTX 5090", (12, 0))
    monkeypatch.setenv("TILEWEAVE_EXPERIMENTAL", "sm100")
    assert cuda_refusal("cuda:0") == "NVIDIA GeForce RTX 5090 is sm_120, not sm_90 (Hopper)"


def site(cores):
    """A rank of four, on a GPU."""
    return Site("virtual", 4, 132, torch.device("cuda", 0), None, cores=cores)


def routes(cores):
    """Paths of ops on such a GPU."""
    gpu = torch.device("cuda", 0)
    a, b = (Like(torch.Size((512, 512)), torch.bfloat16, gpu) for _ in range(2))
    q = Like(torch.Size((1, 8, 512, 128)), torch.bfloat16, gpu)
    w = Like(torch.Size((8, 512, 512)), torch.bfloat16, gpu)
    return {
        "matmul_reduce_scatter": scatter.settle(site(cores), a, b, "sum", None, False, None, None, 0)[1],
        "matmul_all_reduce": reduce.settle(site(cores), a, b, None, None, None, reduce.Options(False, 1e-6, 0), None)[
            1
        ],
        "all_gather_matmul": gather.settle(site(cores), a, (b,), (), False, None, 0)[1],
        "ring_attention": ring.settle(site(cores), q, q, q, None, True, None, "bhsd", "contiguous", None)[1],
        "ulysses_attention": ulysses.settle(site(cores), q, q, q, None, True, None, "bhsd", None)[1],
        "grouped_matmul": grouped.choose(site(cores), grouped.Call(torch.bfloat16, 512, 8, 512, 512), gpu, None),
        "moe_dispatch_matmul": moe.choose(site(cores), w, False, Experts(32, 4), None, None),
        "gated moe_dispatch_matmul": moe.choose(site(cores), w, True, Experts(32, 4), None, None),
        "moe_matmul_combine": moe.choose_combine(
            site(cores), 512, w, moe.combine_problem_of(site(cores), w, 32, 512, 2), None
        ),
    }


@pytest.mark.parametrize("core", ["wgmma", "tcgen05"])
def test_a_plan_has_the_core_that_there_is(core):
    for op, route in routes((core,)).items():
        assert route.fused and route.plan.core == core, op


def test_a_plan_of_another_core_is_refused():
    with pytest.raises(ValueError, match=r"plan\.core='wgmma': the kernel has 'tcgen05' here"):
        gpu = torch.device("cuda", 0)
        a, b = (Like(torch.Size((512, 512)), torch.bfloat16, gpu) for _ in range(2))
        scatter.settle(site(("tcgen05",)), a, b, "sum", None, False, None, Plan(), 0)


def test_what_only_hopper_multiplies_falls_back():
    assert coreless(("wgmma",), ("tcgen05",)) == "the kernel multiplies by wgmma, this GPU by tcgen05"
    assert coreless((), ("tcgen05",)) is None and coreless(("wgmma", "tcgen05"), ("tcgen05",)) is None
    gpu = torch.device("cuda", 0)
    assert (
        out_of_reach(site(("tcgen05",)), gpu, cores=("wgmma",)) == "the kernel multiplies by wgmma, this GPU by tcgen05"
    )
    assert out_of_reach(site(("tcgen05",)), gpu, cores=()) is None


def test_ranks_on_gpus_of_two_kinds_fall_back():
    facts = [
        Facts(None, None, "machine", f"gpu {i}", 1.0, None, False, None, [core], 1) for i, core in enumerate(CORES)
    ]
    why = "the ranks' GPUs are of several kinds, which multiply by tcgen05 and wgmma; a group has one"
    assert ProcessFabric._disagreement(facts) == why
    assert ProcessFabric._disagreement(facts[:1] * 2) is None


def test_hopper_is_refused_only_without_triton(gpu, monkeypatch):
    gpu("NVIDIA H200", (9, 0))
    monkeypatch.setattr(lang, "HAS_TRITON", True)
    assert cuda_refusal("cuda:0") is None
    monkeypatch.setattr(lang, "HAS_TRITON", False)
    assert cuda_refusal("cuda:0") == "Triton is not installed"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_no_gpu_is_refused(device):
    assert cuda_refusal(device) == f"{device} is no CUDA device"


def test_a_process_alone_on_another_architecture_falls_back(gpu):
    gpu("NVIDIA B200", (10, 0))
    made = _alone.__wrapped__(torch.device("cuda:0"))  # without its cache, which other tests read
    assert made.backend == "fallback" and made.refusal().startswith("NVIDIA B200 is sm_100, not sm_90 (Hopper)")
