"""Every argument of every public function, given what it cannot be: whoever refuses it is this library, by name."""

import inspect
import linecache
import traceback

import pytest
import torch

import tileweave as tw
from tests.ops.test_stumbles import calls

X = torch.arange(16.0).view(4, 4)
PLAIN = (None, -1, 2**40, 1.5, float("nan"), True, "x", "", b"x", [1], object())
OTHERS = {
    "place_sequence": {"x": X, "world": 2, "rank": 0, "dim": 0, "placement": "contiguous"},
    "unplace_sequence": {"shards": [X, X], "dim": 0, "placement": "contiguous"},
    "plan": {"op": "all_gather", "shape": {"m": 8, "n": 8}, "dtype": torch.bfloat16, "gpu": "h200", "ranks": 2},
    "tune": {"op": "matmul_reduce_scatter", "shape": {"m": 8, "n": 8, "k": 8}, "dtype": torch.bfloat16},
    "virtual_world": {"n": 2, "device": "cpu", "seed": 0, "sms": 1, "delayed": (), "timeout": 1.0},
    "memory_report": {"group": None, "device": "cpu"},
    "check": {"group": None, "device": "cpu"},
}


def wrong_tensors(x):
    """Tensors unlike `x`: of another dtype, device, layout, number of dimensions or size."""
    yield from (x.to(dtype) for dtype in (torch.int64, torch.complex64, torch.float64, torch.float8_e4m3fn))
    yield from (x.to("meta"), torch.eye(4).to_sparse(), torch.nested.nested_tensor([X[0, :3], X[0, :1]]))
    yield from (torch.ones((), dtype=x.dtype), x[None], torch.cat([x, x], -1), x[..., :-3], x[:0])


def calls_with_a_fault():
    """(name, function, its arguments by name, the argument that may be wrong, what it is given)."""
    everything = [(op, operands | options) for op, (operands, options) in calls().items()]
    for name, arguments in [*everything, *OTHERS.items()]:
        function = getattr(tw, name)
        for word in inspect.signature(function).parameters:
            given = arguments.get(word)
            tensors = wrong_tensors(given) if isinstance(given, torch.Tensor) else (X,)
            for wrong in (*PLAIN, *tensors):
                yield name, function, arguments | {word: wrong}, word, wrong


@pytest.mark.filterwarnings("ignore")
def test_what_an_argument_cannot_be_is_refused_by_name():
    refused = 0
    for name, function, arguments, word, wrong in calls_with_a_fault():
        try:
            function(**arguments)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            lines = [linecache.getline(place.filename, place.lineno - i).strip() for i in range(2)]
            ours = "tileweave" in place.filename and any(line.startswith("raise ") for line in lines)
            named = str(error).startswith((f"{name}: ", word, "group"))
            assert ours and named, f"{name}, {word} = {wrong!r}: {type(error).__name__}: {error}, in {place}"
            refused += 1
    assert refused > 1500
