"""The `tileweave` command, outside of the package: importing that takes seconds, in which an interrupt may come."""

import sys


def main() -> int:
    """Run the command; its exit code, 130 where it was interrupted before it could say so itself."""
    try:
        from tileweave.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("tileweave: interrupted", file=sys.stderr)
        return 130
