"""The `tileweave` command: what it prints, its JSON, its exit codes."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tileweave
import tileweave_command
from tileweave.cli import environment, job, main
from tileweave.cli.problem import BadUsage, make_problem

OP = "matmul_reduce_scatter"
SMALL = ["--ranks", "2", "--shape", "m=128,n=64,k=128", "--device", "cpu"]
KEYS = {"op", "ranks", "backend", "shape", "dtype", "plan", "rel_error", "tolerance", "ok", "seconds", "version"}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

BAD_USAGE = pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "gemm"],
            "OP 'gemm' is not an op that this release runs; it has: matmul_reduce_scatter, all_gather_matmul",
        ),
        (["run"], "OP"),
        (["run", OP, "--dtype", "fp8"], "--dtype must be one of bf16, fp16, got 'fp8'"),
        (["run", OP, "--device", "tpu"], "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (["run", OP, "--ranks", "0"], "--ranks must be from 1 to 126, got 0"),
        (["run", OP, "--ranks", "999999"], "--ranks must be from 1 to 126, got 999999"),
        (["run", OP, "--seed", "99999999999999999999"], "--seed must be from 0 to 4294967295, got 9999"),
        (["run", OP, "--seed", str(2**63 - 1)], "--seed must be from 0 to 4294967295, got 9223372036854775807"),
        (["run", OP, "--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["run", OP, "--shape", "m=400000000000"], "--shape m must be from 0 to 2147483647, got 400000000000"),
        (["run", OP, "--shape", "n=" + "9" * 5000], "--shape n must be from 0 to 2147483647, got 9999"),
        (["run", OP, "--device", "cpu", "--shape", "m=2000000000"], "GiB of memory, and this machine has"),
        (["run", OP, "--ranks", "many"], "--ranks"),
        (["run", OP, "--shape", "m=512,q=3"], "got 'q=3'"),
        (["run", OP, "--shape", "m=-4"], "got 'm=-4'"),
        (
            ["run", "all_gather", "--shape", "k=4"],
            "--shape of all_gather takes m=ROWS,n=COLUMNS with sizes from 0 up, got",
        ),
        (
            ["run", "all_gather", "--deterministic"],
            "--deterministic is nothing that all_gather has; it goes with matmul_",
        ),
        (
            ["run", "all_reduce", "--bias"],
            "--bias is nothing that all_reduce has; it goes with matmul_reduce_scatter, all_",
        ),
        (["run", "all_gather_matmul", "--ranks", "3", "--shape", "n=64"], "nearest legal: n=63 or n=66"),
        (["run", OP, "--shape", "m=4,m=8"], "names m twice"),
        (["run", OP, "--ranks", "3", "--shape", "m=100"], "nearest legal: m=99 or m=102"),
        (["run", OP, "--ranks", "4", "--shape", "k=30"], "nearest legal: k=28 or k=32"),
        (["run", OP, "--colour"], "--colour"),
        (["weave"], "weave"),
    ],
)

HERE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ENVIRONMENTS = pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TILEWEAVE_DEBUG": "yes"}, "TILEWEAVE_DEBUG: expected 0 or 1, got 'yes'"),
        ({"TILEWEAVE_TIMEOUT": "soon"}, "TILEWEAVE_TIMEOUT: expected a number of seconds above 0"),
        ({"TILEWEAVE_WORKSPACE": "2G"}, "TILEWEAVE_WORKSPACE: expected a number of bytes from 1 up"),
        ({"TILEWEAVE_EXPERIMENTAL": "sm10"}, "TILEWEAVE_EXPERIMENTAL: expected sm100, or nothing, got 'sm10'"),
        ({"RANK": "x", "WORLD_SIZE": "2", **HERE}, "RANK: expected a whole number from 0 to 1, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", **HERE}, "RANK: expected a whole number from 0 to 1, got '2'"),
        ({"RANK": "0", "WORLD_SIZE": "two", **HERE}, "WORLD_SIZE: expected a whole number from 1 up, got 'two'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", **HERE, "MASTER_PORT": "-"}, "MASTER_PORT: expected a whole number from 0"),
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

    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_a_fault_is_traced_and_exits_with_3(self, options, monkeypatch, capsys):
        def fail(*args, **kwargs):
            raise LookupError("not foreseen")

        monkeypatch.setattr(tileweave, OP, fail)
        assert main(["run", OP, *SMALL, *options]) == 3
        captured = capsys.readouterr()
        told = json.loads(captured.out)["error"] if options else captured.err
        assert "LookupError: not foreseen" in told and "Traceback" in captured.err

    def test_one_rank_talks_of_no_sending(self, capsys):
        assert main(["run", OP, "--ranks", "1", "--shape", "m=64,n=64,k=64", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        assert f"{OP}, 1 rank, bf16" in text
        assert "sends" not in text.split("try next")[0]

    def test_a_fallback_in_an_emulated_world_is_told_as_one(self, capsys):
        assert main(["run", OP, "--ranks", "3", "--shape", "m=9,n=7,k=15", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        assert "a sum over the emulated ranks: no kernel ran" in text
        assert "process group" not in text.split("reason")[0]

    def test_what_tma_cannot_address_falls_back_and_says_why(self, capsys):
        assert main(["run", OP, "--ranks", "3", "--shape", "m=9,n=7,k=15", "--device", "cpu", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["backend"], report["world"], report["plan"]) == ("fallback", "emulated", None)
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
        assert (report["ranks"], report["backend"], report["world"]) == (2, "fallback", "processes")
        assert report["ok"] is True
        assert ran.stderr.count("waiting for 2 ranks (RANK=0 WORLD_SIZE=2 are set: started by torchrun?)") == 1

    def test_under_torchrun_bad_usage_is_told_once(self):
        ran = start(*TORCHRUN, "2", "-m", "tileweave", "run", OP, "--ranks", "3", "--json")
        assert ran.returncode != 0
        assert "torchrun started" in json.loads(ran.stdout)["error"]

    def test_a_rank_that_is_killed_or_stuck_is_named_within_the_limit(self):
        """By what rank 0 prints, one object for each of the two."""
        ran = start("-m", "tests.cli_program")
        assert ran.returncode == 0, ran.stderr
        rest = ran.stdout
        for _ in range(2):
            told, end = json.JSONDecoder().raw_decode(rest)
            code, _, rest = rest[end:].strip().partition("\n")
            assert told["ok"] is False and told["error"].startswith("DistError: rank 1 has died or is stuck: ")
            assert code == "3"
        assert "Traceback" not in ran.stderr

    @pytest.mark.parametrize(
        ("failure", "code"),
        [
            (torch.OutOfMemoryError("no room"), 2),
            (RuntimeError("DefaultCPUAllocator: no room"), 2),
            (torch.AcceleratorError("an illegal access"), 3),
            (RuntimeError("Connection closed by peer"), 3),
        ],
    )
    def test_a_rank_that_fails_by_itself_blames_nobody(self, failure, code, monkeypatch, capsys):
        """Its peers wait for it and come to no meeting, as if they were stuck."""

        def fails(*_):
            raise failure

        for name, value in ({"RANK": "0", "WORLD_SIZE": "1"} | HERE).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(job.dist, "init_process_group", lambda *_, **options: None)
        monkeypatch.setattr(job, "_of_all_ranks", fails)
        monkeypatch.setattr(job, "_missing_ranks", lambda: [1])
        assert main(["run", OP, "--device", "cpu", "--json"]) == code
        error = json.loads(capsys.readouterr().out)["error"]
        assert ("rank 1 has died or is stuck" in error) == ("peer" in str(failure)) and str(failure) in error

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

    @ENVIRONMENTS
    @pytest.mark.parametrize("as_json", [False, True])
    def test_the_environment_makes_no_sense(self, variables, message, as_json, monkeypatch, capsys):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["run", OP, *SMALL, *["--json"] * as_json]) == 2
        captured = capsys.readouterr()
        told = json.loads(captured.out)["error"] if as_json else captured.err
        assert message in told and "Traceback" not in captured.err

    @pytest.mark.parametrize("variable", ["TIMEOUT", "WORKSPACE", "EXPERIMENTAL"])
    def test_a_doctor_sees_that_too(self, variable, monkeypatch, capsys):
        monkeypatch.setenv(f"TILEWEAVE_{variable}", "x")
        assert main(["doctor"]) == 2
        assert f"tileweave: TILEWEAVE_{variable}: expected" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["run", "check", "trace"])
    def test_a_bound_of_the_workspace_is_no_fault(self, command, monkeypatch, capsys):
        monkeypatch.setenv("TILEWEAVE_WORKSPACE", "10")
        assert main([command, "all_gather", "--ranks", "2"]) == 2
        told = capsys.readouterr().err
        assert "Traceback" not in told and told.splitlines()[-1].startswith("tileweave: collectives: its workspace")
        assert "and TILEWEAVE_WORKSPACE allows 10: a bound of at least" in told

    def test_what_a_container_may_use_counts(self, monkeypatch, capsys):
        monkeypatch.setattr(job, "memory_bytes", lambda cuda: 1 << 20)
        assert main(["run", OP, "--ranks", "2", "--device", "cpu"]) == 2
        assert "GiB of memory, and this machine has 0.0 GiB; take smaller sizes" in capsys.readouterr().err

    def test_memory_that_runs_out_is_no_wrong_result(self, monkeypatch, capsys):
        def fail(*args, **kwargs):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

        monkeypatch.setattr(tileweave, OP, fail)
        assert main(["run", OP, *SMALL]) == 2
        assert "not enough memory, take smaller sizes" in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_cuda_without_a_gpu(self, capsys):
        assert main(["run", OP, "--device", "cuda"]) == 2
        assert "tileweave doctor" in capsys.readouterr().err


class TestProblem:
    @pytest.mark.parametrize("ranks", range(1, 9))
    def test_default_sizes_are_legal_and_aligned_for_any_world(self, ranks):
        problem = make_problem(OP, ranks, "", "bf16")
        assert problem.sizes["m"] % ranks == 0
        assert problem.sizes["k"] // ranks % 8 == 0
        assert (ranks not in (1, 2, 4, 8)) or problem.sizes == {"m": 512, "n": 512, "k": 2048}

    def test_data_differ_by_call_and_rank_and_are_the_same_when_asked_again(self):
        problem = make_problem(OP, 2, "m=8,n=8,k=16", "bf16")
        cpu = torch.device("cpu")
        drawn = [problem.operands(call, rank, cpu)[0] for call in range(2) for rank in range(2)]
        assert all(not torch.equal(x, y) for i, x in enumerate(drawn) for y in drawn[:i])
        assert torch.equal(drawn[3], problem.operands(1, 1, cpu)[0])

    def test_ranks_follow_torchrun(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", "1")
        assert job.choose_ranks(None, "cpu") == 3
        assert environment.speaks()  # set by hand: the others may not exist
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
        assert not environment.speaks()
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


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help(arguments, capsys):
    assert main(arguments) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{tileweave.__version__}\n"


@pytest.mark.parametrize(
    ("command", "code"), [(["plan", OP, "--json"], 2), (["plan", OP], 2), (["plan", "nonsense", "--json"], 2)]
)
def test_a_full_disk_under_standard_output_is_told(command, code, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(command) == code
    assert capsys.readouterr().err == "tileweave: standard output cannot be written: No space left on device\n"


def test_who_reads_may_have_read_enough(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as cut_off:
        monkeypatch.setattr(sys, "stdout", cut_off)
        assert main(["plan", OP, "--json"]) == 141
    assert capsys.readouterr().err == ""


def test_nobody_listens(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["plan", OP, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_the_version_takes_no_pytorch():
    told = "import sys, tileweave_command as it; code = it.main(); sys.exit(code or 'torch' in sys.modules)"
    for word in ("version", "--version"):
        ran = start("-c", told, word)
        assert (ran.returncode, ran.stdout) == (0, f"{tileweave.__version__}\n"), ran.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_interrupt_of_the_work(options, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tileweave.cli.app.run_job", interrupted)
    assert main(["run", OP, *SMALL, *options]) == 130
    told = capsys.readouterr()
    if options:
        assert json.loads(told.out) == {"error": "interrupted", "ok": False}
    else:
        assert told.err.strip() == "tileweave: interrupted"


def test_an_interrupt_while_the_package_is_imported(monkeypatch, capsys):
    class Importing:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "tileweave.cli", Importing())
    assert tileweave_command.main() == 130
    assert capsys.readouterr().err == "tileweave: interrupted\n"
