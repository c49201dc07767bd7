"""Measures a machine for the planner: `tileweave probe`. What each file measures, and how.

| file | measures |
|---|---|
| `copies.py`, `sweep.py` | bandwidth of TMA, registers and the copy engine over message size and number of SMs, put and get, one way and both; the naive way, and what each thing that makes it so costs alone; shapes of tiles, patterns of addresses |
| `latency.py` | hand-over of an mbarrier within an SM, of a flag between SMs and between ranks; launches |
| `nccl.py` | NCCL's collectives |
| `rates.py` | matmul and attention |
| `profile.py`, `draw.py` | the hardware profile that comes of it; curves |

Every copy is verified before it is timed: random data, each rank's its own; the target holds -1 before, and behind the
copy afterwards. A figure is the median of ROUNDS rounds, with the lowest and the highest; of several ranks the slowest
counts. In a round the GPU sleeps for about 3 ms while the host enqueues a start event, repetitions worth about 2 ms and
an end event, so that neither the host nor the ranks' coming together is in the figure, and a launch is a thousandth of
it. One launch before warms up: compilation, module, clocks. A repetition begins when the last one's stores are
performed, so small sizes show latency. Data of up to 50 MB lie in L2; nothing flushes it. The order of what is measured
is that of what tells most, and the time given is looked at between two points, by all ranks together.
"""  # noqa: E501
