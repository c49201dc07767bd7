"""What `tileweave run` is asked to compute: read from the command line, checked, and the same data on every rank."""

from dataclasses import dataclass

import torch

from tileweave.cli.ops import OPS, Op

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
LARGEST_SIZE = 2**31 - 1  # what TMA counts rows and columns with
LARGEST_SEED = 2**32 - 1
CALLS = 2  # the second call meets what the first left in the workspace
MEANINGS = {
    "m": "ROWS", "n": "COLUMNS", "k": "DEPTH", "tokens": "TOKENS", "hidden": "DEPTH", "inner": "COLUMNS",
    "experts": "EXPERTS", "topk": "CHOICES",
}  # fmt: skip


class BadUsage(ValueError):
    """A request that cannot be carried out as written; the message names the argument, the rule and what is legal."""


@dataclass(frozen=True)
class Problem:
    """One `tileweave run`: an op, how many ranks make the call, and the sizes of the whole problem by name."""

    op: str
    ranks: int
    sizes: dict[str, int]
    dtype: str = "bf16"
    deterministic: bool = False
    bias: bool = False
    seed: int = 0

    @property
    def of_op(self) -> Op:
        """What the command knows of the op."""
        return OPS[self.op]

    def shapes(self) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Shapes of a rank's operands and of its result."""
        return self.of_op.shapes(self.of_op.share(self.sizes, self.ranks))

    def operands(self, call: int, rank: int, device: torch.device) -> list[torch.Tensor]:
        """What `rank` hands in in call `call`; the same values wherever it is asked."""
        generator = torch.Generator().manual_seed((self.seed * CALLS + call) * self.ranks + rank)
        drawn = [torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for shape in self.shapes()[0]]
        for place, x in self.of_op.integers(self.of_op.share(self.sizes, self.ranks), generator).items():
            drawn[place] = x
        return [x.to(device) for x in drawn]

    def biases(self, call: int, device: torch.device) -> list[torch.Tensor] | None:
        """Each rank's bias in call `call`; None where none was asked for."""
        if not self.bias:
            return None
        generator = torch.Generator().manual_seed(self.seed * CALLS + call)
        whole = torch.randn(self.sizes["n"], generator=generator).to(device, DTYPES[self.dtype])
        return list(whole.view(self.ranks, -1)) if self.of_op.own_bias else [whole] * self.ranks

    def least_bytes(self, calls: int) -> int:
        """Bytes that `calls` calls need at least, on all ranks together."""
        return self.of_op.least_bytes(self.sizes, self.ranks, DTYPES[self.dtype].itemsize, calls)

    def shape_text(self) -> str:
        """The sizes as --shape takes them."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())


def make_problem(
    op: str,
    ranks: int,
    shape: str,
    dtype: str,
    *,
    seed: int = 0,
    deterministic: bool = False,
    bias: bool = False,
) -> Problem:
    """The Problem of a command line; `shape` is like "m=512,n=512,k=2048", sizes left out have defaults.

    Raises BadUsage for an unknown op, dtype or size name, for an option that the op lacks, for sizes that `ranks` does
    not divide, and for numbers out of range.
    """
    if op not in OPS:
        raise BadUsage(f"OP {op!r} is not an op that this release runs; it has: {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise BadUsage(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if ranks < 1:
        raise BadUsage(f"--ranks must be at least 1, got {ranks}")
    if not 0 <= seed <= LARGEST_SEED:
        raise BadUsage(f"--seed must be from 0 to {LARGEST_SEED}, got {seed}")
    for option, wanted in (("deterministic", deterministic), ("bias", bias)):
        if wanted and option not in OPS[op].options:
            having = ", ".join(name for name, each in OPS.items() if option in each.options)
            raise BadUsage(f"--{option} is nothing that {op} has; it goes with {having}")
    sizes = dict(OPS[op].sizes)
    for name, (_, grain) in OPS[op].shared.items():
        sizes[name] = _round_up(sizes[name], grain * ranks)
    sizes |= _parse_shape(op, shape)
    for name, (meaning, _) in OPS[op].shared.items():
        if sizes[name] % ranks:
            below, above = sizes[name] // ranks * ranks, _round_up(sizes[name], ranks)
            raise BadUsage(
                f"--shape {name}={sizes[name]} is not divisible by --ranks {ranks} ({meaning}); "
                f"nearest legal: {name}={below} or {name}={above}"
            )
    if sizes.get("topk", 0) > sizes.get("experts", 0):
        raise BadUsage(
            f"--shape topk={sizes['topk']} is more than experts={sizes['experts']}, of which a token has its own"
        )
    return Problem(op, ranks, sizes, dtype, deterministic, bias, seed)


def _round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _parse_shape(op: str, shape: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in filter(None, shape.split(",")):
        name, equals, value = part.strip().partition("=")
        if name not in OPS[op].sizes or not equals or not value.isdecimal():
            takes = ",".join(f"{each}={MEANINGS[each]}" for each in OPS[op].sizes)
            raise BadUsage(f"--shape of {op} takes {takes} with sizes from 0 up, got {part!r}")
        if name in sizes:
            raise BadUsage(f"--shape names {name} twice: {shape!r}")
        if len(value.lstrip("0")) > len(str(LARGEST_SIZE)) or int(value) > LARGEST_SIZE:
            raise BadUsage(f"--shape {name} must be from 0 to {LARGEST_SIZE}, got {value[:40]}")
        sizes[name] = int(value)
    for name in ("experts", "topk"):
        if sizes.get(name) == 0:
            raise BadUsage(f"--shape {name} must be from 1 to {LARGEST_SIZE}, got 0")
    return sizes
