"""What a device can do, with the reason where it cannot."""

import os

import torch

from tileweave import lang

# What the environment may say against NVLink multicast: any value of these but the ones that leave it on.
MULTICAST_ON = {"NCCL_NVLS_ENABLE": ("", "1", "2"), "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("", "0")}


# What tensor cores multiply by, see `Plan.core`, by the capability of the GPUs that there are kernels for. Those for
# BLACKWELL have never run on one: they do only where the environment says EXPERIMENTAL=TRIED.
BLACKWELL = (10, 0)
CORES = {(9, 0): "wgmma", BLACKWELL: "tcgen05"}
EXPERIMENTAL, TRIED = "TILEWEAVE_EXPERIMENTAL", "sm100"


def tensor_cores(device: torch.device) -> tuple[str, ...]:
    """What the tensor cores of a CUDA device that is not refused multiply by."""
    return (CORES[torch.cuda.get_device_capability(device)],)


def cuda_refusal(device: torch.device | str) -> str | None:
    """Why fused kernels cannot run on a device; None if they can."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    refusal = refusal_of(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return refusal or (None if lang.HAS_TRITON else "Triton is not installed")


def refusal_of(name: str, capability: tuple[int, int]) -> str | None:
    """Why there are no kernels for a GPU of this name and capability; None if there are, and, for BLACKWELL, they are
    to be tried."""
    asked = os.environ.get(EXPERIMENTAL, "").strip()
    tried = asked == TRIED
    if capability in CORES and (capability != BLACKWELL or tried):
        return None
    refusal = f"{name} is sm_{capability[0]}{capability[1]}, not sm_90 (Hopper)"
    untried = f"; {EXPERIMENTAL}={TRIED} tries kernels that have never run on such a GPU"
    untried += f" ({asked!r}, as it is, means nothing)" if asked else ""
    return refusal + untried if capability == BLACKWELL else refusal


def check_experimental() -> None:
    """ValueError if TILEWEAVE_EXPERIMENTAL has a value that means nothing."""
    asked = os.environ.get(EXPERIMENTAL, "").strip()
    if asked not in ("", TRIED):
        raise ValueError(f"{EXPERIMENTAL}: expected {TRIED}, or nothing, got {asked!r}")


def multicast_forbidden() -> str | None:
    """Why this process's environment forbids NVLink multicast; None if it does not. Asks nothing else."""
    for name, permitting in MULTICAST_ON.items():
        value = os.environ.get(name, "")
        if value.strip() not in permitting:
            return f"{name}={value} in the environment"
    return None


def multicast_refusal(device: torch.device) -> str | None:
    """Why no multicast object may be made on a CUDA device; None if one may.

    The environment is asked first: where it forbids multicast the driver is not called at all. Nothing is created.
    """
    if forbidden := multicast_forbidden():
        return forbidden
    from cuda.bindings import driver

    from tileweave.fabric.peer_memory import call

    try:
        supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        offers = call(driver.cuDeviceGetAttribute, supported, call(driver.cuDeviceGet, device.index))
    except (AttributeError, RuntimeError) as failure:
        return f"whether {device} supports multicast is unknown: {failure}"
    return None if offers else f"{device} does not support multicast"


def memory_bytes_of(device: torch.device) -> int:
    """Bytes of memory of a CUDA device."""
    return torch.cuda.get_device_properties(device).total_memory


def sms_per_rank(ranks: int, device: torch.device, sms: int | None) -> int:
    """SMs of each of `ranks` that share a GPU: `sms`, or an equal share. ValueError if the GPU has too few."""
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if ranks * (sms or 1) > total:
        raise ValueError(f"n, sms: {ranks} ranks of {sms or 1} SMs need {ranks * (sms or 1)}, the GPU has {total}")
    return sms or total // ranks
