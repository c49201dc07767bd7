"""`tileweave run` of every op that it has: what is asked of it, computed, and told."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import tileweave
from tileweave.cli import main
from tileweave.cli.ops import OPS
from tileweave.cli.problem import make_problem

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
OTHERS = [op for op in OPS if op != "matmul_reduce_scatter"]  # which test_cli.py runs
EXPERTS = ("grouped_matmul", "moe_dispatch_matmul")
SMALL = {
    "all_gather_matmul": "m=64,n=128,k=64",
    "matmul_all_reduce": "m=24,n=64,k=96",
    **dict.fromkeys(EXPERTS, "tokens=48,hidden=64,inner=72,experts=6"),
}


def run(op, *options, ranks=2, shape=None):
    """The exit code of a small problem in the emulator."""
    shape = shape or SMALL.get(op, "m=24,n=48")
    return main(["run", op, "--ranks", str(ranks), "--shape", shape, "--device", "cpu", *options])


def test_the_ops_are_those_of_the_library():
    assert set(OPS) == {"matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce", *COLLECTIVES, *EXPERTS}
    assert all(callable(getattr(tileweave, op)) for op in OPS)


@pytest.mark.parametrize("op", OTHERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_small_problem_is_right_and_told_as_one_object(op, ranks, capsys):
    shape = {"all_gather_matmul": "m=96,n=96,k=64"}.get(op)
    assert run(op, "--json", ranks=ranks, shape=shape) == 0
    report = json.loads(capsys.readouterr().out)
    fused = ranks > 1 or op not in (*COLLECTIVES, "moe_dispatch_matmul")  # those of one rank send nothing
    assert (report["op"], report["ranks"], report["world"], report["fused"]) == (op, ranks, "emulated", fused)
    assert (report["plan"] is None) == (op in COLLECTIVES or not fused)
    assert report["ok"] is True and 0 <= report["rel_error"] <= report["tolerance"]
    assert report["rel_error"] > 0 or op in COLLECTIVES


@pytest.mark.parametrize("op", OTHERS)
def test_text_names_sizes_and_shapes_and_what_next(op, capsys):
    assert run(op) == 0
    text = capsys.readouterr().out
    problem = make_problem(op, 2, SMALL.get(op, "m=24,n=48"), "bf16")
    operands, result = problem.shapes()
    assert f"{op}, 2 ranks, bf16" in text
    assert " ".join(f"{name}={size}" for name, size in problem.sizes.items()) in text
    assert f"per rank {' @ '.join(str(list(shape)) for shape in operands)} -> {list(result)}" in text
    assert "right: relative error" in text and f"tileweave run {op} " in text


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_default_sizes_are_legal_and_aligned_for_any_world(op, ranks):
    problem = make_problem(op, ranks, "", "bf16")
    operands = problem.operands(0, 0, torch.device("cpu"))
    aligned = [x.shape for x in operands if x.is_floating_point()] + [problem.shapes()[1]]
    assert all(size % 8 == 0 for shape in aligned for size in shape[1:])
    assert (ranks not in (1, 2, 4, 8)) or problem.sizes == OPS[op].sizes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_shapes_are_those_of_the_op(op, ranks):
    """The truth of drawn operands has the shape that the table says, on every rank."""
    shape = ",".join(f"{name}={12 * (i + 1)}" for i, name in enumerate(reversed(OPS[op].sizes)))  # topk < experts
    problem = make_problem(op, ranks, shape, "bf16", bias="bias" in OPS[op].options)
    cpu = torch.device("cpu")
    operands = [problem.operands(0, rank, cpu) for rank in range(ranks)]
    assert [tuple(x.shape) for x in operands[0]] == problem.shapes()[0]
    truths = problem.of_op.truth(operands, problem.biases(0, cpu))
    assert [tuple(x.shape) for x in truths] == [problem.shapes()[1]] * ranks


@pytest.mark.parametrize(("op", "option"), [(op, option) for op in OTHERS for option in OPS[op].options])
def test_options_reach_the_op(op, option, monkeypatch, capsys):
    asked = []
    right = getattr(tileweave, op)

    def seen(*args, **kwargs):
        asked.append(kwargs)
        return right(*args, **kwargs)

    monkeypatch.setattr(tileweave, op, seen)
    assert run(op, f"--{option}", "--json") == 0
    assert json.loads(capsys.readouterr().out)[option] is True
    assert all(option in kwargs for kwargs in asked) and len(asked) == 4


@pytest.mark.parametrize("op", OTHERS)
def test_a_wrong_result_is_told_and_exits_with_1(op, monkeypatch, capsys):
    right = getattr(tileweave, op)

    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        return (out[0] * 1.5, out[1]) if isinstance(out, tuple) else out * 1.5

    monkeypatch.setattr(tileweave, op, wrong)
    assert run(op) == 1
    assert "WRONG: relative error 5.0e-01" in capsys.readouterr().out


def test_results_of_swapped_ranks_are_wrong(monkeypatch, capsys):
    right = tileweave.all_to_all
    monkeypatch.setattr(tileweave, "all_to_all", lambda x, *args, **kwargs: right(x.flip(0), *args, **kwargs))
    assert run("all_to_all", "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce"])
def test_what_tma_cannot_address_falls_back_and_says_how(op, capsys):
    assert run(op, ranks=3, shape="m=9,n=21,k=15") == 0
    text = capsys.readouterr().out
    assert "emulated ranks" in text and "no kernel ran, so none was checked" in text and "none: no fused kernel" in text


def test_what_is_composed_over_nodes_is_told_so(monkeypatch, capsys):
    explain = tileweave.explain

    def over_nodes(*args, **kwargs):
        inside = explain(*args, **kwargs)
        return replace(inside, backend="nodes", plan=None, reason="2 nodes of 2: ...", inside=inside)

    monkeypatch.setattr(tileweave, "explain", over_nodes)
    assert run("matmul_reduce_scatter", "--json", shape="m=64,n=64,k=128") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["backend"], told["fused"]) == ("nodes", True) and told["plan"]["tile"]
    assert run("matmul_reduce_scatter", shape="m=64,n=64,k=128") == 0
    assert "calls inside each node" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [0, 15, 21, 22, 23, 25, 28, 33])
def test_parts_that_cancel_in_a_small_result_are_not_called_wrong(seed, capsys):
    """Of these seeds' two elements, beside which the parts are large."""
    options = ["--ranks", "2", "--shape", "m=2,n=1,k=64", "--device", "cpu", "--json", "--seed"]
    assert main(["run", "matmul_reduce_scatter", *options, str(seed)]) == 0
    assert json.loads(capsys.readouterr().out)["rel_error"] < 2 * 1.7e-3  # two of the largest roundings


@pytest.mark.parametrize("shape", ["m=2,n=1,k=64", "m=16,n=8,k=64"])
def test_a_small_result_that_is_wrong_is_called_so(shape, monkeypatch):
    right = tileweave.matmul_reduce_scatter
    monkeypatch.setattr(tileweave, "matmul_reduce_scatter", lambda *args, **kwargs: right(*args, **kwargs) * 1.1)
    assert run("matmul_reduce_scatter", shape=shape) == 1


@pytest.mark.parametrize(
    ("op", "ranks", "shape", "told"),
    [
        ("moe_dispatch_matmul", 2, "tokens=8,hidden=7,experts=2", "by an all-to-all of the emulated ranks, a torch."),
        ("grouped_matmul", 2, "tokens=8,hidden=7,experts=2", "a torch.matmul for each expert: no kernel ran"),
        ("all_reduce", 1, "m=8,n=8", "a copy; 2 calls"),
        ("all_gather", 2, "m=0,n=8", "put together by torch: no kernel ran"),
    ],
)
def test_what_no_kernel_computed_is_told_as_a_fallback(op, ranks, shape, told, capsys):
    assert run(op, "--json", ranks=ranks, shape=shape) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["backend"], report["fused"], report["world"]) == ("fallback", False, "emulated")
    assert run(op, ranks=ranks, shape=shape) == 0
    text = capsys.readouterr().out
    assert told in text and "device code itself" not in text


@pytest.mark.parametrize(
    ("program", "command"),
    [("/bin/tileweave", "tileweave"), ("/src/tileweave/__main__.py", "python -m tileweave"), ("x.py", "tileweave")],
)
def test_commands_are_printed_as_this_one_was_started(program, command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program])
    assert run("all_gather", shape="m=2,n=8") == 0
    steps = capsys.readouterr().out.split("try next\n")[1].splitlines()
    assert len(steps) == 3 and all(step.startswith(f"  {command} ") for step in steps)


@pytest.mark.parametrize("op", OTHERS)
def test_empty_sizes(op):
    assert (
        run(op, shape=f"{next(iter(OPS[op].sizes))}=0,{SMALL[op].partition(',')[2]}" if op in SMALL else "m=0,n=48")
        == 0
    )


def test_more_choices_than_experts_are_bad_usage(capsys):
    assert main(["run", "moe_dispatch_matmul", "--shape", "experts=4,topk=300"]) == 2
    assert "--shape topk=300 is more than experts=4" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["experts", "topk"])
def test_tokens_without_experts_are_refused(name, capsys):
    assert run("moe_dispatch_matmul", shape=f"{name}=0") == 2
    assert f"--shape {name} must be from 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("op", OTHERS)
def test_virtual_ranks(op, capsys):
    assert main(["run", op, "--ranks", "4", "--device", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["backend"], report["fused"], report["ok"]) == ("virtual", True, True)
