"""How the blocks of a model are divided over workers: found in the model, and proven on a block of each kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.compat.torch import FakeTensor
from orchestrator.job import Job
from orchestrator.model.batch import leaves, map_leaves, map_tensors, tensors_in
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.proving import built_at_random
from orchestrator.model.repeated_blocks import blocks_of, likeness
from orchestrator.model.tensor.block_calls import BlockCall, Ends, ends_of, seen_calls
from orchestrator.model.tensor.logits import DividedLogits, Share
from orchestrator.model.tensor.peers import Peers
from orchestrator.model.tensor.proof import ProvenBlock, proven
from orchestrator.model.tensor.region import BlockParts, Pair, divide, is_linear
from orchestrator.model.tensor.vocabulary import ROWS, DirectUses, divide_rows, vocabularies
from orchestrator.planning.placement import AxisCut, Placement, Shape
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.keys import Pairs
from orchestrator.strategies.transforms.loss_proof import loss_divides

SAMPLES, PLACES = 2, 16
"""The samples, and the places along their second dimension, such as tokens, with which a division is proven."""


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """Blocks that compute alike.

    Attributes:
        names: the blocks in the model.
        kind: their class.
        proof: how they can be divided.
        sizes: the number of elements of each parameter of one of them.
    """

    names: tuple[str, ...]
    kind: str
    proof: ProvenBlock
    sizes: Mapping[str, int]

    @property
    def divided(self) -> int:
        """The number of elements of the divided parameters."""
        return sum(self.sizes[name] for name in self.proof.parts.cuts) * len(self.names)

    @property
    def total(self) -> int:
        """The number of elements of all parameters."""
        return sum(self.sizes.values()) * len(self.names)

    def __str__(self) -> str:
        pairs = ", ".join(map(str, self.proof.parts.pairs))
        text = f"{len(self.names)} x {self.kind}: {self.divided / max(1, self.total):.0%} of the parameters"
        return text + (f" ({pairs})" if pairs else "")


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model is divided over ``size`` workers.

    Attributes:
        size: the number of parts.
        kinds: the blocks.
        vocabulary: the embeddings and output layers that are divided by rows.
        rows: how many their parameters have, by name.
        divided_logits: whether the loss is computed of outputs that are not gathered.
        ends: the blocks that need all tokens, where a worker has its own between the divided layers.
    """

    size: int
    kinds: tuple[BlockKind, ...]
    vocabulary: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    divided_logits: bool = False
    ends: Ends = field(default_factory=Ends)

    @property
    def share(self) -> float:
        """The part of the parameters of the blocks that is divided."""
        return sum(kind.divided for kind in self.kinds) / max(1, sum(kind.total for kind in self.kinds))

    @property
    def reasons(self) -> list[str]:
        """Why the rest stays whole, if it has been tried."""
        return [f"{pair}: {reason}" for kind in self.kinds for pair, reason in kind.proof.whole.items()]

    @functools.cached_property
    def blocks(self) -> Mapping[str, BlockParts]:
        """How each block is divided, by its name."""
        return {name: kind.proof.parts for kind in self.kinds for name in kind.names}

    @functools.cached_property
    def cuts(self) -> Mapping[str, AxisCut]:
        """How each divided parameter is cut, by its name in the model."""
        cuts = {f"{b}.{name}": cut for b, parts in self.blocks.items() for name, cut in parts.cuts.items()}
        return cuts | dict.fromkeys(self.rows, ROWS)

    @functools.cached_property
    def partial(self) -> frozenset[str]:
        """The whole parameters of whose gradients each worker computes a part."""
        return frozenset(f"{block}.{name}" for block, parts in self.blocks.items() for name in parts.partial)

    def placement(self, name: str, part: Shape) -> Placement:
        """Return where a parameter is of which a worker has a part of this shape."""
        if (cut := self.cuts.get(name)) is None:
            return Placement(shape=part, partial=("tensor",) if name in self.partial else ())
        whole = tuple(
            self.rows.get(name, size * self.size) if axis == cut.axis else size for axis, size in enumerate(part)
        )
        return Placement(shape=whole, cuts=(cut,))

    def divided(self, build: Callable[[], nn.Module], *, index: int, peers: Peers) -> Callable[[], nn.Module]:
        """Return a constructor of the part number ``index`` of the model that ``build`` returns."""

        def built() -> nn.Module:
            model = build()
            for name, parts in self.blocks.items():
                ends = {"enters": name in self.ends.enters, "leaves": name in self.ends.leaves}
                divide(model.get_submodule(name), parts, index=index, count=self.size, peers=peers, **ends)
            divided = self.divided_logits
            divide_rows(model, self.vocabulary, index=index, count=self.size, peers=peers, divided_logits=divided)
            return model

        return built


def found_plan(
    outline: Outline, train_set: Any, size: int, pairs: Pairs = "auto", *, sequence: bool = False
) -> TensorPlan:
    """Find how a model can be divided, and prove it on one block of each kind.

    Args:
        outline: the job and its model.
        train_set: provides a sample.
        size: the number of workers.
        pairs: what to divide.
        sequence: whether to divide the tokens between the pairs.

    Raises:
        ValueError: nothing can be said of the model; the text says why.
    """
    whole = outline.whole
    named = {module: name for name, module in whole.model.named_modules()}
    kinds: dict[Any, list[nn.Module]] = {}
    for block in blocks_of(whole.model):
        kinds.setdefault(likeness(block), []).append(block)
    if not kinds:
        raise ValueError("the model has no nn.ModuleList or nn.Sequential with several blocks of one class")
    every = [block for blocks in kinds.values() for block in blocks]
    tables = vocabularies(whole.model, every, size)
    uses = DirectUses(tables.values())
    first = {named[blocks[0]]: blocks[0] for blocks in kinds.values()}
    linked = {named[block]: block for block in every} if sequence else {}
    calls, ends = _calls(outline.job, whole, train_set, first, linked, uses)
    given = None if pairs == "auto" else [parsed(pair) for pair in pairs]
    found = []
    for blocks in kinds.values():
        names = tuple(named[block] for block in blocks)
        with drawing(0):
            block = _real_block(outline, names[0])
            here = None if given is None else [pair for pair in given if is_in(pair, block)]
            proof = _proven(block, calls[names[0]], size, here, sequence=sequence)
        kind = getattr(blocks[0], "kind", type(blocks[0])).__name__
        sizes = {name: parameter.numel() for name, parameter in blocks[0].named_parameters()}
        found.append(BlockKind(names=names, kind=kind, proof=proof, sizes=sizes))
    tables = {name: module for name, module in tables.items() if module not in uses.found}
    weights = {parameter for module in tables.values() for parameter in module.parameters()}
    rows = {name: len(p) for name, p in whole.model.named_parameters(remove_duplicate=False) if p in weights}
    plan = TensorPlan(size=size, kinds=tuple(found), vocabulary=tuple(tables), rows=rows, ends=ends)
    names_of: dict[Tensor, list[str]] = {}
    for name, parameter in whole.model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    in_blocks = plan.cuts.keys() - plan.rows.keys()
    if tied := [names for names in names_of.values() if len(names) > 1 and in_blocks & {*names}]:
        raise ValueError(f"{' and '.join(tied[0])} are one parameter, which would be divided twice")
    divides = any(is_linear(module) for module in tables.values()) and _loss_divides(outline, plan, train_set)
    return replace(plan, divided_logits=divides)


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


def _proven(
    block: nn.Module, call: BlockCall, size: int, pairs: Sequence[Pair] | None, *, sequence: bool
) -> ProvenBlock:
    """Return what :func:`proven` does; nothing if the block cannot be called as it has been seen, without memory."""
    for seen in (True, False):  # some masks say what is seen, others what is not
        try:
            return proven(block, _real_call(call, masks=seen), size, pairs=pairs, sequence=sequence)
        except Exception as e:
            reason = f"cannot be called with random numbers ({type(e).__name__}: {e})"
    return ProvenBlock(parts=BlockParts(pairs=(), cuts={}), whole={type(block).__name__: reason})


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
        with uses.watched():
            return ends_of(linked, lambda: job.forward(whole.model, map_tensors(whole.fake_input, inputs)))

    try:
        return seen_calls(whole, blocks, lambda: run(short))
    except Exception:
        pass  # the sizes of the model depend on those of the sample
    try:
        return seen_calls(whole, blocks, lambda: run(inputs))
    except Exception as e:
        raise ValueError(f"the model cannot be called without memory ({type(e).__name__}: {e})") from e


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


def _real_block(outline: Outline, name: str) -> nn.Module:
    """Return a block with random weights, and the buffers that the model has."""
    return built_at_random(outline.build, lambda tensor: tensor.startswith(f"{name}.")).get_submodule(name)


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
