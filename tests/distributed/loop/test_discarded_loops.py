"""A process that builds its model anew, to start from a checkpoint, has freed the one before.

A strategy that is closed keeps no process group, because the other ranks would wait for its connections.
"""

from pathlib import Path

import pytest

from helpers.conformance.cases import Case, having
from helpers.jobs.quick_jobs import ScheduledDigits
from helpers.jobs.step_toys import Distillation
from helpers.models.zoo_cells import STRATEGIES
from helpers.ranks.discarded import built_three_times
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign

SHORT = ("hsdp", "parameter_server sync")


@pytest.mark.parametrize("name", [*SHORT, *in_campaign(*(name for name in STRATEGIES if name not in SHORT))])
def test_nothing_is_left_of_a_discarded_loop(gang: Gang, tmp_path: Path, name: str) -> None:
    options, world_size = STRATEGIES[name]
    case = Case(
        job=ScheduledDigits(hidden=24, depth=4),
        train=having(steps=4, global_batch_size=24, ema_decay=0.9 if name in ("ddp", "ddp_pipeline") else None),
        options=options,
        alone=options,
    )
    for left in gang.run(built_three_times, case, world_size, str(tmp_path), world_size=world_size):
        assert left == []


@pytest.mark.campaign
def test_nothing_is_left_of_a_compiled_model(gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    gang.close()  # the next processes have the variable
    case = Case(job=ScheduledDigits(hidden=24), train=having(steps=4, global_batch_size=24, compile=True))
    (left,) = gang.run(built_three_times, case, 1, str(tmp_path), world_size=1, timeout_s=110)
    gang.close()
    assert left == []


def test_nothing_is_left_of_a_job_that_makes_its_own_updates(gang: Gang, tmp_path: Path) -> None:
    case = Case(job=Distillation(), train=having(steps=4, global_batch_size=24, ema_decay=0.9))
    for left in gang.run(built_three_times, case, 2, str(tmp_path), world_size=2):
        assert left == []
