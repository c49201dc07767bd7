"""The `tileweave` command, outside of the package: importing that takes seconds, in which an interrupt may come, and
which the version is not worth."""

import sys

__version__ = "0.1.0"


def main() -> int:
    """Run the command; its exit code, 130 where it was interrupted before it could say so itself."""
    if sys.argv[1:] in (["--version"], ["version"]):
        print(__version__)
        return 0
    try:
        from tileweave.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("tileweave: interrupted", file=sys.stderr)
        return 130
