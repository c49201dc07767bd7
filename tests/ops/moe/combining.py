"""The judge of edits of moe_matmul_combine's kernel, for the tests of either schedule."""

import pytest

import tileweave as tw
from tests.ops.moe.problems import assert_right, problem, truth
from tests.ops.moe.test_dispatch import KINDS
from tests.ops.mutants import put_edited
from tileweave.emulator import DeadlockError, ProtocolError, RaceError

NAME = "moe_matmul_combine"


@pytest.fixture
def mutated(monkeypatch, tmp_path):
    """A function that puts an edited kernel in place of the real one."""
    return lambda edits: put_edited("ops/moe/combine_kernel.py", edits, monkeypatch, tmp_path, NAME)


def outcome_of(seed, tokens, sizes, plan, sms, capacity, signs):
    """What calls of three ranks come to under one schedule: R, D, P, W (wrong result) or None.

    tokens: of each rank; sizes: the other arguments of `problem`; signs: those of h in the calls of two problems, of
    which the second has rows at one rank only, that follow each other with nothing between them. The slots are full of
    NaN before those of the second.
    """
    problems = [problem(tokens, *sizes, seed=i, routing=routing) for i, routing in enumerate(("random", "one"))]

    def calls(p, factors):
        def rank_program(rank, group):
            first, end = p.experts.of(rank)
            options = dict(experts=p.experts.total, capacity=capacity, max_tokens=max(tokens))
            h, route = tw.moe_dispatch_matmul(
                p.x[rank], p.index[rank], p.w[first:end], topk_weight=p.weight[rank], **options
            )
            return [tw.moe_matmul_combine(h * sign, p.down[first:end], route, plan=plan) for sign in factors]

        return rank_program

    try:
        with tw.virtual_world(3, device="cpu", seed=seed, sms=sms, delayed=(seed % 3,)) as world:
            first = world.run(calls(problems[0], signs[0]))
            world.workspace.ops[NAME].staging.fill_(255)
            second = world.run(calls(problems[1], signs[1]))
    except (RaceError, DeadlockError, ProtocolError) as error:
        return next(letter for letter, kind in KINDS.items() if isinstance(error, kind))
    try:
        for by_rank, p, factors in zip((first, second), problems, signs, strict=True):
            for sign, outs in zip(factors, zip(*by_rank, strict=True), strict=True):
                assert_right(outs, [sign * out for out in truth(p, gated=False)])
    except AssertionError:
        return "W"
