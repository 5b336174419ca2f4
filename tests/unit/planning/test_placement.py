"""Placements over random meshes: every element is somewhere, saved once, and whoever has it knows who else does."""

import math
import random
from collections import Counter

import pytest

from orchestrator.planning.mesh import DENSE, DIMENSIONS, Mesh
from orchestrator.planning.placement import AxisCut, Box, Placement, first_overlap, has_hole

MOST_RANKS = 64


def random_mesh(draw: random.Random) -> Mesh:
    sizes = dict.fromkeys(DIMENSIONS, 1)
    for dimension in draw.sample(DIMENSIONS, len(DIMENSIONS)):
        sizes[dimension] = draw.randint(1, min(5, MOST_RANKS // math.prod(sizes.values())))
    return Mesh(**sizes, replicas_close=draw.random() < 0.5, num_servers=draw.choice((0, 0, 2)))


def random_placement(draw: random.Random, mesh: Mesh) -> Placement:
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 3)))
    cuts: list[AxisCut] = []
    for dimension in draw.sample(("shard", "context", "tensor"), draw.randint(0, 3 if shape else 0)):
        axis, sizes, packed = draw.randrange(len(shape)), (), ()
        if not cuts and draw.random() < 0.3:
            packed = tuple(draw.randint(1, 3) * mesh.size(dimension) for _ in range(draw.randint(1, 3)))
            shape = (*shape[:axis], sum(packed), *shape[axis + 1 :])
        elif not cuts and draw.random() < 0.5:
            borders = sorted(draw.choices(range(shape[axis] + 1), k=mesh.size(dimension) - 1))
            sizes = tuple(b - a for a, b in zip((0, *borders), (*borders, shape[axis]), strict=True))
        cuts.append(AxisCut(over=dimension, axis=axis, sizes=sizes, packed=packed))
    stages = tuple(draw.sample(range(mesh.pipeline), draw.randint(1, min(2, mesh.pipeline))))
    return Placement(shape=shape, cuts=tuple(cuts), stages=stages)


@pytest.mark.parametrize("seed", range(40))
def test_rules_of_every_placement(seed: int) -> None:
    draw = random.Random(seed)
    mesh = random_mesh(draw)
    placement = random_placement(draw, mesh)
    boxes = {rank: box for rank in range(mesh.world_size) if (box := placement.box(mesh, rank)) is not None}

    saved = [box for rank, box in boxes.items() if placement.saves(mesh, rank)]
    assert not any(placement.saves(mesh, rank) for rank in range(mesh.world_size) if rank not in boxes)
    assert not has_hole(saved), "an element is saved by nobody"
    assert first_overlap([box for box in saved if math.prod(box.shape)]) is None, "an element is saved twice"

    holders_of = {rank: placement.holders(mesh, rank) for rank in boxes}
    savers = {rank for rank in boxes if placement.saves(mesh, rank)}
    for rank, holders in holders_of.items():
        assert rank in holders
        assert len(holders) == placement.copies(mesh)
        assert all(boxes[other] == boxes[rank] and holders_of[other] == holders for other in holders)
        assert len(savers & {*holders}) == 1
        # What the holders lack for the sum over the batch is on the others along these dimensions.
        assert {*mesh.group(placement.summed_over, rank)} <= {*holders}
    assert all(placement.holders(mesh, rank) == [] for rank in range(mesh.world_size) if rank not in boxes)


def test_an_inner_cut_is_one_of_the_outer_shard() -> None:
    placement = Placement(shape=(8, 3), cuts=(AxisCut(over="tensor"), AxisCut(over="shard")))
    mesh = Mesh(shard=2, tensor=2)
    found = {mesh.coords(rank): placement.box(mesh, rank) for rank in range(4)}
    assert {(c.shard, c.tensor): box and box.offset[0] for c, box in found.items()} == {
        (0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6
    }  # fmt: skip


def test_a_worker_has_an_equal_part_of_all_that_is_packed() -> None:
    placement = Placement(shape=(8, 3), cuts=(AxisCut(over="tensor", packed=(4, 2, 2)), AxisCut(over="shard")))
    found = [str(placement.box(Mesh(shard=2, tensor=2), rank)) for rank in range(4)]
    assert found == ["[0:2, 0:3]", "[2:4, 0:3]", "[4:5+6:7, 0:3]", "[5:6+7:8, 0:3]"]


def test_who_has_what_of_common_layouts() -> None:
    rows = Placement(shape=(6,), cuts=(AxisCut(over=DENSE),))
    hsdp = Mesh(replicate=2, shard=3)
    assert [rows.box(hsdp, rank) for rank in range(3)] == [Box.shard((6,), i, 3) for i in range(3)]
    assert rows.holders(hsdp, 4) == [1, 4]
    assert rows.summed_over == ("replicate",)
    dense = Mesh(shard=2, context=2)
    assert [rows.box(dense, rank) for rank in range(3)] == [Box.shard((6,), i, 4) for i in range(3)]
    scalar = Placement(shape=())
    assert (scalar.copies(hsdp), scalar.summed_over) == (6, ("replicate", "shard", "context"))
    tied = Placement(shape=(6, 2), stages=(3, 0))
    pipelines = Mesh(pipeline=4, replicate=2)
    assert tied.copies(pipelines) == 4
    assert [rank for rank in range(8) if tied.saves(pipelines, rank)] == [3]
    assert Counter(map(len, (tied.holders(pipelines, rank) for rank in range(8)))) == {4: 4, 0: 4}
