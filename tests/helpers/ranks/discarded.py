"""Loops that a process builds one after another, and what is left of those that are discarded."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from helpers.conformance.cases import Case, assignment
from helpers.conformance.training import made, make
from helpers.ranks.gang import own_device
from helpers.ranks.loops import loop_of
from orchestrator.compat.torch import FakeTensor
from orchestrator.worker.control.control import AbandonedError, StepGate
from orchestrator.worker.loop import Loop
from orchestrator.worker.process.process_memory import free_unreachable


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
            loop.finish(timeout_s=60)
            found += ["a process group" for thing in reached(loop.strategy) if isinstance(thing, dist.ProcessGroup)]
            references = list(references_to(loop))
            del loop
            free_unreachable(own_device())
            found += [name for name, reference in references if reference() is not None]
    finally:
        gc.enable()
    found += [f"a parameter of shape {list(p.shape)}" for p in parameters_alive() if id(p) not in before]
    # The threads of a server end with the process group.
    return found + [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def of_generation(rank: int, case: Case, world_size: int, run_dir: str) -> Loop:
    """Return the loop of a generation that has ended with an error on every rank."""
    strategy = make(case, rank)
    made.clear()
    orders = assignment(
        rank=rank, world_size=world_size, generation=1, store_port=0, run_dir=run_dir, case=case, checkpoint_every=2
    )
    loop = loop_of(orders, case, strategy, gate=Abandoning(timeout_s=60), device=own_device())
    with contextlib.suppress(AbandonedError):
        loop.run({})
    strategy.close()
    return loop


def references_to(loop: Loop) -> Iterator[tuple[str, weakref.ref[Any]]]:
    yield "the loop", weakref.ref(loop)
    yield "the strategy", weakref.ref(loop.strategy)
    for name in ("module", "optimizer", "scheduler"):
        if (value := getattr(getattr(loop.strategy, "trained", None), name, None)) is not None:
            yield f"the {name}", weakref.ref(value)


def reached(root: object) -> Iterator[object]:
    """Yield what ``root`` keeps alive, without modules, classes and the globals of functions."""
    left, seen = [root], set[int]()
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, ModuleType | type):
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, FunctionType):
            left += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
        else:
            left += gc.get_referents(thing)


def parameters_alive() -> list[nn.Parameter]:
    parameters = [thing for thing in gc.get_objects() if isinstance(thing, nn.Parameter)]
    return [parameter for parameter in parameters if not isinstance(parameter, FakeTensor)]  # which has no memory
