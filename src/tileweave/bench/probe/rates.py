"""Rates of this GPU's compute: our matmul and attention, beside cuBLAS and cuDNN."""

from typing import Any

import torch

from tileweave.bench import attention, matmul
from tileweave.planner import Problem, plan_for

SQUARES = (8192, 4096, 16384)
ATTENTION = (1, 16, 16, 16384, 128)  # batch, heads, heads of k and v, sequence, head dimension
ROUNDS = 5


def matmul_tflops(n: int) -> dict[str, float]:
    """TFLOP/s of an n x n x n product of bf16, "tileweave" and "cublas". In no process group."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    plan = plan_for(Problem(n, n, n, world=1, message_bytes=2, sms=sms))
    us = matmul.measure("square", n, n, n, True, [plan], ROUNDS)["us"]
    return {("cublas" if name == "cublas" else "tileweave"): 2 * n**3 / times[0] / 1e6 for name, times in us.items()}


def attention_tflops() -> dict[str, float]:
    """TFLOP/s of forward attention, head dimension 128: "core", "cudnn" and what else is installed. In no group."""
    rates: dict[str, Any] = attention.measure(ATTENTION, False, [], ROUNDS)["tflops_of_attention"]
    return rates
