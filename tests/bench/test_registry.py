"""The registry of measurements: shapes that can be measured, and what rows of times mean."""

import csv
import json

import pytest

from tileweave.bench.figures import csv_text, draw, figures_of, limit_us, times_us
from tileweave.bench.harness import WHERE, Bench, Work, main
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
        assert bench.where in WHERE and hasattr(H200, bench.rate)
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


def test_figures_of_a_row():
    bench = bench_of("matmul_reduce_scatter")
    shape = dict(m=4096, n=4096, k=4096)
    found = {each.contender: each for each in figures_of(bench, shape, {"us": TIMES}, H200, 2)}
    assert list(found) == ["matmul", "tileweave", "nccl"]
    assert found["tileweave"].tflops == pytest.approx(2 * 4096**3 / 2 / 110e6)
    assert found["tileweave"].gb_per_s == pytest.approx(4096 * 4096 / 110e3)
    assert found["tileweave"].exposed_percent == pytest.approx(100 * 10 / 110)
    assert found["matmul"].exposed_percent is None
    assert found["nccl"].of_limit == pytest.approx(4096**3 / (H200.matmul_tflops * 1e6) / 150)


def test_the_link_may_be_the_limit():
    assert limit_us(Work(0.0, 350e3), H200, "matmul_tflops") == pytest.approx(350 / H200.link_gb_per_s)
    assert times_us({"ms": {"fused": [1.0, 0.5, 2.0]}}) == {"fused": [1000.0, 500.0, 2000.0]}


def test_as_a_table_and_as_pictures(tmp_path):
    bench = bench_of("all_gather", "virtual")
    found = figures_of(bench, bench.shapes[0], {"us": TIMES}, H200, 2)
    (line, *_), text = list(csv.DictReader(csv_text(found).splitlines())), csv_text(found)
    assert line["contender"] == "matmul" and float(line["us"]) == 100.0 and line["tflops"] == ""
    assert text.count("\n") == 4
    pytest.importorskip("matplotlib")
    assert [file.stat().st_size > 1000 for file in draw(found, tmp_path / "plots")] == [True]


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
    with pytest.raises(ValueError, match="OP 'moe_dispatch_matmul' is not measured here; there are: "):
        chosen(True, ["moe_dispatch_matmul"])
    assert all(isinstance(bench, Bench) for bench in chosen(False, ["moe_dispatch_matmul"]))
