"""What `tileweave run` is asked to compute: read from the command line, checked, and the same data on every rank."""

from dataclasses import dataclass

import torch

OPS = ("matmul_reduce_scatter",)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
LARGEST_SIZE = 2**31 - 1  # what TMA counts rows and columns with
LARGEST_SEED = 2**32 - 1
CALLS = 2  # the second call meets what the first left in the workspace

# Default sizes of the whole problem. A rank's share of m and k is rounded up to a multiple of the grain, so that the
# defaults can be divided, and addressed by TMA, for 3, 5, 6 and 7 ranks too.
_DEFAULTS = {"m": 512, "n": 512, "k": 2048}
_GRAIN_PER_RANK = {"m": 16, "k": 64}


class BadUsage(ValueError):
    """A request that cannot be carried out as written; the message names the argument, the rule and what is legal."""


@dataclass(frozen=True)
class Problem:
    """One `tileweave run`: A [m, k] @ B [k, n], k split over `ranks`, the rows of the result scattered over them."""

    op: str
    ranks: int
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    deterministic: bool = False
    bias: bool = False
    seed: int = 0

    def inputs(self, call: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """a [m, k / ranks] and b [k / ranks, n] of `rank` in call `call`; the same values wherever it is asked."""
        k_local = self.k // self.ranks
        generator = torch.Generator().manual_seed((self.seed * CALLS + call) * self.ranks + rank)
        a = torch.randn(self.m, k_local, generator=generator)
        b = torch.randn(k_local, self.n, generator=generator)
        return a.to(device, DTYPES[self.dtype]), b.to(device, DTYPES[self.dtype])

    def least_bytes(self, calls: int) -> int:
        """Bytes of all ranks' operands of `calls` calls and of one whole result in float32."""
        return calls * DTYPES[self.dtype].itemsize * (self.m + self.n) * self.k + 4 * self.m * self.n

    def bias_vector(self, call: int, device: torch.device) -> torch.Tensor | None:
        """The bias [n] of call `call`, equal on all ranks; None where none was asked for."""
        if not self.bias:
            return None
        generator = torch.Generator().manual_seed(self.seed * CALLS + call)
        return torch.randn(self.n, generator=generator).to(device, DTYPES[self.dtype])


def make_problem(op: str, ranks: int, shape: str, dtype: str, *, seed: int = 0, **options) -> Problem:
    """The Problem of a command line; `shape` is like "m=512,n=512,k=2048", sizes left out have defaults.

    Raises BadUsage for an unknown op, dtype or size name, for sizes that `ranks` does not divide, and for numbers out
    of range.
    """
    if op not in OPS:
        raise BadUsage(f"OP {op!r} is not an op of this release; it has: {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise BadUsage(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if ranks < 1:
        raise BadUsage(f"--ranks must be at least 1, got {ranks}")
    if not 0 <= seed <= LARGEST_SEED:
        raise BadUsage(f"--seed must be from 0 to {LARGEST_SEED}, got {seed}")
    sizes = dict(_DEFAULTS)
    for name, grain in _GRAIN_PER_RANK.items():
        sizes[name] = _round_up(sizes[name], grain * ranks)
    sizes |= _parse_shape(shape)
    for name, meaning in (("m", "each rank gets m / ranks rows"), ("k", "each rank holds k / ranks columns of A")):
        if sizes[name] % ranks:
            below, above = sizes[name] // ranks * ranks, _round_up(sizes[name], ranks)
            raise BadUsage(
                f"--shape {name}={sizes[name]} is not divisible by --ranks {ranks} ({meaning}); "
                f"nearest legal: {name}={below} or {name}={above}"
            )
    return Problem(op, ranks, sizes["m"], sizes["n"], sizes["k"], dtype, seed=seed, **options)


def _round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _parse_shape(shape: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in filter(None, shape.split(",")):
        name, equals, value = part.strip().partition("=")
        if name not in _DEFAULTS or not equals or not value.isdecimal():
            raise BadUsage(f"--shape takes m=ROWS,n=COLUMNS,k=DEPTH with sizes from 0 up, got {part!r}")
        if name in sizes:
            raise BadUsage(f"--shape names {name} twice: {shape!r}")
        if len(value.lstrip("0")) > len(str(LARGEST_SIZE)) or int(value) > LARGEST_SIZE:
            raise BadUsage(f"--shape {name} must be from 0 to {LARGEST_SIZE}, got {value[:40]}")
        sizes[name] = int(value)
    return sizes
