"""Rates of this GPU's compute: our matmul and attention, beside cuBLAS and cuDNN."""

from typing import Any

from tileweave.bench import attention, matmul

SQUARES = (8192, 4096, 16384)
ATTENTION = (1, 16, 16, 16384, 128)  # batch, heads, heads of k and v, sequence, head dimension
ROUNDS = 5


def matmul_tflops(n: int) -> dict[str, float]:
    """TFLOP/s of an n x n x n product of bf16, "tileweave" and "cublas". In no process group."""
    row = matmul.measure("square", n, n, n, True, ROUNDS)
    assert not isinstance(row, str), row
    rates = {name: 2 * n**3 / times[0] / 1e6 for name, times in row["us"].items()}
    return {("cublas" if name == "cublas" else "tileweave"): rate for name, rate in rates.items()}


def attention_tflops() -> dict[str, float]:
    """TFLOP/s of forward attention, head dimension 128: "core", "cudnn" and what else is installed. In no group."""
    rates: dict[str, Any] = attention.measure(ATTENTION, False, ROUNDS)["tflops_of_attention"]
    return rates
