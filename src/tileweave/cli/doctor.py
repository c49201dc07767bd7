"""`tileweave doctor`: what this machine has, which worlds work on it and why not, and what more would need."""

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from tileweave import __version__
from tileweave.cli import probe
from tileweave.fabric import cuda_refusal
from tileweave.fabric.capability import EXPERIMENTAL, TRIED, multicast_forbidden
from tileweave.fabric.processes import process_refusal
from tileweave.lang import HAS_TRITON


def examine() -> dict[str, Any]:
    """Everything `tileweave doctor` reports, as plain values: launches nothing and allocates nothing on a GPU."""
    gpus = probe.gpus()
    count = len(gpus)
    access, handles = probe.peer_access(count), probe.handles(count)
    return {
        "version": __version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'}",
        "triton": _triton(),
        "nccl": _nccl(),
        "cuda_bindings": _version_of("cuda-bindings"),
        "cuda_driver": probe.cuda_version(),
        "driver": probe.driver_version(),
        "gpus": gpus,
        "peer_access": access,
        "peers": probe.peers(count),
        "links": probe.links(count),
        "handles": handles,
        "multicast": {**probe.multicast_offered(count), **_multicast_allowed()},
        "backends": _backends(access, handles),
        "advice": _advice(gpus, access),
    }


def _triton() -> str | None:
    """The version that is imported: distributions of other names carry the same module."""
    return import_module("triton").__version__ if HAS_TRITON else None


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_available() and dist.is_nccl_available() else None


def _version_of(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def _multicast_allowed() -> dict[str, Any]:
    forbidden = multicast_forbidden()
    return {"allowed": forbidden is None, "reason": forbidden or "the environment does not forbid it"}


def _backends(access: list[list[bool]], handles: dict[str, Any]) -> dict[str, dict[str, Any]]:
    obstacle = cuda_refusal("cuda")
    sharing = "several ranks on one GPU, a stream and a share of its SMs each"
    collectives = [name for name in ("nccl", "gloo") if dist.is_available() and dist.is_backend_available(name)]
    return {
        "emulated": _state(True, "the device code, tile by tile, on the CPU"),
        "virtual": _state(obstacle is None, obstacle or sharing),
        "processes": _processes(access, handles),
        "fallback": _state(bool(collectives), f"torch.distributed with {' and '.join(collectives) or 'none'}"),
    }


def _processes(access: list[list[bool]], handles: dict[str, Any]) -> dict[str, Any]:
    """Whether processes can run fused kernels together. Facts that are unknown are no obstacle: a group's first use
    tries."""
    count = len(access)
    refusals = [(index, process_refusal(torch.device("cuda", index))) for index in range(count)]
    obstacles = [f"GPU {index}: {refusal}" for index, refusal in refusals if refusal]
    obstacles += [
        f"GPU {index}: its memory cannot be exported as a file descriptor"
        for index, able in enumerate(handles["posix_fd"] or [])
        if not able
    ]
    obstacles += [f"{pair} do not reach each other's memory" for pair in _apart(access)]
    if not count:
        return _state(False, process_refusal("cuda") or probe.NO_GPU)
    if obstacles:
        return _state(False, f"{'; '.join(obstacles)}; a group of such ranks falls back")
    if count == 1:
        return _state(True, "processes may share the GPU, which gives it to them in turn: for tests")
    return _state(True, f"a process for each of {count} GPUs, which reach each other's memory")


def _apart(access: list[list[bool]]) -> list[str]:
    """The pairs of GPUs that do not reach each other."""
    pairs = combinations(range(len(access)), 2)
    return [f"GPUs {a} and {b}" for a, b in pairs if not (access[a][b] and access[b][a])]


def _state(works: bool, reason: str) -> dict[str, Any]:
    return {"works": works, "reason": reason}


def _has_triton_wheel() -> bool:
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")


def _advice(gpus: list[dict[str, Any]], access: list[list[bool]]) -> list[str]:
    """What to install or have so that more works."""
    advice = []
    if probe.cuda_version() and not torch.version.cuda:
        advice.append("there is an NVIDIA driver, but this PyTorch is a CPU build: pip install --force-reinstall torch")
    if not HAS_TRITON and _has_triton_wheel():
        advice.append("kernels need Triton to run on a GPU, and to be compiled for one: pip install 'triton>=3.6'")
    if gpus and _version_of("cuda-bindings") is None:
        advice.append("peer memory between processes needs cuda-bindings: pip install cuda-bindings")
    hoppers = [gpu for gpu in gpus if gpu["capability"] == "9.0"]
    if any(gpu["capability"] == "10.0" for gpu in gpus):
        advice.append(
            f"kernels for Blackwell have never run on one: {EXPERIMENTAL}={TRIED} tries them, docs/blackwell.md"
        )
    elif not hoppers:
        advice.append("for kernels on hardware: a Hopper GPU (H100, H200; compute capability 9.0) and its driver")
    elif len(hoppers) == 1:
        advice.append("for one process per GPU: a second Hopper GPU that this one reaches, over NVLink")
    if _apart(access):
        advice.append("all GPUs of a group must reach each other: `nvidia-smi topo -p2p r` shows what stands between")
    return advice
