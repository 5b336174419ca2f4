"""Process groups beside the default one: none of a single rank, and all with the timeout of the run."""

import pytest

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import CLUSTER, Case, having
from helpers.conformance.layouts import LAYOUTS
from helpers.jobs.quick_jobs import digits
from helpers.jobs.toys import Tokens, Toy
from helpers.ranks.gang import Gang
from helpers.ranks.groups import formed


@pytest.mark.parametrize(
    ("name", "job", "sizes"),
    [
        ("1F1B-2", digits(depth=8, hidden=8), [2]),
        ("1F1B-2x2", digits(depth=8, hidden=8), [2, 2, 2]),
        ("InterleavedZeroBubble-2x2", Tokens(build=of.tied_ends), [2, 2, 2, 2]),
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
