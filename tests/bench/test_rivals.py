"""Other libraries as contenders: what is not here, does not run or is wrong is told, and ours must be right."""

import pytest
import torch

from tests.nn.test_processes import start
from tileweave.bench import adapters, between, rivals
from tileweave.bench.attention_case import Case
from tileweave.bench.rivals import RIVALS, Rival
from tileweave.ops.attention import reference

TRUTH = torch.arange(1.0, 5.0)


@pytest.fixture
def one_rank(monkeypatch):
    """The largest value of all ranks is this one's."""
    monkeypatch.setattr(between, "slowest", lambda value: value)


def test_what_is_installed_has_its_version():
    assert RIVALS["cublas"].version == torch.__version__
    assert Rival("no such thing", "no_such_module", "none").version is None
    assert Rival("a module without a package of its own", "tileweave.bench", "none").version == "unknown"
    assert set(rivals.versions()) == {"fa3", "flux", "comet", "triton-distributed", "yunchang", "xdit"}


def test_only_what_is_installed_joins(monkeypatch):
    def failing():
        raise OSError("no such library")

    here, absent = Rival("here"), Rival("absent", "no_such_module", "none")
    monkeypatch.setattr(adapters, "RIVALS", {"runs": here, "fails": here, "absent": absent})
    runs = adapters.joined({"ours": lambda: 0}, {"runs": lambda: lambda: 1, "fails": failing, "absent": failing})
    assert list(runs) == ["ours", "runs", "fails"] and runs["runs"]() == 1
    with pytest.raises(OSError, match="no such library"):
        runs["fails"]()


def test_a_rival_that_fails_or_is_wrong_is_left_out_and_told(one_rank):
    def failing():
        raise OSError("no such library\nand more")

    runs = {
        "tileweave": lambda: TRUTH, "nccl": lambda: TRUTH * 1.001, "flux": failing, "yunchang": lambda: TRUTH * 2,
        "xdit": lambda: TRUTH * float("nan"), "matmul": failing,
    }  # fmt: skip
    errors = between.checked(runs, TRUTH, 0.01)
    assert list(runs) == ["tileweave", "nccl", "matmul"]  # what transfers nothing has no result to be checked
    assert errors["tileweave"] == 0 and errors["nccl"] == pytest.approx(1e-3, rel=0.1)
    assert errors["flux"] == "does not run: no such library"
    assert all("wrong" in errors[name] for name in ("yunchang", "xdit"))


@pytest.mark.parametrize("name", ["tileweave", "nccl", "tma intra_sm 4"])
def test_what_must_run_here_and_be_right(name, one_rank):
    with pytest.raises(AssertionError, match=name):
        between.checked({name: lambda: TRUTH * 2}, TRUTH, 0.01)
    with pytest.raises(AssertionError, match=name):
        between.checked({name: lambda: TRUTH * float("nan")}, TRUTH, 0.01)
    with pytest.raises(ZeroDivisionError):
        between.checked({name: lambda: 1 / 0}, TRUTH, 0.01)


def test_ops_and_cases_that_others_have():
    q = torch.zeros(1, 2, 4, 128)
    of = {
        (op, causal): list(adapters.attentions(Case(op, 1, 2, 4, causal), q, q, q))
        for op, causal in (("ring_attention", False), ("ring_attention", True), ("ulysses_attention", True))
    }
    assert list(of.values()) == [["yunchang", "xdit"], ["yunchang"], ["yunchang", "xdit"]]  # xDiT has no zigzag
    assert set(adapters.products("matmul_reduce_scatter", q, q)) == {"flux", "triton-distributed"}
    assert not adapters.products("matmul_all_reduce", q, q)
    assert list(adapters.experts(q, q, q, 1, 1)) == ["comet"]
    assert set(adapters.EAGER) <= set(RIVALS)


def yunchang(rank):
    for op, causal in (("ring_attention", False), ("ulysses_attention", True), ("ring_attention", False)):
        q, k, v = torch.randn(3, 1, 4, 64, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
        own = [x.chunk(2, 2)[rank] for x in (q, k, v)]
        truth = reference(q, k, v, causal=causal)[0].chunk(2, 2)[rank]
        out = adapters.attentions(Case(op, 1, 4, 64, causal), *own)["yunchang"]()()
        assert (out.float() - truth).norm() < 0.01 * truth.norm(), op


def test_yunchang_is_right(tmp_path):
    pytest.importorskip("yunchang")
    start(tmp_path, 2, yunchang)
