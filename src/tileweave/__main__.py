"""`python -m tileweave` is the `tileweave` command; torchrun starts it this way."""

from tileweave.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
