"""The grid of ranks: every rank in one place of it, and which of them are neighbours."""

import itertools
import math
from dataclasses import asdict

import pytest

from orchestrator.planning.mesh import DIMENSIONS, Coords, Mesh, even_shares, recorded_mesh

GRIDS = [(1, 1), (3, 1), (1, 4), (2, 2), (2, 3), (4, 2)]


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 3, 1, 1, 1), (3, 2, 2, 1, 2), (2, 2, 3, 2, 2)])
def test_every_rank_has_a_place_of_its_own(sizes: tuple[int, ...], close: bool) -> None:
    mesh = Mesh(**dict(zip(DIMENSIONS, sizes, strict=True)), replicas_close=close)
    ranks = range(math.prod(sizes))
    assert mesh.world_size == len(ranks)
    assert mesh.coords(0) == Coords()
    assert {mesh.coords(rank) for rank in ranks} == set(
        itertools.starmap(Coords, itertools.product(*map(range, sizes)))
    )
    for dimension in DIMENSIONS:
        groups = mesh.groups(dimension)
        assert sorted(itertools.chain(*groups)) == list(ranks)
        for group in groups:
            for place, rank in enumerate(group):
                assert mesh.group(dimension, rank) == group
                others = {mesh.coords(other)._replace(**{dimension: 0}) for other in group}
                assert (getattr(mesh.coords(rank), dimension), len(others)) == (place, 1)


@pytest.mark.parametrize(("dp", "pp"), GRIDS)
def test_neighbours_are_the_stages_of_a_pipeline_or_the_replicas_of_a_stage(dp: int, pp: int) -> None:
    def run(start: int, length: int) -> list[int]:
        return list(range(start, start + length))

    stages_close = Mesh(replicate=dp, pipeline=pp)
    assert stages_close.groups("pipeline") == stages_close.close_groups == [run(d * pp, pp) for d in range(dp)]
    replicas_close = Mesh(replicate=dp, pipeline=pp, replicas_close=True)
    assert replicas_close.groups("replicate") == replicas_close.close_groups == [run(p * dp, dp) for p in range(pp)]
    for mesh in (stages_close, replicas_close):
        assert [mesh.seed_rank(rank) for rank in range(mesh.world_size)] == list(range(dp * pp))
        assert [[mesh.dp_rank(rank) for rank in ranks] for ranks in mesh.groups("pipeline")] == [
            [d] * pp for d in range(dp)
        ]


def test_ranks_that_compute_parts_of_a_sample_read_the_same_data_with_the_same_seed() -> None:
    mesh = Mesh(replicate=2, shard=2, context=2, tensor=2, num_servers=1)
    assert (mesh.data_parallel_size, mesh.num_workers, list(mesh.servers)) == (4, 16, [16])
    assert [mesh.dp_rank(rank) for rank in range(17)] == [*(d for d in range(4) for _ in range(4)), 0]
    assert [mesh.seed_rank(rank) for rank in range(17)] == [*(d for d in range(4) for _ in range(4)), 16]
    assert [mesh.server(rank) for rank in (15, 16)] == [None, 0]


def test_a_record_is_read_back_whatever_version_wrote_it() -> None:
    mesh = Mesh(replicate=3, pipeline=2, replicas_close=True, num_servers=1)
    assert recorded_mesh(asdict(mesh)) == mesh
    former = {"data_parallel_size": 3, "pipeline_parallel_size": 2, "replicas_close": True, "num_shards": 1}
    assert recorded_mesh(former) == mesh
    assert recorded_mesh({}) == Mesh()


@pytest.mark.parametrize("total", [0, 1, 5, 64, 65, 997])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_even_shares(total: int, parts: int) -> None:
    sizes = even_shares(total, parts)
    assert (sum(sizes), len(sizes)) == (total, parts)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
