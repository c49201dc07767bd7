"""What the process of tests/fabric/test_groups.py does that ends without having closed, nor destroyed, anything.

python -m tests.fabric.exit_program INIT_METHOD
"""

import os
import sys
import weakref

import torch
import torch.distributed as dist

import tileweave as tw
from tests.fabric.groups_program import gpus_by_a_fake_driver
from tests.fabric.process_program import Ledger
from tileweave.fabric.processes import ProcessFabric

if __name__ == "__main__":
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    fakes = gpus_by_a_fake_driver(["gpu"])  # to the end
    device = fakes.__enter__()
    ledger = Ledger.of_this_process()
    weakref.finalize(
        ledger, lambda write: print("held:", *write.__self__.balance()), ledger.write
    )  # before the fabric's
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
    fabric = ProcessFabric.of(dist.group.WORLD, device)  # with a watchdog thread
    channel = fabric.channel("op", 1 << 20, 1 << 20)
    assert min(ledger.balance()) > 0
    world = tw.virtual_world(2, device="cpu")
    outs = world.run(lambda rank, group: tw.all_gather(torch.ones(8, 8), group))
    print("end:", *outs[0].shape)
