"""What a device is refused for, on any machine: PyTorch's answers are replaced."""

import pytest
import torch

from tileweave import lang
from tileweave.fabric import _alone, cuda_refusal, virtual_world


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
        ("NVIDIA B200", (10, 0), "sm_100"),
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
