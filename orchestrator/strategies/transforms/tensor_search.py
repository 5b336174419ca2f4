"""What of a model is divided: proposed by proofs of its blocks, and less if the whole model becomes another one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from orchestrator.compat.generators import drawing
from orchestrator.compat.torch import FakeTensor
from orchestrator.model.batch import map_leaves, tensors_in
from orchestrator.model.proofs.divided_layers import ProvenBlock, proven
from orchestrator.model.proofs.proving import built_at_random
from orchestrator.model.tensor.block_calls import BlockCall
from orchestrator.model.tensor.region import BlockParts, Pair
from orchestrator.model.tensor.token_shards import with_first
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.transforms.tensor_division import BlockKind, TensorPlan
from orchestrator.strategies.transforms.tensor_trial import Trial

MOST_ALONE = 12
"""The blocks of a kind that are tried one by one, if the model is another one when all of them are divided."""


@dataclass(frozen=True)
class Prover:
    """Proves divisions of blocks, with random weights.

    Attributes:
        outline: the job and its model.
        calls: what blocks are called with, by name; the tensors are fake.
        real_calls: the same with real tensors, as far as the whole model has been called.
        size: the number of parts.
    """

    outline: Outline
    calls: Mapping[str, BlockCall]
    real_calls: Mapping[str, BlockCall]
    size: int
    _found: dict[Any, ProvenBlock] = field(default_factory=dict)
    _blocks: dict[str, nn.Module] = field(default_factory=dict)

    def proven(self, name: str, pairs: Sequence[Pair] | None = None, *, sequence: bool = False) -> ProvenBlock:
        """Return how a block can be divided; not at all if it cannot be called as it has been seen.

        Args:
            name: one of those that :attr:`calls` has.
            pairs: what to divide; None for what is found.
            sequence: whether to divide the tokens between the pairs.
        """
        key = (name, None if pairs is None else frozenset(pairs), sequence)
        if key not in self._found:
            with drawing(0):
                self._found[key] = self._proven(name, pairs, sequence=sequence)
        return self._found[key]

    def _proven(self, name: str, pairs: Sequence[Pair] | None, *, sequence: bool) -> ProvenBlock:
        if name not in self._blocks:
            model = built_at_random(self.outline.build, lambda tensor: tensor.startswith(f"{name}."))
            self._blocks[name] = model.get_submodule(name)
        block = self._blocks[name]
        calls = [functools.partial(_at_random, self.real_calls[name])] if name in self.real_calls else []
        calls += [functools.partial(_real_call, self.calls[name], masks=seen) for seen in (True, False)]
        for make in calls:  # some masks say what is seen, others what is not
            try:
                call = make()
                return proven(block, call, self.size, pairs=pairs, sequence=sequence)
            except Exception as e:
                reason = f"cannot be called with random numbers ({type(e).__name__}: {e})"
        return ProvenBlock(parts=BlockParts(pairs=(), cuts={}), whole={type(block).__name__: reason})


def tried(plan: TensorPlan, trial: Trial, prover: Prover, model: nn.Module) -> TensorPlan:
    """Return what of a plan divides the whole model without changing it, beside why the rest does not.

    Args:
        plan: what has been proven of blocks.
        trial: compares divided models with the whole one.
        prover: proves less of a block.
        model: the whole model; its tensors may be fake.
    """

    def wrong(plan: TensorPlan) -> str:
        division = functools.partial(_divided, plan)
        return trial.wrong(division, plan.cuts, plan.partial)

    if not wrong(plan):
        return plan
    settled = _settled(_with_tokens(plan, shared=False), wrong, prover, model)
    if not any(kind.proof.parts.sequence for kind in plan.kinds):
        return settled
    in_tokens = _with_tokens(settled, shared=True)
    return in_tokens if not (reason := wrong(in_tokens)) else _with_tokens(settled, shared=False, why=reason)


def _divided(plan: TensorPlan, build: Callable[[], nn.Module], index: int, peers: Any) -> Callable[[], nn.Module]:
    return plan.divided(build, index=index, peers=peers)


def _with_tokens(plan: TensorPlan, *, shared: bool, why: str = "") -> TensorPlan:
    """Return a plan whose workers have own tokens between the pairs, or do not, and why not."""

    def of(proof: ProvenBlock) -> ProvenBlock:
        return replace(proof, parts=replace(proof.parts, sequence=shared), whole_tokens=why or proof.whole_tokens)

    return replace(plan, kinds=tuple(replace(kind, proof=of(kind.proof)) for kind in plan.kinds))


def _settled(plan: TensorPlan, wrong: Callable[[TensorPlan], str], prover: Prover, model: nn.Module) -> TensorPlan:
    """Return the plan, or a smaller one that is not wrong."""
    tables = {name: model.get_submodule(name) for name in plan.vocabulary}
    for smaller in (plan, replace(plan, divided_logits=False), plan.with_tables(model, {})):
        if not wrong(smaller):
            return smaller
    chosen: dict[str, list[Pair]] = {name: [] for kind in plan.kinds for name in kind.names}
    reasons: dict[str, dict[str, str]] = {name: {} for name in chosen}

    def with_chosen() -> TensorPlan:
        kinds = [part for kind in plan.kinds for part in _parts_of(kind, chosen, reasons, prover)]
        return replace(plan, kinds=tuple(kinds), vocabulary=(), rows={}, divided_logits=False)

    def add(names: Sequence[str], pair: Pair) -> bool:
        """Divide a pair in some blocks, unless the model is another one then."""
        for name in names:
            chosen[name].append(pair)
        if reason := wrong(with_chosen()):
            for name in names:
                chosen[name].remove(pair)
                reasons[name][str(pair)] = f"in the whole model, it {reason}"
            return False
        for name in names:
            reasons[name].pop(str(pair), None)
        return True

    for kind in plan.kinds:
        for pair in kind.proof.parts.pairs:
            if not add(kind.names, pair) and 1 < len(kind.names) <= MOST_ALONE:
                for name in kind.names:
                    add([name], pair)
    found = with_chosen()
    with_tables = found.with_tables(model, tables)
    for larger in (replace(with_tables, divided_logits=plan.divided_logits), with_tables):
        if larger.vocabulary and not wrong(larger):
            return larger
    return found


def _parts_of(
    kind: BlockKind, chosen: Mapping[str, Sequence[Pair]], reasons: Mapping[str, Mapping[str, str]], prover: Prover
) -> list[BlockKind]:
    """Return a kind of blocks as several ones, of which each has its own pairs."""
    alike: dict[frozenset[Pair], list[str]] = {}
    for name in kind.names:
        alike.setdefault(frozenset(chosen[name]), []).append(name)
    kinds = []
    for pairs, names in alike.items():
        proof = prover.proven(kind.first, [pair for pair in kind.proof.parts.pairs if pair in pairs])
        proof = replace(proof, whole={**kind.proof.whole, **reasons[names[0]]})
        kinds.append(replace(kind, names=tuple(names), proof=proof))
    return kinds


def _at_random(call: BlockCall) -> BlockCall:
    """Return a call with random numbers in its first tensor of them, which goes from block to block."""
    args, kwargs = with_first((call.args, call.kwargs), lambda x: torch.randn(x.shape).to(x.dtype).requires_grad_())
    return BlockCall(args=args, kwargs=kwargs)


def _real_call(call: BlockCall, *, masks: bool) -> BlockCall:
    """Return a call with real tensors, whose floating-point numbers are random, and whose masks have one value."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape).to(leaf.dtype).requires_grad_(leaf.requires_grad)
        if leaf.dtype == torch.bool:
            return torch.full(leaf.shape, masks)
        return torch.zeros(leaf.shape, dtype=leaf.dtype)

    args, kwargs = map_leaves(real, (call.args, call.kwargs))
    floats = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    for tensor in floats[:1]:  # what goes from block to block
        tensor.requires_grad_()
    return BlockCall(args=args, kwargs=kwargs)
