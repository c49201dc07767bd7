"""Where tokens lie: shards of a sequence, and the whole of them again."""

import pytest
import torch

import tileweave as tw


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_unplacing_what_was_placed_gives_the_whole(world, placement, dim):
    x = torch.randn(4 * world, 6 * world, 2 * world)
    shards = [tw.place_sequence(x, world, rank, dim, placement) for rank in range(world)]
    assert all(shard.shape[dim] * world == x.shape[dim] for shard in shards)
    assert torch.equal(tw.unplace_sequence(shards, dim, placement), x)
    assert torch.equal(tw.unplace_sequence(torch.cat(shards, dim).chunk(world, dim), dim, placement), x)


def test_which_tokens_a_rank_has():
    tokens = torch.arange(12)
    assert [tw.place_sequence(tokens, 3, rank, 0).tolist() for rank in range(3)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
    ]  # fmt: skip
    assert [tw.place_sequence(tokens, 3, rank, 0, "zigzag").tolist() for rank in range(3)] == [
        [0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]
    ]  # fmt: skip


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_gradients_pass_through_and_nothing_is_a_legal_length(placement):
    x = torch.randn(8, 3, requires_grad=True)
    shards = [tw.place_sequence(x, 2, rank, 0, placement) for rank in range(2)]
    tw.unplace_sequence(shards, 0, placement).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    empty = [tw.place_sequence(torch.zeros(0, 3), 2, rank, 0, placement) for rank in range(2)]
    assert tw.unplace_sequence(empty, 0, placement).shape == (0, 3)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: tw.place_sequence(x, 3, 0, 0), "10 elements in dim=0, not divisible by 3 .* 9 or 12 would be"),
        (lambda x: tw.place_sequence(x, 4, 0, 0, "zigzag"), "not divisible by 8 .zigzag, 4 ranks.; 8 or 16 would be"),
        (lambda x: tw.place_sequence(x, 2, 2, 0), "rank: expected a rank from 0 to 1, got 2"),
        (lambda x: tw.place_sequence(x, 2, 0, 1), "dim: expected a dimension of x, -1 to 0, got 1"),
        (lambda x: tw.place_sequence(x, 2, 0, 0, "ring"), "placement must be 'contiguous' or 'zigzag', got 'ring'"),
        (lambda x: tw.unplace_sequence([], 0), "shards must be those of all ranks, got none"),
        (lambda x: tw.unplace_sequence([x[:3]], 0, "zigzag"), "shard 0 has 3 elements in dim=0, not divisible by 2"),
        (lambda x: tw.unplace_sequence([x, x], 1), "dim: expected a dimension of shard 0, -1 to 0, got 1"),
    ],
)
def test_errors_name_what_would_be_legal(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.arange(10))


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (torch.arange(10), r"list or tuple of all ranks' tensors, whole\.chunk\(world, dim\) for instance, got Tensor"),
        (None, "list or tuple .* got NoneType"),
        ([torch.arange(10), 3], "shard 1 must be a torch.Tensor, got int"),
    ],
    ids=("a whole", "None", "a number"),
)
def test_what_are_no_shards_is_told(shards, words):
    with pytest.raises(TypeError, match=f"^unplace_sequence: .*{words}"):
        tw.unplace_sequence(shards, 0)
