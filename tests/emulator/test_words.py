"""The vocabulary: the emulator's list is lang's, and words mean on the CPU what they mean on the device."""

import inspect
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.kernels import semantics
from tests.emulator.test_async import launch
from tileweave import lang
from tileweave.emulator import ProtocolError, RaceError, words
from tileweave.emulator.tiles import Int32, c_div, c_mod
from tileweave.lang._names import WORDS

COMMUNICATION = WORDS[WORDS.index("load_async") :]
int32s = st.integers(-(2**31), 2**31 - 1)


def test_the_two_lists_of_words_are_equal():
    assert sorted(words.__all__) == sorted(WORDS)
    assert all(hasattr(words, name) for name in WORDS)


def parameters(word):
    """Names of the parameters of a word, without what the compiler adds."""
    word = getattr(word, "declaration", word)
    word = word.__init__ if inspect.isclass(word) else word
    names = inspect.signature(getattr(word, "fn", word)).parameters
    return [name for name in names if name not in ("_semantic", "_generator")]


@pytest.mark.skipif(not lang.HAS_TRITON, reason="without Triton lang only declares the words")
@pytest.mark.parametrize("name", [name for name in COMMUNICATION if name.islower() or name == "Flags"])
def test_communication_words_take_the_same_parameters(name):
    assert parameters(getattr(words, name)) == parameters(getattr(lang, name))


@given(int32s, int32s)
def test_division_truncates(a, b):
    if b:
        assert c_div(a, b) == int(np.trunc(np.longdouble(a) / np.longdouble(b)))
        assert c_div(a, b) * b + c_mod(a, b) == a


@given(int32s, int32s)
def test_loaded_scalars_wrap(a, b):
    for ours, theirs in ((Int32(a) + b, a + b), (Int32(a) - b, a - b), (b - Int32(a), b - a), (Int32(a) * b, a * b)):
        assert type(ours) is Int32
        assert int(ours) == (theirs + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(("a", "b"), [(-7, 2), (7, 2), (3, 5)])
def test_scalars(a, b):
    ints, floats = torch.zeros(17, dtype=torch.int32), torch.zeros(2, dtype=torch.bfloat16)
    ints[16] = 2**31 - 1
    launch(0, semantics.scalars, 3, ints, floats, a, b, 1, (10, -3), num_warps=8)
    quotient, rest = int(a / b), a - int(a / b) * b
    assert ints[:4].tolist() == [quotient, rest, rest, quotient]
    assert ints[4:6].tolist() == [int(not a < b)] * 2
    assert ints[6:8].tolist() == [1, 0]
    assert ints[8:13].tolist() == [5, 16, 8, 13, 1 if a < b else 2]
    assert ints[13:15].tolist() == [-(-max(a, 9) // min(b, 4)), 810]
    assert torch.equal(floats, torch.tensor([1 / 3, 8.0]).bfloat16())


def test_tiles():
    n = 16
    x, out = torch.randn(n, n), torch.zeros(7, n)
    launch(0, semantics.tiles, x, out, n)
    rows = torch.arange(n, dtype=torch.int32) - 3
    for got, expected in zip(
        out,
        (
            x.sum(1), x.amax(1), x.amin(0), x.clamp(min=0).sum(1) / n, (x > 0).float().sum(1),
            (rows / 2).trunc() * 10 + torch.fmod(rows, 2), (rows >= -1).float(),
        ),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pairs_of_columns_packed_and_unpacked(dtype):
    x, packed, out = torch.randn(64, 32), torch.zeros(64, 16, dtype=torch.int32), torch.zeros(64, 32, dtype=dtype)
    word = lang.bfloat16 if dtype == torch.bfloat16 else lang.float16
    launch(0, semantics.pairs, x, packed, out, 32, word)
    assert torch.equal(out, x.to(dtype)) and torch.equal(packed, x.to(dtype).view(torch.int32))


@pytest.mark.parametrize(("columns", "width"), [(64, 64), (64, 32), (128, 32), (256, 64)])
def test_columns_of_a_matrix_from_left_to_right(columns, width):
    x, out = torch.randn(64, columns), torch.zeros(columns // width, 64, width)
    launch(0, semantics.columns, x, out, 3, columns, width)
    torch.testing.assert_close(out, torch.stack(x.split(width, 1)) + 3)


def test_reinterpreted_shared_memory_has_the_same_bytes_and_the_same_accesses():
    x, out = torch.randn(64, 64).bfloat16(), torch.zeros(16, 32)
    launch(0, semantics.reinterpreted, x, out, True)
    assert torch.equal(out.view(torch.int32), x.view(torch.int32).view(4, 16, 32)[1])
    with pytest.raises(RaceError, match="shared memory buf"):
        for seed in range(8):
            launch(seed, semantics.reinterpreted, x, out, False)


def test_constexpr_functions_keep_pythons_division():
    from tileweave.emulator.rebuild import rebuilt

    assert rebuilt(semantics.halves)(7) == (3, -4)


def test_every_word_of_the_emulator_is_documented():
    for name in words.__all__:
        word = getattr(words, name)
        if inspect.isfunction(word) and not re.match("maximum|minimum|max|min|sum|exp2|log2", name):
            assert word.__doc__, name


def test_small_values_over_sums_in_tensor_memory():
    """Two to a column; whether something is there is known of each byte."""
    out = torch.zeros(128, 32)
    launch(0, semantics.halves_of_sums, out, 1)
    assert bool((out == 3.0).all())
    out.zero_()
    with pytest.raises(ProtocolError, match="read before anything has written it"):
        launch(0, semantics.halves_of_sums, out, 0)
    assert bool((out.view(torch.bfloat16) == 1.0).all())


@pytest.mark.parametrize(
    "a, b, said",
    [
        ("bfloat16", "bfloat16", "of bf16 and bf16: fp8e4nv or uint8 are legal"),
        ("float8e4nv", "uint8", "of fp8e4nv and uint8: fp8e4nv or uint8 are legal"),
        ("uint8", "uint8", r"a_scales \[128, 4\] of uint8"),
    ],
)
def test_operands_that_have_no_scales(a, b, said):
    with pytest.raises(ProtocolError, match=said):
        launch(0, semantics.scaled_products, getattr(lang, a), getattr(lang, b))
