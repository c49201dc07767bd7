"""Generic loads, stores and atomics, sums over ranks, and multicast addresses."""

import pytest
import torch

from tests.emulator.kernels import primitives as k
from tests.emulator.problems import D, layout, randn
from tests.emulator.test_async import launch, two_ranks
from tileweave.emulator import Multicast, ProtocolError, RaceError, World

SEEDS = range(6)


def test_masked_loads_and_stores():
    x, y = torch.randn(1000), torch.full((1024,), -1.0)
    launch(0, k.adds, x, y, 1000, 256, grid=4)
    assert torch.equal(y[:1000], x + 1) and (y[1000:] == -1).all()


def test_a_pointer_outside_of_its_storage():
    x = torch.randn(1000)
    with pytest.raises(
        ProtocolError, match=r"store at elements 0 to 1023 of x .*, which has 1000 \(0 to 999 are legal"
    ):
        launch(0, k.writes, x, 1.0, 1024)


def test_two_ctas_that_write_one_place():
    for seed in SEEDS:
        with pytest.raises(RaceError) as found:
            launch(seed, k.writes, torch.zeros(64), 1.0, 64, grid=2)
        text = str(found.value)
        assert "rank 0 CTA 0 partition main" in text and "rank 0 CTA 1 partition main" in text
        assert "a release at scope gpu or sys" in text


def test_races_are_collected_without_halt():
    world = World(1, halt=False)
    world.run(lambda rank: world.launch(k.writes, (3,), torch.zeros(64), 1.0, 64))
    assert world.races and all("race on global memory x" in text for text in world.races)


def test_launches_of_one_stream_are_ordered():
    x = torch.zeros(64)
    world = World(1)

    def fn(rank):
        for value in (1.0, 2.0, 3.0):
            world.launch(k.writes, (1,), x, value, 64)

    world.run(fn)
    assert (x == 3).all()


def test_atomics():
    keys = torch.randint(0, 8, (256,), dtype=torch.int32)
    for seed in SEEDS:
        counters, out = torch.zeros(16, dtype=torch.int32), torch.full((256,), -1, dtype=torch.int32)
        launch(seed, k.counts, counters, keys, out, 256)
        for key in range(8):
            places = out[keys == key].sort().values
            count = (keys == key).sum().item() if key < 4 else 0
            assert counters[key] == count
            assert torch.equal(places, torch.arange(len(places)) * (key < 4))
        assert counters[8:12].tolist() == [7, 3, 1, 6]


def test_a_bounded_poll_is_no_deadlock():
    launch(0, k.polls_three_times, torch.zeros(1, dtype=torch.int32))


def test_a_single_element_is_loaded_by_every_thread():
    for seed in SEEDS:
        x, counter = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        launch(seed, k.hands_over, x, counter, 1, grid=2)
        assert x.item() == 1
        counter.zero_()
        with pytest.raises(RaceError, match=r"barrier\(\) of the partition"):
            launch(seed, k.hands_over, x, counter, 0, grid=2)


@pytest.mark.parametrize(
    "what",
    [
        "a tile store, then a load of reversed addresses",
        "two tile stores to swapped addresses",
        "a tile, then a shifted one",
        "a tile, then an element of every thread",
        "an atomic, then a tile load",
        "one element, then a tile",
        "a load by every thread, then a store by one",
        "two loads, then a tile like the second",
        "one element by all threads, twice",
    ],
)
def test_threads_of_a_partition_race_without_a_barrier(what):
    for seed in SEEDS:
        x, y = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        launch(seed, k.shares, x, y, what, 1)
        with pytest.raises(RaceError, match=r"missing: barrier\(\) of the partition between the two") as found:
            launch(seed, k.shares, x, y, what, 0)
        assert str(found.value).count("primitives.py") == 2


@pytest.mark.parametrize(
    "what",
    [
        "a tile, then the same",
        "a tile, then the same by atomics",
        "a masked tile, then the whole",
        "one element, then an atomic",
        "one element by all threads, once",
        "loads",
    ],
)
def test_a_thread_that_stays_at_its_elements_needs_no_barrier(what):
    for seed in SEEDS:
        launch(seed, k.shares, torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32), what, 0)


def test_an_acquire_of_the_first_thread_does_not_order_a_tile():
    for seed in SEEDS:
        x, counter = torch.zeros(256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        launch(seed, k.takes_over, x, counter, 1, grid=2)
        counter.zero_()
        with pytest.raises(RaceError, match="write: store by rank 0 CTA 0"):
            launch(seed, k.takes_over, x, counter, 0, grid=2)


@pytest.mark.parametrize("everywhere", [0, 1])
def test_sums_over_ranks(everywhere):
    data, out = randn(3, 128, seed=0), torch.zeros(128)
    before = data.clone()
    two_ranks(0, k.sums_ranks, 3, data, 128, out, everywhere, W=3)
    total = before[0].float() + before[1].float() + before[2].float()
    assert torch.equal(out, total)
    assert torch.equal(data, total.bfloat16().expand(3, 128) if everywhere else before)


# ---------------------------------------------------------------- multicast


def multicasts(seed, W, fence, how):
    data, out = torch.zeros(W, 1024, dtype=torch.bfloat16), torch.zeros(W, 1024, dtype=torch.bfloat16)
    flags = torch.zeros(W, 32, dtype=torch.int32)
    two_ranks(seed, k.multicasts, W, Multicast(data), data, 1024, flags, 32, out, fence, how, W=W)
    return out


@pytest.mark.parametrize("how", ["store", "add"])
def test_multicast_reduce_and_store(how):
    W = 3
    for seed in SEEDS:
        out = multicasts(seed, W, 1, how)
        own = [(torch.arange(1024) + rank).bfloat16() for rank in range(W)]
        total = sum(x.float() for x in own).bfloat16()
        for rank in range(W):
            assert torch.equal(out[rank], total + total if how == "store" else own[rank] + total)


def test_multicast_without_alias_fence():
    for seed in SEEDS:
        with pytest.raises(RaceError, match="fence_proxy_alias"):
            multicasts(seed, 2, 0, "store")


def test_the_end_of_a_tma_store_is_no_alias_fence():
    for seed in SEEDS:
        data, out = torch.zeros(1, 32, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
        tiles = D(data[0], [32, 64], layout())
        launch(seed, k.stored_by_tma, tiles, Multicast(data), out, 32, True)
        assert (out == 1).all()
        with pytest.raises(RaceError, match="fence_proxy_alias"):
            launch(seed, k.stored_by_tma, tiles, Multicast(data), out, 32, False)


@pytest.mark.parametrize("what", ["load", "store", "atomic"])
def test_generic_words_refuse_multicast_addresses(what):
    data = torch.zeros(2, 1024, dtype=torch.bfloat16)
    with pytest.raises(ProtocolError, match="multicast address of mc"):
        launch(0, k.misuses_addresses, Multicast(data), data, what)


@pytest.mark.parametrize("what", ["multimem_load_reduce", "multimem_store", "multimem_add"])
def test_multimem_words_refuse_unicast_addresses(what):
    data = torch.zeros(2, 1024, dtype=torch.bfloat16)
    with pytest.raises(ProtocolError, match=f"{what} on a unicast address"):
        launch(0, k.misuses_addresses, Multicast(data), data, what)


def test_multimem_words_stay_inside_of_the_slices():
    data = torch.zeros(2, 1024, dtype=torch.bfloat16)
    with pytest.raises(ProtocolError, match="elements 8 to 1031 of a slice"):
        launch(0, k.misuses_addresses, Multicast(data), data, "beyond")
