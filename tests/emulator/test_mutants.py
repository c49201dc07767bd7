"""Faults planted by text edits are found, and harmless edits raise no alarm."""

# ruff: noqa: E501  (a mutant per row)

import collections

import pytest

from tests.emulator.kernels import all_gather_matmul, matmul_reduce_scatter, puts
from tests.emulator.problems import (
    mutant,
    outcome,
    run_all_gather,
    run_attention,
    run_matmul,
    run_put,
    run_reduce_scatter,
)

SEEDS = 6

WAIT_EMPTY = "            gl.mbarrier_wait(empty.index(s), ((it // S) & 1) ^ 1)\n"
WAIT_MMA = "            acc = gl.warpgroup_mma_wait(num_outstanding=1, deps=[tok])\n"
ARRIVE = "            gl.mbarrier_arrive(empty.index((it - 1) % S), count=1, pred=k > 0)\n"
WAIT_LAST = "        acc = gl.warpgroup_mma_wait(num_outstanding=0, deps=[acc])\n"
ARRIVE_LAST = "        gl.mbarrier_arrive(empty.index((it - 1) % S), count=1)\n"
STORE = "        c_buf.reshape([BM, BN]).store(c)\n"
FENCE = "        gl.fence_async_shared()\n"
READ_WAIT = "        gl.store_read_wait(0)\n        gl.barrier()\n"
VISIBLE = "    gl.store_read_wait(0)\n    gl.store_wait(0)\n"
SIGNAL = '        gl.atomic_add(counters + d * 64, 1, sem="release", scope="sys")\n'
SIGNALS = "    for d in gl.static_range(W):\n" + SIGNAL
POLL = 'while gl.atomic_add(counters + rank * 64, 0, sem="acquire", scope="sys") < want:'
WANT = "want = W * gl.num_programs(0)"
REDUCE_SCATTER = {  # edits, and what must be found (None: nothing, it is harmless)
    "loader does not wait for an empty slot": ([(WAIT_EMPTY, "")], "Race|Protocol"),
    "arrives on empty before the wgmma wait": ([(WAIT_MMA + ARRIVE, ARRIVE + WAIT_MMA)], "Race"),
    "arrives on the slot of the wgmma in flight": ([(ARRIVE, ARRIVE.replace("(it - 1) % S", "s").replace(", pred=k > 0", "")), (ARRIVE_LAST, "")], "Race"),
    "no read wait before c_buf is reused": ([(READ_WAIT, "        gl.barrier()\n")], "Race"),
    "read wait for all but one with one c_buf": ([(READ_WAIT, READ_WAIT.replace("(0)", "(1)"))], "Race"),
    "no full wait before the signal": ([(VISIBLE, "    gl.store_read_wait(0)\n")], "Race"),
    "full wait after the signal": ([(VISIBLE, "    gl.store_read_wait(0)\n"), (SIGNALS, SIGNALS + "    gl.store_wait(0)\n")], "Race"),
    "full wait in the loader's thread": ([(VISIBLE, "    gl.store_read_wait(0)\n"), ("            it += 1\n\n\n@gl.jit\ndef consumer", "            it += 1\n    gl.store_wait(0)\n\n\n@gl.jit\ndef consumer")], "Race"),
    "waits for one signal too few": ([(WANT, WANT + " - 1")], "Race"),
    "waits for one signal too many": ([(WANT, WANT + " + 1")], "Deadlock"),
    "wrong parity in the loader": ([("((it // S) & 1) ^ 1)", "((it // S) & 1))")], "Deadlock"),
    "wrong parity in the consumer": ([("gl.mbarrier_wait(ready.index(s), (it // S) & 1)", "gl.mbarrier_wait(ready.index(s), ((it // S) & 1) ^ 1)")], "Race|Protocol|Deadlock"),
    "no fence_async_shared": ([(FENCE, "")], "Race"),
    "fence_async_shared before the store": ([(STORE + FENCE, FENCE + STORE)], "Race"),
    "signal at scope gpu": ([(SIGNAL, SIGNAL.replace('"sys"', '"gpu"'))], "Race"),
    "poll at scope gpu": ([(POLL, POLL.replace('"sys"', '"gpu"'))], "Race"),
    "relaxed signal": ([(SIGNAL, SIGNAL.replace('"release"', '"relaxed"'))], "Race"),
    "relaxed poll": ([(POLL, POLL.replace('"acquire"', '"relaxed"'))], "Race"),
    "signal before the work": ([(SIGNALS, ""), ("    gl.warp_specialize([\n", SIGNALS + "    gl.warp_specialize([\n")], "Race"),
    "signals its own flag W times": ([(SIGNAL, SIGNAL.replace("d * 64", "rank * 64"))], "Race"),
    "expects too few bytes": ([("(BM + BN) * BK * 2)", "BN * BK * 2)")], "Race|Deadlock|Protocol"),
    "expects too many bytes": ([("(BM + BN) * BK * 2)", "(BM + BN) * BK * 4)")], "Deadlock"),
    "empty initialized for two arrivals": ([("gl.mbarrier_init(empty.index(i), count=1)", "gl.mbarrier_init(empty.index(i), count=2)")], "Deadlock"),
    "reads acc with a wgmma in flight": ([(WAIT_LAST, WAIT_LAST.replace("=0", "=1"))], "Race"),
    "forgets the last arrive of a tile": ([(ARRIVE_LAST, "")], "Deadlock"),
    "arrives twice": ([(ARRIVE_LAST, ARRIVE_LAST * 2)], "Race|Protocol|Deadlock"),
    "loads a into the next slot": ([("ready.index(s), a_bufs.index(s))", "ready.index(s), a_bufs.index((s + 1) % S))")], "Race"),
    "same flag for all ranks": ([(SIGNAL, SIGNAL.replace("d * 64", "0 * 64")), (POLL, POLL.replace("rank * 64", "0"))], "Race"),
    "only CTA 0 tells": ([(SIGNAL, SIGNAL.replace("        gl.", "        if gl.program_id(0) == 0:\n            gl.")), (WANT, "want = W")], "Race"),
    "(harmless) no barrier around the store": ([(READ_WAIT, "        gl.store_read_wait(0)\n"), (FENCE + "        gl.barrier()\n", FENCE)], None),
    "(harmless) no barrier before the signal": ([("    gl.barrier()\n    for d", "    for d")], None),
    "(harmless) full wait only, no read wait": ([(VISIBLE, "    gl.store_wait(0)\n")], None),
    "(harmless) no wgmma left in flight in the loop": ([(WAIT_MMA, WAIT_MMA.replace("=1", "=0"))], None),
}  # fmt: skip

AG_SIGNAL = '            gl.atomic_add(flags + p * fstride + rank * nblk + blk, 1, sem="release", scope="sys")\n'
AG_PERFORMED = "        gl.store_read_wait(0)\n        gl.store_wait(0)\n        gl.barrier()\n"
AG_TELL = "        for d in gl.static_range(W - 1):\n            p = (rank + 1 + d) % W\n" + AG_SIGNAL
ALL_GATHER = {
    "no proxy fence after the wait": ([("            gl.fence_proxy_async()\n", "")], "Race"),
    "proxy fence before the wait": ([("        if owner != rank:\n            while", "        if owner != rank:\n            gl.fence_proxy_async()\n            while"), ("                pass\n            gl.fence_proxy_async()\n", "                pass\n")], "Race"),
    "no full store wait": ([("        gl.store_wait(0)\n", "")], "Race"),
    "no barrier before the flags": ([(AG_PERFORMED, AG_PERFORMED.replace("        gl.barrier()\n", ""))], "Race"),
    "flag of the wrong block": ([("flags + p * fstride + rank * nblk + blk", "flags + p * fstride + rank * nblk + 0")], "Race|Deadlock"),
    "waits for the first K split only": ([("< target:", "< target - 1:")], "Race"),
    "read wait for W with W - 1 stores a tile": ([("gl.store_read_wait(W - 1)", "gl.store_read_wait(W)")], "Race"),
    "signals before its stores are performed": ([(AG_PERFORMED, ""), (AG_TELL, AG_TELL + "    gl.store_wait(0)\n")], "Race"),
}  # fmt: skip

ATTENTION = {
    "scales o with its wgmma in flight": ([("gl.warpgroup_mma_wait(0, deps=[ot])\n        gl.mbarrier_arrive(ve", "gl.warpgroup_mma_wait(1, deps=[ot])\n        gl.mbarrier_arrive(ve")], "Race"),
    "K released by one consumer only": ([("gl.mbarrier_init(ke.index(i), count=NQ)", "gl.mbarrier_init(ke.index(i), count=1)")], "Race|Protocol|Deadlock"),
    "no final read wait": ([("o_buf.index(i))\n    gl.store_read_wait(0)\n", "o_buf.index(i))\n")], "Race"),
    "waits for K where V is meant": ([("        gl.mbarrier_wait(vr.index(pidx), ((j - 1) // ST) & 1)\n", "        gl.mbarrier_wait(kr.index(pidx), ((j - 1) // ST) & 1)\n")], "Race|Deadlock|Protocol"),
    "(harmless: V's release orders it) releases K early": ([("        s = gl.warpgroup_mma_wait(1, deps=[st])\n        gl.mbarrier_arrive(ke.index(sidx), count=1)\n", "        gl.mbarrier_arrive(ke.index(sidx), count=1)\n        s = gl.warpgroup_mma_wait(1, deps=[st])\n")], None),
}  # fmt: skip

HAND_OVER = "        if wg == 0:\n            gl.mbarrier_arrive(turn.index(1), count=1)\n        else:\n            gl.mbarrier_arrive(turn.index(0), count=1)\n"
TAKE_TURN = "        else:\n            gl.mbarrier_wait(turn.index(1), n & 1)\n"
PINGPONG = {
    "consumer 1 does not wait its turn": ([(TAKE_TURN, "")], "Race|Protocol|Deadlock"),
    "hands over the turn before its loop": ([(HAND_OVER, ""), (TAKE_TURN, TAKE_TURN + HAND_OVER)], "Race|Protocol|Deadlock"),
    "it not advanced past the other's tile": ([("        it += nk\n        n += 1\n", "        n += 1\n")], "Race|Protocol|Deadlock"),
}  # fmt: skip

TABLES = [
    ("matmul_reduce_scatter.py", run_reduce_scatter, {"W": 2}, REDUCE_SCATTER),
    ("all_gather_matmul.py", run_all_gather, {"W": 2, "K": 512}, ALL_GATHER),
    ("attention.py", run_attention, {}, ATTENTION),
    ("matmul.py", run_matmul, {"kernel": "pingpong", "S": 4}, PINGPONG),
]
CASES = [(file, name) for file, _, _, table in TABLES for name in table]


@pytest.mark.parametrize(("file", "name"), CASES)
def test_edits_of_kernels(file, name, tmp_path):
    run, options, (edits, want) = next((r, o, table[name]) for f, r, o, table in TABLES if f == file)
    module = mutant(tmp_path, file, edits)
    seen = collections.Counter(outcome(run, module, seed, **options)[0] for seed in range(SEEDS))
    findings = {kind for kind in seen if kind not in ("clean", "WRONG")}
    if want is None:
        assert set(seen) == {"clean"}
    else:
        assert findings, f"nothing found: {dict(seen)}"
        assert findings <= set(want.split("|")), dict(seen)


LITMUS = {
    "TMA put, proxy fence after the wait": (run_put, puts, {"last": (2, 1)}, None),
    "TMA put, no proxy fence after the wait": (run_put, puts, {"last": (0, 1)}, "Race"),
    "TMA put, fence of shared memory only": (run_put, puts, {"last": (1, 1)}, "Race"),
    "TMA put, no barrier between store_wait and signal": (run_put, puts, {"last": (2, 0)}, "Race"),
    "generic put, no barrier before the signal": (run_put, puts, {"kernel": "put_registers", "last": (0, 1)}, "Race"),
    "generic put, acquire of which nobody uses the result": (run_put, puts, {"kernel": "put_registers", "last": (1, 0)}, "Race"),
    "plain stores of several ranks to one tile": (run_reduce_scatter, matmul_reduce_scatter, {"mode": 1}, "Race"),
    "each rank zeroes its own result": (run_reduce_scatter, matmul_reduce_scatter, {"zero": "rank"}, "Race"),
    "adds of several ranks atomic at scope gpu only": (run_reduce_scatter, matmul_reduce_scatter, {"reduce_scope": "gpu"}, "Race"),
    "4 CTAs that wait for each other on 2 SMs": (run_reduce_scatter, matmul_reduce_scatter, {"BN": 128, "grid": 4, "sms": 2}, "Deadlock"),
    "gathered rows overwritten by the next call": (run_all_gather, all_gather_matmul, {"calls": 2}, "Race"),
}  # fmt: skip


@pytest.mark.parametrize("name", LITMUS)
def test_litmus(name):
    run, module, options, want = LITMUS[name]
    seen = collections.Counter(outcome(run, module, seed, **options)[0] for seed in range(SEEDS))
    assert set(seen) <= ({want, "clean"} if want else {"clean"}), dict(seen)
    assert want is None or seen[want], dict(seen)
