"""The bound that a user sets to the workspace of a group."""

import os

SETTING = "TILEWEAVE_WORKSPACE"


class WorkspaceExceeded(RuntimeError):
    """A call needs more workspace than TILEWEAVE_WORKSPACE allows; on all ranks, before a kernel waits for one."""


def workspace_bound() -> int | None:
    """Bytes of workspace that a group may hold on each rank, as TILEWEAVE_WORKSPACE says; None: as many as calls need.

    ValueError unless it is a number of bytes, empty or not set.
    """
    text = os.environ.get(SETTING, "")
    if text and not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError(f"{SETTING}: expected a number of bytes from 1 up, as 2147483648, got {text!r}")
    return int(text) if text else None


def check_bound(op: str, held: int, more: int, bound: int | None) -> None:
    """WorkspaceExceeded if a call of `op` that needs so many bytes `more` on each rank goes beyond the bound; `held`:
    those that are held already, all of which stay while memory grows."""
    if bound is not None and held + more > bound:
        raise WorkspaceExceeded(
            f"{op}: its workspace needs {more} more bytes on each rank, which hold {held} already, and {SETTING} "
            f"allows {bound}: a bound of at least {held + more} or a smaller call would do"
        )
