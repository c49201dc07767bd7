"""What the processes of tests/test_cli.py do: forks of one interpreter, each a rank of `tileweave run` as torchrun
would start it, of which rank 1 is killed, or stopped, in its call, and rank 2 is late, but well.

    python -m tests.cli_program

Prints what rank 0 prints and, behind it, its exit code, for each signal.
"""

import contextlib
import os
import signal
import socket
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import tileweave
from tileweave.cli import job, main

COMMAND = ["run", "matmul_reduce_scatter", "--device", "cpu", "--shape", "m=12,n=8,k=24", "--json"]
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
LATE, SPARE = 6.0, 8.0  # seconds


def rank(number: int, ill: signal.Signals, port: int, told: Path) -> None:
    """A rank of three."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TILEWEAVE_TIMEOUT"] = "1"
    job.SPARE = SPARE
    call = tileweave.matmul_reduce_scatter

    def call_late(*args, **options):
        time.sleep(LATE)
        return call(*args, **options)

    if number == 1:
        tileweave.matmul_reduce_scatter = lambda *args, **options: os.kill(os.getpid(), ill)
    elif number == 2:
        tileweave.matmul_reduce_scatter = call_late
    with (told if number == 0 else Path(os.devnull)).open("w") as text, contextlib.redirect_stdout(text):
        code = main(COMMAND)
    os._exit(code)


def start(ill: signal.Signals, told: Path) -> list[Any]:
    """The processes of three ranks, of which the first prints into the file `told`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    args = ill, port, told
    ranks = [get_context("fork").Process(target=rank, args=(number, *args)) for number in range(3)]
    for each in ranks:
        each.start()
    return ranks


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(start(ill, Path(folder, ill.name)), Path(folder, ill.name)) for ill in SIGNALS]
        for ranks, told in jobs:
            ranks[0].join(60)
            ended = ranks[0].exitcode
            for each in ranks:
                each.kill()
                each.join()
            print(told.read_text(), ended, sep="\n", flush=True)
