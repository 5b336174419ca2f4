"""How the blocks of a model are divided over workers: found in the model, and proven on a block of each kind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.job import Job
from orchestrator.model.batch import leaves, map_leaves, map_tensors, tensors_in
from orchestrator.model.failed_call import error_with_place
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.peers import Peers
from orchestrator.model.repeated_blocks import alike, blocks_of, class_of
from orchestrator.model.tensor.block_calls import BlockCall, Ends, ends_of, seen_calls
from orchestrator.model.tensor.logits import DividedLogits, Share
from orchestrator.model.tensor.region import Pair, is_linear
from orchestrator.model.tensor.vocabulary import DirectUses, vocabularies
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.keys import Pairs
from orchestrator.strategies.transforms.loss_proof import loss_divides
from orchestrator.strategies.transforms.tensor_division import BlockKind, TensorPlan, experts_of
from orchestrator.strategies.transforms.tensor_search import Prover, tried
from orchestrator.strategies.transforms.tensor_trial import MOST_ELEMENTS, Trial

T = TypeVar("T")

SAMPLES, PLACES = 2, 16
"""The samples, and the places along their second dimension, such as tokens, with which a division is proven."""


MOST_NUMBERS = 2**20
"""The numbers of the largest tensor with which a block is called in a proof."""


def found_plan(
    outline: Outline, train_set: Any, size: int, pairs: Pairs = "auto", *, sequence: bool = False
) -> TensorPlan:
    """Find how a model can be divided, and prove it on one block of each kind, and on the whole model.

    Args:
        outline: the job and its model.
        train_set: provides samples.
        size: the number of workers.
        pairs: what to divide.
        sequence: whether to divide the tokens between the pairs.

    Raises:
        ValueError: nothing can be said of the model; the text says why.
    """
    whole = outline.whole
    named = {module: name for name, module in whole.model.named_modules()}
    kinds_of_blocks = alike(blocks_of(whole.model))
    if not kinds_of_blocks:
        raise ValueError("the model has no nn.ModuleList or nn.Sequential with several blocks of one class")
    every = [block for blocks in kinds_of_blocks for block in blocks]
    tables = vocabularies(whole.model, every, size)
    uses = DirectUses(tables.values())
    first = {named[blocks[0]]: blocks[0] for blocks in kinds_of_blocks}
    linked = {named[block]: block for block in every} if sequence else {}
    calls, ends = _calls(outline.job, whole, train_set, first, linked, uses)
    trial = _trial(outline, train_set, size)
    prover = Prover(outline, calls, {} if trial is None else _real_calls(trial, first), size)
    given = None if pairs == "auto" else [parsed(pair) for pair in pairs]
    kinds: dict[str, BlockKind] = {}
    for blocks in kinds_of_blocks:
        names = tuple(named[block] for block in blocks)
        here = None if given is None else [pair for pair in given if is_in(pair, blocks[0])]
        proof = prover.proven(names[0], here, sequence=sequence)
        sizes = {name: parameter.numel() for name, parameter in blocks[0].named_parameters()}
        kind, experts = class_of(blocks[0]).__name__, experts_of(blocks[0])
        found = BlockKind(names=names, first=names[0], kind=kind, proof=proof, sizes=sizes, experts=experts)
        others = kinds.setdefault(repr((kind, proof, sizes)), replace(found, names=()))
        kinds[repr((kind, proof, sizes))] = replace(others, names=(*others.names, *names))
    tables = {name: module for name, module in tables.items() if module not in uses.found}
    plan = TensorPlan(size=size, kinds=tuple(kinds.values()), ends=ends).with_tables(whole.model, tables)
    names_of: dict[Tensor, list[str]] = {}
    for name, parameter in whole.model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    in_blocks = plan.cuts.keys() - plan.rows.keys()
    if tied := [names for names in names_of.values() if len(names) > 1 and in_blocks & {*names}]:
        raise ValueError(f"{' and '.join(tied[0])} are one parameter, which would be divided twice")
    divides = any(is_linear(module) for module in tables.values()) and _loss_divides(outline, plan, train_set)
    plan = replace(plan, divided_logits=divides)
    return plan if trial is None else tried(plan, trial, prover, whole.model)


def _real_calls(trial: Trial, blocks: Collection[str]) -> Mapping[str, BlockCall]:
    """Return what blocks are called with for real samples, if that is not too large for a proof."""
    with contextlib.suppress(Exception):
        calls = trial.calls(blocks)
        if max(t.numel() for call in calls.values() for t in tensors_in((call.args, call.kwargs))) <= MOST_NUMBERS:
            return calls
    return {}


def _trial(outline: Outline, train_set: Any, size: int) -> Trial | None:
    """Return what compares divisions with the whole model; None if it is too large, or cannot be called here."""
    if sum(p.numel() for p in outline.whole.model.parameters()) > MOST_ELEMENTS:
        return None
    key = ("tensor trial", size)
    if key not in outline.found:
        try:
            outline.found[key] = Trial(outline, train_set, size)
        except Exception:  # the workers compare the models before they train
            outline.found[key] = None
    found: Trial | None = outline.found[key]
    return found


def parsed(text: str) -> Pair:
    """Return the pair that ``q + k + v -> out`` stands for.

    Raises:
        ValueError: it stands for none.
    """
    columns, _, rows = (tuple(name.strip() for name in part.split("+")) for part in text.partition("->"))
    pair = Pair(columns=columns, rows=rows)
    if not all(pair.layers):
        raise ValueError(f"{text!r} is no pair; write it as in 'q + k + v -> out'")
    return pair


def is_in(pair: Pair, block: nn.Module) -> bool:
    """Return whether a block has the linear layers of a pair."""
    modules = dict(block.named_modules())
    return all(name in modules and is_linear(modules[name]) for name in pair.layers)


def _calls(
    job: Job,
    whole: FakeModel,
    train_set: Any,
    blocks: Mapping[str, nn.Module],
    linked: Mapping[str, nn.Module],
    uses: DirectUses,
) -> tuple[Mapping[str, BlockCall], Ends]:
    """Return what some blocks of a model are called with for a short sample, without memory, and the ends of others.

    Raises:
        ValueError: the model cannot be called, or does not call a block.
    """
    with drawing(0):
        inputs, _ = example_batch(job, train_set, SAMPLES)
    short = _short(inputs)

    def run(inputs: Any) -> Ends:
        def training() -> Any:
            return job.forward(whole.model, map_tensors(whole.fake_input, inputs))

        with uses.watched():
            if not linked:
                training()
                return Ends()
            return ends_of(linked, [training, functools.partial(_evaluated, whole.model, training)])

    try:
        return seen_calls(whole, blocks, lambda: run(short))
    except Exception:
        pass  # the sizes of the model depend on those of the sample
    try:
        return seen_calls(whole, blocks, lambda: run(inputs))
    except Exception as e:
        raise ValueError(f"the model cannot be called without memory ({error_with_place(e)})") from e


def _evaluated(model: nn.Module, run: Callable[[], T]) -> T:
    """Return what ``run`` returns while a model is evaluated."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return run()
    finally:
        for module, training in modes:
            module.training = training


def _short(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor[:, :PLACES] if tensor.ndim > 1 else tensor, tree)


def _loss_divides(outline: Outline, plan: TensorPlan, train_set: Any) -> bool:
    """Return whether the loss is the same of outputs that are not gathered, which neither it nor the model reads."""
    job, peers, count = outline.job, Peers(), plan.size
    divided_plan = replace(plan, divided_logits=True)

    def transform(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return divided_plan.divided(outline.transform(build), index=0, peers=peers)

    with drawing(0):
        inputs, target = map(_short, example_batch(job, train_set, SAMPLES))
    whole = replace(outline, transform=transform, found={}).whole
    try:
        _, output = seen_calls(whole, {}, lambda: job.forward(whole.model, map_tensors(whole.fake_input, inputs)))
    except Exception:  # the sizes of the model depend on those of the sample
        return False
    words = [leaf.shape[-1] if isinstance(leaf, DividedLogits) else 0 for leaf in leaves(output)]
    reads = [peers.gathered_logits]

    def at_divided(change: Callable[[Tensor, int], Tensor], tree: Any) -> Any:
        known = iter(words)
        return map_leaves(lambda leaf: change(leaf, of_leaf) if (of_leaf := next(known)) else leaf, tree)

    def loss(own: Any, labels: Any, index: int, peers: Peers) -> Tensor:
        def logits(part: Tensor, words: int) -> Tensor:
            return DividedLogits.of(part, Share(index, count, peers, words))

        found = job.loss(at_divided(logits, own), labels)
        reads.append(peers.gathered_logits)
        return found

    return (
        any(words)
        and loss_divides(
            job,
            output,
            target,
            count=count,
            cut=lambda tree, index: at_divided(lambda whole, _: whole.chunk(count, dim=-1)[index], tree),
            loss=loss,
        )
        and not any(reads)
    )
