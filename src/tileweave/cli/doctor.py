"""`tileweave doctor`: what this machine has, which worlds work on it and why not, what to install."""

import ctypes
import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import torch
import torch.distributed as dist

from tileweave import __version__
from tileweave.fabric import cuda_refusal
from tileweave.lang import HAS_TRITON

# What the environment may say against NVLink multicast.
_MULTICAST_OFF = (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"))


def examine() -> dict[str, Any]:
    """Everything `tileweave doctor` reports, as plain values: launches nothing and allocates nothing on a GPU."""
    gpus = _gpus()
    return {
        "version": __version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'}",
        "triton": _triton(),
        "cuda_driver": _driver_version(),
        "cuda_bindings": _version_of("cuda-bindings"),
        "gpus": gpus,
        "peer_access": _peer_access(len(gpus)),
        "multicast": _multicast(),
        "backends": _backends(),
        "advice": _advice(gpus),
    }


def _triton() -> str | None:
    """The version that is imported: distributions of other names carry the same module."""
    return import_module("triton").__version__ if HAS_TRITON else None


def _version_of(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    """The newest CUDA that the driver supports, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "sms": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30),
            }
        )
    return found


def _peer_access(count: int) -> list[list[bool]]:
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]


def _multicast() -> dict[str, Any]:
    for name, off in _MULTICAST_OFF:
        if os.environ.get(name) == off:
            return {"allowed": False, "reason": f"{name}={off} in the environment"}
    return {"allowed": True, "reason": "the environment does not forbid it; used only where the fabric offers it"}


def _backends() -> dict[str, dict[str, Any]]:
    obstacle = cuda_refusal("cuda")
    sharing = "several ranks on one GPU, a stream and a share of its SMs each"
    missing = "fused kernels across processes are not written yet; ranks under torchrun fall back"
    collectives = [name for name in ("nccl", "gloo") if dist.is_available() and dist.is_backend_available(name)]
    return {
        "emulated": _state(True, "the device code, tile by tile, on the CPU"),
        "virtual": _state(obstacle is None, obstacle or sharing),
        "processes": _state(False, missing),
        "fallback": _state(bool(collectives), f"torch.distributed with {' and '.join(collectives) or 'none'}"),
    }


def _state(works: bool, reason: str) -> dict[str, Any]:
    return {"works": works, "reason": reason}


def _advice(gpus: list[dict[str, Any]]) -> list[str]:
    advice = []
    if _driver_version() and not torch.version.cuda:
        advice.append("there is an NVIDIA driver, but this PyTorch is a CPU build: pip install --force-reinstall torch")
    if gpus and not HAS_TRITON:
        advice.append("kernels need Triton to run on the GPU: pip install 'triton>=3.6'")
    if gpus and _version_of("cuda-bindings") is None:
        advice.append("peer memory between processes needs cuda-bindings: pip install cuda-bindings")
    return advice
