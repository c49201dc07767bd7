"""What the environment says about this run: a torchrun's variables, tileweave's own, the memory of the machine."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tileweave.cli.problem import BadUsage
from tileweave.fabric.base import debug_mode
from tileweave.fabric.bound import workspace_bound
from tileweave.fabric.capability import check_experimental
from tileweave.fabric.processes import timeout_seconds


def program() -> str:
    """How this program was started, as a shell takes it: the script may be in no folder of PATH."""
    script = Path(sys.argv[0])
    return "python -m tileweave" if (script.parent.name, script.name) == ("tileweave", "__main__.py") else "tileweave"


def launched_by_torchrun() -> bool:
    """Whether this process is one of the ranks that torchrun, or who else sets its variables, started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def speaks() -> bool:
    """Whether this process tells what went wrong: all do but the ranks above 0 of a torchrun that is known to be there.

    Where RANK was set by hand, the other ranks may not exist.
    """
    rank = os.environ.get("RANK", "0")
    return not (dist.is_torchelastic_launched() and rank.isdecimal() and int(rank) > 0)


def check_settings() -> None:
    """Raise BadUsage for a variable of tileweave's whose value makes no sense, naming it and what would."""
    try:
        debug_mode()
        timeout_seconds()
        workspace_bound()
        check_experimental()
    except ValueError as error:
        raise BadUsage(str(error)) from error


def check_environment() -> None:
    """`check_settings`, and the same for those of torchrun."""
    check_settings()
    if launched_by_torchrun():
        _number("RANK", 0, _number("WORLD_SIZE", 1) - 1)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise BadUsage(
                f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}, by which ranks find each other: "
                "start the command through torchrun, or unset RANK and WORLD_SIZE"
            )
        _number("MASTER_PORT", 0, 65535)
        if "LOCAL_RANK" in os.environ:
            _number("LOCAL_RANK", 0)


def world_size() -> int:
    """torchrun's number of ranks; only after `check_environment`."""
    return int(os.environ["WORLD_SIZE"])


def tell_of_waiting() -> None:
    """Say on standard error that this process is about to wait for others, who may never come."""
    size, rank = world_size(), os.environ["RANK"]
    if size > 1 and speaks():
        told = f"waiting for {size} ranks (RANK={rank} WORLD_SIZE={size} are set: started by torchrun?)"
        print(f"tileweave: {told}", file=sys.stderr, flush=True)


def memory_bytes(cuda: bool) -> int | None:
    """Bytes of memory of the current GPU, or of this machine as far as this process may use it; None if unknown."""
    if cuda:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()  # a container's
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; PyTorch's error for the CPU has no class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ[name]
    if not text.isdecimal() or len(text) > 9 or int(text) < least or (most is not None and int(text) > most):
        expected = f"from {least} to {most}" if most is not None else f"from {least} up"
        raise BadUsage(
            f"{name}: expected a whole number {expected}, got {text!r}; it is set in the environment, by torchrun or "
            "by hand: unset it to run in one process"
        )
    return int(text)
