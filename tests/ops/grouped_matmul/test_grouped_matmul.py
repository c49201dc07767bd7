# ruff: noqa: E501  (a mutant per row)
"""grouped_matmul in the emulator, its fallback, its contract and its gradients."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tests.ops.mutants import SOURCES
from tileweave import Plan
from tileweave.emulator import DeadlockError, ProtocolError, RaceError
from tileweave.ops.grouped_matmul import launch, op, reference
from tileweave.ops.matmul_reduce_scatter import relative_error, tolerance

SIZES = {
    "ragged, some empty": [3, 0, 130, 64, 7, 0],
    "all of one expert": [0, 0, 141],
    "whole tiles": [128, 64, 128],
    "an expert": [70],
    "no rows": [0, 0],
    "many": [i % 3 for i in range(150)],
}


def problem(sizes, k=72, n=136, beyond=0, transposed=False, dtype=torch.bfloat16, seed=0, device="cpu"):
    """x, w and offsets of experts with so many rows, and so many rows `beyond` them, of NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes) + beyond, k, generator=g).to(dtype).to(device)
    x[sum(sizes) :] = float("nan")
    w = torch.randn(len(sizes), *((n, k) if transposed else (k, n)), generator=g).to(dtype).to(device)
    offsets = torch.tensor(sizes, device=device).cumsum(0).int()
    return x, w.transpose(1, 2) if transposed else w, offsets


def assert_right(out, x, w, offsets):
    """Near the truth, and zero beyond the experts."""
    last = int(offsets[-1])
    truth = reference(x, w, offsets)[:last]
    assert out.shape == (x.shape[0], w.shape[2]) and out.dtype == x.dtype
    assert relative_error(out[:last], truth) <= tolerance(x.dtype, 1, True)
    assert not out[last:].any()


def emulated(call, seed=0, sms=4):
    """What `call()` returns on the one rank of an emulated world."""
    with tw.virtual_world(1, device="cpu", seed=seed, sms=sms) as world:
        return world.run(lambda rank, group: call())[0]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("tile", [(64, 64, 64), (128, 128, 64)])
def test_ragged_experts(name, tile):
    for seed, transposed in enumerate((False, True)):
        given = problem(SIZES[name], beyond=9 * seed, transposed=transposed, seed=seed)
        call = partial(tw.grouped_matmul, *given, plan=Plan(tile=tile, stages=3))
        assert_right(emulated(call, seed), *given)


@pytest.mark.parametrize("tile", [(256, 64, 64), (64, 256, 64), (128, 256, 64)])
def test_tiles_and_a_planned_one(tile):
    given = problem([5, 200, 300], k=136, n=264, dtype=torch.float16)
    for plan in (Plan(tile=tile, stages=2), None):
        assert_right(emulated(partial(tw.grouped_matmul, *given, plan=plan)), *given)


def test_a_matrix_beyond_an_experts_end_is_not_read():
    """K is no multiple of a K step: what TMA reads beyond an expert's matrix must be zeros, not the next one's NaN."""
    x, w, offsets = problem([40, 40], k=72)
    w[1] = float("nan")
    out = emulated(lambda: tw.grouped_matmul(x, w, offsets))
    assert relative_error(out[:40], x[:40].float() @ w[0].float()) <= tolerance(x.dtype, 1, True)
    assert out[40:].isnan().all()


def test_offsets_beyond_the_rows_count_as_the_end():
    x, w, offsets = problem([40, 40])
    out = emulated(lambda: tw.grouped_matmul(x, w, offsets + torch.tensor([0, 1000], dtype=torch.int32)))
    assert_right(out, x, w, offsets)


WRONG = {
    "decreasing": [30, 10, 60],
    "negative": [-5, 20, 60],
    "overlapping": [60, 0, 60],
    "wild": [2**31 - 1, -(2**31), 60],
}


@pytest.mark.parametrize("name", WRONG)
def test_decreasing_offsets_are_refused_where_the_host_knows_them(name):
    x, w, _ = problem([40, 10, 10])
    offsets = torch.tensor(WRONG[name], dtype=torch.int32)
    if name == "negative":  # which are none but the first, that has no rows
        assert_right(emulated(lambda: tw.grouped_matmul(x, w, offsets)), x, w, offsets.clamp(min=0))
        return
    told = rf"^grouped_matmul: offsets must not decrease.* offsets\[1\] = {WRONG[name][1]} is below offsets\[0\]"
    for where in (emulated, lambda call: call()):
        with pytest.raises(ValueError, match=told):
            where(lambda: tw.grouped_matmul(x, w, offsets))


@pytest.mark.parametrize("name", WRONG)
def test_on_a_device_wrong_offsets_touch_nothing_beyond_the_operands(name, monkeypatch):
    """The emulator raises where a kernel reads or writes beyond a tensor. One CTA, as rows that two experts claim race."""
    monkeypatch.setattr(op, "check_offsets", lambda offsets: None)
    x, w, _ = problem([40, 10, 10])
    offsets = torch.tensor(WRONG[name], dtype=torch.int32)
    for seed, tile in enumerate(((64, 64, 64), (128, 128, 64))):
        out = emulated(lambda: tw.grouped_matmul(x, w, offsets, plan=Plan(tile=tile, stages=3)), seed, 1)  # noqa: B023
        assert out.shape == (60, w.shape[2])


def test_calls_follow_each_other_with_other_offsets():
    x, w, _ = problem([100, 50, 30])
    splits = [torch.tensor(s, dtype=torch.int32) for s in ([100, 150, 180], [0, 1, 180], [60, 60, 60])]
    outs = emulated(lambda: [tw.grouped_matmul(x, w, offsets) for offsets in splits])
    for out, offsets in zip(outs, splits, strict=True):
        assert_right(out, x, w, offsets)


def test_another_number_of_rows_is_no_cold_call():
    plan, misses = Plan(tile=(64, 64, 64), stages=3), []
    for rows in (40, 41, 0, 90):
        given = problem([rows, 3], seed=rows)
        assert_right(emulated(partial(tw.grouped_matmul, *given, plan=plan)), *given)
        misses.append(launch.prepare.cache_info().misses)
    assert len(set(misses)) == 1


@pytest.mark.parametrize("where", ["fallback", "emulated", "unaddressable"])
def test_gradients(where):
    n = 20 if where == "unaddressable" else 72
    x, w, offsets = problem([3, 0, 70, 1], n=n, beyond=4)
    x[-4:] = 0
    weights = torch.randn(x.shape[0], n).bfloat16()

    def call():
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        (tw.grouped_matmul(*leaves, offsets).float() * weights.float()).sum().backward()
        return [leaf.grad for leaf in leaves]

    got = call() if where == "fallback" else emulated(call)
    truth = x.float().requires_grad_(), w.float().requires_grad_()
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        ((truth[0][start:end] @ truth[1][expert]) * weights[start:end].float()).sum().backward()
        start = end
    for mine, leaf in zip(got, truth, strict=True):
        assert relative_error(mine, leaf.grad) <= tolerance(torch.bfloat16, 1, True)
    assert not got[1][1].any(), "the gradient of an expert without rows is zero, not missing"


def test_the_operator_keeps_pytorchs_rules():
    x, w, offsets = problem([3, 0, 5], k=16, n=8)
    args = (x.requires_grad_(), w.requires_grad_(), offsets, "")
    torch.library.opcheck(torch.ops.tileweave.grouped_matmul.default, args, atol=1e-1, rtol=1e-1)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=torch.zeros(8, 24)), "must both be bfloat16"),
        (dict(x=torch.zeros(8, 32).bfloat16()), r"x must be \[T, H\]"),
        (dict(offsets=torch.zeros(2, dtype=torch.int32)), r"offsets must be \[3\]"),
        (dict(offsets=torch.zeros(3, dtype=torch.int64)), "of int32"),
        (dict(plan=Plan(split=2)), "plan.split=2"),
        (dict(plan=Plan(tile=(64, 48, 64))), "rows and columns are"),
    ],
)
def test_a_broken_contract_is_named(change, message):
    x, w, offsets = problem([3, 0, 5], k=24)
    arguments = dict(x=x, w=w, offsets=offsets) | change
    with pytest.raises(ValueError, match=message):
        tw.grouped_matmul(**arguments)
    with pytest.raises(ValueError, match=message):
        tw.explain("grouped_matmul", **arguments)


def test_what_explain_says():
    given = problem([3, 0, 5])
    assert not tw.explain("grouped_matmul", *given).fused
    route = emulated(lambda: tw.explain("grouped_matmul", *given))
    assert route.fused and route.predicted_us > 0 and "3 experts" in route.reason


KERNEL, GROUPED = "ops/grouped_matmul/kernel.py", "tiles/grouped.py"
MUTANTS = {  # an edit, and what it must lead to: R race, D deadlock, P protocol error, W a wrong result; None: nothing
    "a ragged part by TMA": (GROUPED, [("if row + mm.ROWS <= end:", "if row < end:")], "RW"),
    "no ragged part": (GROUPED, [("    elif row < end:\n", "    elif row < 0:\n")], "W"),
    "a row too many": (GROUPED, [("mask=(rows < end)[:, None]", "mask=(rows <= end)[:, None]")], "RWP"),
    "columns beyond the result": (GROUPED, [(" & (cols < n)[None, :])", ")")], "RWP"),
    "tiles of the next expert": (GROUPED, [("return gl.load(entry), row, row", "return gl.load(entry) + 1, row, row")], "WP"),
    "a multiplier leaves too much out": (GROUPED, [("gl.where(row < end_of(", "gl.where(row + 8 < end_of(")], "W"),
    "a table that ends early": (KERNEL, [("gl.minimum(before + tiles, limit))", "gl.minimum(before, limit))")], "W"),
    "tiles of empty experts": (KERNEL, [("gl.cdiv(gl.maximum(end - start, 0), BM)\n    return", "gl.cdiv(gl.maximum(end - start, 1), BM)\n    return")], "WRP"),
    "rows beyond left as they were": (KERNEL, [("    zero_rows(out, end_of", "    zero_rows(out, rows + end_of")], "W"),
    "a multiplier leaves nothing out": (GROUPED, [("return gl.where(row < end_of(work.offsets, expert, work.rows), steps, 0)", "return steps")], None),
}  # fmt: skip


def put_edited(file, edits, monkeypatch, folder):
    """Put both kernels, with edits (old, new) of `file`, in place of the real ones."""
    found = {}
    for path in (GROUPED, KERNEL):
        text = (SOURCES / path).read_text()
        for old, new in edits if path == file else ():
            assert text.count(old) == 1, f"the text to edit occurs {text.count(old)} times: {old!r}"
            text = text.replace(old, new)
        if path == KERNEL:
            text = text.replace("from tileweave.tiles.grouped import", f"from {found[GROUPED]} import")
        found[path] = name = f"mutant_{folder.name}_{Path(path).stem}"
        target = folder / f"{name}.py"
        target.write_text(text)
        spec = importlib.util.spec_from_file_location(name, target)
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
    for kernel in ("grouped_tiles_kernel", "grouped_matmul_kernel"):
        monkeypatch.setattr(launch, kernel, getattr(sys.modules[found[KERNEL]], kernel))


@pytest.mark.parametrize("name", MUTANTS)
def test_an_edit_is_judged_rightly(name, monkeypatch, tmp_path):
    file, edits, expected = MUTANTS[name]
    given = problem([3, 0, 70, 130, 9], beyond=5, seed=1)
    plan = Plan(tile=(128, 64, 64), stages=2)
    put_edited(file, edits, monkeypatch, tmp_path)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    try:
        assert_right(emulated(lambda: tw.grouped_matmul(*given, plan=plan), seed=2), *given)
        found = None
    except RaceError:
        found = "R"
    except DeadlockError:
        found = "D"
    except ProtocolError:
        found = "P"
    except AssertionError:
        found = "W"
    assert found is None if expected is None else found in expected, found


def poisoned(empty):
    """torch.empty that fills 16-bit floats with NaN and integers with what is no place, so that what nobody writes shows."""

    def fill(*args, **kwargs):
        made = empty(*args, **kwargs)
        value = {torch.bfloat16: float("nan"), torch.int32: 1 << 20}.get(made.dtype)
        return made if value is None or made.device.type != "cpu" else made.fill_(value)

    return fill
