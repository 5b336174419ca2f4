"""Optimizers as a checkpoint has them: several as one, shards of their state, loading without casts, values as JSON."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from orchestrator.compat.torch import pytree

RTOL = 1e-6
"""The relative difference of two numbers of a schedule that rounding explains."""
AVERAGE = "param_ema"
"""The key of the average of a weight in the optimizer state of that parameter."""
_MADE_FOR, _UPDATES, _STEERED = "schedule_made_for", "schedule_updates", "schedule_steered"
"""The keys in the state of a scheduler."""


class ScheduleError(ValueError):
    """A schedule cannot go on for another number of steps than it was made for."""


def made_for(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the schedule with this ``state`` was made for; empty in older checkpoints."""
    found: Mapping[str, Any] = state.get(_MADE_FOR, {})
    return found


def without_length(meta: Mapping[str, Any]) -> None:
    """Let the schedule of a state with this ``meta`` be loaded as it is, because no update will follow."""
    if (packed := meta["scheduler"]) is not None:
        packed["state"].pop(_MADE_FOR, None)


class Schedule:
    """The schedulers of the optimizers that have one, and what evaluations change of the learning rates.

    A scheduler keeps the number of steps that it was made for in its state, so that it cannot be loaded for another
    one. It is then made anew, and makes as many updates as the run has made.

    Attributes:
        made_for: the arguments of ``make``: ``steps``, the steps of the run, and ``steps_per_epoch``, which may be
            None.
        updates: the number of updates that it has followed.
        factor: what all learning rates are multiplied by, of what the schedulers say.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        make: Callable[..., LRScheduler | None],
        *,
        steps: int,
        steps_per_epoch: float | None,
    ):
        """Make the schedulers; ``make`` is called with an optimizer and ``made_for``."""
        self.made_for = {"steps": steps, "steps_per_epoch": steps_per_epoch}
        self.updates = 0
        self.factor = 1.0
        self._make = make
        self._steered = optimizers
        self._scheduled: list[float] | None = None  # all rates without the factor, if there is one
        self._before: list[float] = []  # what evaluations of an earlier run, and those of this one, have measured
        self._measured: list[float] = []
        rates = [[copy.deepcopy(group.get("lr")) for group in optimizer.param_groups] for optimizer in optimizers]
        made = [(optimizer, make(optimizer, **self.made_for)) for optimizer in optimizers]
        self._optimizers = [optimizer for optimizer, scheduler in made if scheduler is not None]
        self._schedulers = [scheduler for _, scheduler in made if scheduler is not None]
        self._rates = [r for one, (_, scheduler) in zip(rates, made, strict=True) if scheduler is not None for r in one]

    @property
    def label(self) -> str:
        """The names of their classes, as in ``StepLR+LambdaLR``; empty if no optimizer has one."""
        return "+".join(type(scheduler).__name__ for scheduler in self._schedulers)

    @property
    def follows_evaluations(self) -> bool:
        """Whether a scheduler is stepped with a metric of each evaluation."""
        return any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers)

    def step(self) -> None:
        """Follow an update: set the learning rates of the next one."""
        with self._without_factor():
            self.updates += 1
            for scheduler in self._schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()

    def steer(self, factor: float, measured: Sequence[float], *, new_run: bool = False) -> None:
        """Change the learning rates from the next update on.

        Args:
            factor: what they are multiplied by.
            measured: what the evaluations of this run have measured so far, for the schedulers that follow them.
            new_run: whether what has been loaded is the end of another run.
        """
        if new_run:
            self._before, self._measured = [*self._before, *self._measured], []
        with self._without_factor():
            self.factor = factor
            if self.follows_evaluations and list(measured) != self._measured:
                self._measured = list(measured)
                self._repeat(self.made_for)

    @contextlib.contextmanager
    def _without_factor(self) -> Iterator[None]:
        """Let the groups have the learning rates of the schedulers alone, and then those with the factor."""
        groups = [group for optimizer in self._steered for group in optimizer.param_groups if "lr" in group]
        if self._scheduled is not None:
            for group, rate in zip(groups, self._scheduled, strict=True):
                _set_rate(group, rate)
            self._scheduled = None
        yield
        if self.factor != 1.0:
            self._scheduled = [float(group["lr"]) for group in groups]
            for group, rate in zip(groups, self._scheduled, strict=True):
                _set_rate(group, self.factor * rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the one scheduler, or of each, with what it was made for and what it has followed."""
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        state = states[0] if len(states) == 1 else {"schedulers": states}
        steered = {
            "factor": self.factor,
            "scheduled": self._scheduled,
            "before": self._before,
            "measured": self._measured,
        }
        return {**state, _MADE_FOR: self.made_for, _UPDATES: self.updates, _STEERED: steered}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, once the optimizers are loaded.

        Raises:
            ScheduleError: it was made for another number of steps, and does not depend on the number of updates alone.
        """
        state, own = dict(state_dict), self.made_for
        before = state.pop(_MADE_FOR, own)  # older checkpoints do not have it
        self.updates = state.pop(_UPDATES, 0)
        if (steered := state.pop(_STEERED, None)) is not None:
            self.factor, self._scheduled = steered["factor"], steered["scheduled"]
            self._before, self._measured = steered["before"], steered["measured"]
        if before["steps"] != own["steps"]:
            if (found := self._difference_to(state, before)) is not None:
                raise ScheduleError(
                    f"train.steps={own['steps']}: the learning-rate schedule of the checkpoint, {self.label}, was made "
                    f"for train.steps={before['steps']}, and Job.scheduler does not come to its state in "
                    f"{self.updates} updates: {found}; make no other change to the schedule, and let it depend on "
                    f"steps and the number of updates alone, or set train.steps={before['steps']}"
                )
            with self._without_factor():
                self._repeat(own)
            return
        states = [state] if len(self._schedulers) == 1 else state["schedulers"]
        for scheduler, values in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(values)

    def _difference_to(self, state: Mapping[str, Any], made_for: Mapping[str, Any]) -> str | None:
        """Return where schedulers that are made anew for ``made_for`` differ from ``state``; None if they do not."""
        settings = self._settings()
        try:
            with self._without_factor():
                self._repeat(made_for)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        if "lr_lambdas" in _keys(state):  # the job's own functions, which are not saved
            return _difference(state, self.state_dict(), without={"_last_lr"})
        return _difference([state, settings], [self.state_dict(), self._settings()])

    def _repeat(self, made_for: Mapping[str, Any]) -> None:
        """Make the schedulers anew from the initial learning rates, and follow all updates and evaluations again."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self._rates, strict=True):
            if rate is not None:
                _set_rate(group, float(group.get("initial_lr", rate)))  # only schedulers of torch enter it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has not seen the updates
            made = [self._make(optimizer, **made_for) for optimizer in self._optimizers]
            self._schedulers = [scheduler for scheduler in made if scheduler is not None]
            for scheduler in self._schedulers:
                if isinstance(scheduler, ReduceLROnPlateau):
                    for value in (*self._before, *self._measured):
                        scheduler.step(value)
                else:
                    for _ in range(self.updates):
                        scheduler.step()

    def _settings(self) -> list[dict[str, Any]]:
        """Return the settings of all parameter groups, some of which the schedule changes."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [{k: copy.deepcopy(v) for k, v in g.items() if k not in ("params", "param_names")} for g in groups]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _keys(tree: Any) -> Iterator[Any]:
    """Yield every key of the mappings in a tree."""
    if isinstance(tree, Mapping):
        yield from tree
    for value in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ():
        yield from _keys(value)


def _difference(one: Any, other: Any, *, without: Collection[str] = (), name: str = "") -> str | None:
    """Return where two states differ, in words; None if they are equal but for rounding, and for keys left out.

    Keys that only one has are of another version of torch.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = [(str(key), one[key], other[key]) for key in one if key in other and key not in without]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = [(name, a, b) for a, b in zip(one, other, strict=True)]
    else:
        numbers = (int, float, Tensor)
        close = isinstance(one, numbers) and isinstance(other, numbers) and math.isclose(one, other, rel_tol=RTOL)
        return None if close or one == other else f"{name} is {other} and was {one}"
    return next((found for key, a, b in pairs if (found := _difference(a, b, without=without, name=key))), None)


class JointOptimizer:
    """The parameter groups and the state of several ``optimizers``, which have no parameter in common."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers = optimizers

    @property
    def label(self) -> str:
        """The names of their classes, as in ``Adam+SGD``."""
        return "+".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the first optimizer, then of the next."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter."""
        return {parameter: values for optimizer in self.optimizers for parameter, values in optimizer.state.items()}


AnyOptimizer = Optimizer | JointOptimizer
AnyScheduler = LRScheduler | Schedule


def label_of(value: AnyOptimizer | AnyScheduler) -> str:
    """Return the name of the class that a checkpoint records; the optimizer that loads it must have the same."""
    return value.label if isinstance(value, (JointOptimizer, Schedule)) else type(value).__name__


class Shard(Tensor):
    """This rank's part of a tensor that has the shape of the whole parameter.

    The type says so, because the shape cannot: the matrix that belongs to the rows of a parameter may have the shape of
    its shard. Copies of a shard are of this type too.
    """


def load_without_casts(
    optimizer: Optimizer,
    said: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Let ``optimizer`` load a state, whose values keep their dtypes where the parameter has its own as well.

    Averages of weights keep theirs in any case. torch takes text for a sequence, which is put back too.

    Args:
        optimizer: its state is replaced.
        said: as ``state_dict()`` returns it.
        parameters: those of the optimizer, by saved name, in the order of their numbers in ``said``.
        dtypes: of the saved parameters, by name.
    """
    saved: Mapping[Any, Any] = said.get("state", {})
    numbered = dict(enumerate(parameters.items()))
    keeping = {number: p for number, (name, p) in numbered.items() if dtypes.get(name) == p.dtype}
    given = dict(said)
    if saved and type(optimizer).load_state_dict is Optimizer.load_state_dict:
        given["state"] = {n: _spared(values, keeping[n]) if n in keeping else values for n, values in saved.items()}
    optimizer.load_state_dict(given)
    for number, (_, parameter) in numbered.items():
        loaded = optimizer.state.get(parameter, {})
        for key, value in saved.get(number, {}).items():
            now = loaded.get(key)
            is_cast = now.dtype != value.dtype if isinstance(now, Tensor) else isinstance(now, (list, tuple, dict))
            keeps = number in keeping or key == AVERAGE
            if type(now) is type(value) and (isinstance(now, str) or (is_cast and keeps)):
                loaded[key] = value


def _spared(values: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state of a parameter with empty tensors in place of those that torch would cast for nothing.

    For casts of all of them at once, a GPU may have no room.
    """

    def spared(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
        is_cast = is_tensor and value.dtype != parameter.dtype and parameter.is_floating_point()
        return value.new_empty(0) if is_cast else value

    return {key: value if key == "step" else pytree.tree_map(spared, value) for key, value in values.items()}


def to_json(value: Any, what: str, remedy: str) -> Any:
    """Convert ``value`` to JSON types. A mapping with keys other than text becomes a list of pairs.

    Args:
        value: numbers, text, tensors and NumPy arrays in nested lists, tuples and mappings.
        what: the owner of the value, the subject of the error message.
        remedy: what the user can do about an error.

    Raises:
        ValueError: the value holds something that JSON cannot represent.
    """
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and NumPy scalars
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        items = [(to_json(k, what, remedy), to_json(v, what, remedy)) for k, v in value.items()]
        return dict(items) if all(isinstance(k, str) for k in value) else [list(i) for i in items]
    if isinstance(value, (list, tuple)):
        return [to_json(v, what, remedy) for v in value]
    raise ValueError(f"{what} holds a {type(value).__name__}, which JSON cannot represent; {remedy}")


def from_json(value: Any, template: Any) -> Any:
    """Convert ``value`` from JSON, taking the types of containers and tensors from ``template``, a similar value."""
    if isinstance(template, Tensor):
        return torch.tensor(value, dtype=template.dtype, device=template.device)
    if isinstance(template, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        result = copy.copy(cast("dict[Any, Any]", template))
        result.clear()
        result.update({k: from_json(v, template.get(k)) for k, v in pairs})
        return result
    if isinstance(value, list):
        inner: Iterable[Any] = [None] * len(value)
        if isinstance(template, (list, tuple)) and len(template) == len(value):
            inner = template
        items = [from_json(v, t) for t, v in zip(inner, value, strict=True)]
        return tuple(items) if isinstance(template, tuple) else items
    return copy.copy(value)
