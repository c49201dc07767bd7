"""`tileweave probe`: its kernels in the emulator, what it would measure, the profile that comes of figures."""

import json

import pytest
import torch

from tileweave import virtual_world
from tileweave.bench.probe import profile, sweep
from tileweave.bench.probe.copies import NAIVE, Arena, Copy
from tileweave.bench.probe.draw import draw, lines, panels
from tileweave.bench.probe.kernel import mbarrier_kernel
from tileweave.bench.probe.latency import HandOver
from tileweave.cli import main
from tileweave.planner.hardware import from_dict

KB = 1 << 10
MACHINE = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "date": "2026-01-01"}
FACTS = {"gpu": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_bytes": 10**11, "l2_bytes": 5 * 10**7}
WAYS = [
    Copy("tma", "put", 8 * KB, KB, 3),
    Copy("tma", "get", 8 * KB, 4 * KB, 2, ways=2),
    Copy("tma", "put", 16 * KB, 8 * KB, 2, columns=64, width=128),
    Copy("register", "put", 8 * KB, 16, 2),
    Copy("register", "get", 2 * KB + 128, 4, 1, ways=2),
    Copy("register", "put", 4 * KB, 4, 2, spread=32),
    Copy("naive", "put", 4 * KB, 4, 2, naive=NAIVE),
    Copy("naive", "put", 2 * KB, 4, 1),
    Copy("copy_engine", "get", 128, 128, 0, ways=2),
]


def fake(us=lambda copy: [2.0, 1.5, 4.0], over="link", copies=None):
    """Rows of all copies with made-up times."""
    return [sweep.row_of(copy, over, us(copy)) for copy in copies or sweep.between(132, sweep.GB)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_way_copies_right(ranks):
    def program(rank, group):
        arena = Arena(group.world.fabric(rank), 16 * KB)
        arena.fill()
        for copy in WAYS:
            arena.verify(copy)
            arena.enqueue(copy, 2)  # the ring and the flags are used again

    with virtual_world(ranks, device="cpu", seed=ranks) as world:
        world.run(program)


@pytest.mark.parametrize("at", [0, 8 * KB // 4 - 1, 8 * KB // 4])
def test_a_wrong_copy_is_found_on_every_rank(at, monkeypatch):
    enqueue = Arena.enqueue

    def spoiled(arena, copy, repeats):
        enqueue(arena, copy, repeats)
        if arena.fabric.rank == 0:
            arena.copies[1][at] += 1

    monkeypatch.setattr(Arena, "enqueue", spoiled)

    def program(rank, group):
        arena = Arena(group.world.fabric(rank), 16 * KB)
        arena.fill()
        with pytest.raises(RuntimeError, match="wrong on rank 1"):
            arena.verify(Copy("copy_engine", "put", 8 * KB, 8 * KB, 0))

    with virtual_world(2, device="cpu") as world:
        world.run(program)


@pytest.mark.parametrize("between", [False, True])
def test_flags_are_handed_over(between):
    def program(rank, group):
        parties = HandOver(group.world.fabric(rank), between)
        for turns in (5, 3):
            parties.verify(turns)
        return parties.came.tolist()

    with virtual_world(3, device="cpu") as world:
        came = world.run(program)
    assert came == ([[3, 0], [0, 3], [0, 0]] if between else [[3, 3]] * 3)


def test_mbarriers_are_handed_over():
    out = torch.zeros(1, dtype=torch.int32)
    with virtual_world(1, device="cpu") as world:
        world.run(lambda rank, group: group.world.fabric(rank).launch(mbarrier_kernel, 1, (out, 7), num_warps=4))
    assert out.item() == 7


@pytest.mark.parametrize("most", [16, 66, 132])
def test_every_copy_can_be_done(most):
    for copy in [*sweep.between(most, sweep.GB), *sweep.within(most, sweep.GB)]:
        assert copy.sms <= most and 128 <= copy.total <= sweep.GB and copy.total % copy.message == 0
        if copy.mechanism == "tma":
            rows = copy.message // (2 * copy.columns)
            assert 8 <= rows <= 256 and copy.total // (2 * copy.width) % rows == 0
        if copy.spread > 1:
            assert copy.total // copy.message % copy.spread == 0
    found = list(sweep.between(most, sweep.GB))
    sizes = {copy.total for copy in found if copy.mechanism == "copy_engine" and copy.ways == 1}
    assert (min(sizes), max(sizes)) == (128, sweep.GB)
    assert {(copy.mechanism, copy.direction, copy.ways) for copy in found} >= {
        (mechanism, direction, ways)
        for mechanism in ("tma", "register", "copy_engine")
        for direction, ways in sweep.WAYS
    }
    assert {copy.naive for copy in found if copy.mechanism == "naive"} >= {NAIVE, ()}


def test_a_profile_of_figures_is_read_by_the_planner():
    rows = fake(lambda copy: [copy.total / 1e5] * 3) + fake(over="memory", copies=list(sweep.within(132, sweep.GB)))
    found = {
        "rows": rows, "sync_us": [2.5, 2.0, 9.0], "launch_us": [1.75, 1.0, 2.0],
        "matmul_tflops": {8192: {"tileweave": 700.04, "cublas": 690.0}}, "attention_tflops": {"core": 650.0},
    }  # fmt: skip
    made = profile.assemble(FACTS | {"links": 18, "ranks": 2}, found, MACHINE)
    read = from_dict(made, "here")
    assert (read.sync_us, read.launch_us, read.matmul_tflops, read.ranks) == (2.5, 1.75, 700.0, 2)
    assert read.link_gb_per_s == pytest.approx(100.0) and read.sm_gb_per_s == pytest.approx(25.0)
    assert read.sources["sync_us"].kind == "measured" and "2026-01-01" in read.sources["sync_us"].source
    assert read.sources["flag_cta_us"] == profile.nearest("NVIDIA H200").sources["flag_cta_us"]  # nobody measured it
    curve = read.curve("copy_engine", "put")
    assert curve is not None and len(curve.points) == len(sweep.SIZES)
    naive = read.curve("naive", "put")
    assert naive is not None and len(naive.points) == 1
    assert made["probe"]["rows"][0]["us"] == [sweep.BULK / 1e5] * 3


def test_of_one_gpu_no_link_is_claimed():
    rows = fake(over="memory")
    read = from_dict(profile.assemble(FACTS, {"rows": rows}, MACHINE), "here")
    base = profile.nearest("NVIDIA H200")
    assert (read.link_gb_per_s, read.sync_us) == (base.link_gb_per_s, base.sync_us)
    assert read.curve("tma", "put") is None and read.curve("tma", "put", over="memory") is not None


def test_the_time_is_up_for_all_ranks():
    def program(rank, group):
        arena = Arena(group.world.fabric(rank), 16 * KB)
        return sweep.measure(arena, iter(WAYS), "memory", 0.0 if rank else float("inf"))

    with virtual_world(2, device="cpu") as world:
        assert world.run(program) == [[], []]


def test_curves(tmp_path):
    rows = fake()
    for _, along, chosen in panels(rows):
        assert chosen and all(points == sorted(points) for points in lines(chosen, along).values())
    pytest.importorskip("matplotlib")
    draw(profile.assemble(FACTS, {"rows": rows}, MACHINE), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "1"], "--seconds must be from 5 to 3600, got 1"),
        (["--ranks", "1"], "--ranks must be from 2, since a copy has two ends, got 1"),
        (["--json", "absent/a.json"], "--json absent/a.json: there is no folder absent"),
        (["--png", "absent/a.png"], "--png absent/a.png: there is no folder absent"),
    ],
)
def test_what_is_refused(arguments, message, capsys):
    assert main(["probe", *arguments]) == 2
    assert message in "".join(capsys.readouterr())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_measure(capsys):
    assert main(["probe"]) == 2
    told = capsys.readouterr().err
    assert "PyTorch sees no CUDA GPU" in told and "copies of 128 bytes to 1 GB" in told


@pytest.mark.gpu
def test_a_probe_of_one_gpu(tmp_path):
    file = tmp_path / "profile.json"
    assert main(["probe", "--seconds", "40", "--ranks", "2", "--json", str(file)]) == 0
    read = from_dict(json.loads(file.read_text()), "here")
    assert 1000 < read.memory_gb_per_s < 8000 and 0 < read.flag_cta_us < read.flag_gpu_us < 20
    assert read.curve("tma", "put", over="memory") is not None
