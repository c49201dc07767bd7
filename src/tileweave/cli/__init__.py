"""The `tileweave` command: `app` reads the command line, `job` runs one of `ops`, `doctor` looks at the machine."""

from tileweave.cli.app import main

__all__ = ["main"]
