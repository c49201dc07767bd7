"""`tileweave bench`: what it lists, refuses, prints and writes, with times made up; on a GPU, one op in truth."""

import csv
import json
import os
import subprocess
import sys

import pytest

from tileweave.bench.harness import Bench
from tileweave.cli import app, benching, main

MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11", "commit": "abc"}
OP = "matmul_reduce_scatter"
TIMES = {
    "one": {"core": [90.0, 80.0, 95.0], "cudnn": [100.0, 95.0, 110.0], "fa3": [85.0, 84.0, 99.0]},
    "virtual": {"fused": [90.0, 80.0, 95.0], "local": [80.0, 75.0, 85.0]},
}


def run(capsys, *arguments):
    """The exit code, standard output and standard error of a command."""
    code = main(["bench", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def made_up(monkeypatch):
    """A GPU whose times are those of TIMES; what `measured` then holds."""
    measured = []

    def row(bench, shape, rounds):
        measured.append((bench.name, bench.label(shape), rounds))
        return {"us": TIMES[bench.where], "rel_error": {"flux": "does not run: no such thing"}}

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(benching, "cuda_refusal", lambda device: None)
    monkeypatch.setattr(benching, "machine", lambda: MACHINE)
    monkeypatch.setattr(Bench, "row", row)
    return measured


def test_the_list_needs_no_gpu(capsys):
    code, out, _ = run(capsys, OP, "attention", "--list", "--quick")
    assert code == 0
    assert "attention, one GPU; L2 cache: as the other contenders leave it" in out
    assert f"{OP}, virtual ranks of one GPU" in out and f"{OP}, several GPUs" in out
    assert "M=64 N=8192 K=28672" in out and "all_gather_matmul, several GPUs" not in out
    assert "not here: fa3-fwd is not installed" in out or "(fa3-fwd " in out
    assert "published by others, not measured here" in out and "bytedance/flux issue 90" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gemm"], "OP 'gemm' is not measured; there are: matmul, attention"),
        (["gemm", "--list"], "OP 'gemm' is not measured"),
        (["--only", "nothing"], "no shape's name contains what --only says: 'nothing'; --list names them"),
        (["--rounds", "0"], "--rounds must be from 1 to 1000, got 0"),
        (["--json", "absent/a.json"], "--json absent/a.json: no folder absent"),
        (["--csv", "."], "--csv .: is a folder"),
        (["--plot", "a.txt"], "--plot a.txt: the name must end with one of .png, .svg, .pdf"),
        (["--rounds", "few"], "--rounds"),
        (["--json", "a", "--csv", "./a"], "--csv a: --json goes to that file; each needs one of its own"),
        (["--list", "--rounds", "3", "--csv", "a"], "--list measures nothing and writes no file; leave out --csv and"),
    ],
)
def test_what_makes_no_sense_is_said(arguments, message, made_up, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and message in err
    assert not made_up


def test_without_a_gpu_it_says_what_it_would_measure(monkeypatch, capsys):
    monkeypatch.setattr(benching, "cuda_refusal", lambda device: "PyTorch sees no CUDA GPU")
    code, out, err = run(capsys, "attention")
    assert (code, out) == (2, "")
    assert "nothing can be measured here: PyTorch sees no CUDA GPU; on Hopper GPUs it would measure 14 shapes" in err


def test_no_picture_without_matplotlib(made_up, monkeypatch, capsys):
    monkeypatch.setattr(benching, "find_spec", lambda name: None)
    assert run(capsys, "attention", "--plot", "a.png") == (
        2,
        "",
        "tileweave: --plot needs matplotlib: pip install matplotlib\n",
    )
    assert not made_up


def test_tables_and_files(made_up, capsys, tmp_path):
    files = tmp_path / "a.json", tmp_path / "a.csv"
    code, out, _ = run(capsys, "attention", OP, "--quick", "--rounds", 5, "--json", files[0], "--csv", files[1])
    assert code == 0
    assert [each[0] for each in made_up] == ["attention", "attention", OP, OP] and {each[2] for each in made_up} == {5}
    assert "90.0 (80.0 to 95.0)" in out and "0.94 (fa3)" in out  # a loss like a win
    assert "virtual ranks of one GPU, which share its SMs and its memory: no link is measured" in out
    assert "left out W=1 M=8192 N=8192 K_local=8192: flux: does not run: no such thing" in out
    found = json.loads(files[0].read_text())
    assert found["machine"] == MACHINE and found["world"] == 1 and found["limits_of"] == "h200"
    assert [each["op"] for each in found["rows"]] == ["attention", "attention", OP, OP]
    assert len(found["figures"]) == 10 and len(found["left_out"]) == 4
    fused = next(each for each in found["figures"] if each["contender"] == "fused")
    assert fused["exposed_percent"] == pytest.approx(100 / 9) and fused["source"] == "measured"
    lines = list(csv.DictReader(files[1].read_text().splitlines()))
    measured = [line for line in lines if line["source"] == "measured"]
    assert len(measured) == 10 and {line["gpu"] for line in measured} == {"NVIDIA H200"}
    others = [line for line in lines if line["source"] != "measured"]
    assert others and {line["gpu"] for line in others} == {""} and len(found["published"]) == len(others)


def test_several_gpus_have_a_process_each(made_up, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(app, "choose_ranks", lambda ranks, device: 2)
    monkeypatch.setattr(app, "needs_processes", lambda ranks, device: True)
    monkeypatch.setattr(app, "start_processes", lambda *asked: started.append(asked) or 7)
    assert run(capsys, OP, "--quick")[0] == 7
    assert started == [(2, ["bench", OP, "--quick"])] and not made_up
    code, _, err = run(capsys, "matmul")
    assert code == 2 and "OP 'matmul' is measured on one GPU only; there are here: all_gather" in err


def test_a_picture_of_it(made_up, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    assert run(capsys, "attention", "--plot", path)[0] == 0
    assert path.stat().st_size > 10000


def test_a_wrong_result_is_told_and_the_rest_measured(made_up, monkeypatch, capsys):
    right = Bench.row

    def row(bench, shape, rounds):
        assert shape["causal"], "relative error 0.3"
        return right(bench, shape, rounds)

    monkeypatch.setattr(Bench, "row", row)
    code, out, _ = run(capsys, "attention", "--quick")
    assert code == 1
    assert "left out B1 H16/16 S16384 D128 full: a result was wrong: relative error 0.3" in out
    assert "B1 H16/16 S16384 D128 causal" in out


def test_what_does_not_fit_is_nothing_measured(made_up, monkeypatch, capsys):
    monkeypatch.setattr(Bench, "row", lambda bench, shape, rounds: "needs 200 GB, 140 are free")
    code, out, _ = run(capsys, "attention", "--quick")
    assert code == 2 and "left out B1 H16/16 S16384 D128 causal: needs 200 GB, 140 are free" in out


@pytest.mark.gpu
def test_one_op_on_a_gpu(tmp_path):
    path = tmp_path / "a.json"
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    own["CUDA_VISIBLE_DEVICES"] = own.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["bench", "matmul_all_reduce", "--quick", "--rounds", "3", "--json", str(path)]
    ran = subprocess.run([sys.executable, "-m", "tileweave", *command], env=own, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    figures = [each for each in json.loads(path.read_text())["figures"] if each["contender"] == "fused"]
    assert len(figures) == 3 and all(0 < each["of_limit"] < 1 and each["us"] > 0 for each in figures)
