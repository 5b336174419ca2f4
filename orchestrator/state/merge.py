"""The states of pipeline stages and shards, joined to the state of the whole model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.planning.placement import Box
from orchestrator.state.manifest import Kind
from orchestrator.state.model_state import LEFT_OUT, total
from orchestrator.state.optimizer_state import FURTHER
from orchestrator.state.train_state import NONFINITE, TrainState

META_OF_PARTS = ("param_groups", "optimizer_scalars", FURTHER, "tied", NONFINITE, LEFT_OUT)
"""The entries of ``meta`` that differ between stages, or must not."""


def merge(states: Sequence[TrainState], *, order: Sequence[str]) -> TrainState:
    """Join the states that ranks with different parts of a model captured at the same step.

    Args:
        states: one state per rank. No two may hold the same part; see :func:`without_shared`, :func:`without_copies`.
        order: the names of all parameters and buffers, in the order of the whole model.

    Raises:
        ValueError: the stages give a parameter group different hyperparameters.
    """
    assert len({state.step for state in states}) == 1, "ranks captured at different steps"
    model, optimizer = _joined(states, "model"), _joined(states, "optimizer")
    position = {name: i for i, name in enumerate(order)}
    model = {name: model[name] for name in sorted(model, key=position.__getitem__)}
    return TrainState(model=model, optimizer=optimizer, meta=merge_meta([part.meta for part in states], order=order))


def _joined(states: Sequence[TrainState], kind: Kind) -> dict[str, Tensor]:
    """Return the tensors of all states, each put together from its boxes."""
    whole: dict[str, Tensor] = {}
    for state in states:
        for name, tensor in getattr(state, kind).items():
            box = state.box(kind, name)
            if box.is_whole:
                assert name not in whole, f"two ranks hold {name}"
                whole[name] = tensor
                continue
            if name not in whole:
                whole[name] = torch.empty(box.full, dtype=tensor.dtype)
            whole[name][box.slices_in(Box.whole(box.full))] = tensor
    return whole


def merge_meta(metas: Sequence[Mapping[str, Any]], *, order: Sequence[str]) -> dict[str, Any]:
    """Join what the stages of a pipeline, or ranks that share tensors, captured beside tensors.

    Parameter groups are joined by position; each parameter is in them once. All entries but ``META_OF_PARTS`` are the
    first one's.

    Args:
        metas: the ``meta`` of each stage.
        order: the names of all parameters and buffers, in the order of the whole model.

    Raises:
        ValueError: the stages give a parameter group different hyperparameters, or their optimizers have other state of
            the whole optimizer.
    """
    scalars: dict[str, Any] = {}
    tied: dict[str, str] = {}
    groups: list[dict[str, Any]] = []
    for meta in metas:
        if meta.get(FURTHER) != metas[0].get(FURTHER):
            raise ValueError(
                f"{metas[0]['optimizer']}: what its state_dict() says of all parameters together differs between "
                f"stages ({metas[0].get(FURTHER)} and {meta.get(FURTHER)}); use strategy=ddp"
            )
        scalars |= meta["optimizer_scalars"]
        tied |= meta["tied"]
        for i, group in enumerate(meta["param_groups"]):
            if i == len(groups):
                groups.append({**group, "params": []})
            for key in sorted((groups[i].keys() | group.keys()) - {"params"}):
                if groups[i].get(key) != group.get(key):
                    raise ValueError(
                        f"parameter group {i}: {key} differs between stages "
                        f"({groups[i].get(key)} and {group.get(key)}); Job.optimizer must make "
                        "the same groups for every part of the model"
                    )
            groups[i]["params"] = list({name: None for name in (*groups[i]["params"], *group["params"])})
    position = {name: i for i, name in enumerate(order)}
    for group in groups:
        group["params"].sort(key=position.__getitem__)
    joined = {"param_groups": groups, "optimizer_scalars": scalars, "tied": tied}
    if nonfinite := [meta[NONFINITE] for meta in metas if meta.get(NONFINITE) is not None]:
        joined[NONFINITE] = nonfinite[0]
    if left_out := total(meta.get(LEFT_OUT, {}) for meta in metas):
        joined[LEFT_OUT] = left_out
    return {**metas[0], **joined}


def without_shared(state: TrainState, first_names: Mapping[str, str], *, saved: Collection[str]) -> TrainState:
    """Return the ``state`` of a stage without the shared tensors that another stage saves.

    Args:
        state: the state of one stage.
        first_names: for each name of a shared parameter in this stage, its first name in the stage that saves it.
        saved: the names of the parameters and buffers that the other stage saves.
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
        boxes=state.boxes,
    )


def without_copies(state: TrainState, own: Collection[str]) -> TrainState:
    """Return the ``state`` of a shard without what another one writes: whole tensors, and shards that both have.

    Args:
        state: the state of one shard.
        own: the names of the parameters whose shards it writes.
    """

    def parts(kind: Kind) -> dict[str, Tensor]:
        boxes = state.boxes.get(kind, {})
        tensors: Mapping[str, Tensor] = getattr(state, kind)
        named = ((path if kind == "model" else path.rpartition("/")[0], path) for path in tensors if path in boxes)
        return {path: tensors[path] for name, path in named if name in own}

    return TrainState(model=parts("model"), optimizer=parts("optimizer"), meta=state.meta, boxes=state.boxes)
