"""The `tileweave` command: what it prints, its JSON, its exit codes."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tileweave
from tileweave.cli import job, main
from tileweave.cli.problem import BadUsage, make_problem

OP = "matmul_reduce_scatter"
SMALL = ["--ranks", "2", "--shape", "m=128,n=64,k=128", "--device", "cpu"]
KEYS = {"op", "ranks", "backend", "shape", "dtype", "plan", "rel_error", "tolerance", "ok", "seconds", "version"}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

BAD_USAGE = pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "gemm"], "OP 'gemm' is not an op of this release; it has: matmul_reduce_scatter"),
        (["run"], "OP"),
        (["run", OP, "--dtype", "fp8"], "--dtype must be one of bf16, fp16, got 'fp8'"),
        (["run", OP, "--device", "tpu"], "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (["run", OP, "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["run", OP, "--ranks", "many"], "--ranks"),
        (["run", OP, "--shape", "m=512,q=3"], "got 'q=3'"),
        (["run", OP, "--shape", "m=-4"], "got 'm=-4'"),
        (["run", OP, "--shape", "m=4,m=8"], "names m twice"),
        (["run", OP, "--ranks", "3", "--shape", "m=100"], "nearest legal: m=99 or m=102"),
        (["run", OP, "--ranks", "4", "--shape", "k=30"], "nearest legal: k=28 or k=32"),
        (["run", OP, "--colour"], "--colour"),
        (["weave"], "weave"),
    ],
)


def start(*arguments):
    """Run Python with `arguments`, with this process's module path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=environment, check=False
    )


class TestRun:
    def test_json_is_one_object_with_all_keys(self):
        ran = start("-m", "tileweave", "run", OP, *SMALL, "--json")
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert report.keys() >= KEYS
        assert (report["op"], report["ranks"], report["backend"], report["dtype"]) == (OP, 2, "emulated", "bf16")
        assert report["shape"] == {"m": 128, "n": 64, "k": 128}
        assert report["plan"]["mechanism"] == "tma"
        assert report["ok"] is True
        assert 0 < report["rel_error"] <= report["tolerance"]
        assert report["seconds"] > 0

    @pytest.mark.parametrize("options", [["--deterministic"], ["--bias"], ["--dtype", "fp16"], ["--seed", "7"]])
    def test_options_reach_the_op(self, options, capsys):
        assert main(["run", OP, *SMALL, "--json", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        name = options[0].removeprefix("--")
        assert report[name] == {"dtype": "fp16", "seed": 7}.get(name, True)

    def test_text_names_plan_reason_error_and_what_next(self, capsys):
        assert main(["run", OP, *SMALL]) == 0
        text = capsys.readouterr().out
        assert "2 ranks" in text
        assert "m=128 n=64 k=128" in text
        assert "emulated ranks" in text
        assert "tma, intra_sm" in text
        assert "right: relative error" in text
        assert "try next" in text

    def test_a_wrong_result_is_told_and_exits_with_1(self, monkeypatch, capsys):
        right = tileweave.matmul_reduce_scatter
        monkeypatch.setattr(tileweave, OP, lambda *args, **kwargs: right(*args, **kwargs) * 1.5)
        assert main(["run", OP, *SMALL]) == 1
        assert "WRONG: relative error 5.0e-01" in capsys.readouterr().out

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_a_poisoned_result_is_wrong(self, monkeypatch, capsys, poison):
        right = tileweave.matmul_reduce_scatter

        def poisoned(*args, **kwargs):
            return right(*args, **kwargs).index_fill_(1, torch.tensor(3), poison)

        monkeypatch.setattr(tileweave, OP, poisoned)
        assert main(["run", OP, *SMALL, "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] is False
        assert report["rel_error"] is None

    def test_an_op_that_raises_is_one_object_and_exits_with_1(self, monkeypatch, capsys):
        def fail(*args, **kwargs):
            raise tileweave.FabricTimeout(op=OP, rank=1, index=0, expected=2, seen=1)

        monkeypatch.setattr(tileweave, OP, fail)
        assert main(["run", OP, *SMALL, "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] is False
        assert "FabricTimeout" in report["error"]

    def test_what_tma_cannot_address_falls_back_and_says_why(self, capsys):
        assert main(["run", OP, "--ranks", "3", "--shape", "m=9,n=7,k=15", "--device", "cpu", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["backend"], report["plan"]) == ("fallback", None)
        assert "16-byte" in report["reason"]

    @pytest.mark.parametrize("shape", ["m=0,n=64", "n=64,k=0", "m=0,n=0,k=0"])
    def test_empty_sizes(self, shape):
        assert main(["run", OP, "--ranks", "2", "--shape", shape, "--device", "cpu"]) == 0

    def test_under_torchrun_rank_0_alone_prints(self):
        ran = start(
            *TORCHRUN, "2", "-m", "tileweave", "run", OP, "--shape", "m=64,n=32,k=64", "--device", "cpu", "--json"
        )
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert (report["ranks"], report["backend"], report["ok"]) == (2, "fallback", True)

    def test_under_torchrun_bad_usage_is_told_once(self):
        ran = start(*TORCHRUN, "2", "-m", "tileweave", "run", OP, "--ranks", "3", "--json")
        assert ran.returncode != 0
        assert "torchrun started" in json.loads(ran.stdout)["error"]

    @pytest.mark.gpu
    def test_virtual_ranks(self):
        ran = start("-m", "tileweave", "run", OP, "--ranks", "4", "--device", "cuda", "--json")
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert (report["backend"], report["ok"]) == ("virtual", True)

    @pytest.mark.multigpu
    def test_several_gpus_run_a_process_each(self):
        ran = start("-m", "tileweave", "run", OP, "--json")
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert (report["backend"], report["ranks"], report["ok"]) == ("processes", torch.cuda.device_count(), True)


class TestWithoutTriton:
    """macOS and Windows have none; here it is hidden."""

    HIDDEN = "import sys; sys.modules['triton'] = None; from tileweave.cli import main; sys.exit(main(sys.argv[1:]))"

    def test_the_main_job_runs_in_the_emulator(self):
        ran = start("-c", self.HIDDEN, "run", OP, "--json")
        assert ran.returncode == 0, ran.stderr
        report = json.loads(ran.stdout)
        assert (report["backend"], report["ranks"], report["ok"]) == ("emulated", 4, True)

    def test_doctor_says_so(self):
        ran = start("-c", self.HIDDEN, "doctor", "--json")
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout)
        assert found["backends"]["emulated"]["works"]
        assert not found["backends"]["virtual"]["works"]
        assert found["triton"] is None


class TestBadUsage:
    @BAD_USAGE
    def test_exits_with_2_and_says_what_is_legal(self, arguments, message, capsys):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""

    @BAD_USAGE
    def test_with_json_it_is_one_object(self, arguments, message, capsys):
        assert main([*arguments, "--json"]) == 2
        captured = capsys.readouterr()
        assert message in json.loads(captured.out)["error"]
        assert captured.err == ""

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_cuda_without_a_gpu(self, capsys):
        assert main(["run", OP, "--device", "cuda"]) == 2
        assert "tileweave doctor" in capsys.readouterr().err


class TestProblem:
    @pytest.mark.parametrize("ranks", range(1, 9))
    def test_default_sizes_are_legal_and_aligned_for_any_world(self, ranks):
        problem = make_problem(OP, ranks, "", "bf16")
        assert problem.m % ranks == 0
        assert problem.k // ranks % 8 == 0
        assert (ranks not in (1, 2, 4, 8)) or (problem.m, problem.n, problem.k) == (512, 512, 2048)

    def test_data_differ_by_call_and_rank_and_are_the_same_when_asked_again(self):
        problem = make_problem(OP, 2, "m=8,n=8,k=16", "bf16")
        cpu = torch.device("cpu")
        drawn = [problem.inputs(call, rank, cpu)[0] for call in range(2) for rank in range(2)]
        assert all(not torch.equal(x, y) for i, x in enumerate(drawn) for y in drawn[:i])
        assert torch.equal(drawn[3], problem.inputs(1, 1, cpu)[0])

    def test_ranks_follow_torchrun(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "1")
        assert job.choose_ranks(None, "cpu") == 3
        assert not job.speaks()
        with pytest.raises(BadUsage, match="3 processes"):
            job.choose_ranks(4, "cpu")

    def test_several_gpus_get_a_process_each(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert job.choose_ranks(None, "auto") == 2
        assert job.choose_ranks(None, "cpu") == 4
        assert job.needs_processes(2, "auto")
        assert not job.needs_processes(4, "auto")  # more ranks than GPUs: virtual ranks on one
        assert not job.needs_processes(2, "cpu")


def test_a_bare_command_shows_its_help(capsys):
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
