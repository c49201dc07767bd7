"""The registry of measurements: shapes that can be measured, and what rows of times mean."""

import csv
import json

import pytest

from tileweave.bench import measure
from tileweave.bench.draw import draw
from tileweave.bench.figures import csv_text, figures_of, left_out, limit_us, times_us
from tileweave.bench.harness import WHERE, Bench, Work, main
from tileweave.bench.published import PUBLISHED, published
from tileweave.bench.registry import chosen, registered
from tileweave.planner import H200

TIMES = {"tileweave": [110.0, 100.0, 130.0], "nccl": [150.0, 140.0, 160.0], "matmul": [100.0, 90.0, 105.0]}


def bench_of(name, where="several"):
    """The measurement of an op."""
    return next(bench for bench in registered() if (bench.name, bench.where) == (name, where))


@pytest.mark.parametrize("several", [False, True])
def test_every_shape_has_a_name_of_its_own_and_work(several):
    benches = chosen(several, [])
    assert len({(bench.name, bench.where) for bench in benches}) == len(benches)
    for bench in benches:
        assert bench.where in WHERE
        labels = [bench.label(shape) for shape in bench.shapes]
        assert len(set(labels)) == len(labels) > 0
        assert bench.chosen(quick=True) == [bench.shapes[i] for i in bench.quick]
        for shape in bench.shapes:
            work = bench.work(shape, 8)
            assert work.flop >= 0 and work.link_bytes >= 0 and bench.needs(shape) >= 0
            assert several == (work.link_bytes > 0)


def test_the_papers_shapes_are_there():
    reduce_scatter = [(s["m"], s["n"], s["k"]) for s in bench_of("matmul_reduce_scatter").shapes]
    assert {(n, n, n) for n in (2048, 4096, 8192, 16384, 32768)} <= set(reduce_scatter)


@pytest.mark.parametrize(
    "op, flop, sent",
    [
        ("matmul_reduce_scatter", 2 * 4096**3 / 2, 4096 * 4096),  # half of a bf16 matrix
        ("all_gather_matmul", 2 * 4096**3 / 2, 4096 * 4096),
        ("matmul_all_reduce", 2 * 4096**3 / 2, 2 * 4096 * 4096),
        ("ring_attention", 2 * 16 * 16 * 3072**2 * 128, 2 * 2 * 16 * 16 * 1536 * 128),
        ("ulysses_attention", 128 * 3072**2 * 128, 4 * 128 * 1536 * 128),  # causal; half of four tensors
    ],
)
def test_work_of_two_gpus(op, flop, sent):
    bench = bench_of(op)
    assert bench.work(bench.shapes[0], 2) == Work(flop, sent)


def test_what_the_gpus_cannot_share_evenly_is_not_measured(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (0, 0))  # what can be shared would need memory
    cases = (
        ("matmul_reduce_scatter", 0, "4096"),
        ("ulysses_attention", 0, "128"),  # the sequence is divisible, the heads are not
        ("moe_dispatch_matmul", 0, "8192"),
    )
    for name, i, size in cases:
        bench = bench_of(name)
        assert bench.row(bench.shapes[i], 1) == f"3 GPUs cannot share {size} evenly"
    monkeypatch.setattr("tileweave.bench.harness.free_bytes", lambda: 0.0)
    ring = bench_of("ring_attention")
    assert "GB, 0 are free" in ring.row(ring.shapes[0], 1)


def test_figures_of_a_row():
    bench = bench_of("matmul_reduce_scatter")
    shape = dict(m=4096, n=4096, k=4096)
    found = {each.contender: each for each in figures_of(bench, shape, {"us": TIMES}, H200, 2)}
    assert list(found) == ["matmul", "tileweave", "nccl"]
    assert found["tileweave"].tflops == pytest.approx(2 * 4096**3 / 2 / 110e6)
    assert found["tileweave"].gb_per_s == pytest.approx(4096 * 4096 / 110e3)
    assert found["tileweave"].exposed_percent == pytest.approx(100 * 10 / 110)
    assert found["matmul"].exposed_percent is None
    assert found["nccl"].of_limit == pytest.approx(4096**3 / (H200.matmul_peak_tflops * 1e6) / 150)


def test_the_link_may_be_the_limit():
    assert limit_us(Work(0.0, 450e3), H200) == pytest.approx(1.0)
    assert limit_us(Work(989e6, 450e3), H200) == pytest.approx(1.0)
    assert limit_us(Work(989e6, 900e3), H200) == pytest.approx(2.0)
    assert times_us({"ms": {"fused": [1.0, 0.5, 2.0]}}) == {"fused": [1000.0, 500.0, 2000.0]}


def test_who_leads_by_how_much():
    """Losses like wins; what transfers nothing is no rival, nor is cuBLAS within virtual ranks."""
    bench, within = bench_of("matmul_reduce_scatter"), bench_of("matmul_reduce_scatter", "virtual")
    times = {"tileweave": [200.0, 190.0, 230.0], "nccl": [150.0, 140.0, 160.0], "matmul": [90.0, 80.0, 95.0]}
    found = {
        e.contender: e for e in figures_of(bench, bench.shapes[0], {"us": times | {"async-tp": [300.0] * 3}}, H200, 2)
    }
    assert (found["tileweave"].vs_best_rival, found["tileweave"].best_rival) == (0.75, "nccl")
    assert {found[name].vs_best_rival for name in ("nccl", "async-tp", "matmul")} == {None}
    times = {"fused": [90.0] * 3, "local": [80.0] * 3, "cublas": [60.0] * 3}
    fused, *_ = (e for e in figures_of(within, within.shapes[0], {"us": times}, H200, 1) if e.contender == "fused")
    assert fused.vs_best_rival is None and fused.exposed_percent == pytest.approx(100 / 3)


def test_what_is_to_be_known_of_a_time():
    bench = bench_of("matmul_reduce_scatter")
    row = {
        "us": TIMES, "graph": {"tileweave": True, "nccl": False}, "route": {"fused": False, "reason": "too few rows"},
        "rel_error": {"tileweave": 1e-3, "async-tp": "does not run: no symmetric memory"},
    }  # fmt: skip
    notes = {each.contender: each.note for each in figures_of(bench, bench.shapes[0], row, H200, 2)}
    assert notes == {
        "tileweave": "the plain way, no kernel of ours: too few rows", "nccl": "called eagerly", "matmul": ""
    }  # fmt: skip
    assert left_out(row) == {"async-tp": "does not run: no symmetric memory"}
    assert left_out("needs 200 GB, 140 are free") == {"": "needs 200 GB, 140 are free"}
    row["route"]["fused"] = True
    assert {each.note for each in figures_of(bench, bench.shapes[0], row, H200, 2)} == {"called eagerly", ""}


def test_as_a_table():
    bench = bench_of("all_gather", "virtual")
    text = csv_text(figures_of(bench, bench.shapes[0], {"us": TIMES}, H200, 2), {"gpu": "a GPU, large"})
    line, *_ = csv.DictReader(text.splitlines())
    assert (line["contender"], float(line["us"]), line["tflops"]) == ("matmul", 100.0, "")
    assert (line["source"], line["gpu"]) == ("measured", "a GPU, large")
    assert text.count("\n") == 4


@pytest.mark.parametrize("name, where", [("all_gather", "virtual"), ("all_gather", "several"), ("matmul", "one")])
def test_as_a_picture(name, where, tmp_path):
    pytest.importorskip("matplotlib")
    bench, path = bench_of(name, where), tmp_path / "bars.png"
    shapes = bench.shapes[:9]  # more than a row of the picture holds
    draw([each for shape in shapes for each in figures_of(bench, shape, {"us": TIMES}, H200, 2)], path)
    assert path.stat().st_size > 10000


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce", "ring_attention"])
def test_published_figures_say_where(op, monkeypatch):
    monkeypatch.setattr("tileweave.bench.published.versions", dict)
    found = published([op])
    assert found and {each.op for each in found} == {op}
    for each in found:
        assert each.source != "measured" and each.where.startswith("8 H")
        assert each.us_low is None and each.of_limit is None and each.exposed_percent is None
        assert (each.us is None) == ("times as fast" in each.note)
    rates = [each.tflops for each in found if each.tflops]
    assert all(10 < rate < 800 for rate in rates)  # of a GPU: what a Hopper can do


def test_published_figures_of_some_shapes_and_of_what_is_not_here(monkeypatch):
    found = published(["matmul_reduce_scatter"], ["M=2048 N=4096"])
    assert [each.us for each in found if each.us] == pytest.approx([423, 755])
    monkeypatch.setattr("tileweave.bench.published.versions", lambda: {"flux": "1.1"})
    assert "flux" in {each.contender for each in PUBLISHED}
    assert "flux" not in {each.contender for each in published(["all_gather_matmul"])}


@pytest.mark.parametrize(
    "arguments, rank, message",
    [
        ([], "0", "this is measured on one GPU, not under torchrun"),
        (["--only", "nothing"], None, "no shape's name contains what --only says: 'nothing'"),
        (["--json", "absent/a.json"], None, "--json absent/a.json: there is no folder absent"),
        (["all_reduce"], None, "unknown OP all_reduce: expected some of matmul"),
    ],
)
def test_a_command_that_would_measure_nothing_says_so(arguments, rank, message, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("sys.argv", ["matmul", *arguments])
    with pytest.raises(SystemExit):
        main("", [bench_of("matmul", "one")])
    assert message in capsys.readouterr().err


def test_what_is_asked_for_is_measured_and_written(monkeypatch, capsys, tmp_path):
    shapes = [dict(n=n) for n in (1, 2, 3)]
    bench = Bench(
        "an op", "one", shapes, lambda n, rounds, more: "too large" if n == 3 else {"n": n, "us": rounds, "more": more},
        lambda shape: f"n={shape['n']}", lambda row: f"{row['us']} us", lambda shape, world: Work(1.0), rounds=7,
    )  # fmt: skip
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("tileweave.bench.harness.machine", lambda: {})
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1, 1))
    path = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["an op", "--only", "n=2", "n=3", "--json", str(path), "--more", "x"])
    main("", [bench], {"--more": {}})
    assert capsys.readouterr().out == "an op n=2: 7 us\nan op n=3: too large\n"
    assert json.loads(path.read_text()) == {"machine": {}, "rows": [{"n": 2, "us": 7, "more": "x"}]}


def test_an_unknown_op():
    with pytest.raises(ValueError, match="OP 'matmul' is measured on one GPU only; there are here: "):
        chosen(True, ["matmul"])
    with pytest.raises(ValueError, match="OP 'gemm' is not measured; there are: matmul, "):
        chosen(None, ["gemm"])
    assert all(isinstance(bench, Bench) for bench in chosen(False, ["moe_dispatch_matmul"]))
    assert len(chosen(None, [])) == len(chosen(True, [])) + len(chosen(False, []))


def test_the_commit_of_figures(monkeypatch, tmp_path):
    assert measure.commit() == "unknown" or len(measure.commit().removesuffix("-dirty")) >= 7
    monkeypatch.setattr(measure, "__file__", str(tmp_path / "a/b/c/measure.py"))
    (tmp_path / "a/b").mkdir(parents=True)
    assert measure.commit() == "unknown"  # no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.commit() == "unknown"  # no git
