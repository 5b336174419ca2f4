"""``tensor``: the workers of a group compute each block of the model together, each with a part of its linear layers.

Which layers these are is found from the model, and proven on its blocks before anything is trained
(:mod:`orchestrator.model.tensor`). Each worker has its part of the divided parameters, and the whole of all others. A
block sums activations once for each row, and in the backward pass once for the inputs of its columns. Megatron-LM:
Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.config.schema import Config, TrainConfig
from orchestrator.config.text import first_few, to_cli
from orchestrator.job import Job
from orchestrator.model.peers import Peers
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.model.tensor.region import is_linear
from orchestrator.model.tensor.vocabulary import vocabularies
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.placement import Placement
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import opened_dataset
from orchestrator.strategies.groups import check_equal
from orchestrator.strategies.keys import MeshConfig, Pairs
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.transforms.part import Part
from orchestrator.strategies.transforms.tensor_division import TensorPlan
from orchestrator.strategies.transforms.tensor_plan import found_plan, is_in, parsed

LEAST_SHARE = 0.45
"""The part of the parameters of the blocks that has to be divided for the dimension to be worth its sums."""


@dataclass(frozen=True)
class TensorPart(Part):
    """The part of one worker.

    Attributes:
        plan: how the model is divided.
        index: the number of the part.
        peers: the workers that have the others.
        waits: what a step waits for them.
    """

    dimension = "tensor"
    divides_layers = True

    plan: TensorPlan
    index: int
    peers: Peers
    waits: WaitTimer

    @classmethod
    def unused_keys(cls, mesh: Mesh) -> Mapping[str, Sequence[str]]:
        if mesh.tensor == 1:
            return {"strategy.tensor=1 divides no layers": ("tensor_pairs", "sequence")}
        return {"the stages of a pipeline exchange all tokens": ("sequence",)} if mesh.pipeline > 1 else {}

    @classmethod
    def check(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        size, options = plan.mesh.tensor, MeshConfig.of(config.strategy)
        if config.train.compile is not False and not config.train.compiles_blocks:
            errors.append(
                f"train.compile={to_cli(config.train.compile)}: strategy.tensor={size} divides the blocks of the "
                "model; set it to blocks, which compiles each of them"
            )
            return ()
        train_set = opened_dataset(outline.job, "train", config.seed)
        found, notes = tensor_errors(outline, train_set, size, options.tensor_pairs, sequence=options.sequence)
        errors += found
        return notes

    @classmethod
    def outline(cls, outline: Outline, count: int, found: Mapping[Hashable, Any]) -> Outline:
        return tensor_outline(outline, count)

    @classmethod
    def find(cls, context: Context, job: Job, train_set: Any) -> TensorPart:
        options, outline = MeshConfig.of(context.options), Outline(job, context.train)
        size, pairs = context.mesh.tensor, options.tensor_pairs
        plan = found_plan(outline, train_set, size, pairs, sequence=options.sequence)
        index = context.mesh.coords(context.global_rank).tensor
        return cls(plan, index, Peers(), WaitTimer(context.device, counts=False))

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.plan.size

    def of(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return self.plan.divided(build, index=self.index, peers=self.peers)

    def placed(self, name: str, placement: Placement) -> Placement:
        return self.plan.placement(name, placement.shape)

    def connect(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        if group is not None:
            plan = (self.plan.blocks, self.plan.vocabulary, self.plan.divided_logits, self.plan.ends)
            check_equal(plan, group, device, what="strategy.tensor: divisions of the model")
        self.peers.group, self.peers.waiting = group, self.waits.waiting

    def flop_share(self) -> float:
        return 1 if self.peers.inside else 1 / self.plan.size

    def is_timed(self, train: TrainConfig) -> bool:
        return train.compile is False  # compiled code measures nothing


def assumed_division(model: nn.Module, size: int) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Return the parameters inside and outside of blocks that ``size`` workers divide, if every proof succeeds."""
    blocks = blocks_of(model)
    tables = vocabularies(model, blocks, size).values() if size > 1 else ()
    return (
        {parameter for block in blocks for parameter in block.parameters() if parameter.ndim > 1},
        {parameter for module in tables for parameter in module.parameters()},
    )


def tensor_outline(outline: Outline, size: int) -> Outline:
    """Return the outline of what one of ``size`` workers has of the model, after :func:`tensor_errors`."""
    found = outline.found.get(("tensor", size))
    if not isinstance(found, TensorPlan):
        return outline
    return replace(outline, transform=functools.partial(found.divided, index=0, peers=Peers()), found={})


def tensor_errors(
    outline: Outline, train_set: Any, size: int, pairs: Pairs = "auto", *, sequence: bool = False
) -> tuple[list[str], tuple[str, ...]]:
    """Return why the model cannot be divided over ``size`` workers, and otherwise how it is, for users."""
    key = f"strategy.tensor={size}"
    remedy = f"use strategy.shard={size} in place of it"
    if pairs != "auto":
        try:
            given = [parsed(pair) for pair in pairs]
        except ValueError as e:
            return [f"strategy.tensor_pairs: {e}"], ()
        blocks = blocks_of(outline.whole.model)
        if lost := [str(pair) for pair in given if not any(is_in(pair, block) for block in blocks)]:
            return [f"strategy.tensor_pairs: no block has the linear layers {first_few(lost, 1)}"], ()
    try:
        plan = found_plan(outline, train_set, size, pairs, sequence=sequence)
    except ValueError as e:
        return [f"{key}: {e}; {remedy}"], ()
    if plan.reasons and pairs != "auto":
        return [f"strategy.tensor_pairs: {first_few(plan.reasons, 1)}; leave it out, or set it to auto"], ()
    if plan.share < LEAST_SHARE:
        smaller = sorted(range(2, size), key=lambda n: (size % n != 0, -n))  # those first that divide as many workers
        fitting = next((n for n in smaller if found_plan(outline, train_set, n, pairs).share >= LEAST_SHARE), None)
        if fitting is not None:
            remedy = f"set it to {fitting}, or {remedy}"
        reasons = plan.reasons or ["the rest has no linear layers that feed other ones alone"]
        why = first_few(reasons, 2, separator="; ")
        return [f"{key}: {plan.share:.0%} of the parameters of the blocks could be divided ({why}); {remedy}"], ()
    if mixing := [f"a {kind.kind} {kind.proof.whole_tokens}" for kind in plan.kinds if kind.proof.whole_tokens]:
        return [f"strategy.sequence=true: with a part of the tokens, {first_few(mixing, 1)}; set it to false"], ()
    outline.found["tensor", size] = plan
    notes = [f"{key} divides, as proven on a block of each kind, {'; '.join(map(str, plan.kinds))}"]
    if plan.vocabulary:
        notes[0] += f"; and the rows of {first_few(plan.vocabulary, 2)}"
        if plan.divided_logits:
            notes[0] += ", whose outputs stay divided in the loss"
        elif any(is_linear(outline.whole.model.get_submodule(name)) for name in plan.vocabulary):
            notes[0] += ", whose outputs are gathered on each worker, because the loss reads all of them"
    if sequence:
        notes.append(f"strategy.sequence=true: each worker computes 1/{size} of the tokens between the divided layers")
    if experts := [f"{len(kind.names)} x {kind.kind}" for kind in plan.kinds if kind.whole_experts]:
        notes.append(f"{key} leaves the experts of {first_few(experts, 2)} whole on each worker")
    if plan.reasons:
        notes.append(f"{key} leaves whole {first_few(plan.reasons, 2)}")
    return [], tuple(notes)
