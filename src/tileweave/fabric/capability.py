"""What a device can do, with the reason where it cannot."""

import torch

from tileweave import lang


def cuda_refusal(device: torch.device | str) -> str | None:
    """Why fused kernels cannot run on a device; None if they can."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is sm_{capability[0]}{capability[1]}, not sm_90 (Hopper)"
    return None if lang.HAS_TRITON else "Triton is not installed"


def sms_per_rank(ranks: int, device: torch.device, sms: int | None) -> int:
    """SMs of each of `ranks` that share a GPU: `sms`, or an equal share. ValueError if the GPU has too few."""
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if ranks * (sms or 1) > total:
        raise ValueError(f"n, sms: {ranks} ranks of {sms or 1} SMs need {ranks * (sms or 1)}, the GPU has {total}")
    return sms or total // ranks
