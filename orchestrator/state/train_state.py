"""Snapshots of the training state, keyed by the model's own parameter names so that any layout can load them.

:func:`capture` copies the state of a live model, optimizer and scheduler to host memory; :func:`restore` loads it back.
A :class:`TrainState` keeps tensors apart from all other values, which are plain JSON.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from orchestrator.planning.placement import Box
from orchestrator.state import model_state
from orchestrator.state.manifest import Kind
from orchestrator.state.optimizer_state import FURTHER, Move, load, pack
from orchestrator.state.optimizers import AnyOptimizer, AnyScheduler, Shard, from_json, label_of, to_json
from orchestrator.state.tensor_file import StoredTensors
from orchestrator.state.tensor_memory import host_copies, with_own_memory

NONFINITE = "nonfinite"


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """A snapshot of the training state, in host memory or in the files of a checkpoint.

    Attributes:
        model: parameters and buffers by the model's own names; tied parameters appear under each name.
        optimizer: tensors by ``"<parameter name>/<state key>"``; a tied parameter appears under its first name.
        meta: JSON values: ``step``, ``samples_consumed``, ``param_groups``, ``optimizer``, ``optimizer_scalars``,
            ``scheduler``, ``tied``, and the entries that the caller of :func:`capture` added; ``optimizer_further``, if
            the optimizer has state beside that of its parameters; ``nonfinite``, the name of a trained parameter that
            holds NaN or an infinity, if there is one; ``left_out``, if ``model`` lacks frozen parameters.
        boxes: where the tensors are that are shards of larger ones, by ``"model"`` or ``"optimizer"`` and by name. All
            others are whole.
    """

    model: MutableMapping[str, Tensor]
    optimizer: MutableMapping[str, Tensor]
    meta: dict[str, Any]
    boxes: Mapping[Kind, Mapping[str, Box]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.meta["step"])

    @property
    def samples_consumed(self) -> int:
        """The number of global samples consumed."""
        return int(self.meta["samples_consumed"])

    @property
    def nonfinite_parameter(self) -> str | None:
        """The name of a trained parameter that holds NaN or an infinity, or None. Buffers may hold both."""
        name: str | None = self.meta.get(NONFINITE)
        return name

    @property
    def size_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(t.nbytes for part in (self.model, self.optimizer) for t in outline(part).values())

    def box(self, kind: Kind, name: str) -> Box:
        """Return which shard of its tensor an entry is."""
        found = self.boxes.get(kind, {}).get(name)
        return Box.whole(outline(getattr(self, kind))[name].shape) if found is None else found

    def part(self, kind: Kind, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, which this state has; nothing else is read from the files of a checkpoint."""
        tensors = getattr(self, kind)
        if isinstance(tensors, StoredTensors):
            return tensors.read(name, box)
        found: Tensor = tensors[name]
        return found[box.slices_in(self.box(kind, name))]


def outline(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors that have the shapes and dtypes of ``tensors``; values in a file are not read."""
    return tensors.outline() if isinstance(tensors, StoredTensors) else tensors


@torch.no_grad()
def capture(
    model: nn.Module,
    optimizer: AnyOptimizer,
    scheduler: AnyScheduler | None,
    *,
    step: int,
    samples_consumed: int,
    into: TrainState | None = None,
    live: bool = False,
    boxes: Mapping[str, Box] | None = None,
    marked: bool = False,
    left_out: Mapping[str, int] | None = None,
    **more: Any,
) -> TrainState:
    """Copy the training state to host memory, where later updates cannot change it.

    Args:
        model: the model, possibly wrapped in ``DistributedDataParallel`` or ``DataParallel``.
        optimizer: its optimizer, or several as one.
        scheduler: the learning-rate scheduler, or None.
        step: the number of completed steps.
        samples_consumed: the number of global samples consumed.
        into: an earlier snapshot that is no longer needed. Its memory is reused where shapes and dtypes fit.
        live: refer to the tensors where they are instead; the next update changes them.
        boxes: where the parameters and buffers of ``model`` are that are shards of larger tensors, by name; it may have
            others. The tensors of the optimizer that have the shape of such a shard are at the same place.
        marked: whether those tensors are of the type ``Shard``, and all others are whole.
        left_out: the checksums of frozen parameters that are not copied, by name.
        more: further entries of ``meta``.

    Raises:
        ValueError: some state cannot be stored as tensors and JSON; the text names its owner.
    """
    model = _unwrapped(model)
    tied = _tied_names(model)
    parameters: dict[str, Tensor] = {}
    left_out = left_out or {}
    further_tensors, further = model_state.pack_further(model)
    for name, value in model_state.own_tensors(model).items():
        if name not in left_out:
            same = parameters.get(tied.get(name, ""))
            parameters[name] = value.detach() if same is None else same
    parameters |= further_tensors

    names = {p: name for name, p in model.named_parameters()}
    boxes = boxes or {}
    packed = pack(optimizer, names)
    tensors: MutableMapping[str, Tensor] = packed.tensors
    shapes = {name: parameter.shape for parameter, name in names.items()}
    owners = {path: path.rpartition("/")[0] for path in tensors}
    like = {path for path, name in owners.items() if name in boxes and tensors[path].shape == shapes[name]}
    if marked:
        shards = {path for path, tensor in tensors.items() if isinstance(tensor, Shard)}
        if others := sorted(shards - like):
            raise ValueError(
                f"{label_of(optimizer)}: state_dict() has the state of another parameter as {others[0]!r}; "
                "number parameters as in param_groups"
            )
        like = shards
    optimizer_boxes = {path: boxes[owners[path]] for path in like}
    tensors = {path: tensor.as_subclass(Tensor) for path, tensor in tensors.items()}
    meta = {
        **{key: to_json(value, key, "pass plain data") for key, value in more.items()},
        "step": step,
        "samples_consumed": samples_consumed,
        "optimizer": label_of(optimizer),
        "param_groups": packed.groups,
        "optimizer_scalars": packed.scalars,
        "scheduler": None if scheduler is None else _pack_scheduler(scheduler),
        "tied": tied,
    }
    if packed.further:
        meta[FURTHER] = packed.further
    if further:
        meta[model_state.MODEL_FURTHER] = further
    if left_out:
        meta[model_state.LEFT_OUT] = dict(left_out)
    trained = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
    finite = _all_finite(trained)
    if not live:
        parameters, tensors, finite = _on_host(parameters, tensors, finite, into)
    if not bool(finite) and (nonfinite := _first_nonfinite(trained)) is not None:
        meta[NONFINITE] = nonfinite
    model_boxes = {name: box for name, box in boxes.items() if name in parameters}
    where: dict[Kind, Mapping[str, Box]] = {"model": model_boxes, "optimizer": optimizer_boxes} if boxes else {}
    return TrainState(model=parameters, optimizer=tensors, meta=meta, boxes=where)


@torch.no_grad()
def restore(
    state: TrainState,
    model: nn.Module,
    optimizer: AnyOptimizer,
    scheduler: AnyScheduler | None,
    *,
    partial: bool = False,
    consume: bool = False,
    boxes: Mapping[str, Box] | None = None,
    marked: bool = False,
) -> None:
    """Load ``state`` in place, keeping the devices and dtypes of ``model``, and the parameters that it leaves out.

    The model does not share memory with ``state`` afterwards. The tensors of the optimizer are replaced one by one in
    their own memory where dtypes and shapes fit, because a GPU may have no room for those of two states.

    Args:
        model: the model, possibly wrapped in ``DistributedDataParallel`` or ``DataParallel``.
        optimizer: its optimizer, or several as one.
        scheduler: the learning-rate scheduler, or None.
        partial: whether ``model`` is a part of the saved model, such as a pipeline stage. Names that it does not have
            are ignored.
        consume: remove each tensor from ``state`` as it is loaded, so that its memory is free for the next one.
        boxes: where the parameters and buffers of ``model`` are that are shards of larger tensors, by name.
        marked: whether the parts of the optimizer's tensors at these places become ``Shard``.

    Raises:
        ValueError: the state is of another model, optimizer or scheduler. Nothing was loaded.
    """
    model = _unwrapped(model)
    boxes = boxes or {}
    own = model_state.own_tensors(model)
    stored = {name: tensor for name, tensor in own.items() if name not in state.meta.get(model_state.LEFT_OUT, {})}
    shapes = {name: (boxes[name].full if name in boxes else tuple(t.shape), t.dtype) for name, t in stored.items()}
    there = _full_outline(state)
    further = [name for name in model_state.further_entries(model) if name in there]
    errors = model_state.mismatches(shapes, {n: t for n, t in there.items() if n not in further}, partial=partial)
    for kind, here in (("optimizer", optimizer), ("scheduler", scheduler)):
        recorded = state.meta[kind]
        saved = recorded["class"] if isinstance(recorded, Mapping) else recorded
        wanted = None if here is None else label_of(here) or None
        if (saved or None) != wanted:
            errors.append(f"{kind}: the checkpoint has {saved}, the job has {wanted}")
    names: list[list[str]] = []
    if not errors:
        names, errors = _match_groups(state, model, optimizer, partial=partial)
    if errors:
        raise ValueError("\n".join(errors))

    dtypes = {name: tensor.dtype for name, tensor in outline(state.model).items()}
    model_state.load_tensors(
        model,
        {name: _take(state, "model", name, boxes.get(name), consume=consume) for name in (*stored, *further)},
        state.meta.get(model_state.MODEL_FURTHER, {}),
    )
    saved_names = {parameter: name for name, parameter in model.named_parameters()}
    updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
    saved_names |= zip(updated, itertools.chain(*names), strict=True)
    there_is = with_own_memory(pack(optimizer, saved_names).tensors, own.values())
    move = _mover(state, boxes, there_is, consume=consume, marked=marked)
    load(optimizer, state.meta, names, [*state.optimizer], move, dtypes=dtypes)
    if scheduler is not None and state.meta["scheduler"] is not None:
        scheduler.load_state_dict(from_json(state.meta["scheduler"]["state"], scheduler.state_dict()))


def _on_host(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], finite: Tensor, into: TrainState | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Return copies of the tensors of a model and its optimizer, and of ``finite``; equal tensors have one copy."""
    parts = ((parameters, into.model if into else {}), (tensors, into.optimizer if into else {}))
    earlier = {id(tensor): (tensor, old.get(name)) for own, old in parts for name, tensor in own.items()}
    sources, buffers = zip(*earlier.values(), (finite, None), strict=True)
    copies = dict(zip([*earlier, id(finite)], host_copies(sources, into=buffers), strict=True))
    model, optimizer = ({name: copies[id(tensor)] for name, tensor in own.items()} for own in (parameters, tensors))
    return model, optimizer, copies[id(finite)]


def _all_finite(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return, on the device of the first, whether the sums of all parameters are finite.

    The sums tell almost always whether the parameters are; sums of finite numbers may overflow.
    """
    sums = [parameter.sum().abs().float() for parameter in _numbers(parameters).values()]
    return torch.stack([s.to(sums[0].device) for s in sums]).isfinite().all() if sums else torch.tensor(True)


def _full_outline(state: TrainState) -> Mapping[str, Tensor]:
    """Return tensors that have the shapes and dtypes of the whole tensors of the model."""
    found, boxes = outline(state.model), state.boxes.get("model", {})
    whole = {name: torch.empty(box.full, dtype=found[name].dtype, device="meta") for name, box in boxes.items()}
    return {**found, **whole}


def _take(state: TrainState, kind: Kind, name: str, box: Box | None, *, consume: bool) -> Tensor:
    """Return an entry of ``state``, or the part of it that a ``box`` of its tensor is; remove it if ``consume``."""
    tensors: MutableMapping[str, Tensor] = getattr(state, kind)
    if box is None:
        return tensors.pop(name) if consume else tensors[name]
    part = state.part(kind, name, box)
    if consume:
        del tensors[name]
    return part


def _first_nonfinite(parameters: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first parameter that holds NaN or an infinity, or None."""
    return next((name for name, p in _numbers(parameters).items() if not bool(p.isfinite().all())), None)


def _numbers(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in parameters.items() if p.is_floating_point() or p.is_complex()}


def _unwrapped(model: nn.Module) -> nn.Module:
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return cast(nn.Module, model.module)
    return model


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter, by each of its further names."""
    first = {p: name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in every if first[p] != name}


def _pack_scheduler(scheduler: AnyScheduler) -> dict[str, Any]:
    label = label_of(scheduler)
    remedy = "give it a state_dict() of numbers, text, lists and dicts, or use another scheduler"
    values = scheduler.state_dict().items()
    return {
        "class": label,
        "state": {k: to_json(v, f"{label}: its state {k!r}", remedy) for k, v in values},
    }


def _match_groups(
    state: TrainState, model: nn.Module, optimizer: AnyOptimizer, *, partial: bool
) -> tuple[list[list[str]], list[str]]:
    """Find the saved name of each parameter in each group of ``optimizer``; also return the mismatches.

    A tied parameter may be saved under another of its names.
    """
    tied = state.meta["tied"]
    aliases: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[parameter] += [name, tied.get(name, name)]
    saved_groups = [g["params"] for g in state.meta["param_groups"]]
    groups = [g["params"] for g in optimizer.param_groups]
    if len(groups) > len(saved_groups) or (not partial and len(groups) < len(saved_groups)):
        counts = f"{len(saved_groups)} parameter groups in the checkpoint, {len(groups)} in the job"
        return [], [f"optimizer: {counts}"]
    names, missing, unexpected = [], [], []
    for parameters, saved in zip(groups, saved_groups, strict=False):
        known = set(saved)
        found = [next((n for n in aliases[p] if n in known), None) for p in parameters]
        missing += [aliases[p][0] for p, n in zip(parameters, found, strict=True) if n is None]
        unexpected += sorted(known.difference(*(aliases[p] for p in parameters)))
        names.append([name for name in found if name is not None])
    absent = "not in this parameter group of the"
    errors = list(
        model_state.capped_lines(missing, lambda n: f"{n}: {absent} checkpoint's optimizer", f"are {absent} same")
    )
    if not partial:
        errors += model_state.capped_lines(unexpected, lambda n: f"{n}: {absent} job's optimizer", f"are {absent} same")
    return names, errors


def _mover(
    state: TrainState, boxes: Mapping[str, Box], own: Mapping[str, Tensor], *, consume: bool, marked: bool
) -> Move:
    """Return what takes the tensors of an optimizer out of ``state``, or copies of them, because training changes them.

    Args:
        boxes: where those parameters are that are shards of larger tensors, by saved name.
        own: the tensors that the optimizer has now, by their saved paths. Their memory is used again.
        consume: whether the tensors are removed from ``state``.
        marked: whether parts of tensors become ``Shard``.
    """

    def moved(path: str, key: str, parameter: nn.Parameter | None) -> Tensor:
        box = boxes.get(path.rpartition("/")[0])
        if box is not None and state.box("optimizer", path).full != box.full:
            box = None  # it is one for the whole parameter
        value = _take(state, "optimizer", path, box, consume=consume)
        kind = Tensor if box is None or not marked else Shard
        value = value.as_subclass(kind)
        old = own.get(path)
        if old is not None and (type(old), old.shape, old.dtype) == (type(value), value.shape, value.dtype):
            return old.copy_(value)
        if parameter is None:
            return value if consume else value.clone()
        device = torch.device("cpu") if key == "step" else parameter.device  # step counters stay on the host
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            # A fused update goes through the memory of both in one order, whatever their formats are.
            return torch.empty_like(parameter, dtype=value.dtype, device=device).copy_(value).as_subclass(kind)
        return value.to(device) if consume else value.to(device, copy=True)

    return moved
