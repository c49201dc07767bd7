"""`tileweave trace`: what it says, what it writes, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from tileweave.checker import problems
from tileweave.cli import main, tracing
from tileweave.planner.hardware import profile

SMALL = ["trace", "matmul_reduce_scatter", "--ranks", "2", "--shape", "m=128,n=256,k=256"]


def test_json_and_trace_events(tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert main([*SMALL, "--out", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["shape"] == {"m": 128, "n": 256, "k": 256} and told["out"] == str(path)
    assert told["variant"] == "intra_sm"
    assert told["times"] == "modelled by the rates of an H200, not measured"
    roles = {role["role"]: role for role in told["roles"]}
    assert {"TMA load", "wgmma", "2 (load_role)"} <= set(roles)
    for role in roles.values():
        assert 0 <= role["busy"] + role["waits_for_flags"] + role["other_waits"] <= 1.001
    assert roles["wgmma"]["busy"] > 0 and roles["2 (load_role)"]["waits_for_flags"] > 0
    trace = json.loads(path.read_text())
    assert trace["otherData"]["times"] == told["times"]
    last = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last == pytest.approx(told["microseconds"])
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "s", "f", "M"}


def test_the_table(capsys):
    assert main(["trace", "matmul_reduce_scatter", "--ranks", "1", "--shape", "m=128,n=256,k=256"]) == 0
    text = capsys.readouterr().out
    assert "matmul_reduce_scatter, 1 emulated rank of 4 SMs" in text and "not measured" in text


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.png"
    assert main([*SMALL, "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_result_is_told(monkeypatch, capsys):
    op = problems.PROBLEMS["all_gather"]
    wrong = replace(op, call=lambda *args, **options: tuple(-x for x in op.call(*args, **options)))
    monkeypatch.setitem(problems.PROBLEMS, "all_gather", wrong)
    assert main(["trace", "all_gather", "--ranks", "2", "--json"]) == 1
    assert "relative error" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    "options, said",
    [
        (["gemm"], "OP must be one of matmul_reduce_scatter"),
        (["my_module:test"], "OP must be one of matmul_reduce_scatter"),
        (["all_gather", "--ranks", "0"], "--ranks must be from 1 to"),
        (["all_gather", "--ranks", "2", "--shape", "m=3"], "m=3 is not divisible by the 2 ranks"),
        (["all_gather", "--shape", "k=8"], "there are m, n, got k"),
        (["all_gather", "--out", "no/such/folder/t.json"], "there is no folder"),
        (["all_gather", "--out", "a.png", "--png", "./a.png"], "--png a.png: --out goes to that file"),
        (["all_gather", "--device", "gpu"], "--device must be one of cpu, cuda"),
    ],
)
def test_bad_usage(options, said, capsys):
    assert main(["trace", "--json", *options]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    assert main([*SMALL, "--device", "cuda", "--json"]) == 2
    assert "--device cuda: " in json.loads(capsys.readouterr().out)["error"]


def test_not_between_processes(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([*SMALL, "--device", "cuda", "--json"]) == 2
    assert "start it without torchrun" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_reduce", "moe_dispatch_matmul", "grouped_matmul"])
def test_a_gpu(op, tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert main(["trace", op, "--ranks", "2", "--device", "cuda", "--out", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["world"] == "virtual" and told["times"].startswith("measured on an NVIDIA")
    assert 1 < told["microseconds"] < 1e5 and told["lost"] == 0
    roles = {role["role"]: role for role in told["roles"]}
    assert {"all_reduce": {"main"}}.get(op, {"load_role", "multiply_role", "store_role"}) <= set(roles)
    # A route, or what lies between the two kernels of a small call, is the host's.
    assert roles["SM"]["busy"] > {"moe_dispatch_matmul": 0, "grouped_matmul": 0}.get(op, 0.2)
    for role in roles.values():
        assert 0 <= role["busy"] + role["waits_for_flags"] + role["other_waits"] <= 1.001
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(told["microseconds"])


def test_a_rank_has_its_share_of_the_gpu():
    hardware = profile("h200")
    whole, four = tracing.rates_of(hardware, hardware.sms), tracing.rates_of(hardware, 4)
    assert whole.link_bytes == 350e3 and four.link_bytes * hardware.sms == pytest.approx(4 * whole.link_bytes)
    assert whole.sm_flops == four.sm_flops


def test_what_goes_to_a_peer_passes_the_link(monkeypatch, capsys):
    """Workspaces of the emulated world are told from the ranks' own memory."""
    times = []
    for factor in (1, 100):
        slow = replace(profile("h200"), link_gb_per_s=profile("h200").link_gb_per_s / factor)
        monkeypatch.setattr(tracing, "profile", lambda name, slow=slow: slow)
        assert main(["trace", "all_gather", "--ranks", "2", "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["microseconds"])
    assert times[1] > 10 * times[0]
