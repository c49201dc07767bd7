"""The `tileweave` command: `app` reads the command line, `job` runs an op, `doctor` looks at the machine."""

from tileweave.cli.app import main

__all__ = ["main"]
