"""What this machine's GPUs are and what joins them, from PyTorch, the driver's attributes and nvidia-smi.

Nothing is created on a GPU: no memory, no multicast object. What cannot be read is None, and `why` says why.
"""

import ctypes
import re
import subprocess
from collections.abc import Callable
from typing import Any

import torch

NO_GPU = "PyTorch sees no CUDA GPU"
SMI_SECONDS = 30
# Kinds of handle that a GPU's memory can be exported as, by the driver's name of the attribute.
HANDLES = {"posix_fd": "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "fabric": "HANDLE_TYPE_FABRIC_SUPPORTED"}
PEERS = {"performance_rank": "PERFORMANCE_RANK", "native_atomics": "NATIVE_ATOMIC_SUPPORTED"}


def gpus() -> list[dict[str, Any]]:
    """The GPUs that PyTorch sees: index, name, capability ("9.0"), sms, memory_gib."""
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


def peer_access(count: int) -> list[list[bool]]:
    """[a][b]: whether GPU a reaches GPU b's memory."""
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]


def cuda_version() -> str | None:
    """The newest CUDA that the driver supports, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def driver_version() -> dict[str, Any]:
    """`version` of the NVIDIA driver, as nvidia-smi tells it."""

    def read() -> dict[str, Any]:
        return {"version": nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0].strip()}

    return _known(read, "version")


def links(count: int) -> dict[str, Any]:
    """`nvlinks`: active NVLink links of each GPU; `gb_per_s`: their speeds each way, added up, in GB/s."""

    def read() -> dict[str, Any]:
        by_uuid = parse_links(nvidia_smi("nvlink", "--status"))
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        missing = [index for index, uuid in enumerate(uuids) if uuid not in by_uuid]
        if missing:
            raise RuntimeError(f"nvidia-smi nvlink does not list GPU {missing[0]}")
        speeds = [by_uuid[uuid] for uuid in uuids]
        return {"nvlinks": [len(each) for each in speeds], "gb_per_s": [round(sum(each), 1) for each in speeds]}

    return _known(read, "nvlinks", "gb_per_s") if count else _unknown(NO_GPU, "nvlinks", "gb_per_s")


def parse_links(text: str) -> dict[str, list[float]]:
    """The speeds of each GPU's active links in GB/s, by UUID, from what `nvidia-smi nvlink --status` prints."""
    found: dict[str, list[float]] = {}
    speeds: list[float] = []
    for line in text.splitlines():
        if gpu := re.match(r"GPU \d+: .*\(UUID: GPU-(\S+)\)", line):
            speeds = found.setdefault(gpu[1], [])
        elif link := re.match(r"\s+Link \d+: ([\d.]+) GB/s", line):
            speeds.append(float(link[1]))
    return found


def peers(count: int) -> dict[str, Any]:
    """[a][b] for every pair of GPUs, None for a == b.

    `performance_rank`: the driver's, among the links of this machine; `native_atomics`: whether the link carries
    atomic operations.
    """

    def read() -> dict[str, Any]:
        return {name: [[ask(name, a, b) for b in range(count)] for a in range(count)] for name in PEERS}

    def ask(name: str, a: int, b: int) -> int | bool | None:
        if a == b:
            return None
        value = _driver_call("cuDeviceGetP2PAttribute", "CUdevice_P2PAttribute", f"P2P_ATTRIBUTE_{PEERS[name]}", a, b)
        return bool(value) if name == "native_atomics" else value

    return _known(read, *PEERS) if count > 1 else _unknown("there are no two GPUs" if count else NO_GPU, *PEERS)


def handles(count: int) -> dict[str, Any]:
    """Whether each GPU's memory can be exported to other processes: as a `posix_fd`, as a `fabric` handle."""

    def read() -> dict[str, Any]:
        return {kind: _attribute(attribute, count) for kind, attribute in HANDLES.items()}

    return _known(read, *HANDLES) if count else _unknown(NO_GPU, *HANDLES)


def multicast_offered(count: int) -> dict[str, Any]:
    """`offered`: whether each GPU supports multicast objects, by its attribute; none is made."""
    known = _known(lambda: {"offered": _attribute("MULTICAST_SUPPORTED", count)}, "offered")
    return known if count else _unknown(NO_GPU, "offered")


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints. RuntimeError if it is missing or fails."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except FileNotFoundError as failure:
        raise RuntimeError("nvidia-smi is not installed") from failure
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise RuntimeError(f"nvidia-smi does not run: {failure}") from failure
    if ran.returncode or not ran.stdout.strip():
        raise RuntimeError(f"nvidia-smi {arguments[0]}: {(ran.stderr or ran.stdout).strip() or 'no output'}")
    return ran.stdout


def _known(read: Callable[[], dict[str, Any]], *names: str) -> dict[str, Any]:
    """What `read` returns, with `why` None; or all `names` None and the reason."""
    try:
        return {**read(), "why": None}
    except (RuntimeError, ImportError) as failure:
        return _unknown(str(failure), *names)


def _unknown(why: str, *names: str) -> dict[str, Any]:
    return {**dict.fromkeys(names), "why": why}


def _attribute(name: str, count: int) -> list[bool]:
    """An attribute of each GPU, by its name without CU_DEVICE_ATTRIBUTE_."""
    return [
        bool(_driver_call("cuDeviceGetAttribute", "CUdevice_attribute", f"ATTRIBUTE_{name}", index))
        for index in range(count)
    ]


def _driver_call(function: str, kind: str, attribute: str, *gpus: int) -> int:
    """Ask the driver for an attribute, a member of the enumeration `kind`. RuntimeError or ImportError if it fails."""
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as failure:
        raise ImportError("the package cuda-bindings is not installed") from failure
    from tileweave.fabric.peer_memory import call

    call(driver.cuInit, 0)
    member = getattr(getattr(driver, kind), f"CU_DEVICE_{attribute}", None)
    if member is None:
        raise RuntimeError(f"this release of cuda-bindings does not know CU_DEVICE_{attribute}")
    return call(getattr(driver, function), member, *(call(driver.cuDeviceGet, gpu) for gpu in gpus))
