"""Boxes of tensors: what they have in common, where they are in memory, and whether they make up a whole."""

import itertools
import math
import random

import pytest
import torch

from orchestrator.planning.placement import Box, box_problem, first_overlap, has_hole


def box(full: tuple[int, ...], *ranges: tuple[int, int]) -> Box:
    return Box.at(full=full, offset=tuple(a for a, _ in ranges), shape=tuple(b - a for a, b in ranges))


def places_of(found: Box) -> list[set[int]]:
    return [{place for start, size in ranges for place in range(start, start + size)} for ranges in found.ranges]


def random_box(full: tuple[int, ...], numbers: random.Random) -> Box:
    """A box with a range of places in each dimension, or two in the first."""
    cuts = [
        sorted(numbers.sample(range(size + 1), numbers.choice((2, 2 if axis else 4)))) for axis, size in enumerate(full)
    ]
    pairs = ([(a, b - a) for a, b in zip(own[::2], own[1::2], strict=True)] for own in cuts)
    return Box(full=full, ranges=tuple(map(tuple, pairs)))


@pytest.mark.parametrize("full", [(7,), (4, 6), (3, 4, 5), ()])
def test_an_overlap_is_read_from_either_box(full: tuple[int, ...]) -> None:
    whole, numbers = torch.arange(math.prod(full)).view(full), random.Random(0)
    for _ in range(50):
        one, other = random_box(full, numbers), random_box(full, numbers)
        common = one.overlap(other)
        places = itertools.product(*map(range, full))
        inside = [all(p[i] in places_of(b)[i] for b in (one, other) for i in range(len(full))) for p in places]
        assert (common is not None) == any(inside)
        if common is None:
            continue
        expected = whole[common.slices_in(Box.whole(full))]
        assert expected.numel() == sum(inside)
        for outer in (one, other):
            values = whole[outer.slices_in(Box.whole(full))].contiguous()
            assert torch.equal(values[common.slices_in(outer)], expected)
            flat, runs = values.view(-1), list(common.runs_in(outer))
            assert torch.equal(torch.cat([flat[first : first + n] for first, n in runs]), expected.reshape(-1))


def test_runs_are_as_long_as_the_memory_is_contiguous() -> None:
    outer = Box.whole((4, 3, 2))
    assert list(outer.runs_in(outer)) == [(0, 24)]
    assert list(box((4, 3, 2), (1, 3), (0, 3), (0, 2)).runs_in(outer)) == [(6, 12)]
    assert list(box((4, 3, 2), (1, 3), (1, 2), (0, 2)).runs_in(outer)) == [(8, 2), (14, 2)]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (box((4, 4), (0, 4), (2, 4)), None),
        (Box.whole(()), None),
        (Box.whole((0, 3)), None),
        (box((4, 4), (0, 4), (2, 5)), "[0:4, 2:5] is outside of its tensor of shape [4, 4]"),
        (box((4, 4), (-1, 3), (0, 4)), "[-1:3, 0:4] is outside of its tensor of shape [4, 4]"),
        (Box.at(full=(4,), offset=(0, 0), shape=(2, 2)), "has 2 dimensions in a tensor of 1"),
        (Box(full=(9,), ranges=(((4, 2), (1, 2)),)), "[4:6+1:3] has ranges without a gap between them"),
    ],
)
def test_a_box_is_within_its_tensor(found: Box, problem: str | None) -> None:
    assert box_problem(found) == problem


def test_pieces_of_a_tensor_cover_it_once() -> None:
    full, numbers = (5, 6, 4), random.Random(1)
    for _ in range(100):
        cuts = [sorted({0, size, *numbers.sample(range(1, size), 2)}) for size in full]
        pieces = [box(full, *ranges) for ranges in itertools.product(*(list(itertools.pairwise(c)) for c in cuts))]
        numbers.shuffle(pieces)
        assert first_overlap(pieces) is None
        assert not has_hole(pieces)
        assert has_hole(pieces[1:])
        extra = random_box(full, numbers)
        pair = first_overlap([*pieces, extra])
        assert pair[1] == len(pieces)
        assert pieces[pair[0]].overlap(extra) is not None
    assert first_overlap([Box.whole(()), Box.whole(())]) == (0, 1)


@pytest.mark.parametrize(("size", "count"), [(10, 5), (10, 4), (7, 5), (2, 5), (1, 3), (0, 2)])
def test_the_shards_of_a_tensor_are_its_chunks(size: int, count: int) -> None:
    whole = torch.arange(size * 3).view(size, 3)
    shards = [Box.shard(whole.shape, index, count) for index in range(count)]
    values = [whole[shard.slices_in(Box.whole(whole.shape))] for shard in shards]
    chunks = whole.chunk(count) if size else []
    assert [v.tolist() for v in values if len(v)] == [c.tolist() for c in chunks]
    assert first_overlap(shards) is None
    assert not has_hole(shards)
    assert all(box_problem(shard) is None for shard in shards)
