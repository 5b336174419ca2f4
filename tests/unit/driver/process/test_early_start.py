"""When Ray's processes start before the configuration is checked, and with how many workers."""

import pytest

from orchestrator.config.overrides import values
from orchestrator.driver.process.early_start import embeds_ray, num_workers


@pytest.mark.parametrize(
    ("overrides", "ray_address", "expected"),
    [
        ([], None, True),
        (["strategy=pipeline", "train.steps=3", "tracking=none"], "", True),
        ([], "local", True),
        ([], "10.0.0.1:6379", False),
        (["cluster=local"], "10.0.0.1:6379", True),
        (["cluster=default"], None, True),
        (["cluster=auto"], None, False),
        (["cluster=misspelt"], None, False),
        (["cluster.address=10.0.0.1:6379"], None, False),
        (["cluster=local", "cluster.address=10.0.0.1:6379"], None, False),
        (["cluster.dashboard=true"], None, False),
        (["plan=true"], None, False),
        (["experiment=quick"], None, False),
    ],
)
def test_only_a_run_that_certainly_embeds_a_plain_ray_starts_one_early(
    overrides: list[str], ray_address: str | None, expected: bool
) -> None:
    environment = {} if ray_address is None else {"RAY_ADDRESS": ray_address}
    assert embeds_ray(values(overrides), environment) is expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 1),
        (["strategy.num_workers=2"], 2),
        (["strategy=pipeline", "strategy.num_workers=4"], 4),
        (["strategy.num_workers=16"], 4),
        (["strategy.num_workers=auto"], 1),
        (["strategy.num_workers=-1"], 1),
        (["strategy=single", "strategy.num_workers=2"], 1),
        (["strategy=auto", "strategy.num_workers=2"], 1),
    ],
)
def test_no_more_workers_start_early_than_the_run_has_and_than_there_are_cores(
    overrides: list[str], expected: int
) -> None:
    assert num_workers(values(overrides), cores=4) == expected
