"""A divided model beside the whole one: real weights and samples, as all workers in turn, in one process.

The proofs of blocks propose what to divide. What is between them, reads their weights or calls their layers shows only
in the whole model: in its loss, the gradients of all parameters, its tensors afterwards and its evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors, split_batch, tensors_in
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.proofs.divided_layers import COARSE_TOLERANCE, LARGER
from orchestrator.model.proofs.proving import TOLERANCE, difference
from orchestrator.model.tensor.block_calls import BlockCall, first_calls
from orchestrator.model.tensor.region import part_of
from orchestrator.model.tensor.vocabulary import Reads
from orchestrator.planning.placement import AxisCut
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch, make_batch

MOST_ELEMENTS = 2**25
"""The parameters of a model that is tried whole. Larger ones are compared on their workers alone."""
SAMPLES = 2
MOST_WORK = 2**32
"""The parameters times the tokens of the samples. Longer samples are cut."""
FEWEST_PLACES = 16
LOSS = "the loss"

_COARSE = (torch.float32, torch.float16, torch.bfloat16)

Division = Callable[[Callable[[], nn.Module], int, Peers], Callable[[], nn.Module]]
"""Returns the constructor of a part of the model that another one returns, given the number of the part."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What a pass has computed.

    Attributes:
        loss: the loss.
        outputs: what an evaluation returns; empty in training.
        gradients: those of the parameters, by name.
        tensors: the parameters and buffers afterwards, by name.
    """

    loss: Tensor
    outputs: Sequence[Tensor]
    gradients: Mapping[str, Tensor | None]
    tensors: Mapping[str, Tensor]


class Trial:
    """Compares divisions of a model with the whole of it."""

    def __init__(self, outline: Outline, train_set: Any, count: int):
        """Run the whole model.

        Args:
            outline: the job and its model.
            train_set: provides samples.
            count: the number of parts.

        Raises:
            Exception: whatever the model raises.
            ValueError: it computes something else each time.
        """
        self._outline = outline
        self._count = count
        elements = sum(parameter.numel() for parameter in outline.whole.model.parameters())
        with drawing(0):
            self._batch = _cut(real_batch(outline.job, train_set), MOST_WORK // (SAMPLES * max(1, elements)))
        self._precise = True
        coarse: list[Tensor] = []
        see = Reads(lambda tensor: coarse.append(tensor.new_empty(0)) if tensor.dtype in _COARSE else None)
        try:
            with see:
                self._whole = self._looks(self._built())
        except Exception:
            self._precise = False
            self._whole = self._looks(self._built())
        self._tolerance = COARSE_TOLERANCE if coarse or not self._precise else TOLERANCE
        names: dict[Tensor, list[str]] = {}
        for name, parameter in self._built().named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self._names = {one: tuple(of) for of in names.values() for one in of}
        if self.wrong(lambda build, index, peers: build, {}):
            raise ValueError("it computes something else each time")

    def calls(self, names: Collection[str]) -> Mapping[str, BlockCall]:
        """Return what modules of the whole model are first called with, by their names."""
        self._precise, was_precise = False, self._precise
        try:
            model = self._built()
            return first_calls({name: model.get_submodule(name) for name in names}, lambda: self._pass(model))[0]
        finally:
            self._precise = was_precise

    def wrong(self, division: Division, cuts: Mapping[str, AxisCut], partial: frozenset[str] = frozenset()) -> str:
        """Return what a divided model computes that the whole one does not, as a predicate; empty if there is nothing.

        Args:
            division: divides the model.
            cuts: how its parameters are cut, by name.
            partial: the whole parameters whose gradients are sums over the parts.
        """

        def of_rank(index: int, peers: Peers) -> list[_Look]:
            return self._looks(self._built(lambda build: division(build, index, peers)))

        try:
            with drawing(0):
                ranks = in_lockstep(self._count, of_rank)
        except Exception as e:
            return f"raises {type(e).__name__}: {' '.join(str(e).split())}"
        for whole, *parts in zip(self._whole, *ranks, strict=True):
            for apart, what in self._differences(whole, parts, cuts, partial):
                if apart > self._tolerance:
                    return f"would change {what} by {apart:.2g} of its {'value' if what == LOSS else 'largest entry'}"
        return ""

    def _built(
        self, transform: Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]] | None = None
    ) -> nn.Module:
        with drawing(0):
            build = self._outline.build
            model = (transform or (lambda same: same))(build)()
        return model.double() if self._precise else model.float()

    def _looks(self, model: nn.Module) -> list[_Look]:
        looks = [self._training(model), self._evaluation(model)]
        if not self._precise:  # larger numbers have larger errors too
            return looks
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and parameter.is_floating_point():
                    parameter.mul_(LARGER)
        looks.append(self._training(model))
        return looks

    def _training(self, model: nn.Module) -> _Look:
        model.train()
        model.zero_grad()
        _, loss = self._pass(model)
        if loss.requires_grad:
            loss.backward()
        return _Look(
            loss=loss.detach(),
            outputs=(),
            gradients={
                n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)
            },
            tensors=dict(_tensors_of(model)),
        )

    def _evaluation(self, model: nn.Module) -> _Look:
        model.eval()
        with torch.no_grad():
            output, loss = self._pass(model)
        outputs = [tensor.clone() for tensor in tensors_in(_compared(output)) if tensor.is_floating_point()]
        return _Look(loss=loss, outputs=outputs, gradients={}, tensors=dict(_tensors_of(model)))

    def _pass(self, model: nn.Module) -> tuple[Any, Tensor]:
        torch.manual_seed(0)
        dtype = torch.float64 if self._precise else torch.float32
        inputs, target = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t.clone(), self._batch)
        output = self._outline.job.forward(model, inputs)
        return output, self._outline.job.loss(output, target)

    def _differences(
        self, whole: _Look, parts: Sequence[_Look], cuts: Mapping[str, AxisCut], partial: frozenset[str]
    ) -> Iterator[tuple[float, str]]:
        """Yield how far each of what the parts have computed is from the whole, and what it is."""
        if not whole.loss.isfinite():
            return  # with larger weights
        for part in parts:
            yield difference(part.loss, whole.loss), LOSS
            if len(part.outputs) != len(whole.outputs):
                yield float("inf"), "the output of an evaluation"
            for one, other in zip(part.outputs, whole.outputs, strict=False):
                yield difference(one, other), "the output of an evaluation"
        scale = max(
            (float(g.abs().max()) for g in whole.gradients.values() if g is not None and g.numel()), default=0.0
        )
        for name, wanted in whole.gradients.items():
            found = [part.gradients.get(name) for part in parts]
            if name in cuts:
                own = [self._part(wanted, cuts[name], index) for index in range(self._count)]
            else:
                own = [wanted] * self._count
                if partial & {*self._names[name]} and not all(gradient is None for gradient in found):
                    total = functools.reduce(torch.add, [g for g in found if g is not None])
                    found = [total] * self._count
            for part_of_it, expected in zip(found, own, strict=True):
                yield difference(part_of_it, expected, scale), f"the gradient of {name}"
        for name, value in whole.tensors.items():
            for index, part in enumerate(parts):
                remains = self._part(value, cuts[name], index) if name in cuts else value
                yield _apart(part.tensors.get(name), remains), f"{name}, which a pass changes,"

    def _part(self, whole: Tensor | None, cut: AxisCut, index: int) -> Tensor | None:
        return None if whole is None else part_of(whole, cut, index=index, count=self._count).detach()


def real_batch(job: Job, train_set: Any) -> tuple[Any, Any]:
    """Return a batch of different samples, where the dataset has numbered ones."""
    with contextlib.suppress(Exception):
        return split_batch(make_batch(job.collate, [train_set[index] for index in range(SAMPLES)]))
    return example_batch(job, train_set, SAMPLES)


def _cut(batch: tuple[Any, Any], places: int) -> tuple[Any, Any]:
    """Return a batch of which the tensors have no more than so many places along their second dimension."""
    most = max(FEWEST_PLACES, places)
    cut: tuple[Any, Any] = map_tensors(lambda tensor: tensor[:, :most] if tensor.ndim > 1 else tensor, batch)
    return cut


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    every = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return ((name, tensor.detach().clone()) for name, tensor in every)


def _compared(output: Any) -> Any:
    """Return an output without the caches of attention, of which each worker keeps its own part."""
    if isinstance(output, Mapping) and "past_key_values" in output:
        return {name: value for name, value in output.items() if name != "past_key_values"}
    return output


def _apart(found: Tensor | None, wanted: Tensor | None) -> float:
    if found is None or wanted is None or wanted.is_floating_point():
        return difference(found, wanted)
    return 0.0 if torch.equal(found, wanted) else float("inf")
