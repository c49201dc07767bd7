"""The protocol table of the kernel is true: each edit that breaks one of its lines is found, harmless ones are not.

An edit is (old text, new text) in kernel.py or a tile file; the old text must occur exactly once. What is expected is
the kind of finding: R race, D deadlock, P protocol error; None: the edit is harmless and nothing may be reported.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

import tileweave as tw
from tests.ops.problems import assert_right, operands, run_calls
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.ops.matmul_reduce_scatter import launch

SOURCES = Path(launch.__file__).parents[2]
KERNEL, MATMUL, CHANNEL = "ops/matmul_reduce_scatter/kernel.py", "tiles/matmul.py", "tiles/channel.py"
KINDS = {"R": RaceError, "D": DeadlockError, "P": ProtocolError}

MUTANTS = {
    # storer: foreign tiles
    "sends before the multiplier has written": (KERNEL, [("        work.result.consumer_wait(n)\n        send_tile", "        send_tile")], "R"),
    "c_buf released before the store has read it": (KERNEL, [("    gl.store_read_wait(0)\n\n\n@gl.jit\ndef publish", "\n\n@gl.jit\ndef publish")], "R"),
    "published after the read wait only": (KERNEL, [("    gl.store_wait(0)\n    gl.barrier()\n    sent", "    gl.barrier()\n    sent")], "R"),
    "no barrier between the full wait and the count": (KERNEL, [("    gl.store_wait(0)\n    gl.barrier()\n    sent", "    gl.store_wait(0)\n    sent")], "R"),
    "tiles counted without release": (KERNEL, [('gl.atomic_add(sent, 1, sem="acq_rel", scope="gpu")', 'gl.atomic_add(sent, 1, sem="relaxed", scope="gpu")')], "R"),
    "flag raised by the last tile but one": (KERNEL, [("== tiles_per_owner(work) - 1:", "== tiles_per_owner(work) - 2:")], "RD"),
    "count not put back": (KERNEL, [('        gl.atomic_xchg(sent, 0, sem="relaxed", scope="gpu")\n', "")], "RD"),
    "sends into the wrong slot": (KERNEL, [("owner, [slot, row, col], work.c_buf", "owner, [slot ^ 1, row, col], work.c_buf")], "RW"),
    "one slot for all calls": (KERNEL, [("    slot = epoch & 1\n", "    slot = epoch & 0\n")], "R"),
    "does not tell one peer": (KERNEL, [("        gl.signal(work.flags, owner, work.flags.rank, epoch)", "        gl.signal(work.flags, work.flags.rank, work.flags.rank, epoch)")], "D"),
    # storer: own tiles
    "does not wait for the peers": (KERNEL, [("        met = met & gl.wait(work.flags, (work.flags.rank + i) % work.flags.world, epoch)", "        met = met & (i >= 0)")], "R"),
    "waits for the previous call's flags": (KERNEL, [("% work.flags.world, epoch)", "% work.flags.world, epoch - 1)")], "R"),
    "waits for one peer only": (KERNEL, [("    for i in range(1, work.flags.world):\n        met = met &", "    for i in range(1, 2):\n        met = met &")], "R"),
    "no proxy fence after the flags": (KERNEL, [("    gl.fence_proxy_async()\n    return met", "    return met")], "R"),
    "partial sums loaded over an unread one": (KERNEL, [("        work.partial.producer_wait(first + i)\n", "")], "RP"),
    "slot zeroed while it is being loaded": (KERNEL, [("        work.partial.consumer_wait(first)\n        if met", "        if met")], "R"),
    "slot not zeroed": (KERNEL, [("        zero_slot(work, slot, row, col)\n", "        pass\n")], "W"),
    "result stored before it is written": (KERNEL, [("    work.result.consumer_wait(n)\n    gl.tma_store", "    gl.tma_store")], "R"),
    "c_buf reused under the result's store": (KERNEL, [("    gl.store_read_wait(0)\n    work.result.release(n)\n\n\n@gl.jit\ndef store_role", "    work.result.release(n)\n\n\n@gl.jit\ndef store_role")], "R"),
    "expects too few bytes of a partial sum": (KERNEL, [("bitwidth // 8\n    from_row", "bitwidth // 16\n    from_row")], "RDP"),
    # multiplier
    "partial sum read before it is there": (KERNEL, [("            work.partial.consumer_wait(first + i)\n", "")], "R"),
    "partial sum not released": (KERNEL, [("            work.partial.release(first + i)\n", "")], "DR"),
    "tile written before c_buf is free": (KERNEL, [("    work.result.producer_wait(done)\n", "")], "R"),
    "no shared-memory fence before the store": (KERNEL, [("    gl.fence_async_shared()\n    work.result.publish(done)", "    work.result.publish(done)")], "R"),
    "published before it is written": (KERNEL, [("    tile.store(acc.to(work.out.dtype))\n    gl.fence_async_shared()\n    work.result.publish(done)", "    work.result.publish(done)\n    tile.store(acc.to(work.out.dtype))\n    gl.fence_async_shared()")], "R"),
    # epoch
    "epoch not advanced": (KERNEL, [('        gl.atomic_xchg(work.state + EPOCH, epoch, sem="relaxed", scope="gpu")\n', "        pass\n")], "R"),
    "epoch advanced by every CTA": (KERNEL, [('    if gl.atomic_add(work.state + DONE, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:', "    if True:")], "RD"),
    "DONE without order": (KERNEL, [('work.state + DONE, 1, sem="acq_rel", scope="gpu"', 'work.state + DONE, 1, sem="relaxed", scope="gpu"')], "R"),
    # template
    "loader does not wait for an empty slot": (MATMUL, [("            mm.ring.producer_wait(n)\n", "")], "RP"),
    "slot released under the wgmma in flight": (MATMUL, [("        mm.ring.release(n - 1, pred=step > 0)", "        mm.ring.release(n)"), ("    mm.ring.release(n - 1)\n    return acc", "    return acc")], "RP"),
    "operands read before they are there": (MATMUL, [("        mm.ring.consumer_wait(n)\n", "")], "R"),
    "accumulator read with a wgmma in flight": (MATMUL, [("num_outstanding=0, deps=[acc]", "num_outstanding=1, deps=[acc]")], "R"),
    "last slot of a tile not released": (MATMUL, [("    mm.ring.release(n - 1)\n    return acc", "    return acc")], "D"),
    "expects one operand's bytes": (MATMUL, [("(mm.BM + mm.BN) * mm.BK * 2", "mm.BN * mm.BK * 2")], "RDP"),
    "wrong parity of the producer": (CHANNEL, [("((n // self.STAGES) & 1) ^ 1)", "(n // self.STAGES) & 1)")], "D"),
    "empty waits for two arrivals": (CHANNEL, [("gl.mbarrier_init(empty.index(i), count=1)", "gl.mbarrier_init(empty.index(i), count=2)")], "D"),
    # harmless
    "waits for all wgmma each step": (MATMUL, [("num_outstanding=1, deps=[pending]", "num_outstanding=0, deps=[pending]")], None),
    "a barrier more": (KERNEL, [("    gl.store_wait(0)\n    gl.barrier()\n    sent", "    gl.store_wait(0)\n    gl.barrier()\n    gl.barrier()\n    sent")], None),
    "a fence more": (KERNEL, [("    gl.fence_proxy_async()\n    return met", "    gl.fence_proxy_async()\n    gl.fence_proxy_async()\n    return met")], None),
    "waits for the peers in another order": (KERNEL, [("gl.wait(work.flags, (work.flags.rank + i) % work.flags.world, epoch)", "gl.wait(work.flags, (work.flags.rank + work.flags.world - i) % work.flags.world, epoch)")], None),
    "full wait before the buffer is released": (KERNEL, [("    gl.store_read_wait(0)\n\n\n@gl.jit\ndef publish", "    gl.store_read_wait(0)\n    gl.store_wait(0)\n\n\n@gl.jit\ndef publish")], None),
}  # fmt: skip


@pytest.fixture
def mutated(monkeypatch, tmp_path):
    """A function that puts an edited kernel in place of the real one."""

    def apply(file, edits):
        modules = {}
        for path in (CHANNEL, MATMUL, KERNEL):
            text = (SOURCES / path).read_text()
            for old, new in edits if path == file else ():
                assert text.count(old) == 1, f"the text to edit occurs {text.count(old)} times: {old!r}"
                text = text.replace(old, new)
            for name, module in modules.items():
                text = text.replace(f"from tileweave.{name} import", f"from {module} import")
            name = f"mutant_{tmp_path.name}_{Path(path).stem}"
            target = tmp_path / f"{name}.py"
            target.write_text(text)
            spec = importlib.util.spec_from_file_location(name, target)
            monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
            spec.loader.exec_module(sys.modules[name])
            modules[path.removesuffix(".py").replace("/", ".")] = name
        kernel = sys.modules[modules["ops.matmul_reduce_scatter.kernel"]].matmul_reduce_scatter_kernel
        monkeypatch.setattr(launch, "matmul_reduce_scatter_kernel", kernel)

    return apply


def outcome(seed):
    """What four calls of three ranks come to under one schedule: R, D, P, W (wrong result) or None.

    Odd seeds take the deterministic mode.
    """
    deterministic = bool(seed % 2)
    calls = [(*operands(3, 3 * 136, 192, 256, seed=i)[:2], {}) for i in range(4)]
    try:
        with tw.virtual_world(3, device="cpu", seed=seed, sms=2) as world:
            results = run_calls(world, calls, deterministic=deterministic, plan=Plan(tile=(128, 64, 64), stages=2))
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for outs, (a, b, _) in zip(results, calls, strict=True):
            assert_right(outs, a, b, deterministic=deterministic)
    except AssertionError:
        return "W"


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, mutated):
    file, edits, expected = MUTANTS[name]
    mutated(file, edits)
    if expected is None:
        assert [outcome(seed) for seed in range(4)] == [None] * 4
        return
    for seed in range(12):
        found = outcome(seed)
        if found:
            break
    assert found and found in expected, f"expected one of {expected}, found {found}"
