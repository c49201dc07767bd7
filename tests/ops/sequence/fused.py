"""Calls of the attention ops' kernels: plans of small tiles, several calls in a row, comparison with the truth."""

import tileweave as tw
from tests.ops.sequence.problems import assert_near, laid, shards, truth
from tileweave import Plan


def plan(tile=(64, 64, 64), stages=3, comm_sms=1, **changes):
    """A plan of small tiles, of which even small problems have several."""
    return Plan(**{**dict(tile=tile, stages=stages, comm_sms=comm_sms, schedule="inter_sm"), **changes})


def placed(tensors, size, kw):
    """The ranks' shards of whole tensors, as a call with these options takes them."""
    return [shards(x, size, kw.get("layout", "bhsd"), kw.get("placement", "contiguous")) for x in tensors]


def run_calls(world, name, calls):
    """Make the calls, one after the other, on every rank; a call is (whole tensors, options). No rank waits for the
    others between its calls. Returns per call the whole results: out, and lse of ring_attention."""
    parts = [placed(tensors[:3], world.size, kw) for tensors, kw in calls]
    more = dict(return_lse=True) if name == "ring_attention" else {}

    def rank_program(rank, group):
        results = []
        for part, (_, kw) in zip(parts, calls, strict=True):
            result = getattr(tw, name)(*(x[rank] for x in part), group, **more, **kw)
            results.append(result if more else (result,))
        return results

    results = []
    for by_rank, (_, kw) in zip(zip(*world.run(rank_program), strict=True), calls, strict=True):
        outs, *lses = zip(*by_rank, strict=True)
        outs = [laid(x, kw.get("layout", "bhsd")) for x in outs]
        results.append([tw.unplace_sequence(xs, 2, kw.get("placement", "contiguous")) for xs in (outs, *lses)])
    return results


def assert_right(results, calls):
    """Every result is near the truth."""
    for got, (tensors, kw) in zip(results, calls, strict=True):
        assert_near(got, truth(tensors, return_lse=len(got) == 2, **kw), tensors[0].dtype)


def explained(name, tensors, group, kw):
    """The route of a call on one rank."""
    return tw.explain(name, *(x[0] for x in placed(tensors[:3], group.size(), kw)), group, **kw)
