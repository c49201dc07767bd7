"""What `plan` says of a group is what the op's own route is, whatever the shape and the group."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import tileweave
from tileweave import TokenRoute
from tileweave.ops.contract import Site
from tileweave.ops.moe import Experts
from tileweave.ops.plans import COLLECTIVES, SHARED, SIZES

WORLD = 4
RUNS = settings(max_examples=120, deadline=None, derandomize=True)
EDGES = {"causal": (0, 1), "dim": (8, 64, 100, 128, 256, 264), "topk": (1, 2, 8), "batch": (1, 2), "kv_heads": (1, 4)}
FEW_ROWS = {"m": 64, "n": 1024, "k": 28672}  # and few columns: where NCCL is faster
SHARES = (1, 2, 7, 9, 12, 16, 64, 1000, 1024, 8192)


@st.composite
def questions(draw):
    """An op and the sizes of its whole problem."""
    op = draw(st.sampled_from(sorted(SIZES)))
    sizes = {}
    for name in SIZES[op]:
        size = draw(st.sampled_from(EDGES.get(name, SHARES)))
        sizes[name] = size * (WORLD if name in SHARED[op] else 1)
    if "heads" in sizes:
        sizes["heads"] = draw(st.sampled_from((4, 8, 12)))
    if "experts" in sizes:
        sizes["experts"] = draw(st.sampled_from((8, 64, 8192)))
    if op == "all_gather_matmul":
        sizes |= draw(st.sampled_from(({}, FEW_ROWS)))
    return op, sizes


def operands(op, s):
    """A rank's, without memory of their own, and the options."""

    def like(*shape, dtype=torch.bfloat16):
        return torch.zeros((), dtype=dtype).expand(shape)

    if "attention" in op:
        rows, causal = s["seq"] // WORLD, bool(s["causal"])
        kv = like(s["batch"], s["kv_heads"], rows, s["dim"])
        placement = {"placement": "zigzag"} if op == "ring_attention" and causal else {}
        return (like(s["batch"], s["heads"], rows, s["dim"]), kv, kv), {"causal": causal, **placement}
    if op == "all_gather_matmul":
        return (like(s["m"] // WORLD, s["k"]), like(s["k"], s["n"] // WORLD)), {}
    if op in COLLECTIVES:
        rows = s["m"] // (WORLD if op in ("all_gather", "all_to_all") else 1)
        return (like(rows, s["n"]),), {"split_dim": 1, "concat_dim": 0} if op == "all_to_all" else {}
    if op == "grouped_matmul":
        w = like(s["experts"], s["hidden"], s["inner"])
        return (like(s["rows"], s["hidden"]), w, like(s["experts"], dtype=torch.int32)), {}
    if op == "moe_matmul_combine":
        tokens, experts = s["tokens"] // WORLD, s["experts"] // WORLD
        rows, words = tokens * s["topk"], {"dtype": torch.int32}
        lists = like(experts, **words), like(rows, **words), like(rows, **words), None, like(tokens, WORLD, **words)
        more = [like(tokens, s["topk"], **words)] * 2
        every = Experts(s["experts"], WORLD)
        bounds = like(WORLD, every.most + 1, **words)
        way = TokenRoute(*lists, *more, like(**words), bounds, tokens, rows, every, None)
        return (like(rows, s["inner"]), like(experts, s["inner"], s["hidden"]), way), {}
    if op == "moe_dispatch_matmul":
        tokens = s["tokens"] // WORLD
        w = like(s["experts"] // WORLD, s["hidden"], s["inner"])
        return (like(tokens, s["hidden"]), like(tokens, s["topk"], dtype=torch.int64), w), {}
    return (like(s["m"], s["k"] // WORLD), like(s["k"] // WORLD, s["n"])), {}


def said(ask):
    """Verdict, kernel and reason, or that the shape breaks the op's contract."""
    try:
        answer = ask()
    except ValueError as error:
        return "refused", str(error)
    plan = answer.plan if answer.verdict == "fused" and answer.op not in COLLECTIVES else None
    return answer.verdict, answer.reason, plan and (plan.mechanism, plan.schedule, plan.tile, plan.split, plan.comm_sms)


def alike(question, group):
    """The verdict, once both have the same."""
    op, sizes = question
    tensors, options = operands(op, sizes)
    joined = {} if op == "grouped_matmul" else {"group": group}
    told = said(lambda: tileweave.explain(op, *tensors, **joined, **options))
    planned = said(lambda: tileweave.plan(op, sizes, group=group))
    assert told == planned, question
    return told[0]


def every_verdict(run):
    """Those of all questions."""
    seen = set()

    @RUNS
    @given(questions())
    def ask(question):
        seen.add(run(question))

    ask()
    return seen


@pytest.fixture
def in_a_world():
    """Asks emulated ranks, all of which say the same."""
    with tileweave.virtual_world(WORLD, device="cpu") as world:

        def ask(question):
            (verdict,) = set(world.run(lambda rank, group: alike(question, group)))
            return verdict

        yield ask


def test_of_an_emulated_world(in_a_world):
    assert every_verdict(in_a_world) == {"fused", "fallback", "refused"}


def test_of_a_group_with_nccl_and_links(in_a_world, monkeypatch):
    """A stand-in for four GPUs: all that the path depends on is in a Site."""
    there = Site("processes", WORLD, 132, torch.device("cpu"), None, "it is off", linked=True, nccl=True)
    monkeypatch.setattr(Site, "of", classmethod(lambda cls, fabric: there))
    assert every_verdict(in_a_world) == {"fused", "plain", "fallback", "refused"}


def test_of_a_group_without_kernels():
    """CPU tensors in a group of torch.distributed, of which no peer is asked for anything."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        assert every_verdict(lambda question: alike(question, dist.group.WORLD)) == {"fallback", "refused"}
    finally:
        dist.destroy_process_group()
