"""Standard output, whose failures are told from those of anything else that is written."""

import os
from collections.abc import Callable
from typing import IO, Any


class LostOutput(Exception):
    """Standard output has not taken what was written; `why` is what the system says."""

    def __init__(self, why: OSError):
        super().__init__(f"standard output cannot be written: {why.strerror}")
        self.why = why


class Output:
    """A stream that raises LostOutput where `stream` fails; in all else that stream."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write to the stream."""
        return _told(self._stream.write, text)

    def flush(self) -> None:
        """Flush the stream."""
        _told(self._stream.flush)

    def give_up(self) -> None:
        """Let go of what could not be written, with which Python would fail once more when it ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _told(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except OSError as error:
        raise LostOutput(error) from error
