"""The grid of ranks: every rank in one place of it, and which of them are neighbours."""

from __future__ import annotations

import pytest

from orchestrator.planning.mesh import Mesh, even_shares

GRIDS = [(1, 1), (3, 1), (1, 4), (2, 2), (2, 3), (4, 2)]


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize(("dp", "pp"), GRIDS)
def test_every_rank_has_a_place_of_its_own(dp: int, pp: int, close: bool) -> None:
    mesh = Mesh(data_parallel_size=dp, pipeline_parallel_size=pp, replicas_close=close)
    assert mesh.world_size == dp * pp
    for rank in range(mesh.world_size):
        d, p = mesh.dp_rank(rank), mesh.pp_rank(rank)
        assert mesh.global_rank(dp_rank=d, pp_rank=p) == rank
        assert mesh.pipeline(d)[p] == mesh.replicas(p)[d] == rank
    assert sorted(r for d in range(dp) for r in mesh.pipeline(d)) == list(range(dp * pp))
    assert sorted(r for p in range(pp) for r in mesh.replicas(p)) == list(range(dp * pp))


@pytest.mark.parametrize(("dp", "pp"), GRIDS)
def test_neighbours_are_the_stages_of_a_pipeline_or_the_replicas_of_a_stage(dp: int, pp: int) -> None:
    def run(start: int, length: int) -> list[int]:
        return list(range(start, start + length))

    stages_close = Mesh(data_parallel_size=dp, pipeline_parallel_size=pp)
    assert [stages_close.pipeline(d) for d in range(dp)] == [run(d * pp, pp) for d in range(dp)]
    replicas_close = Mesh(data_parallel_size=dp, pipeline_parallel_size=pp, replicas_close=True)
    assert [replicas_close.replicas(p) for p in range(pp)] == [run(p * dp, dp) for p in range(pp)]


@pytest.mark.parametrize("close", [False, True])
def test_rank_0_has_the_first_stage_of_the_first_replica(close: bool) -> None:
    mesh = Mesh(data_parallel_size=3, pipeline_parallel_size=2, replicas_close=close)
    assert (mesh.dp_rank(0), mesh.pp_rank(0)) == (0, 0)


@pytest.mark.parametrize("total", [0, 1, 5, 64, 65, 997])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_even_shares(total: int, parts: int) -> None:
    sizes = even_shares(total, parts)
    assert (sum(sizes), len(sizes)) == (total, parts)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
