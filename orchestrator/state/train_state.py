"""Training state keyed by the model's own parameter names: what every layout can save and load.

A snapshot lies in host memory. Tensors are apart from everything else, which is plain JSON.
"""

from __future__ import annotations

import copy
import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# How an update is computed, not what it computes: a property of the process that loads.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_LISTED = 4


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """A snapshot in host memory.

    ``model``: parameters and buffers by the model's own names, tied ones under each name.
    ``optimizer``: ``"<parameter name>/<state key>"``, a tied parameter under its first name.
    ``meta``: JSON: ``step``, ``samples_consumed``, ``param_groups``, ``optimizer``,
    ``optimizer_scalars``, ``scheduler``, ``tied`` and what the caller added.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def samples_consumed(self) -> int:
        return int(self.meta["samples_consumed"])

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.model.values(), *self.optimizer.values()))


@torch.no_grad()
def capture(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    *,
    step: int,
    samples_consumed: int,
    into: TrainState | None = None,
    **more: Any,
) -> TrainState:
    """Copy the training state to host memory, where later updates cannot change it.

    ``into`` is an earlier snapshot that nobody reads any more: its memory is reused wherever
    shapes and dtypes still fit. ``more`` goes to ``meta``.

    Raises:
        ValueError: some state cannot be kept as tensors and JSON; the text names its owner.
    """
    model = _bare(model)
    host = _HostCopies()
    tied = _tied(model)
    old = into.model if into else {}
    parameters: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{type(model).__name__}: {name} in its state_dict() is a {type(value).__name__}; "
                "only tensors can be saved, make it a buffer"
            )
        same = parameters.get(tied.get(name, ""))
        parameters[name] = host.copy(value, old.get(name)) if same is None else same

    names = {p: name for name, p in model.named_parameters()}
    old = into.optimizer if into else {}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    label = type(optimizer).__name__
    for parameter, values in optimizer.state.items():
        name = _name_of(parameter, names)
        for key, value in values.items():
            path = f"{name}/{key}"
            if isinstance(value, Tensor):
                tensors[path] = host.copy(value, old.get(path))
            elif value is None or isinstance(value, (bool, int, float, str)):
                scalars.setdefault(name, {})[key] = value
            else:
                raise ValueError(
                    f"{label}: its state {key!r} of {name} is a {type(value).__name__}; "
                    "only tensors, numbers and text can be saved, choose another optimizer"
                )
    meta = {
        **{key: _to_json(value, key, "pass plain data") for key, value in more.items()},
        "step": step,
        "samples_consumed": samples_consumed,
        "optimizer": label,
        "param_groups": [_pack_group(g, names, label) for g in optimizer.param_groups],
        "optimizer_scalars": scalars,
        "scheduler": None if scheduler is None else _pack_scheduler(scheduler),
        "tied": tied,
    }
    host.finish()
    return TrainState(model=parameters, optimizer=tensors, meta=meta)


@torch.no_grad()
def restore(
    state: TrainState,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    *,
    partial: bool = False,
) -> None:
    """Load ``state`` in place; device and dtype stay those of ``model``.

    The state itself is not changed and keeps no tie to the model. ``partial``: the model is a part
    of the one that was saved (a pipeline stage); names it does not have are ignored.

    Raises:
        ValueError: the state is of another model, optimizer or scheduler. Nothing was loaded.
    """
    model = _bare(model)
    own = model.state_dict()
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    errors = mismatches(shapes, state, partial=partial)
    for kind, here in (("optimizer", optimizer), ("scheduler", scheduler)):
        there = state.meta[kind]
        saved = there["class"] if isinstance(there, Mapping) else there
        wanted = None if here is None else type(here).__name__
        if saved != wanted:
            errors.append(f"{kind}: the checkpoint is of {saved}, the job has {wanted}")
    if not errors:
        ids = _saved_names(state, model, optimizer, errors, partial=partial)
    if errors:
        raise ValueError("\n".join(errors))

    model.load_state_dict({name: state.model[name] for name in own})
    optimizer.load_state_dict(_optimizer_state_dict(state, optimizer, ids))
    if scheduler is not None:
        saved_state = state.meta["scheduler"]["state"]
        scheduler.load_state_dict(_like(scheduler.state_dict(), saved_state))


def merge(states: Sequence[TrainState], *, order: Sequence[str]) -> TrainState:
    """Join the parts that pipeline stages captured at the same step; ``order`` has the names in the model's.

    Parameter groups are united by position; everything else in ``meta`` is the first stage's.

    Raises:
        ValueError: the stages give a parameter group different hyperparameters.
    """
    model: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    tied: dict[str, str] = {}
    groups: list[dict[str, Any]] = []
    for part in states:
        assert part.step == states[0].step, "stages captured at different steps"
        assert model.keys().isdisjoint(part.model), "two stages hold the same parameter"
        model |= part.model
        optimizer |= part.optimizer
        scalars |= part.meta["optimizer_scalars"]
        tied |= part.meta["tied"]
        for i, group in enumerate(part.meta["param_groups"]):
            if i == len(groups):
                groups.append({**group, "params": []})
            for key in sorted((groups[i].keys() | group.keys()) - {"params"}):
                if groups[i].get(key) != group.get(key):
                    raise ValueError(
                        f"parameter group {i}: {key} differs between stages "
                        f"({groups[i].get(key)} and {group.get(key)}); Job.optimizer must make "
                        "the same groups for every part of the model"
                    )
            groups[i]["params"] = [*groups[i]["params"], *group["params"]]
    place = {name: i for i, name in enumerate(order)}
    for group in groups:
        group["params"].sort(key=place.__getitem__)
    model = {name: model[name] for name in sorted(model, key=place.__getitem__)}
    united = {"param_groups": groups, "optimizer_scalars": scalars, "tied": tied}
    return TrainState(model=model, optimizer=optimizer, meta={**states[0].meta, **united})


def without_shared(state: TrainState, first_names: Mapping[str, str], *, saved: Collection[str]) -> TrainState:
    """``state`` of a stage without what another stage saves of the tensors that both have.

    ``first_names``: the names that shared parameters have here, each with the first name that they have there.
    ``saved``: the names, of parameters and buffers, under which they are saved there.
    """
    groups = [
        {**group, "params": [name for name in group["params"] if name not in first_names]}
        for group in state.meta["param_groups"]
    ]
    scalars = {n: v for n, v in state.meta["optimizer_scalars"].items() if n not in first_names}
    tied = {name: first for name, first in first_names.items() if name not in saved}
    return TrainState(
        model={n: t for n, t in state.model.items() if n not in saved},
        optimizer={p: t for p, t in state.optimizer.items() if p.rpartition("/")[0] not in first_names},
        meta={
            **state.meta,
            "param_groups": groups,
            "optimizer_scalars": scalars,
            "tied": {**state.meta["tied"], **tied},
        },
    )


def mismatches(
    model_shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    state: TrainState,
    *,
    partial: bool = False,
) -> list[str]:
    """One line for each parameter or buffer that does not fit, the first few of each sort.

    ``model_shapes`` has the shape and dtype of each name in the model. A change between floating
    dtypes fits. ``partial``: names that only the checkpoint has fit too.
    """
    missing = [name for name in model_shapes if name not in state.model]
    unexpected = [name for name in state.model if name not in model_shapes]
    unlike = []
    for name, (shape, dtype) in model_shapes.items():
        saved = state.model.get(name)
        if saved is None:
            continue
        if tuple(saved.shape) != tuple(shape):
            unlike.append(f"{name}: {list(saved.shape)} in the checkpoint, {list(shape)} in the model")
        elif saved.dtype != dtype and not (saved.is_floating_point() and dtype.is_floating_point):
            unlike.append(f"{name}: {saved.dtype} in the checkpoint, {dtype} in the model")

    def near(name: str, others: list[str]) -> str:
        found = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
        return f" (nearest: {found[0]})" if found else ""

    def lacks(name: str) -> str:
        return f"{name}: not in the checkpoint{near(name, unexpected)}"

    def lacks_here(name: str) -> str:
        return f"{name}: not in the model{near(name, missing)}"

    return [
        *_first(missing, lacks, "are not in the checkpoint"),
        *([] if partial else _first(unexpected, lacks_here, "are not in the model")),
        *_first(unlike, str, "differ in shape or type"),
    ]


def nonfinite_parameter(state: TrainState) -> str | None:
    """The first of the trained parameters that holds NaN or an infinity; buffers may hold what they like."""
    for name in (name for group in state.meta["param_groups"] for name in group["params"]):
        tensor = state.model[name]
        if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
            return str(name)
    return None


class _HostCopies:
    """Copies to host memory: asynchronous from a GPU, through pinned buffers."""

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def copy(self, source: Tensor, buffer: Tensor | None) -> Tensor:
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        buffer.copy_(source.detach(), non_blocking=True)
        if source.is_cuda:
            self._devices.add(source.device)
        return buffer

    def finish(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


def _bare(model: nn.Module) -> nn.Module:
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return cast(nn.Module, model.module)
    return model


def _tied(model: nn.Module) -> dict[str, str]:
    """The further names of shared parameters, each with the first name."""
    first = {p: name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in every if first[p] != name}


def _name_of(parameter: Tensor, names: Mapping[nn.Parameter, str]) -> str:
    name = names.get(cast(nn.Parameter, parameter))
    if name is None:
        raise ValueError(
            f"the optimizer holds a tensor of shape {list(parameter.shape)} that is no parameter "
            "of the model; Job.optimizer must use the parameters it is given"
        )
    return name


def _pack_group(group: Mapping[str, Any], names: Mapping[nn.Parameter, str], label: str) -> dict[str, Any]:
    kept = {k: v for k, v in group.items() if k not in {"params", "param_names"} | _IMPLEMENTATION}
    remedy = "use numbers and text"
    return {
        **{k: _to_json(v, f"{label}: its option {k!r}", remedy) for k, v in kept.items()},
        "params": [_name_of(p, names) for p in group["params"]],
    }


def _pack_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    label = type(scheduler).__name__
    remedy = "give it a state_dict() of numbers, text, lists and dicts, or use another scheduler"
    values = scheduler.state_dict().items()
    return {
        "class": label,
        "state": {k: _to_json(v, f"{label}: its state {k!r}", remedy) for k, v in values},
    }


def _saved_names(
    state: TrainState,
    model: nn.Module,
    optimizer: Optimizer,
    errors: list[str],
    *,
    partial: bool,
) -> list[list[str]]:
    """For each parameter of each group of ``optimizer``, the name it has in ``state``.

    A tied parameter may be known there by another of its names.
    """
    tied = state.meta["tied"]
    aliases: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[parameter] += [name, tied.get(name, name)]
    saved_groups = [g["params"] for g in state.meta["param_groups"]]
    groups = [g["params"] for g in optimizer.param_groups]
    if len(groups) > len(saved_groups) or (not partial and len(groups) < len(saved_groups)):
        errors.append(f"optimizer: {len(saved_groups)} parameter groups in the checkpoint, {len(groups)} in the job")
        return []
    result, lacking, left_over = [], [], []
    for parameters, saved in zip(groups, saved_groups, strict=False):
        known = set(saved)
        found = [next((n for n in aliases[p] if n in known), None) for p in parameters]
        lacking += [aliases[p][0] for p, n in zip(parameters, found, strict=True) if n is None]
        left_over += sorted(known.difference(*(aliases[p] for p in parameters)))
        result.append([name for name in found if name is not None])
    told = "not in this parameter group of the"
    errors += _first(lacking, lambda n: f"{n}: {told} checkpoint's optimizer", f"are {told} same")
    if not partial:
        errors += _first(left_over, lambda n: f"{n}: {told} job's optimizer", f"are {told} same")
    return result


def _optimizer_state_dict(state: TrainState, optimizer: Optimizer, ids: Sequence[Sequence[str]]) -> dict[str, Any]:
    """``state`` in torch's own form, whose loading casts to the parameters' dtypes and devices."""
    by_name: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, tensor in state.optimizer.items():
        name, _, key = path.rpartition("/")
        by_name[name][key] = tensor
    for name, scalars in state.meta["optimizer_scalars"].items():
        by_name[name].update(scalars)

    values, groups, index = {}, [], 0
    for group, names, saved in zip(optimizer.param_groups, ids, state.meta["param_groups"], strict=False):
        for i, (parameter, name) in enumerate(zip(group["params"], names, strict=True), index):
            if name in by_name:
                values[i] = {k: _detach(k, v, parameter) for k, v in by_name[name].items()}
        packed = {k: v for k, v in group.items() if k != "params"}
        packed |= {k: _like(group.get(k), v) for k, v in saved.items() if k != "params"}
        groups.append({**packed, "params": list(range(index, index + len(names)))})
        index += len(names)
    return {"state": values, "param_groups": groups}


def _detach(key: str, value: Any, parameter: Tensor) -> Any:
    """A copy, since torch would train on in the snapshot's memory; counters stay on the host."""
    if not isinstance(value, Tensor):
        return value
    return value.to("cpu" if key == "step" else parameter.device, copy=True)


def _to_json(value: Any, what: str, remedy: str) -> Any:
    """``value`` as JSON; a mapping whose keys are not text becomes a list of pairs."""
    if hasattr(value, "tolist"):  # tensors, numpy arrays and numpy's numbers
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        items = [(_to_json(k, what, remedy), _to_json(v, what, remedy)) for k, v in value.items()]
        return dict(items) if all(isinstance(k, str) for k in value) else [list(i) for i in items]
    if isinstance(value, (list, tuple)):
        return [_to_json(v, what, remedy) for v in value]
    raise ValueError(f"{what} holds a {type(value).__name__}, which is no JSON; {remedy}")


def _like(template: Any, value: Any) -> Any:
    """``value`` from JSON with the container types that ``template`` has in its place."""
    if isinstance(template, Tensor):
        return torch.tensor(value, dtype=template.dtype, device=template.device)
    if isinstance(template, Mapping):
        pairs = value.items() if isinstance(value, dict) else value
        result = copy.copy(cast("dict[Any, Any]", template))
        result.clear()
        result.update({k: _like(template.get(k), v) for k, v in pairs})
        return result
    if isinstance(value, list):
        inner: Iterable[Any] = [None] * len(value)
        if isinstance(template, (list, tuple)) and len(template) == len(value):
            inner = template
        items = [_like(t, v) for t, v in zip(inner, value, strict=True)]
        return tuple(items) if isinstance(template, tuple) else items
    return copy.copy(value)


def _first(names: Sequence[str], line: Callable[[str], str], rest: str) -> Iterator[str]:
    yield from map(line, names[:_LISTED])
    if len(names) > _LISTED:
        yield f"and {len(names) - _LISTED} more {rest}"
