"""Sizes that kernels and planner agree on, the table of tile configurations, and the fit that makes it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tileweave.bench import fit
from tileweave.planner.hardware import H200
from tileweave.planner.tiling import (
    BY_OPERAND_BYTES,
    LOAD_US,
    TILINGS,
    operand_bytes,
    part_buffers,
    part_rows,
    ring_bytes,
    ring_says,
    rings_of,
    tiles_of,
    tiling_of,
    tilings_of,
    whole_tiles,
    work_of,
)

FIGURES = Path(__file__).parents[2] / "docs/figures"


@pytest.mark.parametrize("message_bytes", [2, 4])
def test_every_configuration_fits_a_cta(message_bytes):
    for each in TILINGS:
        buffers = part_buffers(each.tile, each.stages, message_bytes)
        used = ring_bytes(each.tile, each.stages) + buffers * each.tile[0] * 128
        assert buffers >= 1 and used + 1024 <= H200.shared_bytes
        assert buffers & (buffers - 1) == 0 and buffers <= each.tile[1] * message_bytes // 128


def test_what_does_not_fit_has_no_buffer():
    assert part_buffers((128, 256, 64), 5, 2) == 0


def test_a_tile_of_more_than_64_rows_has_two_halves():
    assert [part_rows((rows, 128, 64)) for rows in (64, 128, 256)] == [64, 64, 128]


PROBED = "probe_2xH200.json"


def test_a_load_takes_what_was_probed():
    rows = json.loads((FIGURES / PROBED).read_text())["probe"]["rows"]
    of = {"mechanism": "tma", "direction": "put", "over": "link", "total": 1 << 15, "message": 1 << 14}
    (us,) = [row["us"][0] for row in rows if of.items() <= row.items()]
    assert us == pytest.approx(LOAD_US, abs=0.005)


@pytest.mark.parametrize("core, scales", [("wgmma", 0), ("tcgen05", 0), ("tcgen05", 4)])
@pytest.mark.parametrize("size", [1, 2])
def test_rings_are_as_deep_as_they_fit_and_a_stage_less(size, core, scales):
    for tiling in tilings_of(size, core, scales):
        depths = [tiling.stages, *(ring.stages for ring in rings_of(tiling, H200.shared_bytes, core, scales))]
        most = max(depths)
        assert len(depths) > 1 and sorted(depths) == list(range(max(tiling.stages - 1, 2), most + 1))
        fits = [part_buffers(tiling.tile, stages, 2, H200, core, scales) > 0 for stages in (most, most + 1)]
        assert fits == [True, False]


def test_a_k_step_waits_where_the_other_stages_do_not_hide_a_load():
    tiling = replace(tiling_of((128, 128, 64), 6), step_us=0.2)
    paces = [replace(tiling, stages=stages).pace_us for stages in (2, 3, 4, 5, 6)]
    assert paces == pytest.approx([LOAD_US, LOAD_US / 2, LOAD_US / 3, 0.2, 0.2])
    waits = replace(tiling, stages=2)
    assert waits.compute_us(132, 10, 1, 132) - tiling.compute_us(132, 10, 1, 132) == pytest.approx(10 * (LOAD_US - 0.2))
    assert ring_says(waits) == "of 2 stages one is loaded, 0.7 us at least, while the others are multiplied, 0.2 us"


def test_the_rings_of_the_sweeps_hide_a_load():
    """Else what they take would be in the table's K steps already."""
    for size in BY_OPERAND_BYTES:
        assert all(each.pace_us == each.step_us for each in tilings_of(size, "wgmma"))


def test_units_of_work():
    assert tiles_of(136, 512, 3, (128, 256, 64)) == 2 * 2 * 3
    assert whole_tiles(300, 132, 1) == 300 and whole_tiles(300, 132, 2) == 264 and whole_tiles(100, 132, 4) == 0
    assert work_of(300, 10, 1, 132) == (1, 30, 3, 0)
    assert work_of(300, 10, 3, 132) == (1, 24, 3, 1)  # two whole tiles and a third, rounded up, of another
    assert work_of(264, 10, 3, 132) == (1, 20, 2, 0)


def test_operands_are_read_at_least_once_and_again_by_each_wave():
    small = operand_bytes(512, 512, 512, (128, 128, 64), 132)
    assert small == 2 * 512 * 1024
    large = operand_bytes(16384, 16384, 8192, (128, 256, 64), 132)
    assert large > 2 * 2 * 16384 * 8192
    assert operand_bytes(16384, 16384, 8192, (128, 256, 64), 16) > large  # smaller waves share less


def test_the_table_is_what_the_committed_sweep_gives(tmp_path, monkeypatch, capsys):
    made = json.loads(fit.TABLE.read_text())
    sweeps = [str(FIGURES / name) for name in made["from"]]
    monkeypatch.setattr(fit, "TABLE", tmp_path / "tilings.json")
    monkeypatch.setattr("sys.argv", ["fit", *sweeps])
    fit.main()
    again = json.loads((tmp_path / "tilings.json").read_text())
    assert again["machine"] == made["machine"]
    assert again["tilings"].keys() == made["tilings"].keys() == {"1", "2"}
    for size, table in again["tilings"].items():
        for ours, theirs in zip(table, made["tilings"][size], strict=True):
            assert ours["tile"] == theirs["tile"] and ours["stages"] == theirs["stages"]
            for name in ("launch_us", "step_us", "tile_us", "share_us"):
                assert ours[name] == pytest.approx(theirs[name], abs=2e-3)


def test_the_fit_finds_what_made_the_times_and_nothing_below_zero():
    rng = np.random.default_rng(0)
    work = rng.integers(1, 50, (40, 4)).astype(float)
    cost = np.array([2.0, 0.5, 0.0, 5.0])
    assert fit.nonnegative(work / (work @ cost)[:, None]) == pytest.approx(cost, abs=1e-6)
    below = fit.nonnegative(work / (work @ np.array([3.0, 0.5, -0.3, 5.0]))[:, None])
    assert (below >= 0).all()


def test_the_plan_is_near_the_best_that_the_sweep_measured():
    from tileweave.bench.matmul import key
    from tileweave.planner import Problem, candidates

    sweeps = FIGURES.glob("matmul_sweep*_1xH200.json")
    rows = [row for sweep in sweeps for row in json.loads(sweep.read_text())["rows"]]
    losses = []
    for row in rows:
        times = {name: us[0] for name, us in row["us"].items() if name != "cublas"}
        size = fit.element_bytes(row)
        problem = Problem(row["m"], row["n"], row["k"], world=1, message_bytes=2, sms=132, operand_bytes=size)
        chosen = next((key(plan) for _, plan in candidates(problem) if key(plan) in times), None)
        assert chosen is not None
        losses.append(times[chosen] / min(times.values()) - 1)
    losses.sort()
    assert losses[len(losses) // 2] < 0.01 and losses[int(0.9 * len(losses))] < 0.05
