"""What the processes of tests/test_cli.py do: forks of one interpreter, each a rank of `tileweave run` as torchrun
would start it, of which rank 1 is killed, or stopped, in its call.

    python -m tests.cli_program

Prints the exit code of rank 0 behind what that prints, for each signal.
"""

import os
import signal
import socket
from multiprocessing import get_context

import torch

import tileweave
from tileweave.cli import job, main

COMMAND = ["run", "matmul_reduce_scatter", "--device", "cpu", "--shape", "m=8,n=8,k=16", "--json"]
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


def rank(number: int, ill: signal.Signals, port: int) -> None:
    """A rank of two."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TILEWEAVE_TIMEOUT"] = "1"
    job.SPARE = job.MEETING = 1.0
    if number == 1:
        tileweave.matmul_reduce_scatter = lambda *args, **options: os.kill(os.getpid(), ill)
    os._exit(main(COMMAND))


def run(ill: signal.Signals, port: int) -> int | None:
    """The exit code of rank 0; None if it does not end."""
    ranks = [get_context("fork").Process(target=rank, args=(number, ill, port)) for number in range(2)]
    for each in ranks:
        each.start()
    ranks[0].join(30)
    for each in ranks:
        each.kill()
        each.join()
    return None if ranks[0].exitcode == -signal.SIGKILL else ranks[0].exitcode


if __name__ == "__main__":
    torch.set_num_threads(1)
    for ill in SIGNALS:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        print(run(ill, port), flush=True)
