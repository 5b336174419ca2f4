"""The limits of a run in the order in which they speak: the loader, the hang detector, the collective operation."""

import pytest

from orchestrator.config.compose import compose
from orchestrator.config.schema import LONGEST_HANG_FACTOR, Config
from orchestrator.policy.hang import limit_of
from orchestrator.policy.recovery import GENERATIONS_WITHOUT_PROGRESS
from orchestrator.protocol.messages import Heartbeat, Phase
from orchestrator.strategies import registry

HUNG_AT = 7


def composed(*overrides: str) -> tuple[Config | None, list[str]]:
    errors: list[str] = []
    config, _ = compose(list(overrides), errors, registry.config_class)
    return config, errors


@pytest.mark.parametrize("phase", ["connect", "train", "eval", "sample", "checkpoint", "callback"])
def test_a_hang_is_found_before_those_who_wait_give_up(phase: Phase) -> None:
    config, errors = composed()
    assert config is not None, errors
    hangs = (HUNG_AT,) * (GENERATIONS_WITHOUT_PROGRESS - 1)
    limit_s, _ = limit_of(config.recovery, Heartbeat(step=HUNG_AT, phase=phase), earlier_hangs=hangs)
    assert limit_s == LONGEST_HANG_FACTOR * config.recovery.hang_max_s
    assert config.cluster.collective_timeout_s > limit_s
    assert config.recovery.loader_timeout_s < config.recovery.hang_max_s


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["recovery.hang_max_s=600"], "cluster.collective_timeout_s=1500: "),
        (["cluster.collective_timeout_s=300"], "cluster.collective_timeout_s=300: "),
        (["cluster.collective_timeout_s=240", "recovery.hang_max_s=60"], "cluster.collective_timeout_s=240: "),
    ],
)
def test_limits_that_collide_are_refused(overrides: list[str], value: str) -> None:
    config, (error,) = composed(*overrides)
    assert config is None
    assert error.startswith(value)
    assert "recovery.hang_max_s=" in error


def test_limits_that_are_raised_together_are_accepted() -> None:
    config, errors = composed("cluster.collective_timeout_s=5000", "recovery.hang_max_s=1200")
    assert config is not None, errors
