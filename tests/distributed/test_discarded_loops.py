"""A process that builds its model anew, to start from a checkpoint, has freed the one before."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from helpers.cases import Case, assignment, having
from helpers.gang import Gang
from helpers.loops import loop_of
from helpers.quick_jobs import ScheduledDigits
from helpers.step_toys import Distillation
from helpers.training import CPU, made, make
from helpers.zoo_cells import STRATEGIES
from orchestrator.compat.torch import FakeTensor
from orchestrator.worker.control import AbandonedError, StepGate
from orchestrator.worker.loop import Loop
from orchestrator.worker.process import memory


class Abandoning(StepGate):
    """The driver ends the generation before step 3."""

    def begin(self, step: int, generation: int) -> bool:
        if step == 3:
            self.abandon(generation)
        return super().begin(step, generation)


def built_three_times(rank: int, case: Case, world_size: int, run_dir: str) -> list[str]:
    """Build and train three times; what is alive of them after each time."""
    Path(run_dir, "checkpoints").mkdir(exist_ok=True)
    gc.collect()
    gc.disable()
    before = {id(parameter) for parameter in parameters_alive()}
    found: list[str] = []
    try:
        for _ in range(3):
            loop = of_generation(rank, case, world_size, run_dir)
            loop.finish(timeout_s=5)
            references = list(references_to(loop))
            del loop
            memory.free_unreachable(CPU)
            found += [name for name, reference in references if reference() is not None]
    finally:
        gc.enable()
    found += [f"a parameter of shape {list(p.shape)}" for p in parameters_alive() if id(p) not in before]
    # The threads of a shard end with the process group.
    return found + [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def of_generation(rank: int, case: Case, world_size: int, run_dir: str) -> Loop:
    """Return the loop of a generation that has ended with an error on every rank."""
    strategy = make(case, rank)
    made.clear()
    orders = assignment(
        rank=rank,
        world_size=world_size,
        generation=1,
        store_port=0,
        run_dir=run_dir,
        case=case,
        checkpoint_every=2,
    )
    loop = loop_of(orders, case, strategy, gate=Abandoning(timeout_s=5))
    with contextlib.suppress(AbandonedError):
        loop.run({})
    strategy.close()
    return loop


def references_to(loop: Loop) -> Iterator[tuple[str, weakref.ref[Any]]]:
    yield "the loop", weakref.ref(loop)
    yield "the strategy", weakref.ref(loop.strategy)
    for name in ("model", "optimizer", "scheduler"):
        if (value := getattr(loop.strategy, name, None)) is not None:
            yield f"the {name}", weakref.ref(value)


def parameters_alive() -> list[nn.Parameter]:
    parameters = [thing for thing in gc.get_objects() if isinstance(thing, nn.Parameter)]
    return [parameter for parameter in parameters if not isinstance(parameter, FakeTensor)]  # which has no memory


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_left_of_a_discarded_loop(gang: Gang, tmp_path: Path, name: str) -> None:
    options, world_size = STRATEGIES[name]
    case = Case(
        job=ScheduledDigits(hidden=24, depth=4),
        train=having(steps=4, global_batch_size=24, ema_decay=0.9 if name in ("ddp", "pipeline") else None),
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
