"""Litmus tests of the memory model (docs/memory-model.md): in the emulator, and on a GPU.

    python -m tileweave.bench.litmus                      in the emulator: verdicts
    python -m tileweave.bench.litmus --gpu --json FILE    on the GPU: outcomes counted
    python -m tileweave.bench.litmus --table PAGE         the table of a page, made anew from the tests and the figures

`cases.py` has the table of tests, `kernel.py` and `async_kernel.py` their kernels, `run.py` what runs them.
"""
