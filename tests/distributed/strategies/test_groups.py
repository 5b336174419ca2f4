"""Process groups beside the default one: none of a single rank, and all with the timeout of the run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import CLUSTER, SINGLE, Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.jobs.quick_jobs import digits
from helpers.jobs.toys import Toy
from helpers.ranks.gang import Gang
from helpers.ranks.groups import formed
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.base import Context
from orchestrator.strategies.groups import own_group


@pytest.mark.parametrize(
    ("name", "job", "sizes"),
    [
        ("1F1B-2", digits(depth=8, hidden=8), [2]),
        ("1F1B-2x2", digits(depth=8, hidden=8), [2, 2, 2]),
        ("InterleavedZeroBubble-2x2", of.TokenChain(build=of.tied_ends), [2, 2, 2, 2]),
    ],
    ids=["a pipeline", "replicas of one", "shared tensors"],
)
def test_groups_have_the_timeout_of_the_run_and_more_than_one_rank(
    gang: Gang, name: str, job: Toy, sizes: list[int]
) -> None:
    layout = LAYOUTS[name]
    case = layout.of(Case(job=job, train=having(global_batch_size=32)))
    expected = [(size, CLUSTER.collective_timeout_s) for size in sizes]
    for found in gang.run(formed, case, world_size=layout.world_size):
        assert found == expected


def test_with_nccl_all_parts_are_split_from_the_default_group_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    group = object()
    monkeypatch.setattr(dist, "split_group", lambda **arguments: (calls.append(arguments), group)[1])
    mesh = Mesh(replicate=2, pipeline=2)
    context = Context(
        mesh=mesh,
        global_rank=1,
        device=torch.device("cuda", 0),
        seed=0,
        train=having(),
        options=SINGLE,
        collective_timeout_s=41,
    )
    assert own_group(context, mesh.groups("replicate")) is group
    assert own_group(context, [[0], [1], [2], [3]]) is None
    assert calls == [{"split_ranks": [[0, 2], [1, 3]], "timeout": timedelta(seconds=41)}]
