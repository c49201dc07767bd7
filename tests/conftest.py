"""What every test shares: one thread per process, skipping what this machine has no hardware for, and saying so."""

import os
from collections import Counter

# Tests run side by side and start processes of their own: more threads than cores would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


def _hopper_gpus() -> int:
    """The number of sm_90 GPUs in reach."""
    if not torch.cuda.is_available():
        return 0
    return sum(torch.cuda.get_device_capability(index) == (9, 0) for index in range(torch.cuda.device_count()))


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu or multigpu where the GPUs are missing, with the reason."""
    unnamed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not unnamed, f"an id that holds an address is another one in each of the workers: {unnamed}"
    gpus = _hopper_gpus()
    needs = {"gpu": 1, "multigpu": 2}
    for item in items:
        for marker, count in needs.items():
            if item.get_closest_marker(marker) and gpus < count:
                item.add_marker(pytest.mark.skip(reason=f"needs {count} Hopper GPU(s), found {gpus}"))


def pytest_terminal_summary(terminalreporter):
    """Why tests were skipped, a line for each reason: `-rs` takes one for each place."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
